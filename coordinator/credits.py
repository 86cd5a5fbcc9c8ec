"""Bounds what a stream has in flight: a number of tasks and of bytes. Knows nothing of what is sent."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Credits:
    """The tasks and bytes in flight on one stream."""

    def __init__(self) -> None:
        """No credit before the first grant."""
        self._max_tasks = self._max_bytes = 0
        self._tasks = self._bytes = 0
        self._freed = asyncio.Event()

    def grant(self, max_tasks: int, max_bytes: int) -> None:
        """What the worker allows, from the handshake."""
        self._max_tasks, self._max_bytes = max_tasks, max_bytes

    @contextlib.asynccontextmanager
    async def borrow(self, size: int) -> AsyncIterator[None]:
        """Wait for room for one task; a task larger than all credit goes alone."""
        while self._tasks and (self._tasks >= self._max_tasks or self._bytes + size > self._max_bytes):
            self._freed.clear()
            await self._freed.wait()
        self._tasks += 1
        self._bytes += size
        try:
            yield
        finally:
            self._tasks -= 1
            self._bytes -= size
            self._freed.set()
