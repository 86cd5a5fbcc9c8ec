"""From each command to its first token: which commands there are, and in which order they are run.

Knows what a person would type for each engine. Measuring one is `cluster.first_token`'s.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

from cluster.bench import ASSISTED, NUM_FIRST_TOKENS, TRANSFORMERS, outrider
from cluster.bench_plan import BenchPlan, BenchWish
from cluster.finding import NO_DRAFT
from cluster.first_token import seconds_of_command, seconds_of_transformers


def time_commands(
    plan: BenchPlan, wish: BenchWish, say: Callable[[str], None], startup_seconds: float
) -> dict[str, list[float]]:
    """Seconds to the first token, by engine, NUM_FIRST_TOKENS times each, in turns."""

    def of_transformers(assistant: Path | None) -> float:
        models = plan.baseline.model_copy(update={"assistant": assistant})
        return seconds_of_transformers(models, plan.prompts[0], startup_seconds)

    def of_outrider(draft: str) -> float:
        return seconds_of_command(_generate(wish.target, draft, plan.questions[0].text, startup_seconds))

    commands: list[tuple[list[str], Callable[[], float]]] = [
        ([TRANSFORMERS], partial(of_transformers, None)),
        ([ASSISTED], partial(of_transformers, plan.baseline.assistant)),
        ([outrider(0)], partial(of_outrider, NO_DRAFT)),
        # The first token comes before any draft, so that one K is as good as another.
        ([way.engine for way in plan.drafting if way.num_draft_tokens], partial(of_outrider, wish.draft)),
    ]
    found: dict[str, list[float]] = {}
    for turn, (names, run) in product(range(1, NUM_FIRST_TOKENS + 1), commands):
        if names:
            say(f"Timing commands to their first token, {turn} of {NUM_FIRST_TOKENS}: {names[-1]}")
            seconds = run()
            for name in names:
                found.setdefault(name, []).append(seconds)
    return found


def _generate(target: str, draft: str, prompt: str, startup_seconds: float) -> Sequence[str]:
    options = {
        "target": target,
        "draft": draft,
        "max-tokens": 2,
        "temperature": 0,
        "startup-timeout": startup_seconds,
    }
    return ["generate", *(f"--{name}={value}" for name, value in options.items()), "--", prompt]
