"""The joint law of the first tokens behind a prompt as a tree, cut into cells to compare counts with.

Knows rows of p, sequences and statistics; no model, no wire. All sequences of D tokens cannot be listed, but
a tree of prefixes partitions them: behind a prefix whose row is known every token is a branch of its own or
falls under "any other", so each cell has an exact mass, a product of p, and the masses sum to 1.

N samples, D tokens of a sequence, C cells.
"""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Tokens = tuple[int, ...]

ROUNDING = 1e-9  # what sums of probabilities may be off by


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """p at one position, by its positive entries."""

    ids: NDArray[np.int64]  # [S] ascending, distinct
    probabilities: NDArray[np.float64]  # [S] positive

    def p_of(self, token: int) -> float:
        """p(token)."""
        index = int(np.searchsorted(self.ids, token))
        found = index < self.ids.size and self.ids[index] == token
        return float(self.probabilities[index]) if found else 0.0


def total_variation(first: Row, second: Row) -> float:
    """Half the sum of the differences between two rows."""
    ids = np.union1d(first.ids, second.ids)
    difference = np.zeros(ids.size)
    difference[np.searchsorted(ids, first.ids)] += first.probabilities
    difference[np.searchsorted(ids, second.ids)] -= second.probabilities
    return float(np.abs(difference).sum()) / 2


class Kind(Enum):
    """What the sequences of a cell have in common."""

    BEGINS = "begins"  # they begin with these tokens
    OTHER = "other"  # and go on by none of the branches that are known or cells of their own
    REST = "rest"  # they lie in no other cell


@dataclass(frozen=True, slots=True)
class Cell:
    """Some sequences and their mass."""

    kind: Kind
    tokens: Tokens
    mass: float


class LawTree:
    """Prefixes with their rows of p, grown from the likeliest on: by p alone, never by what was sampled."""

    def __init__(self, *, depth: int, least_mass: float, end_token_ids: Iterable[int] = ()) -> None:
        """Prefixes of fewer than `depth` tokens that have at least `least_mass` are worth a row.

        Nothing follows an end token.
        """
        self._depth = depth
        self._least_mass = least_mass
        self._end_token_ids = frozenset(end_token_ids)
        self._rows: dict[Tokens, Row] = {}
        self._masses: dict[Tokens, float] = {(): 1.0}
        self._wanted: list[tuple[float, Tokens]] = [(-1.0, ())]  # a heap by falling mass

    @property
    def rows(self) -> Mapping[Tokens, Row]:
        """The known rows by their prefix."""
        return self._rows

    def next_prefix(self) -> Tokens | None:
        """The likeliest prefix that is worth a row and has none; None when there is none."""
        return self._wanted[0][1] if self._wanted else None

    def add(self, prefix: Tokens, row: Row) -> None:
        """The row behind a prefix that `next_prefix` named."""
        _, likeliest = heapq.heappop(self._wanted)
        assert prefix == likeliest
        mass = self._masses[prefix]
        self._rows[prefix] = row
        for token, p in zip(row.ids.tolist(), row.probabilities.tolist(), strict=True):
            child = (*prefix, token)
            self._masses[child] = mass * p
            is_open = len(child) < self._depth and token not in self._end_token_ids
            if is_open and mass * p >= self._least_mass:
                heapq.heappush(self._wanted, (-mass * p, child))

    def is_whole(self, sample: Tokens) -> bool:
        """Whether it has D tokens or more, or fewer of which the last is an end token."""
        return len(sample) >= self._depth or not self._end_token_ids.isdisjoint(sample[-1:])

    def partition(self, least_mass: float) -> "Partition":
        """The cells, all of at least `least_mass` where the law has two such.

        A branch without it falls under its prefix's "any other"; where that has too little itself, under one
        cell of all the rest, which takes the smallest cells until it has enough.
        """
        cells: list[Cell] = []
        for prefix, row in self._rows.items():
            other = self._masses[prefix]
            for child in ((*prefix, token) for token in row.ids.tolist()):
                mass = self._masses[child]
                if child in self._rows or mass >= least_mass:
                    other -= mass
                if child not in self._rows and mass >= least_mass:
                    cells.append(Cell(Kind.BEGINS, child, mass))
            if other >= least_mass:
                cells.append(Cell(Kind.OTHER, prefix, other))
        cells.sort(key=lambda cell: -cell.mass)
        num_kept, rest = len(cells), 1.0 - math.fsum(cell.mass for cell in cells)
        while num_kept and ROUNDING < rest < least_mass:
            num_kept -= 1
            rest += cells[num_kept].mass
        return Partition(self._rows.keys(), cells, num_kept)


class Partition:
    """Cells of which every sequence lies in exactly one."""

    def __init__(self, prefixes: Iterable[Tokens], cells: Sequence[Cell], num_kept: int) -> None:
        """`prefixes` are those with a row; the cells from `num_kept` on are folded into the rest."""
        kept = cells[:num_kept]
        rest = 1.0 - math.fsum(cell.mass for cell in kept)
        self.cells = (*kept, Cell(Kind.REST, (), rest if rest > ROUNDING else 0.0))
        self._prefixes = frozenset(prefixes)
        self._indices = {(cell.kind, cell.tokens): min(i, num_kept) for i, cell in enumerate(cells)}
        self._rest = num_kept

    @property
    def masses(self) -> NDArray[np.float64]:
        """[C] the cells' masses, the rest's last."""
        return np.array([cell.mass for cell in self.cells])

    def index_of(self, sample: Tokens) -> int:
        """The cell of a sequence of D tokens or more, or of fewer when an end token is the last.

        Raises ValueError for a sequence that stops at a prefix whose row is known.
        """
        length = 0
        while sample[: length + 1] in self._prefixes and length < len(sample):
            length += 1
        if length == len(sample):
            raise ValueError(f"the sample {sample} is cut short: something follows these tokens")
        other = self._indices.get((Kind.OTHER, sample[:length]), self._rest)
        return self._indices.get((Kind.BEGINS, sample[: length + 1]), other)

    def counts(self, samples: Iterable[Tokens]) -> NDArray[np.int64]:
        """[C] how many of the samples lie in each cell."""
        indices = [self.index_of(sample) for sample in samples]
        return np.bincount(np.array(indices, dtype=np.int64), minlength=len(self.cells))


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """Pearson's test."""

    statistic: float
    degrees_of_freedom: int
    p_value: float


def chi_square(counts: NDArray[np.int64], masses: NDArray[np.float64]) -> ChiSquare:
    """Compare counts `[C]` with the masses `[C]` they should follow; one cell alone agrees with anything.

    Cells of mass zero are left out: what lies there is no matter of chance.
    """
    possible = masses > 0.0
    observed, expected = counts[possible], masses[possible]
    if expected.size < 2 or not observed.sum():
        return ChiSquare(0.0, 0, 1.0)
    result = stats.chisquare(observed, expected * (observed.sum() / expected.sum()))
    return ChiSquare(float(result.statistic), expected.size - 1, float(result.pvalue))


def pairs_p_value(cells: Sequence[int], masses: NDArray[np.float64]) -> float:
    """Whether neighbours (first and second, third and fourth, ..) agree more often than independent draws.

    `cells` are those of the samples. Two independent draws lie in the same cell with probability Σ m², so the
    number of pairs that do is binomial. Samples that share their random numbers agree more often.
    """
    num_equal = sum(first == second for first, second in zip(cells[::2], cells[1::2], strict=False))
    num_pairs = len(cells) // 2
    if not num_pairs:
        return 1.0
    chance = min(float((masses**2).sum()), 1.0)
    return float(stats.binomtest(num_equal, num_pairs, chance, alternative="greater").pvalue)


def acceptance_p_value(num_kept: int, chances: Sequence[tuple[int, float]], num_unseen: int = 0) -> float:
    """Whether draft tokens are kept as often as the token rule keeps them.

    `num_kept` of the judged tokens were kept; `chances` are groups of judged tokens with the mean of their
    Σ min(p, q), the probability of being kept. A token is judged or not by what came before it, so the sum is
    one of martingale differences, whose variance is at most Σ n·m·(1 − m). Up to `num_unseen` more were kept
    but are not counted, since an end token cut them off.
    """
    expected = sum(n * mean for n, mean in chances)
    variance = sum(n * mean * (1.0 - mean) for n, mean in chances)
    excess = num_kept - expected
    distance = max(excess, -excess - num_unseen, 0.0)
    if variance <= ROUNDING:
        return 1.0 if distance < 0.5 else 0.0
    return float(2.0 * stats.norm.sf(distance / math.sqrt(variance)))
