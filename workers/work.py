"""A task at a worker, from its arrival to its reply: when it came, what it has taken, who is told.

Knows tasks, jobs and times; not the passes between.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from protos.worker_pb2 import TaskReply, WorkTimes
from workers.jobs import Job, Task


@dataclass(slots=True, eq=False)
class Work:
    """A task on its way to its reply."""

    task: Task
    key: bytes  # names the question, so that the same round asked twice is answered once
    reply: Callable[[TaskReply], None]  # called on the event loop, exactly once
    arrived_ns: int = field(default_factory=time.monotonic_ns)
    started_ns: int = 0
    first_pass: int = 0  # the worker's first one that the task took part in
    pass_ns: int = 0
    job: Job | None = None

    @property
    def at_job(self) -> Job:
        """The job of a task at work, which has one."""
        assert self.job is not None, "a task at work has a job"
        return self.job

    @property
    def seconds_left(self) -> float:
        """Until the answer is of no more use."""
        return (self.arrived_ns + self.task.state.timeout_ns - time.monotonic_ns()) / 1e9

    def out_of_time(self) -> bool:
        """Whether the answer is of no more use."""
        return self.seconds_left <= 0

    def answer(self, outcome: TaskReply) -> TaskReply:
        """The outcome with the times it took; as it is without a pass: an error, or a reply given before."""
        if self.started_ns:
            times = WorkTimes(
                queue_ns=self.started_ns - self.arrived_ns,
                pass_ns=self.pass_ns,
                total_ns=time.monotonic_ns() - self.arrived_ns,
                first_pass=self.first_pass,
            )
            for name in ("draft", "verify"):
                if outcome.HasField(name):
                    getattr(outcome, name).times.CopyFrom(times)
        return outcome
