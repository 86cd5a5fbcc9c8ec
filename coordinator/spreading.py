"""Which of several equal workers a session goes to: the one with the most free slots.

Knows capacities and counts; not what a worker does. A session stays where it was placed, unless it is moved
because its worker is lost.
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


class Place(Generic[W]):
    """Where one session is."""

    def __init__(self, spread: "Spread[W]", worker: W) -> None:
        """At this worker, to begin with."""
        self.worker = worker
        self._spread = spread
        worker.num_sessions += 1

    def move(self) -> bool:
        """Go to the ready worker with the most free slots, if another one than this has any."""
        others = [worker for worker in self._spread.workers if worker is not self.worker]
        best = max(others, key=_rank, default=None)
        if best is None or not _num_free(best):
            return False
        self.leave()
        self.worker = best
        best.num_sessions += 1
        return True

    def leave(self) -> None:
        """The session is here no longer."""
        self.worker.num_sessions -= 1
        self._spread.has_left.set()


class Spread(Generic[W]):
    """Workers of one role."""

    def __init__(self, workers: Sequence[W]) -> None:
        """At least one worker."""
        self.workers = workers
        self.has_left = asyncio.Event()  # a session, so that others may look again

    @contextlib.contextmanager
    def place(self) -> Iterator[Place[W]]:
        """A session's place for as long as the block lasts: a ready worker's before others, however full."""
        place = Place(self, max(self.workers, key=_rank))
        try:
            yield place
        finally:
            place.leave()

    @contextlib.asynccontextmanager
    async def place_in_slot(self) -> AsyncIterator[Place[W]]:
        """As `place`, but wait for a free slot while some worker is ready: when others are lost, the sessions
        that all were to hold must not push each other out of the slots that are left. Those that were at a
        lost worker come first.
        """
        while any(worker.is_ready for worker in self.workers) and not self._takes_another():
            self.has_left.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOKING_SECONDS):
                    await self.has_left.wait()
        with self.place() as place:
            yield place

    def _takes_another(self) -> bool:
        num_stranded = sum(worker.num_sessions for worker in self.workers if not worker.is_ready)
        return sum(map(_num_free, self.workers)) > num_stranded


def _num_free(worker: Worker) -> int:
    return max(0, worker.num_slots - worker.num_sessions) if worker.is_ready else 0


def _rank(worker: Worker) -> tuple[bool, int]:
    return worker.is_ready, worker.num_slots - worker.num_sessions
