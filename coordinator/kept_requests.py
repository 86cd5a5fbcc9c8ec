"""Requests that nobody decodes, kept for a while so that their streams can go on.

Knows names, ages and sizes; not what a request is. What is not asked for in time is forgotten, and the oldest
where there are too many, so that clients that go away cost a bounded memory.
"""

import asyncio
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """What keeping needs to know."""

    @property
    def num_tokens(self) -> int:
        """That are kept with it, its prompt's included."""


R = TypeVar("R", bound=Sized)


@dataclass(frozen=True, slots=True)
class KeepSettings:
    """How much is kept, and how long."""

    seconds: float  # 0 keeps nothing
    max_requests: int
    max_tokens: int  # of all of them


class KeptRequests(Generic[R]):
    """The requests of one coordinator that wait to be asked for."""

    def __init__(self, settings: KeepSettings) -> None:
        """None yet."""
        self._settings = settings
        self._requests: dict[str, R] = {}  # the oldest first
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        """How many there are."""
        return len(self._requests)

    def keep(self, name: str, request: R) -> None:
        """From now on; its size must stay as it is while it is kept."""
        settings = self._settings
        if not settings.seconds:
            return
        loop = asyncio.get_running_loop()
        self._requests[name] = request
        self._timers[name] = loop.call_later(settings.seconds, self.forget, name)
        self.num_tokens += request.num_tokens
        while len(self._requests) > settings.max_requests or self.num_tokens > settings.max_tokens:
            self.forget(next(iter(self._requests)))

    def get(self, name: str) -> R | None:
        """The request of this name, which stays here."""
        return self._requests.get(name)

    def forget(self, name: str) -> None:
        """Keep it no longer, if it is here."""
        request = self._requests.pop(name, None)
        if request is not None:
            self._timers.pop(name).cancel()
            self.num_tokens -= request.num_tokens

    def clear(self) -> None:
        """Keep nothing."""
        for name in list(self._requests):
            self.forget(name)
