"""Messages meet the faults that are armed, once and in their direction: without faults nothing is proved."""

from collections.abc import Sequence

import pytest

from protos.wire import seal, unseal
from protos.worker_pb2 import DraftResult, Proposal, ReplyBatch, Sealed, TaskBatch, TaskReply
from tests.fault_messages import Direction, MessageFaults, What


def tasks(*ids: int) -> list[TaskBatch]:
    return [TaskBatch(tasks=[Sealed(task_id=task_id)]) for task_id in ids]


async def arriving(faults: MessageFaults, sent: Sequence[TaskBatch | ReplyBatch]) -> list[int]:
    """The first numbers of what comes out."""
    came = []
    for batch in sent:
        direction: Direction = "task" if isinstance(batch, TaskBatch) else "reply"
        came += await faults.through(batch, direction)
    return [(b.tasks if isinstance(b, TaskBatch) else b.replies)[0].task_id for b in came]


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("drop", [2, 3]),
        ("double", [1, 1, 2, 3]),
        ("swap", [2, 1, 3]),
        ("hold", [1, 2, 3]),
    ],
)
async def test_the_next_message_meets_the_fault_and_no_other(what: What, expected: list[int]) -> None:
    faults = MessageFaults()
    faults.arm(what, "task")
    assert await arriving(faults, tasks(1, 2, 3)) == expected
    assert faults.done == {f"{what}-task": 1}
    replies = [ReplyBatch(replies=[Sealed(task_id=task_id)]) for task_id in (1, 2, 3)]
    assert await arriving(faults, replies) == [1, 2, 3]


async def test_a_message_that_carries_nothing_meets_no_fault() -> None:
    faults = MessageFaults()
    faults.arm("drop", "task")
    echo = TaskBatch(echo=1)
    assert await faults.through(echo, "task") == [echo]
    assert not faults.done


async def test_nonsense_is_sealed_as_if_it_were_right() -> None:
    reply = TaskReply(draft=DraftResult(proposal=Proposal(tokens=b"\1\0\0\0", rows=b"")))
    faults = MessageFaults()
    faults.arm("nonsense", "reply")
    [batch] = await faults.through(ReplyBatch(replies=[seal(7, reply)]), "reply")
    spoilt = unseal(batch.replies[0], TaskReply)
    assert spoilt.draft.proposal.tokens == reply.draft.proposal.tokens
    assert spoilt.draft.proposal.rows == b"\xff\xff"
