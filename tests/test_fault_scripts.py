"""Scripts of faults against whole deployments of processes: a short form of `fault_run`.

Guards against tokens that are lost, repeated or drawn again, calls that never end, slots that stay taken and
objects that stay behind, whatever of messages, bytes, connections, processes and clients fails in between.
All of it holds for as long as the coordinator lives.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, Phase, example, given, note, settings
from hypothesis import strategies as st

from protos.inference_pb2 import (
    FINISH_REASON_ABORT,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    Finished,
    GenerateReply,
    GenerateRequest,
    Started,
    TokenIds,
    Tokens,
    Usage,
)
from tests.fault_clients import Clients, undisturbed_texts
from tests.fault_history import HAS_INDEX, Record, law_p_value, sample_law, samples_of, violations
from tests.fault_script import BYTES, CLIENTS, CONNECTIONS, KINDS, MESSAGES, NOBODY, PROCESSES, Fault, script
from tests.fault_site import MOST_LEFT, Site, num_objects, site

NUM_FAULTS, SCRIPT_SECONDS = 12, 1.5


def of(*words: str) -> frozenset[str]:
    """The kinds of fault that begin with these words."""
    return frozenset(kind for kind in KINDS if kind.partition("-")[0] in words)


GROUPS = (of(*MESSAGES), of(*BYTES, *CONNECTIONS), of(*PROCESSES, *CLIENTS), frozenset(KINDS))


@pytest_asyncio.fixture
async def deployment() -> AsyncIterator[Site]:
    """One for all examples of a test: what one leaves behind meets the next. In the end nothing is left."""
    async with site(2, 1) as running:
        await live_through(running, [Fault(0.5, "cancel", NOBODY, 0.0, 0)], 0)  # what is made once is made
        await running.settle()
        before = num_objects()
        yield running
        await running.settle()
        assert (num_objects() - before).total() <= MOST_LEFT


async def live_through(running: Site, faults: Sequence[Fault], seed: int) -> Clients:
    """Clients that have asked while the script ran."""
    clients = Clients(running, seed, await undisturbed_texts(running))
    await clients.live_through(faults)
    await running.nobody_is_left()
    return clients


@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),  # a shorter script would fail at another moment, or not at all
    suppress_health_check=(HealthCheck.function_scoped_fixture, HealthCheck.too_slow),
)
@given(seed=st.integers(0, 2**32 - 1), kinds=st.sampled_from(GROUPS))
@example(seed=1, kinds=GROUPS[-1])
async def test_no_script_of_faults_breaks_a_promise(
    deployment: Site, seed: int, kinds: frozenset[str]
) -> None:
    faults = script(seed, NUM_FAULTS, SCRIPT_SECONDS, tuple(deployment.workers), kinds)
    note("\n".join(map(str, faults)))
    clients = await live_through(deployment, faults, seed)
    assert not clients.broken()
    records = clients.history.records
    assert sum(record.is_complete for record in records) > len(records) / 2
    assert law_p_value(samples_of(records), sample_law()) > 1e-6


def test_a_script_is_read_as_it_is_written_and_follows_from_its_seed() -> None:
    workers = ("target-0", "draft-0", "draft-1")
    faults = script(5, 200, 9.0, workers)
    assert tuple(Fault.read(str(fault)) for fault in faults) == faults == script(5, 200, 9.0, workers)
    assert faults != script(6, 200, 9.0, workers)
    assert {fault.kind for fault in faults} == set(KINDS)
    assert all(fault.whom != "target-0" for fault in faults if fault.kind == "nonsense-reply")


# ---- what the history would notice


def replies(*texts: Sequence[int], reason: Any = FINISH_REASON_LENGTH) -> list[GenerateReply]:
    """A whole call, of one choice, a message a text."""
    said: list[GenerateReply] = [GenerateReply(started=Started())]
    num_tokens = 0
    for text in texts:
        tokens = Tokens(choice=0)
        if HAS_INDEX:
            setattr(tokens, "first_index", num_tokens)  # noqa: B010 - a field that there may not be
        for token in text:
            tokens.tokens.add(id=token)
        num_tokens += len(text)
        said.append(GenerateReply(tokens=tokens))
    said.append(GenerateReply(finished=Finished(choice=0, reason=reason)))
    said.append(GenerateReply(usage=Usage(num_completion_tokens=num_tokens)))
    return said


class Call:
    """Says what it is told, and then ends or fails."""

    def __init__(self, said: Sequence[GenerateReply], status: grpc.StatusCode | None = None) -> None:
        self._said = said
        self._status = status

    async def __aiter__(self) -> AsyncIterator[GenerateReply]:
        for reply in self._said:
            yield reply
        if self._status is not None:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(self._status, nothing, nothing)


async def problems_of(call: Call, **seen: Any) -> list[str]:
    request = GenerateRequest(token_ids=TokenIds(ids=[1]), max_tokens=4)
    record = Record("greedy", request)
    await record.follow(call)
    for name, value in seen.items():
        setattr(record, name, value)
    return violations(record, [1, 2, 3, 0])


async def test_a_history_without_faults_breaks_no_promise() -> None:
    assert not await problems_of(Call(replies([1], [2, 3, 0])))
    assert not await problems_of(Call(replies([1], [2])[:3], grpc.StatusCode.UNAVAILABLE))
    assert not await problems_of(Call(replies([1], [2])[:3], grpc.StatusCode.CANCELLED), has_left=True)
    assert not await problems_of(Call(replies([1, 2], reason=FINISH_REASON_ABORT)), was_aborted=True)


BROKEN = {
    "a token is lost": Call(replies([1], [3, 0])),
    "a token comes twice": Call(replies([1, 2], [2, 3])),
    "tokens change places": Call(replies([1], [3, 2, 0])),
    "a token is another one": Call(replies([1, 2, 3, 1])),
    "the text is too long": Call(replies([1, 2, 3, 0, 1])),
    "the text is too short": Call(replies([1, 2])),
    "it goes on behind its end": Call([*replies([1, 2])[:-1], *replies([3, 0])[1:]]),
    "nothing says how it ended": Call(replies([1, 2, 3, 0])[:-1]),
    "it is aborted by nobody": Call(replies([1, 2], reason=FINISH_REASON_ABORT)),
    "it stops without an end token": Call(replies([1, 2], reason=FINISH_REASON_STOP)),
    "the service says that it is at fault": Call(replies([1])[:2], grpc.StatusCode.INTERNAL),
    "it is cancelled by nobody": Call(replies([1])[:2], grpc.StatusCode.CANCELLED),
    "it does not begin": Call(replies([1, 2, 3, 0])[1:]),
    "the usage does not count what came": Call(
        [*replies([1, 2, 3, 0])[:-1], GenerateReply(usage=Usage(num_completion_tokens=5))]
    ),
}


@pytest.mark.parametrize("problem", BROKEN)
async def test_the_history_notices_that(problem: str) -> None:
    assert await problems_of(BROKEN[problem])


def test_the_law_of_samples_is_told_from_another() -> None:
    law = sample_law()
    likeliest = max(law, key=lambda sequence: law[sequence])
    assert law_p_value([likeliest] * 50, law) < 1e-9
