"""How long rounds take beside what was computed of them: with drafts and without, by how many sessions share.

Arithmetic only. What the model of costs leaves out, such as workers that compute on the same cores or the
message handling of many sessions, shows in the rounds themselves. Only how rounds with drafts compare with
those without decides anything.
"""

from dataclasses import dataclass, field

_SHARE = 0.05  # of a new round in what is known, where one session is alone; more of the first ones
_CLIP = 1.5  # times what is known: a round beside a long prompt counts as that
_FADING = 0.0003  # a round, of what is known of the other kind, so that it is tried again some time


@dataclass(slots=True)
class _Factor:
    """By what rounds of one kind are longer than computed."""

    value: float = 1.0
    num_rounds: float = 0.0  # that told it, each counted once for all sessions that shared it

    def learn(self, factor: float, weight: float) -> None:
        factor = min(max(factor, self.value / _CLIP), self.value * _CLIP)
        self.num_rounds += weight
        self.value += max(_SHARE, 1 / (1 + self.num_rounds)) * weight * (factor - self.value)


@dataclass(slots=True)
class RoundTimes:
    """Of one number of sessions, roughly."""

    _plain: _Factor = field(default_factory=_Factor)
    _drafting: _Factor = field(default_factory=_Factor)

    def learn(self, drafted: bool, factor: float, num_sessions: int) -> None:
        """A round took `factor` times what was computed; so many sessions had one at the same time."""
        known, other = (self._drafting, self._plain) if drafted else (self._plain, self._drafting)
        known.learn(factor, 1 / num_sessions)
        other.value += (_FADING / num_sessions if other.num_rounds else 1.0) * (known.value - other.value)

    @property
    def excess(self) -> float:
        """By what rounds with drafts are longer than computed, beside those without."""
        return self._drafting.value / self._plain.value


@dataclass(slots=True)
class TimesBySessions:
    """RoundTimes by the power of two that the number of sessions is below."""

    _times: dict[int, RoundTimes] = field(default_factory=dict)

    def of(self, num_sessions: int) -> RoundTimes:
        """Those of so many sessions."""
        return self._times.setdefault(num_sessions.bit_length(), RoundTimes())
