"""A coordinator's end of a worker's stream with messages dropped, doubled, swapped, held up or rewritten.

Knows whole messages, in both directions; not who fares how with it, nor the bytes below them.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import coordinator.server
from coordinator.worker_client import WorkerClient
from protos.wire import seal, unseal
from protos.worker_pb2 import ReplyBatch, TaskBatch, TaskReply

Direction = Literal["task", "reply"]
What = Literal["drop", "double", "swap", "hold", "nonsense"]
Batch = TaskBatch | ReplyBatch
Rewrite = Callable[[ReplyBatch], Sequence[ReplyBatch | None]]  # None: a message that does not parse

HOLD_SECONDS = 0.3


def unchanged(batch: ReplyBatch) -> Sequence[ReplyBatch | None]:
    """As it came."""
    return [batch]


@dataclass(eq=False)
class MessageFaults:
    """What becomes of the messages of one worker: each fault hits the next message that carries something."""

    rewrite: Rewrite = unchanged
    armed: dict[str, deque[What]] = field(default_factory=lambda: {"task": deque(), "reply": deque()})
    held: dict[str, list[Any]] = field(default_factory=lambda: {"task": [], "reply": []})
    done: Counter[str] = field(default_factory=Counter)

    def arm(self, what: What, direction: Direction) -> None:
        """The next message in the direction, or the next ones where some are armed already."""
        self.armed[direction].append(what)

    async def through(self, batch: Batch, direction: Direction) -> list[Any]:
        """What comes out where this message went in."""
        behind, self.held[direction] = self.held[direction], []
        carries = batch.tasks if isinstance(batch, TaskBatch) else batch.replies
        if not carries or not self.armed[direction]:
            return [batch, *behind]
        what = self.armed[direction].popleft()
        self.done[f"{what}-{direction}"] += 1
        if what == "swap":
            self.held[direction] = [batch]
        elif what == "hold":
            await asyncio.sleep(HOLD_SECONDS)
        elif what == "nonsense":
            batch = _with_nonsense(batch)
        return {"drop": [], "swap": [], "double": [batch, batch]}.get(what, [batch]) + behind


def _with_nonsense(batch: Any) -> ReplyBatch:
    """Each proposal with rows that do not parse, under the right checksum."""
    spoilt = ReplyBatch()
    spoilt.CopyFrom(batch)
    for sealed in spoilt.replies:
        reply = unseal(sealed, TaskReply)
        if reply.draft.proposal.tokens:
            reply.draft.proposal.rows = b"\xff\xff"
            sealed.CopyFrom(seal(sealed.task_id, reply))
    return spoilt


class _FaultyCall:
    """A stream with the faults in it."""

    def __init__(self, call: Any, faults: MessageFaults) -> None:
        self._call = call
        self._faults = faults
        for held in faults.held.values():  # what was held of an older stream is gone with it
            held.clear()

    async def write(self, batch: TaskBatch) -> None:
        for message in await self._faults.through(batch, "task"):
            await self._call.write(message)

    def cancel(self) -> None:
        self._call.cancel()

    async def __aiter__(self) -> AsyncIterator[ReplyBatch | None]:
        async for batch in self._call:
            if batch is None:
                yield None
                continue
            for message in await self._faults.through(batch, "reply"):
                for rewritten in self._faults.rewrite(message):
                    yield rewritten


class FaultyClient(WorkerClient):
    """A client as the product has it, each of its streams with the faults of its address in it."""

    all_faults: dict[str, MessageFaults]  # by address; those of addresses that are missing are added

    async def _run_stream(self) -> None:
        faults = self.all_faults.setdefault(self.address, MessageFaults())
        opens: Callable[[], Any] = self.__dict__.setdefault("_opens", self._open_stream)
        self._open_stream = lambda: _FaultyCall(opens(), faults)
        await super()._run_stream()


def faulty_clients(all_faults: dict[str, MessageFaults]) -> AbstractContextManager[Any]:
    """Coordinators that start within the block have these faults between them and their workers."""
    client = type("FaultyClientHere", (FaultyClient,), {"all_faults": all_faults})
    return mock.patch.object(coordinator.server, "WorkerClient", client)
