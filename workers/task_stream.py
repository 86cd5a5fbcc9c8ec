"""One coordinator's stream: tasks in as they come, replies out as they are ready.

Knows sealed messages, generations and credits; hands tasks to the pass loop and does not know what they ask.
"""

import asyncio
import time
from collections.abc import AsyncIterator

from protos.status import TaskError
from protos.wire import MAX_MESSAGE_BYTES, MessageType, seal, unseal
from protos.worker_pb2 import DraftTask, PassCost, ReplyBatch, Sealed, TaskBatch, TaskReply, VerifyTask
from workers.passes import PassLoop
from workers.work import Work

MAX_BATCH_BYTES = MAX_MESSAGE_BYTES // 2  # of the bodies in a message of replies
TELL_COST_SECONDS = 1.0  # how often replies bring what passes take


class TaskStream:
    """The two directions of one stream, joined by the replies that wait to be written."""

    def __init__(
        self,
        passes: PassLoop,
        kind: MessageType[DraftTask | VerifyTask],
        task_credits: int,
        byte_credits: int,
    ) -> None:
        """`kind` is the message that the tasks are."""
        self._passes = passes
        self._kind = kind
        self._task_credits, self._byte_credits = task_credits, byte_credits
        self._generation = 0
        self._in_flight = 0
        self._bytes_in_flight = 0
        self._replies: list[tuple[Sealed, int]] = []  # with the size of the task that each answers
        self._changed = asyncio.Event()
        self._echo = 0  # owed
        self._ended = False
        self._tell_cost_at = 0.0
        self._told_rows: tuple[int, ...] = ()

    async def read(self, batches: AsyncIterator[TaskBatch]) -> None:
        """Take tasks until the coordinator closes the stream."""
        try:
            async for batch in batches:
                self._generation = batch.generation
                for session in batch.released_sessions:
                    self._passes.release(session)
                for sealed in batch.tasks:
                    self._take(sealed)
                if batch.echo:
                    self._echo = batch.echo
                    self._changed.set()
        finally:
            self._ended = True
            self._changed.set()

    def _take(self, sealed: Sealed) -> None:
        task_id, size = sealed.task_id, len(sealed.body)
        self._in_flight += 1
        self._bytes_in_flight += size

        def reply(outcome: TaskReply) -> None:
            self._replies.append((seal(task_id, outcome), size))
            self._changed.set()

        try:
            self._check_credits()
            task = unseal(sealed, self._kind)
            self._passes.submit(Work(task, _question(task), reply))
        except TaskError as error:
            reply(TaskReply(error=error.to_status()))

    def _check_credits(self) -> None:
        """A task larger than all credit may go alone."""
        for name, used, limit in (
            ("tasks", self._in_flight, self._task_credits),
            ("bytes", self._bytes_in_flight, self._byte_credits),
        ):
            if used > limit and self._in_flight > 1:
                raise TaskError.exhausted(f"{used} {name} in flight; the stream's credit is {limit}", 0.1)

    async def next_replies(self) -> ReplyBatch | None:
        """The replies that are ready and fit a message; None when the stream is over and nothing is owed."""
        while not self._replies and not self._echo:
            if self._ended and not self._in_flight:
                return None
            self._changed.clear()
            await self._changed.wait()
        batch = ReplyBatch(generation=self._generation, cost=self._due_cost(), echo=self._echo)
        self._echo = 0
        num_bytes = 0
        for reply, _ in self._replies:
            num_bytes += len(reply.body)
            if batch.replies and num_bytes > MAX_BATCH_BYTES:
                break
            batch.replies.append(reply)
        for _, task_size in self._replies[: len(batch.replies)]:  # what was not written is still in flight
            self._in_flight -= 1
            self._bytes_in_flight -= task_size
        del self._replies[: len(batch.replies)]
        return batch

    def _due_cost(self) -> PassCost | None:
        """What passes take, when it is time to tell, or when passes of another size are known."""
        cost = self._passes.cost
        if cost is None or (time.monotonic() < self._tell_cost_at and cost.rows == self._told_rows):
            return None
        self._tell_cost_at, self._told_rows = time.monotonic() + TELL_COST_SECONDS, cost.rows
        return cost.to_message()


def _question(task: DraftTask | VerifyTask) -> bytes:
    """What a round is asked: all of its task but where it stands and the drafts, which the digest names."""
    left_out = {"state", "proposal"}
    question = type(task)(**{f.name: value for f, value in task.ListFields() if f.name not in left_out})
    return question.SerializeToString(deterministic=True)
