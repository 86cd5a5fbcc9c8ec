"""What rounds ought to take and yield, by what their parts cost: the closed form beside the measurement.

    tokens a second = N / (K t_d + t_v + r)

N = 1 + a_0 + a_0 a_1 + ... from a text's own acceptance by position, t_d and t_v from what the workers told
of their passes just behind it, r from what asking took beyond the workers' time. The time of whole rounds
does not enter, so what is measured may differ. Rounds without drafts count with their share: N = 1, K = 0.

Pure arithmetic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import floor
from statistics import median

from cluster.bench import Sample, Written
from cluster.bench_statistics import Estimate, estimate
from cluster.told_costs import PassCosts
from protos.pass_cost import PassCost, PassShape

_NS_PER_SECOND = 1e9


@dataclass(frozen=True, slots=True)
class Prediction:
    """One text's rounds behind the first, which takes in the prompt."""

    share_drafted: float  # of the rounds
    num_draft_tokens: float  # K: the mean over rounds with drafts
    tokens_a_round: float  # N, of rounds with and without drafts
    step_seconds: float  # t_d
    plain_seconds: float  # t_v of one position
    verify_seconds: float  # t_v of K + 1
    wire_seconds: float  # r
    predicted: float  # tokens/s
    measured: float  # tokens/s behind the first token, by the client's clock


@dataclass(frozen=True, slots=True)
class FormFigures:
    """One engine at one temperature."""

    engine: str
    temperature: float
    middle: Prediction  # the median of each of its fields over the texts
    reached: Estimate  # measured / predicted, text by text


def form_figures(
    samples: Sequence[Sample],
    engines: Sequence[str],
    prompts: Sequence[tuple[int, ...]],
    costs: Mapping[tuple[int, int, float], PassCosts],
) -> list[FormFigures]:
    """Of each engine that counts its rounds' times. `costs` are by repeat, question and temperature."""
    found: dict[tuple[float, str], list[Prediction]] = {
        (temperature, engine): []
        for temperature in dict.fromkeys(sample.temperature for sample in samples)
        for engine in engines
    }
    for sample in samples:
        told = costs.get((sample.repeat, sample.question, sample.temperature))
        text = None if told is None else predict(sample.written, len(prompts[sample.question]), told)
        if text is not None:
            found[sample.temperature, sample.engine].append(text)
    return [
        FormFigures(engine, temperature, _middle(texts), estimate([t.measured / t.predicted for t in texts]))
        for (temperature, engine), texts in found.items()
        if texts
    ]


def predict(text: Written, num_prompt_tokens: int, costs: PassCosts) -> Prediction | None:
    """None of a text whose rounds nobody timed."""
    counts = text.counts
    num_rounds = counts.num_rounds - 1
    if num_rounds < 1 or not counts.num_timed_rounds or text.first_token_seconds is None:
        return None
    share = counts.num_drafts / num_rounds
    k = counts.num_draft_tokens / counts.num_drafts if counts.num_drafts else 0.0
    num_tokens, reached = 1.0, 1.0
    for chance in _chances(counts.num_drafts, counts.num_accepted_per_pos):
        reached *= chance
        num_tokens += share * reached
    length = num_prompt_tokens + len(text.tokens) // 2  # in the mean
    step = _pass_seconds(costs.draft, length, 1)
    plain = _pass_seconds(costs.target, length, 1)
    verify = _pass_seconds(costs.target, length, k + 1)
    wire = counts.wire_ns / counts.num_timed_rounds / _NS_PER_SECOND
    return Prediction(
        share_drafted=share,
        num_draft_tokens=k,
        tokens_a_round=num_tokens,
        step_seconds=step,
        plain_seconds=plain,
        verify_seconds=verify,
        wire_seconds=wire,
        predicted=num_tokens / (share * (k * step + verify) + (1 - share) * plain + wire),
        measured=(len(text.tokens) - 1) / (text.seconds - text.first_token_seconds),
    )


def _chances(num_drafts: int, num_accepted_per_pos: Sequence[int]) -> list[float]:
    """Of draft i to be kept, once those before it were, as far as any was."""
    chances = []
    for num_accepted in num_accepted_per_pos:
        if num_drafts == 0:
            break
        chances.append(num_accepted / num_drafts)
        num_drafts = num_accepted
    return chances


def _pass_seconds(cost: PassCost, length: int, num_rows: float) -> float:
    """Of one sequence's pass; between two whole numbers of rows, what lies between."""
    whole = floor(num_rows)
    at = [cost.pass_seconds(PassShape().with_feed(length - 1, n)) for n in (whole, whole + 1)]
    return at[0] + (num_rows - whole) * (at[1] - at[0])


def _middle(texts: Sequence[Prediction]) -> Prediction:
    return Prediction(**{f.name: median(getattr(text, f.name) for text in texts) for f in fields(Prediction)})
