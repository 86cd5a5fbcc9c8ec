"""Scripts of faults: when, what, to whom, for how long. Drawn from a seed, written as lines and read again.

Knows the kinds and their names; does none of it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random
from typing import Self

MESSAGES = ("drop", "double", "swap", "hold")
BYTES = ("corrupt", "truncate")
DIRECTIONS = ("task", "reply")
DIRECTED = tuple(f"{what}-{direction}" for what in (*MESSAGES, *BYTES) for direction in DIRECTIONS)
CONNECTIONS = ("delay", "blackhole", "cut")
PROCESSES = ("kill", "stop", "slow")
DRAFTERS = ("nonsense-reply",)
CLIENTS = ("cancel", "abort")
KINDS = (*DIRECTED, *CONNECTIONS, *PROCESSES, *DRAFTERS, *CLIENTS)

SHORTEST_SECONDS, LONGEST_SECONDS = 0.1, 1.2
NOBODY = "-"  # a client's fault hits any of those that are there


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault."""

    at: float  # seconds behind the script's begin
    kind: str  # of KINDS
    whom: str  # a worker's name
    seconds: float  # for how long, where it has a length
    number: int  # which bit, byte or client

    def __str__(self) -> str:
        return f"{self.at:.3f} {self.kind} {self.whom} {self.seconds:.2f} {self.number}"

    @classmethod
    def read(cls, line: str) -> Self:
        """The inverse of str."""
        at, kind, whom, seconds, number = line.split()
        return cls(float(at), kind, whom, float(seconds), int(number))


def script(
    seed: int, num_faults: int, seconds: float, workers: Sequence[str], kinds: Collection[str] = KINDS
) -> tuple[Fault, ...]:
    """Faults at random times within so many seconds; `workers` are names that begin with their role."""
    random = Random(seed)
    among = [kind for kind in KINDS if kind in kinds]
    faults = [_fault(random, seconds, workers, random.choice(among)) for _ in range(num_faults)]
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _fault(random: Random, seconds: float, workers: Sequence[str], kind: str) -> Fault:
    whom = [name for name in workers if kind not in DRAFTERS or name.startswith("draft")]
    return Fault(
        at=round(seconds * random.random(), 3),
        kind=kind,
        whom=NOBODY if kind in CLIENTS else random.choice(whom),
        seconds=round(random.uniform(SHORTEST_SECONDS, LONGEST_SECONDS), 2),
        number=random.randrange(1 << 12),
    )
