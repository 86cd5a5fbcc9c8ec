"""Whether a worker that has failed is asked again: for a while by nobody, then by one, then by all.

Knows attempts, failures and times; not what is asked. Attempts are numbered by the state that they began in:
what becomes of one that began before the state changed says nothing any more, so sessions that fail together
are one failure.
"""

import time
from collections.abc import Callable

from protos.control_pb2 import CIRCUIT_CLOSED, CIRCUIT_HALF_OPEN, CIRCUIT_OPEN
from protos.control_pb2 import Circuit as CircuitState

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 30.0  # doubled with each failure in a row
_MAX_DOUBLINGS = 16


class Circuit:
    """One worker's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Closed: everybody may ask."""
        self._clock = clock
        self._number = 0  # of the state
        self._is_closed = True
        self._is_tried = False  # half-open: somebody asks
        self._not_before = 0.0
        self._num_failures = 0  # in a row
        self._reason = ""

    @property
    def state(self) -> "CircuitState":
        """Closed: asked by all; open: by nobody; half-open: by one at a time."""
        if self._is_closed:
            return CIRCUIT_CLOSED
        return CIRCUIT_OPEN if self._clock() < self._not_before else CIRCUIT_HALF_OPEN

    @property
    def problem(self) -> str:
        """While it is open, why and for how long, in words; else empty."""
        if self.state != CIRCUIT_OPEN:
            return ""
        return f"left alone for {self._not_before - self._clock():.0f} s more: {self._reason}"

    @property
    def lets_in(self) -> bool:
        """Whether `enter` would."""
        return self._is_closed or (not self._is_tried and self._clock() >= self._not_before)

    def enter(self) -> int | None:
        """The number of an attempt that may begin; None: it may not.

        `leave` must follow, behind `succeeded`, `answered` or `failed` where the attempt says so much.
        """
        if not self.lets_in:
            return None
        self._is_tried = not self._is_closed
        return self._number

    def leave(self, attempt: int) -> None:
        """The attempt is over, however it ended."""
        if attempt == self._number:
            self._is_tried = False

    def succeeded(self, attempt: int) -> None:
        """The worker does what it is there for: everybody may ask, and nothing is held against it."""
        if attempt == self._number:
            self._num_failures = 0
            self.answered(attempt)

    def answered(self, attempt: int) -> None:
        """The worker answers: everybody may ask, but the next failure counts as one more in a row."""
        if attempt == self._number and not self._is_closed:
            self._change(is_closed=True)

    def failed(self, attempt: int, reason: str) -> float | None:
        """Open it, longer after each failure in a row, so that a broken worker costs little.

        Returns for how many seconds; None for an attempt from before the last change.
        """
        if attempt != self._number:
            return None
        pause = FIRST_PAUSE_SECONDS * 2.0 ** min(self._num_failures, _MAX_DOUBLINGS)
        self._num_failures += 1
        return self.open(min(pause, LONGEST_PAUSE_SECONDS), reason)

    def open(self, seconds: float, reason: str) -> float:
        """Let nobody in for so long. Returns how long that is."""
        self._not_before, self._reason = self._clock() + seconds, reason
        self._change(is_closed=False)
        return seconds

    def _change(self, *, is_closed: bool) -> None:
        self._number += 1
        self._is_closed, self._is_tried = is_closed, False
