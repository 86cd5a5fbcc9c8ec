"""How much of a worker's time its model was at work for tasks, and on how much.

Knows moments and counts; not what a pass does. Written by the model's thread, read by any other: what must
fit together stands in one attribute each, so nothing needs a lock.
"""

import time
from collections.abc import Callable

from protos.worker_pb2 import BusyTime

RECENT_SECONDS = 10
_SECOND_NS = 10**9


class Busy:
    """One life of a worker."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """The worker serves from now on."""
        self._clock_ns = clock_ns
        self._serving_ns = clock_ns()
        self._work = (0, 0)  # ns that are over, and when the work at hand began, 0 without any
        self._by_second: dict[int, int] = {}  # of the clock: ns at work in it
        self._counts = (0, 0)  # passes, rows

    @property
    def num_passes(self) -> int:
        """Passes that are over, which names the one at hand."""
        return self._counts[0]

    def begin(self) -> None:
        """The model begins to work on tasks."""
        self._work = (self._work[0], self._clock_ns())

    def count(self, num_passes: int, num_rows: int) -> None:
        """Passes that succeeded, and the tokens that they were fed."""
        passes, rows = self._counts
        self._counts = (passes + num_passes, rows + num_rows)

    def end(self) -> None:
        """What `begin` began is over, the draws and verdicts behind its passes too."""
        (busy, begun), ended = self._work, self._clock_ns()
        self._work = (busy + ended - begun, 0)
        last = ended // _SECOND_NS
        for second in range(max(begun // _SECOND_NS, last - RECENT_SECONDS), last + 1):
            self._by_second[second] = self._by_second.get(second, 0) + _overlap(begun, ended, second)
        while len(self._by_second) > RECENT_SECONDS + 1:  # they were added in their order
            del self._by_second[next(iter(self._by_second))]

    def to_message(self) -> BusyTime:
        """All of it, as it is told; the pass at hand counts up to now."""
        now, (busy, begun), (num_passes, num_rows) = self._clock_ns(), self._work, self._counts
        last = now // _SECOND_NS
        seconds = range(last - RECENT_SECONDS, last + 1)  # the last of them has only begun
        recent = sum(self._by_second.get(second, 0) for second in seconds)
        since = max(seconds[0] * _SECOND_NS, self._serving_ns)
        if begun:
            busy += now - begun
            recent += now - max(begun, since)
        return BusyTime(
            serving_seconds=(now - self._serving_ns) / _SECOND_NS,
            busy_seconds=busy / _SECOND_NS,
            num_passes=num_passes,
            num_rows=num_rows,
            recent_share=min(1.0, recent / max(now - since, 1)),
        )


def _overlap(begun: int, ended: int, second: int) -> int:
    """Of what went from `begun` to `ended`, the part within the second."""
    return min(ended, (second + 1) * _SECOND_NS) - max(begun, second * _SECOND_NS)
