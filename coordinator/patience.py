"""How long an answer may take before it is late: by what is usual, as in TCP (RFC 6298). Arithmetic only."""

from dataclasses import dataclass

_MEAN_SHARE, _DEVIATION_SHARE = 1 / 8, 1 / 4  # of a new answer in what is known
_DEVIATIONS = 4.0


@dataclass(slots=True)
class Patience:
    """A moving mean over answers, and how far they lie from it."""

    mean_seconds: float = 0.0  # 0 until the first answer
    deviation_seconds: float = 0.0

    def learn(self, seconds: float) -> None:
        """An answer took so long."""
        if not self.mean_seconds:
            self.mean_seconds, self.deviation_seconds = seconds, seconds / 2
            return
        distance = abs(seconds - self.mean_seconds)
        self.deviation_seconds += _DEVIATION_SHARE * (distance - self.deviation_seconds)
        self.mean_seconds += _MEAN_SHARE * (seconds - self.mean_seconds)

    @property
    def seconds(self) -> float:
        """What hardly any answer takes; 0 while none is known."""
        return self.mean_seconds + _DEVIATIONS * self.deviation_seconds
