"""Bounds what a stream has in flight: a number of tasks and of bytes. Knows nothing of what is sent."""

import asyncio


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

    def take(self, size: int) -> bool:
        """Take room for one task, to be given back; False when there is none.

        A task larger than all credit goes alone.
        """
        if self._tasks and (self._tasks >= self._max_tasks or self._bytes + size > self._max_bytes):
            return False
        self._tasks += 1
        self._bytes += size
        return True

    async def wait(self, size: int) -> None:
        """Take room for one task as soon as there is some."""
        while not self.take(size):
            self._freed.clear()
            await self._freed.wait()

    def give_back(self, size: int) -> None:
        """A task is over."""
        self._tasks -= 1
        self._bytes -= size
        self._freed.set()
