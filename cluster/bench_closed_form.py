"""What a round ought to take and yield, by what its parts cost: the closed form beside the measurement.

    tokens a second = N / (K t_d + t_v + r)

N = 1 + a_0 + a_0 a_1 + ... from the run's own acceptance by position, t_d and t_v from what the workers tell
of their passes, r from what asking took beyond the workers' time. The time of whole rounds does not enter, so
what is measured may differ. Rounds without drafts count with their share: N = 1, K = 0.

Pure arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from statistics import mean

from cluster.bench import Sample, Written
from cluster.bench_statistics import pooled
from cluster.told_costs import PassCosts
from protos.pass_cost import PassCost, PassShape

_NS_PER_SECOND = 1e9


@dataclass(frozen=True, slots=True)
class Prediction:
    """One engine's rounds behind the first of each text, which takes in the prompt."""

    engine: str
    temperature: float
    share_drafted: float  # of the rounds
    num_draft_tokens: float  # K: the mean over rounds with drafts
    chances: tuple[float, ...]  # a_i: of draft i to be kept, once those before it were
    tokens_a_round: float  # N, of rounds with and without drafts
    step_seconds: float  # t_d
    verify_seconds: float  # t_v of K + 1 positions
    plain_seconds: float  # t_v of one
    wire_seconds: float  # r
    predicted: float  # tokens/s
    measured: float  # tokens/s behind the first token, by the client's clock

    @property
    def reached(self) -> float:
        """Measured / predicted."""
        return self.measured / self.predicted


def predictions(
    samples: Sequence[Sample], prompts: Sequence[tuple[int, ...]], costs: Sequence[PassCosts]
) -> list[Prediction]:
    """Of each engine that counts its rounds' times, at each temperature.

    `costs` were told while the samples were made.
    """
    if not costs:
        return []
    length = _mean_length(samples, prompts)
    found = []
    for temperature, engine in dict.fromkeys((s.temperature, s.engine) for s in samples):
        texts = [s.written for s in samples if (s.temperature, s.engine) == (temperature, engine)]
        found += _prediction(engine, temperature, texts, length, costs)
    return found


def _prediction(
    engine: str, temperature: float, texts: Sequence[Written], length: int, costs: Sequence[PassCosts]
) -> list[Prediction]:
    """One; none where no round was timed."""
    counts = pooled([text.counts for text in texts])
    num_rounds = counts.num_rounds - len(texts)  # without the first of each text
    if num_rounds <= 0 or not counts.num_timed_rounds:
        return []
    share = counts.num_drafts / num_rounds
    k = counts.num_draft_tokens / counts.num_drafts if counts.num_drafts else 0.0
    chances = _chances(counts.num_drafts, counts.num_accepted_per_pos)
    num_tokens, reached = 1.0, 1.0
    for chance in chances:
        reached *= chance
        num_tokens += share * reached
    step = mean(_pass_seconds(cost.draft, length, 1) for cost in costs)
    plain = mean(_pass_seconds(cost.target, length, 1) for cost in costs)
    verify = mean(_pass_seconds(cost.target, length, k + 1) for cost in costs)
    wire = counts.wire_ns / counts.num_timed_rounds / _NS_PER_SECOND
    seconds = share * (k * step + verify) + (1 - share) * plain + wire
    measured = sum(len(text.tokens) - 1 for text in texts) / sum(
        text.seconds - (text.first_token_seconds or 0.0) for text in texts
    )
    return [
        Prediction(
            engine=engine,
            temperature=temperature,
            share_drafted=share,
            num_draft_tokens=k,
            chances=chances,
            tokens_a_round=num_tokens,
            step_seconds=step,
            verify_seconds=verify,
            plain_seconds=plain,
            wire_seconds=wire,
            predicted=num_tokens / seconds,
            measured=measured,
        )
    ]


def _chances(num_drafts: int, num_accepted_per_pos: Sequence[int]) -> tuple[float, ...]:
    """Of each position, as far as any draft was kept."""
    chances = []
    for num_accepted in num_accepted_per_pos:
        if num_drafts == 0:
            break
        chances.append(num_accepted / num_drafts)
        num_drafts = num_accepted
    return tuple(chances)


def _pass_seconds(cost: PassCost, length: int, num_rows: float) -> float:
    """Of one sequence's pass; between two whole numbers of rows, what lies between."""
    whole = floor(num_rows)
    at = [cost.pass_seconds(PassShape().with_feed(length - 1, n)) for n in (whole, whole + 1)]
    return at[0] + (num_rows - whole) * (at[1] - at[0])


def _mean_length(samples: Sequence[Sample], prompts: Sequence[tuple[int, ...]]) -> int:
    """Of the committed tokens, over all rounds: each text's prompt and half of what was written."""
    return round(mean(len(prompts[s.question]) + len(s.written.tokens) / 2 for s in samples))
