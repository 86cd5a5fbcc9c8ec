"""From a benchmark's samples to its figures: medians with intervals, paired ratios, pooled rates.

Pure arithmetic: knows no clock and no file. What does not exist, such as an acceptance rate where nothing was
drafted, is None, never 0 or NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import median

import numpy as np
from scipy import stats

from cluster.bench import Counts, Engine, Sample

CONFIDENCE = 0.95
MIN_FOR_INTERVAL = 6  # of fewer, even the range from least to greatest misses the median once in 16 times
_NUM_RESAMPLES = 9999
_NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median, and the interval that a bootstrap over the prompts gives it."""

    median: float
    low: float | None  # None, as `high` is: too few prompts
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
    of_plain: Estimate | None  # times the same engine without drafts; None for that itself
    acceptance_rate: float | None  # accepted / drafted
    mean_acceptance_length: float | None  # 1 + accepted / rounds with drafts
    mean_min_pq: float | None  # over judged tokens; it and the next must agree
    accepted_of_judged: float | None
    q_bytes_per_draft_token: float | None
    round: Round | None
    num_fallbacks: int


def estimate(values: Sequence[float]) -> Estimate:
    """The values' median and its 95 % interval (percentile bootstrap, always with the same resamples)."""
    if len(values) < MIN_FOR_INTERVAL:
        return Estimate(median(values), None, None)
    interval = stats.bootstrap(
        (np.asarray(values),),
        np.median,
        confidence_level=CONFIDENCE,
        n_resamples=_NUM_RESAMPLES,
        method="percentile",
        random_state=np.random.default_rng(0),
    ).confidence_interval
    return Estimate(median(values), float(interval.low), float(interval.high))


def pooled(counts: Sequence[Counts]) -> Counts:
    """The sums."""
    return Counts(**{field.name: sum(getattr(c, field.name) for c in counts) for field in fields(Counts)})


def figures(samples: Sequence[Sample], engines: Sequence[Engine], reference: str) -> list[Figures]:
    """Each engine at each temperature that was measured; `reference` names what all are compared with."""
    temperatures = dict.fromkeys(sample.temperature for sample in samples)
    return [
        _figures(samples, engine, temperature, reference)
        for temperature in temperatures
        for engine in engines
    ]


def _figures(samples: Sequence[Sample], engine: Engine, temperature: float, reference: str) -> Figures:
    speeds = _speeds(samples, engine.name, temperature)

    def ratio(other: str) -> Estimate | None:
        if other == engine.name:
            return None
        others = _speeds(samples, other, temperature)
        return estimate([speed / others[question] for question, speed in speeds.items()])

    counts = pooled(
        [s.written.counts for s in samples if (s.engine, s.temperature) == (engine.name, temperature)]
    )
    accepted, drafted = counts.num_accepted_tokens, counts.num_draft_tokens
    judged = counts.num_judged_tokens
    return Figures(
        engine=engine.name,
        temperature=temperature,
        tokens_per_second=estimate(list(speeds.values())),
        of_transformers=ratio(reference),
        of_plain=ratio(engine.plain),
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
