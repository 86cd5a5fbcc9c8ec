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

    num_sessions: int  # that are placed on it now


W = TypeVar("W", bound=Worker)


class Spread(Generic[W]):
    """Workers of one role."""

    def __init__(self, workers: Sequence[W]) -> None:
        """At least one worker."""
        self.workers = workers
        self._has_left = asyncio.Event()

    @contextlib.contextmanager
    def place(self) -> Iterator[W]:
        """A session's worker for as long as the block lasts: a ready one before others, free slots or not."""
        worker = max(self.workers, key=_rank)
        worker.num_sessions += 1
        try:
            yield worker
        finally:
            worker.num_sessions -= 1
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
        return any(is_ready and num_free > 0 for is_ready, num_free in map(_rank, self.workers))


def _rank(worker: Worker) -> tuple[bool, int]:
    return worker.is_ready, worker.num_slots - worker.num_sessions
