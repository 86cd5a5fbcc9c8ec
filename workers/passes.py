"""The worker's loop: what has arrived while the last pass ran goes into the next one.

Knows jobs, feeds and passes; not what a job computes, nor streams. Everything that touches the model or its
slots happens on one thread, so nothing needs a lock and the event loop stays free to answer health.
"""

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from protos.pass_cost import PassCost, PassShape
from protos.status import TaskError
from protos.worker_pb2 import DraftTask, TaskReply, VerifyTask
from workers.busy import Busy
from workers.calibration import Calibration
from workers.cost_model import CostModel
from workers.jobs import DraftJob, Job
from workers.language_model import LanguageModel
from workers.pass_results import Planned, Result, compute
from workers.schedule import Schedule
from workers.slots import SlotTable
from workers.work import Work

logger = logging.getLogger(__name__)


def model_thread() -> ThreadPoolExecutor:
    """One thread, for all that a process does with torch, loading included.

    Each thread that computes has helpers of its own, which spin while they wait for it; where all helpers
    together are more than the cores, OpenMP puts them to sleep instead, and waking them doubles a pass.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="model")


class PassLoop:
    """Runs passes over the jobs at hand, as the schedule says, and learns from each what passes take."""

    def __init__(
        self,
        model: LanguageModel,
        slots: SlotTable,
        open_job: Callable[[Work], Job],
        *,
        max_pass_tokens: int,
        max_step_seconds: float = math.inf,
        calibration_seconds: float = 0.0,
        thread: ThreadPoolExecutor | None = None,
    ) -> None:
        """`open_job` makes a task's job enter its slot; `thread` is the one that loaded the model.

        `max_pass_tokens` bounds a pass with prefills, `max_step_seconds` how long a round takes beside them,
        `calibration_seconds` the passes that measure while nothing is asked.
        """
        self.busy = Busy()
        self.num_broken_rows = 0  # of p that verdicts looked at and that are no distribution
        self._model = model
        self._slots = slots
        self._open_job = open_job
        self._cost_model = CostModel()
        self._schedule = Schedule(
            slots, self._cost_model, max_pass_tokens=max_pass_tokens, max_step_seconds=max_step_seconds
        )
        self._calibration = Calibration(model, self._cost_model, max_pass_tokens, calibration_seconds)
        self._arrived: list[Work] = []
        self._released: list[str] = []
        self._at_work: list[Work] = []
        self._closed = False
        self._ended = False
        self._busy_at = math.inf  # until a coordinator is there
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._thread = thread or model_thread()

    @property
    def cost(self) -> PassCost | None:
        """What passes take, as far as it is known; None before the first one."""
        return self._cost_model.cost

    @property
    def num_tasks(self) -> int:
        """Tasks that are queued or at work."""
        return len(self._arrived) + len(self._at_work)

    def greet(self) -> None:
        """A coordinator is there, and so the deployment complete: only now do idle moments cost nobody."""
        self._busy_at = min(self._busy_at, time.monotonic())

    def submit(self, work: Work) -> None:
        """Queue a task for the next pass. Raises TaskError(UNAVAILABLE) once closed."""
        if self._closed:
            raise TaskError.unavailable("this worker is draining")
        self._arrived.append(work)
        self._idle.clear()
        self._wake.set()

    def release(self, session: str) -> None:
        """Free a session's slot before the next pass; tasks of it that came earlier are dropped."""
        dropped = [work for work in self._arrived if work.task.state.session == session]
        self._arrived = [work for work in self._arrived if work not in dropped]
        for work in dropped:
            work.reply(_error(TaskError.stale("the session was released")))
        self._released.append(session)
        self._wake.set()

    def close(self) -> None:
        """Take no further tasks."""
        self._closed = True

    async def drained(self) -> None:
        """Wait until no task is queued or at work."""
        await self._idle.wait()

    async def run(self) -> None:
        """Run passes for ever; cancel to stop behind the pass that runs."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                if not self._at_work:
                    await self._wait_for_work(loop)
                arrived, self._arrived = self._arrived, []
                released, self._released = self._released, []
                for work, outcome in await loop.run_in_executor(self._thread, self._turn, arrived, released):
                    work.reply(work.answer(outcome))
                if not self._at_work and not self._arrived:
                    self._idle.set()
                await self._wait_for_others()
        finally:
            self._ended = True
            self._thread.shutdown(wait=False)  # a pass that hangs must not hold up the event loop

    async def _wait_for_others(self) -> None:
        """Until somebody comes who joins the next pass, or for as long as that is worth."""
        self._wake.clear()
        seconds = self._schedule.waits_until - time.monotonic()
        if seconds > 0 and not (self._arrived or self._released):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._wake.wait()

    async def _wait_for_work(self, loop: asyncio.AbstractEventLoop) -> None:
        """Until something arrives, or for a second: leases run out meanwhile. Time to measure passes."""
        self._wake.clear()
        idle_seconds = time.monotonic() - self._busy_at
        while not self._arrived and not self._released:
            num_free = len(self._slots.free)
            if not self._closed and self._calibration.is_due(idle_seconds, num_free):
                await loop.run_in_executor(self._thread, self._run_trial)
                continue
            try:
                async with asyncio.timeout(1.0):
                    await self._wake.wait()
            except TimeoutError:
                return

    def _run_trial(self) -> None:
        self._calibration.run_trial(self._slots.emptied(self._calibration.num_slots))

    def _turn(self, arrived: list[Work], released: list[str]) -> list[tuple[Work, TaskReply]]:
        """One turn on the model's thread: passes until something is answered, or something has come."""
        answered = self._step(arrived, released)
        while self._at_work and not (
            answered or self._arrived or self._released or self._ended or self._schedule.waits_until
        ):
            answered = self._step([], [])
        return answered

    def _step(self, arrived: list[Work], released: list[str]) -> list[tuple[Work, TaskReply]]:
        """Releases, arrivals, a pass. Returns what is answered."""
        answered: list[tuple[Work, TaskReply]] = []
        if arrived or released or self._at_work:
            self._busy_at = time.monotonic()
            self._calibration.clear()
        for session in released:
            self._slots.release(session)
        gone = set(released)
        for work in [w for w in self._at_work if w.task.state.session in gone]:
            self._finish(work, _error(TaskError.stale("the session was released")), answered)
        for session in released:
            self._schedule.released(session)
        for work in arrived:
            self._start(work, answered)
        self._slots.expire()  # also where it is never idle
        for work in [w for w in self._at_work if not isinstance(w.task, DraftTask) and w.out_of_time()]:
            self._finish(work, _error(TaskError.deadline("the task ran out of time")), answered)
        self._catch_up(answered)
        plan = self._schedule.next_pass(self._at_work)
        if plan:
            self.busy.begin()
            self._run_pass(plan, answered)
            self.busy.end()
        return answered

    def _start(self, work: Work, answered: list[tuple[Work, TaskReply]]) -> None:
        try:
            earlier = self._slots.answered(work.task.state, work.key)
            if earlier is not None:
                answered.append((work, earlier))
                return
            if not work.task.state.timeout_ns:
                raise TaskError.invalid("state.timeout_ns", "is 0; every task says how long it is of use")
            if not isinstance(work.task, DraftTask) and work.out_of_time():
                raise TaskError.deadline("the task ran out of time in the queue")
            if self._take_over(work, answered):
                return
            work.job = self._open_job(work)
            self._schedule.arrived(work)
        except TaskError as error:
            answered.append((work, _error(error)))
        except Exception:
            answered.append((work, _error(_fault("a task could not be started"))))
        else:
            self._at_work.append(work)

    def _take_over(self, work: Work, answered: list[tuple[Work, TaskReply]]) -> bool:
        """Let a task that is asked again, over another stream, have the job that is at work on it."""
        state = work.task.state
        for i, old in enumerate(self._at_work):
            was = old.task.state
            same_round = (was.session, was.round, was.base_length) == (
                state.session,
                state.round,
                state.base_length,
            )
            if same_round and old.key == work.key and isinstance(work.task, VerifyTask):
                work.job = old.job
                self._at_work[i] = work
                answered.append((old, _error(TaskError.stale("the task was asked again"))))
                return True
        return False

    def _catch_up(self, answered: list[tuple[Work, TaskReply]]) -> None:
        """Tasks that waited for others' tokens take them over."""
        for work in list(self._at_work):
            job = work.at_job
            try:
                del job.pending[: self._slots.catch_up(job.slot)]
            except Exception:
                self._finish(work, _error(_fault("a prefix could not be copied")), answered)

    def _run_pass(self, plan: list[Planned], answered: list[tuple[Work, TaskReply]]) -> None:
        started_ns, first_pass = time.monotonic_ns(), self.busy.num_passes
        try:
            results = compute(self._model, plan, self._cost_model.cost)
        except Exception:
            fault = _fault("a pass failed")
            if len(plan) == 1:
                self._finish(plan[0].work, _error(fault), answered)
            else:  # find the one at fault; the others go on
                for alone in plan:
                    self._run_pass([alone], answered)
            return
        pass_ns = time.monotonic_ns() - started_ns
        shape, num_passes, num_drawn = PassShape(), 1, 0
        for planned, result in zip(plan, results, strict=True):
            work, job, feed = planned.work, planned.job, planned.feed
            shape = shape.with_feed(feed.start, len(feed.tokens))
            if not work.started_ns:
                work.started_ns, work.first_pass = started_ns, first_pass
            work.pass_ns += pass_ns
            job.slot.tokens.extend(feed.tokens)
            if isinstance(result, list):
                num_passes = max(num_passes, len(result))
                num_drawn += len(result) - 1  # and fed again
                job.slot.tokens.extend([one.token for one in result[:-1]])
            del job.pending[: len(feed.tokens)]
            if not job.pending:
                self._advance(work, job, result, answered)
        self.busy.count(num_passes, shape.num_rows + num_drawn)
        if num_passes == 1 or shape.num_rows <= 2 * shape.num_sequences:  # its passes were alike
            self._cost_model.observe(shape, (time.monotonic_ns() - started_ns) / 1e9 / num_passes)

    def _advance(self, work: Work, job: Job, result: Result, answered: list[tuple[Work, TaskReply]]) -> None:
        try:
            if isinstance(result, list):
                assert isinstance(job, DraftJob), "only drafts are drawn"
                outcome: TaskReply | None = job.take(result)
            else:
                outcome = job.advance(result)
        except TaskError as error:
            self._finish(work, _error(error), answered)
        except Exception:
            self._finish(work, _error(_fault("a task failed")), answered)
        else:
            if outcome is not None:
                job.slot.remember(work.task.state, work.key, outcome)
                self._finish(work, outcome, answered)
        finally:
            self.num_broken_rows += job.num_broken_rows

    def _finish(self, work: Work, outcome: TaskReply, answered: list[tuple[Work, TaskReply]]) -> None:
        self._at_work.remove(work)
        self._slots.leave(work.at_job.slot)
        self._schedule.answered(work.at_job)
        answered.append((work, outcome))


def _error(error: TaskError) -> TaskReply:
    return TaskReply(error=error.to_status())


def _fault(what: str) -> TaskError:
    """A fault of ours, being handled: its trace goes to the log under an id, the id to the caller."""
    fault_id = uuid.uuid4().hex[:12]
    logger.exception("%s (fault %s)", what, fault_id)
    return TaskError.internal(f"{what}; the worker's log has it as fault {fault_id}")
