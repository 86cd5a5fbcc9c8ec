"""The process of transformers' own generation, from its owner's side: start it, ask it, leave nothing of it.

Knows one child (`workers.baseline`) and its pipes. Never loads torch.
"""

import os
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Self, TypeVar

from protos.settings import Settings
from workers.baseline_tasks import (
    BaselineModels,
    BaselineReady,
    BaselineRequest,
    BaselineTask,
    BaselineText,
    Gap,
    GapTask,
)

_Answer = TypeVar("_Answer", bound=Settings)


class BaselineFailed(RuntimeError):
    """The sentence gives the process's last words."""


class BaselineProcess:
    """transformers with its models loaded, from entering the block to its exit."""

    ready: BaselineReady

    def __init__(self, models: BaselineModels) -> None:
        """Nothing is started before the block begins."""
        self._models = models

    def __enter__(self) -> Self:
        """Start it and wait until the models are loaded."""
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            # -P: a file in the current folder must not stand in for a module.
            [sys.executable, "-P", "-m", "workers.baseline"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},  # the folders are complete
            start_new_session=True,  # Ctrl-C reaches its owner alone
        )
        try:
            self.ready = self._ask(self._models, BaselineReady)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def pid(self) -> int:
        """The process, which leads a session of its own."""
        return self._process.pid

    def write(self, task: BaselineTask) -> BaselineText:
        """Have one text written. Raises BaselineFailed."""
        return self._ask(BaselineRequest(task=task), BaselineText)

    def gap(self, prompt: tuple[int, ...]) -> float:
        """By how much the target's best logit behind `prompt` exceeds the second. Raises BaselineFailed."""
        return self._ask(BaselineRequest(task=GapTask(prompt=prompt)), Gap).gap

    def _ask(self, line: Settings, answer: type[_Answer]) -> _Answer:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line.model_dump_json().encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise BaselineFailed(self._last_words()) from None
        said = self._process.stdout.readline()
        if not said:
            raise BaselineFailed(self._last_words())
        return answer.model_validate_json(said)

    def _last_words(self) -> str:
        self._process.wait()
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip().splitlines() or ["it left no message"]
        return f"The process of transformers' generate ended: {words[-1]}"

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()  # closes the pipes and collects it
        self._log.close()
