"""How many sessions run at once, and how many may wait. A full queue says so at once."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from protos.status import TaskError


class Admission:
    """A bounded number of running sessions behind a bounded queue."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        """Both count sessions, which are choices of requests."""
        self.max_running = max_running
        self._max_waiting = max_waiting
        self._permits = asyncio.Semaphore(max_running)
        self._num_admitted = 0
        self.num_running = 0

    @property
    def num_waiting(self) -> int:
        """Sessions that are admitted and do not run yet."""
        return self._num_admitted - self.num_running

    def admit(self, num_sessions: int) -> None:
        """Take so many more sessions, each of which must `leave` once.

        Raises TaskError(RESOURCE_EXHAUSTED) when that would leave too many waiting.
        """
        if self._num_admitted + num_sessions > self.max_running + self._max_waiting:
            raise TaskError.exhausted(
                f"{self.num_running} sessions run and {self.num_waiting} wait; with {num_sessions} more, "
                f"over {self._max_waiting} would wait",
                retry_seconds=1.0,
            )
        self._num_admitted += num_sessions

    def leave(self) -> None:
        """One admitted session is over, whether it ran or not."""
        self._num_admitted -= 1

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a place among the running, first come, first served."""
        async with self._permits:
            self.num_running += 1
            try:
                yield
            finally:
                self.num_running -= 1
