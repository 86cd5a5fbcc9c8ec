"""The process of transformers' own generation, from its owner's side: start it, ask it, leave nothing of it.

Knows one child (`workers.baseline`) and its pipes. Never loads torch.
"""

import tempfile
import threading
import time
from types import TracebackType
from typing import Self, TypeVar

from cluster.module_process import last_words, start_module
from protos.settings import Settings
from workers.baseline_tasks import (
    BaselineBatch,
    BaselineModels,
    BaselineReady,
    BaselineRequest,
    BaselineTask,
    BaselineText,
    BaselineTexts,
    Gap,
    GapTask,
)

# Every wait has an end. Beyond these no model that is worth waiting for is still at work.
_PROMPT_SECONDS = 600.0
_SECONDS_A_TOKEN = 60.0

_Answer = TypeVar("_Answer", bound=Settings)


class BaselineFailed(RuntimeError):
    """The sentence gives the process's last words, or the time within which it said nothing."""


class BaselineProcess:
    """transformers with its models loaded, from entering the block to its exit."""

    ready: BaselineReady

    def __init__(self, models: BaselineModels, startup_seconds: float) -> None:
        """Nothing is started before the block begins; `startup_seconds` bounds the loading of the models."""
        self._models = models
        self._startup_seconds = startup_seconds

    def __enter__(self) -> Self:
        """Start it and wait until the models are loaded. Raises BaselineFailed."""
        self._log = tempfile.TemporaryFile()
        # Offline: the folders are complete.
        self._process = start_module("workers.baseline", log=self._log, HF_HUB_OFFLINE="1")
        try:
            self.ready = self._ask(self._models, BaselineReady, self._startup_seconds)
        except BaseException:  # Ctrl-C too leaves no process behind
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
        seconds = _PROMPT_SECONDS + _SECONDS_A_TOKEN * task.num_tokens
        return self._ask(BaselineRequest(task=task), BaselineText, seconds)

    def write_batch(self, batch: BaselineBatch) -> BaselineTexts:
        """Have several written at once. Raises BaselineFailed."""
        seconds = len(batch.prompts) * (_PROMPT_SECONDS + _SECONDS_A_TOKEN * batch.num_tokens)
        return self._ask(BaselineRequest(task=batch), BaselineTexts, seconds)

    def gap(self, prompt: tuple[int, ...]) -> float:
        """By how much the target's best logit behind `prompt` exceeds the second. Raises BaselineFailed."""
        return self._ask(BaselineRequest(task=GapTask(prompt=prompt)), Gap, _PROMPT_SECONDS).gap

    def _ask(self, line: Settings, answer: type[_Answer], seconds: float) -> _Answer:
        """Send a line and wait for its answer; a process that takes longer is ended."""
        begun = time.monotonic()
        end = threading.Timer(seconds, self._process.kill)  # which ends a wait to write, and one to read
        end.start()
        try:
            said = self._exchange(line.model_dump_json().encode() + b"\n")
            if said.endswith(b"\n"):
                return answer.model_validate_json(said)
            self._process.wait()
        finally:
            end.cancel()
        if time.monotonic() - begun >= seconds:
            raise BaselineFailed(f"The process of transformers' generate said nothing within {seconds:g} s.")
        raise BaselineFailed(f"The process of transformers' generate ended: {last_words(self._log)}")

    def _exchange(self, line: bytes) -> bytes:
        """The line that answers, without its end from a process that ends before."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            return b""
        return self._process.stdout.readline()

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()  # closes the pipes and collects it
        self._log.close()
