"""Brings back actors that died: under their names, with their settings, at their addresses.

Knows Ray's word on whether an actor lives. Does not know what it serves: whoever placed it gives a way to
start it again. The others find the new life at the old address by themselves; it has another epoch.
"""

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0  # before an actor that dies again and again is started
HEALTHY_SECONDS = 60.0  # who has lived so long is not dying again and again


@dataclass(slots=True)
class Placed:
    """An actor, and how it is started again."""

    name: str
    actor: Any  # its handle
    start: Callable[[], tuple[Any, Any]]  # a new handle, and a reference that is there when it serves


class Revival:
    """Looks after actors that serve."""

    def __init__(self, placed: Iterable[Placed], adopt: Callable[[str, Any], None]) -> None:
        """`adopt` is told of each new handle."""
        self._wards = [_Ward(one, adopt) for one in placed]

    def look(self) -> None:
        """Once, without waiting for anybody: see who died, and start those whose pause is over."""
        for ward in self._wards:
            ward.look()


class _Ward:
    """One actor: asked whether it lives, or due to be started, or starting."""

    def __init__(self, placed: Placed, adopt: Callable[[str, Any], None]) -> None:
        self._placed = placed
        self._adopt = adopt
        self._answer: Any = None  # a reference to what it was asked, or to its start
        self._is_starting = False
        self._due: float | None = None  # when it is started; None: it lives, as far as is known
        self._since = time.monotonic()  # it has lived
        self._pause = FIRST_PAUSE_SECONDS

    def look(self) -> None:
        import ray
        from ray.exceptions import ActorUnavailableError, RayError

        if self._due is not None:
            self._start_when_due()
            return
        if self._answer is None:
            self._answer = self._placed.actor.pid.remote()
        if not ray.wait([self._answer], timeout=0)[0]:
            return
        answer, self._answer = self._answer, None
        try:
            ray.get(answer)
        except ActorUnavailableError:
            return  # not known yet
        except RayError as error:
            self._failed("did not start again" if self._is_starting else "died", error)
        else:
            if self._is_starting:
                _say(f"{self._placed.name} serves again")
                self._is_starting, self._since = False, time.monotonic()

    def _start_when_due(self) -> None:
        """The old process is dead, or has failed to serve; its name and address are free when it is gone."""
        import ray

        assert self._due is not None
        if time.monotonic() < self._due:
            return
        self._due, self._is_starting = None, True
        try:
            ray.kill(self._placed.actor)
            self._placed.actor, self._answer = self._placed.start()
            self._adopt(self._placed.name, self._placed.actor)
        except (ray.exceptions.RayError, ValueError) as error:  # such as a name that is not free yet
            self._failed("could not be started again", error)

    def _failed(self, what: str, error: Exception) -> None:
        now = time.monotonic()
        if not self._is_starting and now - self._since >= HEALTHY_SECONDS:
            self._pause = FIRST_PAUSE_SECONDS
        words = str(error).strip().splitlines()
        reason = words[-1] if words else type(error).__name__
        _say(f"{self._placed.name} {what}: {reason}; it is started in {self._pause:.0f} s")
        self._due, self._answer, self._is_starting = now + self._pause, None, False
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
