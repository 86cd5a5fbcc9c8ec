"""How many requests at once, the two rules and the closed form are told: tables and sentences.

Knows their figures and words. Prints nothing and measures nothing.
"""

from collections.abc import Sequence

from cluster.bench import outrider
from cluster.bench_closed_form import FormFigures
from cluster.bench_ratios import LoadFigures, RuleFigures, best_fixed
from cluster.bench_table import interval, markdown, number, table
from protos.limits import AUTO

LOAD_DEFINITIONS = (
    "Many requests at once: all texts of a block go through so many places, the longest prompt first, and"
    " the next one begins when a place is free; tokens/s are all tokens over all time from the first request"
    " to the last token, prompts and the end with fewer texts included. transformers' `generate` of several"
    " prompts is one call of so many, padded on the left. Every engine had the same prompts and wrote texts"
    " of the same length, behind end tokens too.",
    "The ratios beside them, of one request too: within blocks, whose engines take turns in random order; the"
    " middle of the blocks' ratios, and an interval of at least 95 % (Wilcoxon's signed ranks on logarithms)."
    " The best fixed K is picked on the same blocks, which can only flatter it.",
)
FORM_DEFINITION = (
    "Closed form: N / (K t_d + t_v + r) of the rounds behind each text's first, one request at a time. N is"
    " from the text's own acceptance by position, t_d and t_v are what the workers told of their passes just"
    " behind it, at its mean length, r is what asking took beyond the workers' own time; rounds without"
    " drafts enter with their share. Measured: tokens/s behind the first token, by the client's clock. All"
    " columns are medians over the texts, the last one of their ratios, with an interval of at least 95 %."
)


def load_table(figures: Sequence[LoadFigures]) -> str:
    """A line for each engine at each number of requests."""
    heads = ("T", "requests", "blocks", "engine", "tokens/s", "of K = 0", "of generate", "auto of it")
    lines = table((*heads, "drafted", "accepted", "length"))
    for f in figures:
        lines.add_row(
            f"{f.temperature:g}",
            str(f.num_requests),
            str(f.num_blocks),
            f.engine,
            number(f.tokens_per_second, 1),
            interval(f.of_plain, 2),
            interval(f.of_generate, 2),
            interval(f.auto_of_it, 2),
            number(f.share_drafted, 2),
            number(f.acceptance_rate, 3),
            number(f.mean_acceptance_length, 2),
        )
    return markdown(lines)


def rule_table(figures: Sequence[RuleFigures]) -> str:
    """A line for each K at each number of requests."""
    lines = table(("T", "requests", "blocks", "K", "tokens a round", "tokens/s"))
    for f in figures:
        lines.add_row(
            f"{f.temperature:g}",
            str(f.num_requests),
            str(f.num_blocks),
            str(f.num_draft_tokens),
            interval(f.tokens_a_round, 3),
            interval(f.tokens_per_second, 3),
        )
    return markdown(lines)


def form_table(figures: Sequence[FormFigures]) -> str:
    """A line for each engine; times in ms."""
    heads = ("T", "engine", "drafted", "K", "N", "t_d", "t_v(1)", "t_v(K+1)", "r")
    lines = table((*heads, "closed form, tokens/s", "measured", "of it"))
    for f in figures:
        p = f.middle
        seconds = (p.step_seconds, p.plain_seconds, p.verify_seconds, p.wire_seconds)
        lines.add_row(
            f"{f.temperature:g}",
            f.engine,
            number(p.share_drafted, 2),
            number(p.num_draft_tokens, 2),
            number(p.tokens_a_round, 2),
            *(number(1e3 * value, 1) for value in seconds),
            number(p.predicted, 1),
            number(p.measured, 1),
            interval(f.reached, 2),
        )
    return markdown(lines)


def load_sentences(figures: Sequence[LoadFigures]) -> list[str]:
    """The ratios that decide, a sentence for each temperature and number of requests."""
    sentences = []
    for auto in (f for f in figures if f.drafting is not None and f.drafting.num_draft_tokens == AUTO):
        here = {
            f.engine: f
            for f in figures
            if (f.temperature, f.num_requests) == (auto.temperature, auto.num_requests)
        }
        at = "one request" if auto.num_requests == 1 else f"{auto.num_requests} requests"
        parts = []
        if auto.of_plain is not None:
            parts.append(f"{interval(auto.of_plain, 2)} times K = 0")
        best = best_fixed(figures, auto)
        if best is not None:
            fixed = best.engine.removeprefix("Outrider, ")
            parts.append(f"{interval(best.auto_of_it, 2)} times the best fixed one, {fixed}")
        if auto.of_generate is not None:
            called = f"generate of {auto.num_requests}" if auto.num_requests > 1 else "generate"
            parts.append(f"{interval(auto.of_generate, 2)} times transformers' {called}")
            plain = here.get(outrider(0))
            if plain is not None and plain.of_generate is not None:
                parts[-1] += f" (K = 0: {interval(plain.of_generate, 2)})"
        if parts:
            sentences.append(f"{at} at temperature {auto.temperature:g}: K = auto is {', '.join(parts)}.")
    return [sentence[:1].upper() + sentence[1:] for sentence in sentences]
