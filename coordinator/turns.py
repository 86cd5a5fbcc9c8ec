"""Who may be at the drafter now: a group at a time, so that one is drafted for while another is verified.

Knows numbers of sessions; not what they ask, nor how many groups are wise. With no bound on a group all may,
at any time, as in plain batching. A group is those who ask within one turn of the event loop, as sessions do
that were answered by the same message; who comes later waits for the next group, and nobody waits while no
group is at work.
"""

import asyncio
import math
from collections import deque


class Turns:
    """One drafter's."""

    def __init__(self) -> None:
        """No bound."""
        self.limit: float = math.inf  # sessions of a group
        self.number = 0  # of the group at work
        self._num_in = 0
        self._is_open = False  # the group at work still takes members
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Wait to be one of the group at work; `leave` must follow."""
        if self.limit == math.inf and not self._waiting:
            self._num_in += 1
            return
        if not self._num_in:
            self._begin()
        if self._is_open and self._num_in < self.limit:
            self._num_in += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn came at the same moment
                self.leave()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def leave(self) -> None:
        """A member was answered; the last one makes room for the next group."""
        self._num_in -= 1
        if self._num_in or not self._waiting:
            return
        self._begin()
        while self._waiting and self._num_in < self.limit:
            turn = self._waiting.popleft()
            if not turn.done():  # a task that is cancelled cancels what it waits for before it runs again
                self._num_in += 1
                turn.set_result(None)

    def _begin(self) -> None:
        self.number += 1
        self._is_open = True
        asyncio.get_running_loop().call_soon(self._close, self.number)

    def _close(self, number: int) -> None:
        if number == self.number:
            self._is_open = False
