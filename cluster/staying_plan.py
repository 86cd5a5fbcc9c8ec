"""From models that were found and numbers of workers to the plan of a deployment that stays, and fits.

Knows checkpoints, cores and memory. Starts nothing and loads no weights.
"""

import math
from dataclasses import dataclass
from typing import Literal

from cluster.actors import WorkerSettings
from cluster.finding import NO_DRAFT, Found
from cluster.machine import usable_cores
from cluster.memory import Estimate, estimate, model_memory
from cluster.outcome import Refused
from cluster.plan import Plan
from protos.limits import AUTO, MAX_DRAFT_TOKENS, NumDraftTokens
from workers.checkpoints import CheckpointInfo, check, check_pair

# As many sessions as still share a pass well on a small machine; each takes its part of the cache.
DEFAULT_NUM_SLOTS = 32
DEFAULT_MAX_LENGTH = 2048
_MEMORY_SHARE = 0.75  # what slots by default leave of the memory is for everything else


@dataclass(frozen=True, slots=True)
class StayingWish:
    """What to deploy, as a person says it. None: a default that depends on models and machine."""

    target: str
    draft: str  # a model, or NO_DRAFT
    num_targets: int
    num_drafters: int | None
    num_draft_tokens: NumDraftTokens | None  # None: AUTO, where there are drafts
    rule: Literal["token", "block"]
    num_slots: int | None  # sessions that each target holds at once
    max_length: int | None  # positions of each
    num_threads: int | None  # of each worker but shallow drafts
    port: int

    @property
    def drafts(self) -> bool:
        """Whether there are drafters."""
        return self.draft != NO_DRAFT


@dataclass(frozen=True, slots=True)
class StayingPlan:
    """What to start, and what it takes."""

    plan: Plan
    memory: str  # a sentence


def check_wish(wish: StayingWish) -> None:
    """Refuse what can be refused without knowing the models."""
    limits = {
        "num_targets": (1, 64),
        "num_drafters": (1, 64),
        "num_draft_tokens": (0, MAX_DRAFT_TOKENS),
        "num_slots": (1, 4096),
        "max_length": (2, 2**31 - 1),
        "num_threads": (1, usable_cores()),
        "port": (1, 65535),
    }
    for name, (lowest, highest) in limits.items():
        value = getattr(wish, name)
        if value not in (None, AUTO) and not lowest <= value <= highest:
            raise Refused(f"{name} is {value}; it must lie in {lowest}..{highest}")
    for name in ("num_drafters", "num_draft_tokens"):
        if not wish.drafts and getattr(wish, name):
            raise Refused(f"{name} is {getattr(wish, name)}; there is no drafter with --draft {NO_DRAFT}")


def prepare_staying(wish: StayingWish, found: Found) -> StayingPlan:
    """Plan the deployment of the models, which were found.

    Raises Refused or ModelRefused for what cannot be run, DoesNotFit when memory is short.
    """
    target, draft = check(found.target, role="target"), None
    if found.draft is not None:
        draft = check(found.draft, role="draft")
        check_pair(target, draft)
    if wish.max_length is not None and wish.max_length > target.context_length:
        raise Refused(f"max_length is {wish.max_length}; {wish.target} has {target.context_length} positions")
    num_slots = wish.num_slots or _default_num_slots(wish, target, draft, found.available)
    needed = _estimate(wish, target, draft, num_slots)
    needed.require(found.available, lower="--slots, --max-length, --targets or --drafters")
    return StayingPlan(_plan(wish, target, draft, num_slots), needed.sentence(found.available))


def _default_num_slots(
    wish: StayingWish, target: CheckpointInfo, draft: CheckpointInfo | None, available: int
) -> int:
    """As many as fit well, 1 at least."""
    num_slots = DEFAULT_NUM_SLOTS
    while num_slots > 1 and _estimate(wish, target, draft, num_slots).total > _MEMORY_SHARE * available:
        num_slots -= 1
    return num_slots


def _estimate(
    wish: StayingWish, target: CheckpointInfo, draft: CheckpointInfo | None, num_slots: int
) -> Estimate:
    plan = _plan(wish, target, draft, num_slots)
    workers = [
        ("target", target, plan.target, plan.num_targets),
        ("draft", draft, plan.draft, plan.num_drafters),
    ]
    return estimate(
        [
            model_memory(
                role, info, num_slots=settings.num_slots, max_length=settings.max_length, count=count
            )
            for role, info, settings, count in workers
            if info is not None and settings is not None
        ]
    )


def _plan(wish: StayingWish, target: CheckpointInfo, draft: CheckpointInfo | None, num_slots: int) -> Plan:
    num_drafters = wish.num_drafters or 1
    max_length = min(target.context_length, wish.max_length or DEFAULT_MAX_LENGTH)

    # Workers work at the same time, on different sessions, and torch's threads wait for each other: more of
    # them than cores slow all of them down. A shallow draft has one thread and is soon done.
    num_sharing = wish.num_targets
    if draft is not None and not draft.is_shallow:
        num_sharing += num_drafters
    fair_share = max(1, usable_cores() // num_sharing)

    def settings(name: str, info: CheckpointInfo, num_slots: int) -> WorkerSettings:
        return WorkerSettings(
            name=name,
            folder=info.folder,
            gguf=info.gguf,
            num_slots=num_slots,
            max_length=min(info.context_length, max_length),
            num_threads=info.num_threads(wish.num_threads or fair_share),
        )

    # Every session that a target holds finds a place at a drafter.
    num_draft_slots = math.ceil(num_slots * wish.num_targets / num_drafters)
    return Plan(
        target=settings(wish.target, target, num_slots),
        draft=None if draft is None else settings(wish.draft, draft, num_draft_slots),
        num_targets=wish.num_targets,
        num_drafters=num_drafters,
        num_draft_tokens=_num_draft_tokens(wish),
        rule=wish.rule,
        port=wish.port,
    )


def _num_draft_tokens(wish: StayingWish) -> NumDraftTokens:
    if not wish.drafts:
        return 0
    return AUTO if wish.num_draft_tokens is None else wish.num_draft_tokens
