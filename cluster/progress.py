"""Says on standard error what is being done, for how long already, and for how long still.

Knows a console and a clock. On a terminal one line with a spinner goes from step to step; elsewhere each step
is a line.
"""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Pace:
    """How long work still takes: as it was guessed beforehand, corrected by what the done part of it took."""

    def __init__(self, guessed_seconds: float) -> None:
        """All of the work; it begins now."""
        self._left = guessed_seconds
        self._done = 0.0
        self._begun = time.monotonic()

    def done(self, guessed_seconds: float) -> None:
        """So much of what was guessed has been done."""
        self._left -= guessed_seconds
        self._done += guessed_seconds

    @property
    def minutes_left(self) -> float:
        """The guess itself until something is done."""
        pace = (time.monotonic() - self._begun) / self._done if self._done else 1.0
        return max(0.0, self._left) * pace / 60


class Steps:
    """The steps of something that takes its time, from entering the block to `end` or its exit."""

    def __init__(self, console: Console) -> None:
        """Nothing is shown before the block begins."""
        self._console = console
        self._begun = time.monotonic()
        columns = SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
        self._spinner = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._spinner.add_task("", total=None)

    def __enter__(self) -> Self:
        self._spinner.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def say(self, step: str) -> None:
        """What is being done now."""
        if self._console.is_terminal:
            self._spinner.update(self._task, description=step)
        else:
            self.note(f"[{time.monotonic() - self._begun:5.1f} s] {step}")

    def note(self, sentence: str) -> None:
        """What is worth keeping in sight."""
        self._console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def end(self) -> None:
        """Take the spinner away; what has been noted stays."""
        self._spinner.stop()
