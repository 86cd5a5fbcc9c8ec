"""Seconds from typing a command to the first token, measured by running such a command.

Knows how Outrider's own command and the process of transformers' `generate` are started.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Literal

from cluster.baseline_process import BaselineProcess
from workers.baseline_tasks import BaselineModels, BaselineTask

_END_SECONDS = 30.0  # for a command that is told to end to end its deployment


class FirstTokenFailed(RuntimeError):
    """The sentence gives the command's last words."""


def seconds_of_command(arguments: Sequence[str]) -> float:
    """From starting `outrider` with these arguments to the first byte of its standard output."""
    with tempfile.TemporaryFile() as log:
        begun = time.monotonic()
        process = subprocess.Popen(
            # -P: a file in the current folder must not stand in for a module.
            [sys.executable, "-P", "-m", "cluster.command_line", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            bufsize=0,
            env=os.environ | {"OUTRIDER_OFFLINE": "1"},
            start_new_session=True,  # Ctrl-C reaches us, and we end it
        )
        assert process.stdout is not None
        try:
            first = process.stdout.read(1)
            seconds = time.monotonic() - begun
            while first and process.stdout.read(1 << 16):
                pass
            process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(_END_SECONDS)
            process.stdout.close()
        if not first or process.returncode:
            log.seek(0)
            words = log.read().decode(errors="replace").strip().splitlines() or ["it left no message"]
            raise FirstTokenFailed(f"outrider {arguments[0]} ended with {process.returncode}: {words[-1]}")
    return seconds


def seconds_of_transformers(models: BaselineModels, prompt: tuple[int, ...]) -> float:
    """From starting Python to the first token that `generate` writes; the prompt's ids are known before."""
    kind: Literal["plain", "assisted"] = "plain" if models.assistant is None else "assisted"
    begun = time.monotonic()
    with BaselineProcess(models) as baseline:
        baseline.write(BaselineTask(kind=kind, prompt=prompt, num_tokens=1, temperature=0, seed=0))
        return time.monotonic() - begun
