"""What goes into the next pass, and when it begins: decoding first, prompts in chunks beside it.

Knows tasks at work, their slots and what passes take; runs nothing. What is computed and answered is the
loop's (`workers.passes`); the arithmetic is `workers.pass_plan`'s and `workers.returns`'.
"""

import math
import time
from collections.abc import Sequence

from protos.pass_cost import PassShape
from protos.worker_pb2 import DraftTask
from workers.cost_model import CostModel
from workers.jobs import Job
from workers.language_model import Feed
from workers.pass_plan import MIN_PREFILL_TOKENS, PassBounds, Pending, fast_rows, plan_pass
from workers.pass_results import Planned
from workers.returns import Returns
from workers.slots import SlotTable
from workers.work import Work

NEXT_ROUND_SECONDS = 1.0  # a session that was answered is expected back for this long


class Schedule:
    """The passes of one worker."""

    def __init__(
        self, slots: SlotTable, cost_model: CostModel, *, max_pass_tokens: int, max_step_seconds: float
    ) -> None:
        """`max_pass_tokens` bounds a pass with prefills, `max_step_seconds` a round beside them."""
        self._slots, self._cost_model = slots, cost_model
        self._max_pass_tokens, self._max_step_seconds = max_pass_tokens, max_step_seconds
        self._returns = Returns()
        self.waits_until = 0.0  # for others to join the next pass, by the monotonic clock; 0: for nobody

    def arrived(self, work: Work) -> None:
        """A task has entered its slot."""
        self._returns.arrived(work.task.state.session, work.arrived_ns / 1e9)

    def answered(self, job: Job) -> None:
        """A task is over; its session is expected back."""
        self._returns.answered(job.slot.session, job.num_logits, len(job.slot.tokens), time.monotonic())

    def released(self, session: str) -> None:
        """The session is over."""
        self._returns.forget(session)

    def next_pass(self, at_work: Sequence[Work]) -> list[Planned]:
        """The feeds of the next pass, the oldest task first; none while it waits, until `waits_until`."""
        ready = [work for work in at_work if work.at_job.slot.ahead is None]
        tasks = [_pending(work.at_job) for work in ready]
        decoding = [work for work, task in zip(ready, tasks, strict=True) if task.decodes]
        sizes = plan_pass(tasks, self._bounds(decoding))
        plan = [
            Planned(work, work.at_job, _feed(work.at_job, size))
            for work, size in zip(ready, sizes, strict=True)
            if size
        ]
        if plan and self._others_are_due(plan):
            return []
        self.waits_until = 0.0
        return plan

    def _bounds(self, decoding: Sequence[Work]) -> PassBounds:
        """In time where sessions decode, or will in a moment; else in rows that are read at the best rate.

        A round that comes in the middle of a pass waits for its end, so passes before it get half of a step,
        and its own, of which a draft has several, what is left.
        """
        cost = self._cost_model.cost
        if cost is None or not (decoding or self._slots.answered_within(NEXT_ROUND_SECONDS)):
            return PassBounds(fast_rows(cost, self._max_pass_tokens), math.inf, lambda _: 0.0)
        seconds = self._max_step_seconds / 2
        if decoding:
            waited_ns = time.monotonic_ns() - min(work.arrived_ns for work in decoding)
            seconds = self._max_step_seconds - waited_ns / 1e9
        return PassBounds(self._max_pass_tokens, seconds, cost.pass_seconds)

    def _others_are_due(self, plan: Sequence[Planned]) -> bool:
        """Whether the pass waits for sessions that are about to come back: until a time that is not put off.

        Drafts, of many short passes, take in whoever comes between two of them.
        """
        cost, now = self._cost_model.cost, time.monotonic()
        is_due = 0.0 < self.waits_until <= now
        if cost is None or is_due or isinstance(plan[0].work.task, DraftTask):
            return False
        shape = PassShape()
        for planned in plan:
            shape = shape.with_feed(planned.feed.start, len(planned.feed.tokens))
        seconds = self._returns.worth_waiting(shape, cost, now)
        if not seconds:
            return False
        self.waits_until = min(self.waits_until or math.inf, now + seconds)
        return True


def _pending(job: Job) -> Pending:
    slot, num_tokens, num_logits = job.slot, len(job.pending), job.num_logits
    is_small = num_tokens <= max(MIN_PREFILL_TOKENS, num_logits)
    return Pending(len(slot.tokens), num_tokens, num_logits, is_small and slot.last_reply is not None)


def _feed(job: Job, size: int) -> Feed:
    """The next `size` pending tokens; the positions behind the last of them alone are wanted."""
    num_logits = job.num_logits if size == len(job.pending) else 0
    return Feed(job.slot.index, len(job.slot.tokens), tuple(job.pending[:size]), num_logits)
