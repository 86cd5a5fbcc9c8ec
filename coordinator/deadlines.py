"""Tells when tasks have waited too long: one timer for all, since one for each would cost as much as a task.

Knows keys and times; not what waits. A key that is no longer waited for is forgotten in passing.
"""

import asyncio
import heapq
from collections.abc import Callable, Container

GRAIN_SECONDS = 0.01  # how late a deadline may be noticed
_SPARE = 256  # keys beyond those that wait, before they are looked through


class Deadlines:
    """The deadlines of keys, each added once."""

    def __init__(self, waiting: Container[int], expire: Callable[[int], None]) -> None:
        """`expire` is called on the event loop for each key that is still in `waiting` at its time."""
        self._waiting = waiting
        self._expire = expire
        self._due: list[tuple[float, int]] = []  # a heap
        self._num_after_look = 0  # keys that were left when they were last looked through
        self._timer: asyncio.TimerHandle | None = None

    def add(self, key: int, due: float) -> None:
        """The key is waited for until then, by the event loop's clock."""
        loop = asyncio.get_running_loop()
        heapq.heappush(self._due, (due, key))
        if len(self._due) > 2 * self._num_after_look + _SPARE:
            self._due = [entry for entry in self._due if entry[1] in self._waiting]
            heapq.heapify(self._due)
            self._num_after_look = len(self._due)
        if self._timer is None or due < self._timer.when() - GRAIN_SECONDS:
            self._set_timer(loop, due)

    def close(self) -> None:
        """Forget all keys."""
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(due, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        while self._due and (self._due[0][0] <= now or self._due[0][1] not in self._waiting):
            _, key = heapq.heappop(self._due)
            if key in self._waiting:
                self._expire(key)
        if self._due:
            self._set_timer(loop, max(self._due[0][0], now + GRAIN_SECONDS))
