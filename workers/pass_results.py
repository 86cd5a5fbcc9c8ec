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
    draws = [_draws(planned, cost) if planned.feed.num_logits else None for planned in plan]
    num_wanting = sum(planned.feed.num_logits > 0 for planned in plan)
    if not 0 < num_wanting == len(draws) - draws.count(None):
        return None
    drawn = model.draw([planned.feed for planned in plan], draws)
    if drawn is None:
        return None
    return [_NO_LOGITS if draw is None else tokens for draw, tokens in zip(draws, drawn, strict=True)]


def _draws(planned: Planned, cost: PassCost | None) -> Draws | None:
    """As many as there is time for by what passes take: once begun, they are not stopped."""
    if not isinstance(planned.job, DraftJob):
        return None
    most = MAX_DRAFT_TOKENS
    if cost is not None:
        step = cost.pass_seconds(PassShape().with_feed(planned.feed.start, 1))
        most = max(1, min(most, int(planned.work.seconds_left / step)))
    return planned.job.draws(most)
