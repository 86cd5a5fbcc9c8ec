"""From a benchmark's samples to its figures: medians with intervals, paired ratios, pooled rates.

Pure arithmetic: knows no clock and no file. What does not exist, such as an acceptance rate where nothing was
drafted, is None, never 0 or NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from math import exp, log
from statistics import median

from scipy import stats

from cluster.bench import Counts, Engine, Sample

CONFIDENCE = 0.95
_NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median, and an interval of at least the confidence asked for."""

    median: float
    low: float | None  # None, as `high` is: too few prompts for any
    high: float | None

    @property
    def excludes_one(self) -> bool:
        """For a ratio: whether it is not 1, as far as the interval tells."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


@dataclass(frozen=True, slots=True)
class Round:
    """Milliseconds of a mean round, by parts."""

    draft: float | None  # None without drafts
    wire: float
    target: float
    rest: float

    @property
    def total(self) -> float:
        """All of it."""
        return (self.draft or 0.0) + self.wire + self.target + self.rest


@dataclass(frozen=True, slots=True)
class Figures:
    """One engine at one temperature."""

    engine: str
    temperature: float
    tokens_per_second: Estimate
    of_transformers: Estimate | None  # times transformers' `generate`; None for that itself
    of_plain: Estimate | None  # times the same engine without drafts, all K at once; None for that itself
    share_drafted: float | None  # rounds with drafts / rounds
    acceptance_rate: float | None  # accepted / drafted
    mean_acceptance_length: float | None  # 1 + accepted / rounds with drafts
    mean_min_pq: float | None  # over judged tokens; it and the next must agree
    accepted_of_judged: float | None
    q_bytes_per_draft_token: float | None
    round: Round | None
    num_fallbacks: int


def estimate(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """The values' median and, from two of the values themselves, an interval of at least this confidence.

    It holds for values of any law: how many of n lie below their law's median is binomial. Of five, even the
    range from least to greatest misses that median once in 16 times: there is no interval.
    """
    rank = int(stats.binom.ppf((1 - confidence) / 2, len(values), 0.5))  # from either end, from 1
    if rank == 0:
        return Estimate(median(values), None, None)
    ordered = sorted(values)
    return Estimate(median(values), ordered[rank - 1], ordered[-rank])


def middle_ratio(ratios: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """The middle of paired ratios (Hodges and Lehmann), with an interval by Wilcoxon's signed ranks.

    Exact where the ratios' logarithms scatter alike to both sides of their middle, as those of two engines
    that take turns in random order do. So it is narrower than `estimate`, which supposes nothing.
    """
    logs = [log(ratio) for ratio in ratios]
    means = sorted((a + b) / 2 for i, a in enumerate(logs) for b in logs[i:])
    rank = _mean_rank(len(logs), (1 - confidence) / 2)
    if rank == 0:
        return Estimate(exp(median(means)), None, None)
    return Estimate(exp(median(means)), exp(means[rank - 1]), exp(means[-rank]))


def _mean_rank(num_values: int, tail: float) -> int:
    """Of the values' pairwise means, counted from either end, the last beyond which their middle seldom lies.

    Seldom is with a chance of at most `tail`; 0: there is no such mean.
    How many means lie beyond the middle is the signed-rank statistic: the sum of a random subset of 1..n.
    """
    num_subsets = [1]  # by their sum
    for i in range(1, num_values + 1):
        num_subsets = [a + b for a, b in zip(num_subsets + [0] * i, [0] * i + num_subsets, strict=True)]
    num_below = 0
    for rank, count in enumerate(num_subsets):
        num_below += count
        if num_below > tail * 2**num_values:
            return rank
    raise AssertionError("all subsets are more than a tail of them")


def pooled(counts: Sequence[Counts]) -> Counts:
    """The sums."""
    sums = {
        field.name: sum(getattr(c, field.name) for c in counts)
        for field in fields(Counts)
        if field.name != "num_accepted_per_pos"
    }
    per_pos = zip_longest(*(c.num_accepted_per_pos for c in counts), fillvalue=0)
    return Counts(**sums, num_accepted_per_pos=tuple(map(sum, per_pos)))


def figures(samples: Sequence[Sample], engines: Sequence[Engine], reference: str) -> list[Figures]:
    """Each engine at each temperature that was measured; `reference` names what all are compared with.

    The best of several K is found on the samples that it is judged by. So the intervals of ratios to the same
    plain engine are wider: they hold for all K at once with the confidence told (Bonferroni).
    """
    temperatures = dict.fromkeys(sample.temperature for sample in samples)
    return [
        _figures(samples, engine, _joint_confidence(engine, engines), temperature, reference)
        for temperature in temperatures
        for engine in engines
    ]


def _joint_confidence(engine: Engine, engines: Sequence[Engine]) -> float:
    """What an interval needs for all that draft for the same plain engine to hold at once."""
    num_drafting = sum(other.plain == engine.plain != other.name for other in engines)
    return 1 - (1 - CONFIDENCE) / max(1, num_drafting)


def _figures(
    samples: Sequence[Sample], engine: Engine, joint_confidence: float, temperature: float, reference: str
) -> Figures:
    speeds = _speeds(samples, engine.name, temperature)

    def ratio(other: str, confidence: float) -> Estimate | None:
        if other == engine.name:
            return None
        others = _speeds(samples, other, temperature)
        return estimate([speed / others[question] for question, speed in speeds.items()], confidence)

    counts = pooled(
        [s.written.counts for s in samples if (s.engine, s.temperature) == (engine.name, temperature)]
    )
    accepted, drafted = counts.num_accepted_tokens, counts.num_draft_tokens
    judged = counts.num_judged_tokens
    return Figures(
        engine=engine.name,
        temperature=temperature,
        tokens_per_second=estimate(list(speeds.values())),
        of_transformers=ratio(reference, CONFIDENCE),
        of_plain=ratio(engine.plain, joint_confidence),
        share_drafted=counts.num_drafts / counts.num_rounds if counts.num_drafts else None,
        acceptance_rate=accepted / drafted if drafted else None,
        mean_acceptance_length=1 + accepted / counts.num_drafts if counts.num_drafts else None,
        mean_min_pq=counts.sum_min_pq / judged if judged else None,
        accepted_of_judged=accepted / judged if judged else None,
        q_bytes_per_draft_token=counts.num_q_bytes / drafted if drafted and counts.num_q_bytes else None,
        round=_round(counts),
        num_fallbacks=counts.num_fallbacks,
    )


def _speeds(samples: Sequence[Sample], engine: str, temperature: float) -> dict[int, float]:
    """Tokens/s by question: a question's repeats are no further questions, so their median counts once."""
    speeds: dict[int, list[float]] = {}
    for sample in samples:
        if (sample.engine, sample.temperature) == (engine, temperature):
            written = sample.written
            speeds.setdefault(sample.question, []).append(len(written.tokens) / written.seconds)
    return {question: median(repeats) for question, repeats in speeds.items()}


def _round(counts: Counts) -> Round | None:
    num_rounds = counts.num_timed_rounds
    if not num_rounds:
        return None

    def mean(nanoseconds: int) -> float:
        return nanoseconds / num_rounds / _NS_PER_MS

    return Round(
        draft=mean(counts.draft_ns) if counts.num_drafts else None,
        wire=mean(counts.wire_ns),
        target=mean(counts.target_ns),
        rest=mean(counts.total_ns - counts.draft_ns - counts.wire_ns - counts.target_ns),
    )
