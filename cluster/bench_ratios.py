"""From runs of many requests at once to the ratios that decide: auto K, fixed K, the rules, transformers.

Pure arithmetic. A ratio is taken within each block, whose engines had the same works one soon after another;
its interval is over the blocks (`cluster.bench_statistics.middle_ratio`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.bench import TRANSFORMERS, Drafting, outrider
from cluster.bench_load import LoadRun, LoadSample
from cluster.bench_statistics import Estimate, middle_ratio, pooled
from protos.limits import AUTO

_Value = Callable[[LoadRun], float]


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """One engine at one temperature and number of requests at once."""

    engine: str
    drafting: Drafting | None  # None: not ours
    temperature: float
    num_requests: int
    num_blocks: int
    tokens_per_second: float  # all tokens over all seconds
    of_plain: Estimate | None  # times Outrider with K = 0; None for that itself
    of_generate: (
        Estimate | None
    )  # times transformers' `generate`; None for that itself and where it had no part
    auto_of_it: Estimate | None  # what auto is times this; None for auto itself
    share_drafted: float | None  # rounds with drafts / rounds
    acceptance_rate: float | None  # accepted / drafted
    mean_acceptance_length: float | None  # 1 + accepted / rounds with drafts


@dataclass(frozen=True, slots=True)
class RuleFigures:
    """The block rule over the token rule, for one K at one temperature and number of requests."""

    num_draft_tokens: int
    temperature: float
    num_requests: int
    num_blocks: int
    tokens_a_round: Estimate  # of rounds with drafts
    tokens_per_second: Estimate


class Blocks:
    """The runs of one temperature and number of requests, by engine and block."""

    def __init__(self, samples: Sequence[LoadSample], temperature: float, num_requests: int) -> None:
        """Only those samples count that are of these."""
        self._runs: dict[str, dict[int, LoadRun]] = {}
        for sample in samples:
            if (sample.temperature, sample.num_requests) == (temperature, num_requests):
                self._runs.setdefault(sample.engine, {})[sample.block] = sample.run

    def runs(self, engine: str) -> list[LoadRun]:
        """All of an engine's; none if it had no part."""
        return list(self._runs.get(engine, {}).values())

    def ratio(self, engine: str, other: str, value: _Value) -> Estimate | None:
        """The engine's value over the other's, block by block. None without blocks of both, and of itself."""
        ours, theirs = self._runs.get(engine, {}), self._runs.get(other, {})
        both = [block for block in ours if block in theirs]
        if engine == other or not both:
            return None
        return middle_ratio([value(ours[block]) / value(theirs[block]) for block in both])


def load_figures(samples: Sequence[LoadSample], drafting: Sequence[Drafting]) -> list[LoadFigures]:
    """Each engine wherever it was measured, transformers' batches first."""
    auto = next((way.engine for way in drafting if way.num_draft_tokens == AUTO), "")
    found = []
    for temperature, num_requests in _circumstances(samples):
        blocks = Blocks(samples, temperature, num_requests)
        for name, way in [(TRANSFORMERS, None), *((way.engine, way) for way in drafting)]:
            runs = blocks.runs(name)
            if not runs:
                continue
            counts = pooled([run.counts for run in runs])
            accepted, drafted = counts.num_accepted_tokens, counts.num_draft_tokens
            found.append(
                LoadFigures(
                    engine=name,
                    drafting=way,
                    temperature=temperature,
                    num_requests=num_requests,
                    num_blocks=len(runs),
                    tokens_per_second=sum(run.num_tokens for run in runs) / sum(run.seconds for run in runs),
                    of_plain=blocks.ratio(name, outrider(0), _speed),
                    of_generate=blocks.ratio(name, TRANSFORMERS, _speed),
                    auto_of_it=blocks.ratio(auto, name, _speed),
                    share_drafted=counts.num_drafts / counts.num_rounds if counts.num_drafts else None,
                    acceptance_rate=accepted / drafted if drafted else None,
                    mean_acceptance_length=1 + accepted / counts.num_drafts if counts.num_drafts else None,
                )
            )
    return found


def best_fixed(figures: Sequence[LoadFigures], auto: LoadFigures) -> LoadFigures | None:
    """The fastest fixed K, 0 included, where and by the rule that `auto` was measured."""
    assert auto.drafting is not None
    rivals = [
        f
        for f in figures
        if (f.temperature, f.num_requests) == (auto.temperature, auto.num_requests)
        and f.drafting is not None
        and f.drafting.num_draft_tokens != AUTO
        and (f.drafting.rule == auto.drafting.rule or f.drafting.num_draft_tokens == 0)
    ]
    return max(rivals, key=lambda f: f.tokens_per_second, default=None)


def rule_figures(samples: Sequence[LoadSample], drafting: Sequence[Drafting]) -> list[RuleFigures]:
    """Each fixed K that both rules judged."""
    found = []
    for temperature, num_requests in _circumstances(samples):
        blocks = Blocks(samples, temperature, num_requests)
        for way in drafting:
            k = way.num_draft_tokens
            if k == AUTO or way.rule != "block":
                continue
            tokens_a_round = blocks.ratio(way.engine, outrider(k), _tokens_a_round)
            tokens_per_second = blocks.ratio(way.engine, outrider(k), _speed)
            if tokens_a_round is not None and tokens_per_second is not None:
                num_blocks = len(blocks.runs(way.engine))
                found.append(
                    RuleFigures(k, temperature, num_requests, num_blocks, tokens_a_round, tokens_per_second)
                )
    return found


def _circumstances(samples: Sequence[LoadSample]) -> list[tuple[float, int]]:
    """Each temperature and number of requests, in the order in which they were measured."""
    return list(dict.fromkeys((sample.temperature, sample.num_requests) for sample in samples))


def _speed(run: LoadRun) -> float:
    return run.num_tokens / run.seconds


def _tokens_a_round(run: LoadRun) -> float:
    """Of rounds with drafts; 1 where there was none."""
    return 1 + run.counts.num_accepted_tokens / max(1, run.counts.num_drafts)
