"""What a round trip to a worker takes beside the worker's own time. Arithmetic only."""

from dataclasses import dataclass

_SHARE = 0.1  # of a new round trip in what is known
_SHORTEST_SECONDS = 1e-9  # by clocks of two processes it may be none
_CLIP = 3.0  # times what is known: one that a busy moment held up counts as that


@dataclass(slots=True)
class WireTime:
    """A moving mean over round trips."""

    seconds: float = 0.0  # 0 until the first round trip

    def learn(self, seconds: float) -> None:
        """A round trip, less what the worker took."""
        seconds = max(seconds, _SHORTEST_SECONDS)
        if not self.seconds:
            self.seconds = seconds
        self.seconds += _SHARE * (min(seconds, _CLIP * self.seconds) - self.seconds)
