"""What a model makes of the feeds of a pass: logits, or drafts that it drew itself, several passes at once.

Knows models and what jobs want of them; not slots, nor what becomes of a result.

C logit columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protos.limits import MAX_DRAFT_TOKENS
from protos.pass_cost import PassCost, PassShape
from workers.jobs import DraftJob, Job
from workers.language_model import DrawingModel, Drawn, Draws, Feed, LanguageModel, Logits
from workers.work import Work

_NO_LOGITS = np.empty((0, 0), dtype=np.float32)

Result = Logits | list[Drawn]  # `[num_logits, C]`, or the whole draft


@dataclass(frozen=True, slots=True)
class Planned:
    """A task's share of a pass."""

    work: Work
    job: Job
    feed: Feed


def compute(model: LanguageModel, plan: Sequence[Planned], cost: PassCost | None) -> list[Result]:
    """The result of each feed, or what the model raises. `cost` tells how many draws there is time for."""
    if isinstance(model, DrawingModel) and model.can_draw:
        drawn = _drawn(model, plan, cost)
        if drawn is not None:
            return drawn
    logits = model.forward([planned.feed for planned in plan])
    if len(logits) != len(plan):
        raise ValueError(f"the model answered {len(logits)} of {len(plan)} feeds")
    return [*logits]


def _drawn(model: DrawingModel, plan: Sequence[Planned], cost: PassCost | None) -> list[Result] | None:
    """Drafts, and no logits for what reads a prompt; None where the host has to look at logits."""
    num_wanting = sum(planned.feed.num_logits > 0 for planned in plan)
    if not num_wanting:
        return None
    most = _most_draws(plan, cost)
    draws = [_draws(planned, most) if planned.feed.num_logits else None for planned in plan]
    if num_wanting != len(draws) - draws.count(None):
        return None
    drawn = model.draw([planned.feed for planned in plan], draws)
    if drawn is None:
        return None
    return [_NO_LOGITS if draw is None else tokens for draw, tokens in zip(draws, drawn, strict=True)]


def _draws(planned: Planned, most: int) -> Draws | None:
    return planned.job.draws(most) if isinstance(planned.job, DraftJob) else None


def _most_draws(plan: Sequence[Planned], cost: PassCost | None) -> int:
    """As many as there is time for by what passes take, for whoever has the least: once begun, they go on.

    Nobody is answered before all have drawn.
    """
    if cost is None:
        return MAX_DRAFT_TOKENS
    first = step = PassShape()
    for planned in plan:
        feed = planned.feed
        first = first.with_feed(feed.start, len(feed.tokens))
        step = step.with_feed(feed.start + len(feed.tokens), 1)
    left = min(planned.work.seconds_left for planned in plan if planned.feed.num_logits)
    further = (left - cost.pass_seconds(first)) / cost.pass_seconds(step)
    return max(1, min(MAX_DRAFT_TOKENS, 1 + int(further)))
