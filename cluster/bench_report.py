"""A benchmark's outcome and how it is told: tables, sentences, an object of JSON.

Knows figures and words. Prints nothing and measures nothing.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from cluster.bench import NUM_FIRST_TOKENS, Difference, Sample, outrider
from cluster.bench_closed_form import FormFigures
from cluster.bench_conditions import Conditions
from cluster.bench_load import LoadSample
from cluster.bench_load_report import (
    FORM_DEFINITION,
    LOAD_DEFINITIONS,
    form_table,
    load_sentences,
    load_table,
    rule_table,
)
from cluster.bench_ratios import LoadFigures, RuleFigures
from cluster.bench_statistics import Figures
from cluster.bench_table import interval, markdown, number, table
from cluster.prompt_file import NUM_CATEGORIES, Question


@dataclass(frozen=True, slots=True)
class Report:
    """All that a benchmark found."""

    conditions: Conditions
    questions: tuple[Question, ...]
    figures: tuple[Figures, ...]
    first_token_seconds: dict[str, list[float]]  # from command to first token, by engine, each time
    differences: dict[str, list[Difference]] | None  # of greedy texts, by engine; None: not compared
    samples: tuple[Sample, ...]
    num_runs: int  # that were wanted, of both kinds; fewer samples mean that it was ended before
    load_samples: tuple[LoadSample, ...] = ()  # of several requests at once
    loads: tuple[LoadFigures, ...] = ()
    rules: tuple[RuleFigures, ...] = ()
    forms: tuple[FormFigures, ...] = ()

    @property
    def num_samples(self) -> int:
        """Of both kinds."""
        return len(self.samples) + len(self.load_samples)

    def at(self, engine: str, temperature: float) -> Figures | None:
        """One engine's figures."""
        return next((f for f in self.figures if (f.engine, f.temperature) == (engine, temperature)), None)

    def first_token(self, engine: str) -> float | None:
        """The median of its times."""
        times = self.first_token_seconds.get(engine)
        return median(times) if times else None


def as_text(report: Report) -> str:
    """The tables, in Markdown, and the sentences."""
    tables = []
    if report.figures:
        tables += [
            ("Speed: medians over the prompts, intervals of at least 95 % in brackets", _speed_table(report)),
            ("Drafts, pooled over the prompts, and the mean round in ms", _drafting_table(report)),
        ]
    if report.forms:
        tables.append(("One request beside the closed form, times in ms", form_table(report.forms)))
    if report.loads:
        tables.append(("Many requests at once", load_table(report.loads)))
    if report.rules:
        tables.append(("The block rule: times the token rule", rule_table(report.rules)))
    return "\n".join(
        [
            *(f"{title}\n\n{lines}\n" for title, lines in tables),
            *(f"- {sentence}" for sentence in sentences(report)),
        ]
    )


def _speed_table(report: Report) -> str:
    """Tokens a second, what that is compared with, and how long a command takes until it writes."""
    heads = "T", "engine", "tokens/s", "of transformers", "of own plain", "first token, s"
    lines = table(heads)
    for f in report.figures:
        cells = [interval(f.tokens_per_second, 1), interval(f.of_transformers, 2), interval(f.of_plain, 2)]
        lines.add_row(f"{f.temperature:g}", f.engine, *cells, number(report.first_token(f.engine), 1))
    return markdown(lines)


def _drafting_table(report: Report) -> str:
    """What became of the drafts, and where the time of a round goes."""
    heads = ("T", "engine", "drafted", "accepted", "length", "Σ min(p, q)", "acc./judged", "q bytes")
    lines = table((*heads, *_PARTS, "round"))
    for f in report.figures:
        parts = [None if f.round is None else getattr(f.round, part) for part in (*_PARTS, "total")]
        lines.add_row(
            f"{f.temperature:g}",
            f.engine,
            number(f.share_drafted, 2),
            number(f.acceptance_rate, 3),
            number(f.mean_acceptance_length, 2),
            number(f.mean_min_pq, 3),
            number(f.accepted_of_judged, 3),
            number(f.q_bytes_per_draft_token, 0),
            *(number(part, 1) for part in parts),
        )
    return markdown(lines)


_PARTS = ("draft", "wire", "target", "rest")
_DEFINITIONS = (
    "Intervals: at least 95 % confident, whatever law the prompts' values follow; those of own plain are so"
    " for all K at once (Bonferroni), since the best is picked.",
    "Drafted: rounds with drafts of all rounds. Accepted: accepted of drafted tokens. Length: 1 + accepted /"
    " rounds with drafts. Σ min(p, q): the mean over judged tokens, those up to the first rejection of a"
    " round; it and accepted / judged must agree. q bytes: of one draft token.",
    "Mean round: without each text's first, which takes in the prompt, and for K above 0 without rounds that"
    " had no drafts.",
    f"First token: from starting a command to its first token, the median of {NUM_FIRST_TOKENS}, models in"
    " the cache; `outrider generate` starts a deployment for it, with its own choice of threads (all"
    " cores), transformers is given the prompt's ids.",
)


def sentences(report: Report) -> list[str]:
    """The result first, then what it must be read with."""
    interrupted = f"Ended after {report.num_samples} of {report.num_runs} runs; what follows is of these."
    notes = [] if report.num_samples == report.num_runs else [interrupted]
    notes += [verdict(report, t) for t in dict.fromkeys(f.temperature for f in report.figures)]
    notes += load_sentences(report.loads)
    notes += _few(report.questions) + _greedy(report)
    notes += [
        f"{f.engine} at temperature {f.temperature:g}: the drafter failed {f.num_fallbacks} rounds."
        for f in report.figures
        if f.num_fallbacks
    ]
    wires = [f.round.wire for f in report.figures if f.engine == outrider(0) and f.round is not None]
    if wires:
        notes.append(
            f"Round trip: loopback; a round at K = 0 has one, of {wires[0]:.1f} ms beside the target's time."
        )
    notes += report.conditions.sentences()
    notes += _DEFINITIONS if report.figures else ()
    notes += [FORM_DEFINITION] if report.forms else []
    return notes + list(LOAD_DEFINITIONS if report.loads else ())


def verdict(report: Report, temperature: float) -> str:
    """Whether drafting pays, and how Outrider compares with transformers, in one sentence."""
    drafting = [
        (f.of_plain.median, f.of_plain, f.engine)
        for f in report.figures
        if f.temperature == temperature and f.of_plain is not None and f.engine.startswith("Outrider")
    ]
    plain = report.at(outrider(0), temperature)
    of_transformers = None if plain is None else plain.of_transformers
    compared = f"without drafts, Outrider is {interval(of_transformers, 2)} times transformers' generate"
    if not drafting:
        return f"At temperature {temperature:g}, {compared}."
    _, ratio, engine = max(drafting, key=lambda candidate: candidate[0])
    among = "" if len(drafting) == 1 else ", the best K here,"
    if ratio.low is None:
        outcome = "too few prompts to tell whether it pays"
    elif not ratio.excludes_one:
        outcome = "no clear difference on this machine"
    else:
        outcome = "it pays on this machine" if ratio.median > 1 else "it does not pay on this machine"
    return (
        f"At temperature {temperature:g}, drafting with {engine.removeprefix('Outrider, ')}{among} is "
        f"{interval(ratio, 2)} times plain decoding by the same engine: {outcome}; {compared}."
    )


def as_json(report: Report) -> dict[str, Any]:
    """Everything by name. What does not exist is left out; texts are token ids, questions are lines."""
    return {
        "conditions": asdict(report.conditions),
        "questions": [{"category": q.category, "line": q.line} for q in report.questions],
        "figures": [_known(asdict(f) | _first_tokens(report, f.engine)) for f in report.figures],
        "greedy_differences": None
        if report.differences is None
        else {engine: [asdict(d) for d in found] for engine, found in report.differences.items()},
        "notes": sentences(report),
        "closed_form": [asdict(f) for f in report.forms],
        "loads": [_known(asdict(f)) for f in report.loads],
        "rules": [asdict(f) for f in report.rules],
        "samples": [asdict(sample) for sample in report.samples],
        "load_samples": [asdict(sample) for sample in report.load_samples],
        "num_runs": report.num_runs,
    }


def _first_tokens(report: Report, engine: str) -> dict[str, Any]:
    times = report.first_token_seconds.get(engine)
    times_range = [min(times), max(times)] if times else None
    return {"first_token_seconds": report.first_token(engine), "first_token_seconds_range": times_range}


def _few(questions: Sequence[Question]) -> list[str]:
    """Says so when there are fewer prompts than a result to rely on needs."""
    num_categories = len({question.category for question in questions})
    if min(len(questions), num_categories) >= NUM_CATEGORIES:
        return []
    return [
        f"Prompts: only {len(questions)} of {num_categories} categories; a figure to go by needs at least"
        f" {NUM_CATEGORIES}, one a category."
    ]


def _greedy(report: Report) -> list[str]:
    """How many greedy texts are transformers' own, an engine a line."""
    notes = []
    for engine, found in (report.differences or {}).items():
        num_texts = sum(
            (sample.engine, sample.temperature, sample.repeat) == (engine, 0, 0) for sample in report.samples
        )
        note = f"{engine}: {num_texts - len(found)} of {num_texts} greedy texts are transformers' generate's"
        if found:
            places = ", ".join(
                f"token {d.position + 1} of {report.questions[d.question].name}, {d.gap:.2g}" for d in found
            )
            note += (
                f"; the others part at (the gap between generate's two best logits there behind it): {places}"
            )
        notes.append(note + ".")
    return notes


def _known(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
