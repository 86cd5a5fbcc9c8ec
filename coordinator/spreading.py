"""Which of several equal workers a session goes to: the one with the most free slots.

Knows capacities and counts; not what a worker does. A session stays where it was placed.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

LOOKING_SECONDS = 1.0  # how often one who waits looks whether a worker has come back


class Worker(Protocol):
    """What placing needs to know."""

    @property
    def num_slots(self) -> int:
        """Sessions that it can hold at once."""

    @property
    def is_ready(self) -> bool:
        """Whether it can be asked now."""


W = TypeVar("W", bound=Worker)


class Spread(Generic[W]):
    """Workers of one role, and how many sessions each has."""

    def __init__(self, workers: Sequence[W]) -> None:
        """At least one worker."""
        self.workers = workers
        self._num_sessions = [0] * len(workers)
        self._has_left = asyncio.Event()

    def num_sessions(self, index: int) -> int:
        """Sessions that are placed on a worker now."""
        return self._num_sessions[index]

    @contextlib.contextmanager
    def place(self) -> Iterator[W]:
        """A session's worker for as long as the block lasts: a ready one before others, free slots or not."""
        index = max(range(len(self.workers)), key=self._rank)
        self._num_sessions[index] += 1
        try:
            yield self.workers[index]
        finally:
            self._num_sessions[index] -= 1
            self._has_left.set()

    @contextlib.asynccontextmanager
    async def place_in_slot(self) -> AsyncIterator[W]:
        """As `place`, but wait for a free slot while some worker is ready: when others are lost, the sessions
        that all were to hold must not push each other out of the slots that are left.
        """
        while any(worker.is_ready for worker in self.workers) and not self._has_free_slot():
            self._has_left.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOKING_SECONDS):
                    await self._has_left.wait()
        with self.place() as worker:
            yield worker

    def _has_free_slot(self) -> bool:
        return any(
            is_ready and num_free > 0 for is_ready, num_free in map(self._rank, range(len(self.workers)))
        )

    def _rank(self, index: int) -> tuple[bool, int]:
        worker = self.workers[index]
        return worker.is_ready, worker.num_slots - self._num_sessions[index]
