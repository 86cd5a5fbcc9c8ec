"""Seconds from typing a command to the first token, measured by running such a command.

Knows how Outrider's own command and the process of transformers' `generate` are started.
"""

import tempfile
import time
from collections.abc import Sequence
from typing import Literal

from cluster.baseline_process import BaselineProcess
from cluster.module_process import last_words, start_module
from workers.baseline_tasks import BaselineModels, BaselineTask

_END_SECONDS = 30.0  # for a command that is told to end to end its deployment


class FirstTokenFailed(RuntimeError):
    """The sentence gives the command's last words."""


def seconds_of_command(arguments: Sequence[str]) -> float:
    """From starting `outrider` with these arguments to the first byte of its standard output."""
    begun = time.monotonic()
    with (
        tempfile.TemporaryFile() as log,
        start_module("cluster.command_line", *arguments, log=log, OUTRIDER_OFFLINE="1") as process,
    ):
        assert process.stdout is not None
        try:
            first = process.stdout.read(1)
            seconds = time.monotonic() - begun
            process.communicate()  # until its end
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(_END_SECONDS)
        if not first or process.returncode:
            raise FirstTokenFailed(
                f"outrider {arguments[0]} ended with {process.returncode}: {last_words(log)}"
            )
    return seconds


def seconds_of_transformers(models: BaselineModels, prompt: tuple[int, ...], startup_seconds: float) -> float:
    """From starting Python to the first token that `generate` writes; the prompt's ids are known before."""
    kind: Literal["plain", "assisted"] = "plain" if models.assistant is None else "assisted"
    begun = time.monotonic()
    with BaselineProcess(models, startup_seconds) as baseline:
        baseline.write(BaselineTask(kind=kind, prompt=prompt, num_tokens=1, temperature=0, seed=0))
        return time.monotonic() - begun
