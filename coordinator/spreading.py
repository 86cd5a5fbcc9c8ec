"""Which of several equal workers a session goes to: the connected one with the most free slots.

Knows capacities and counts; not what a worker does. A session stays where it was placed.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar


class Worker(Protocol):
    """What placing needs to know."""

    @property
    def num_slots(self) -> int:
        """Sessions that it can hold at once."""

    @property
    def is_connected(self) -> bool:
        """Whether it can be reached now."""


W = TypeVar("W", bound=Worker)


class Spread(Generic[W]):
    """Workers of one role, and how many sessions each has."""

    def __init__(self, workers: Sequence[W]) -> None:
        """At least one worker."""
        self.workers = workers
        self._num_sessions = [0] * len(workers)

    def num_sessions(self, index: int) -> int:
        """Sessions that are placed on a worker now."""
        return self._num_sessions[index]

    @contextlib.contextmanager
    def place(self) -> Iterator[W]:
        """A session's worker, for as long as the block lasts."""
        index = max(range(len(self.workers)), key=self._room)
        self._num_sessions[index] += 1
        try:
            yield self.workers[index]
        finally:
            self._num_sessions[index] -= 1

    def _room(self, index: int) -> tuple[bool, int]:
        worker = self.workers[index]
        return worker.is_connected, worker.num_slots - self._num_sessions[index]
