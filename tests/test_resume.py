"""Streams that break and go on: every token once, in order, and never drawn again.

Guards against tokens that are lost, repeated or drawn anew when a client loses its stream, a law that depends
on where streams break, slots that stay taken meanwhile, and memory that grows with clients that never return.
"""

import asyncio
import contextlib
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo

from coordinator.kept_requests import KeepSettings, KeptRequests
from protos.inference_pb2 import (
    FINISH_REASON_ABORT,
    AbortRequest,
    Finished,
    GenerateRequest,
    Started,
    Token,
    Usage,
)
from tests import test_law
from tests.laws import assert_follows
from tests.pipelines import Pipeline, generate, pipeline
from tests.test_faults import Worker, deployment, failure_of
from tests.test_service import (
    A_MOMENT,
    TARGET,
    all_is_free,
    details_of,
    draft_model,
    error_of,
    greedy,
    ids_of,
    target_model,
    wordy,
)
from tests.test_worker_client import SOON, eventually
from workers.table_model import TableModel


@dataclass
class Client:
    """One request, whose stream may be left and resumed. Sees to it that every token comes once, in order."""

    stub: Any
    request: GenerateRequest
    choices: list[list[Token]] = field(init=False)
    finished: dict[int, Finished] = field(default_factory=dict)
    started: Started = field(default_factory=Started)
    usage: Usage | None = None

    def __post_init__(self) -> None:
        self.choices = [[] for _ in range(max(1, self.request.n))]

    async def read(self, num_events: float = math.inf) -> None:
        """One stream, from where the last one ended, to its end or until it is left after so many events."""
        call = self.stub.Generate(self.request, timeout=30)
        async for reply in call:
            match reply.WhichOneof("event"):
                case "started":
                    self.started = reply.started
                case "tokens":
                    said = self.choices[reply.tokens.choice]
                    assert reply.tokens.first_index == len(said)
                    said += reply.tokens.tokens
                case "finished":
                    self.finished[reply.finished.choice] = reply.finished
                case "usage":
                    self.usage = reply.usage
            num_events -= 1
            if num_events <= 0:
                call.cancel()
                break
        self.request.request_id = self.started.request_id
        self.request.resume_from[:] = [len(said) for said in self.choices]

    def ids(self, choice: int = 0) -> tuple[int, ...]:
        return tuple(token.id for token in self.choices[choice])

    async def is_left(self, service: Pipeline) -> None:
        """Wait until the coordinator knows."""
        running = service.coordinator._service._running
        await eventually(lambda: self.request.request_id not in running)


async def in_pieces(
    service: Pipeline, request: GenerateRequest, dice: random.Random, most: int = 6
) -> Client:
    """A request that is read in streams of up to `most` events."""
    client = Client(service.stub, request)
    while client.usage is None:
        await client.read(dice.randint(1, most))
        if client.usage is None:
            await client.is_left(service)
    return client


def num_sessions(service: Pipeline) -> int:
    """Sessions that have begun so far. To be asked once."""
    return next(service.coordinator._service._choices._session_numbers) - 1


# ---- every token once


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
async def test_a_text_that_is_read_in_pieces_is_the_whole_text(num_draft_tokens: int) -> None:
    dice = random.Random(4)
    async with pipeline(target_model(0.001), draft_model(), num_draft_tokens=num_draft_tokens) as service:
        for prompt in range(4):
            request = ids_of([prompt], n=3, max_tokens=30, temperature=0.0)
            client = await in_pieces(service, request, dice)
            assert {client.ids(choice) for choice in range(3)} == {greedy([prompt], 30)}
            assert client.usage is not None
            assert client.usage.num_completion_tokens == 90
        await all_is_free(service)
        totals = service.coordinator._service.totals()
        assert num_sessions(service) > 2 * 4 * 3, "choices were interrupted"
    assert (totals.num_requests, totals.num_completion_tokens) == (4, 4 * 90)


@pytest.mark.parametrize("rule", ["token", "block"])
async def test_sequences_follow_the_law_wherever_their_streams_break(rule: str) -> None:
    """What was committed is drawn once; a round that was cut off is drawn again, and nobody saw its end."""
    dice = random.Random(7)
    num_choices, num_tokens = test_law.NUM_CHOICES, test_law.NUM_TOKENS
    target = TableModel(test_law.TARGET, test_law.V, num_slots=128, latency_seconds=lambda _: 0.002)
    draft = TableModel(test_law.GOOD, test_law.V, num_slots=128)
    samples: list[tuple[int, ...]] = []
    async with pipeline(target, draft, rule=rule, num_draft_tokens=2, num_groups=2) as service:
        for seed in range(0, 1024 // num_choices, 2):
            requests = [
                ids_of(test_law.PROMPT, n=num_choices, max_tokens=num_tokens, seed=3000 + seed + i)
                for i in range(2)
            ]
            for client in await asyncio.gather(
                *(in_pieces(service, request, dice, most=300) for request in requests)
            ):
                samples.extend(client.ids(choice) for choice in range(num_choices))
        assert num_sessions(service) > 1.2 * len(samples), "choices were interrupted"
    assert_follows(samples, test_law.law_of(test_law.PROMPT))


async def test_a_seeded_plain_text_is_the_same_wherever_its_stream_breaks() -> None:
    """Nothing is drawn with other numbers for having been interrupted."""
    wanted: dict[str, Any] = {"max_tokens": 40, "seed": 5, "num_draft_tokens": 0}
    async with pipeline(target_model(0.001), draft_model()) as service:
        whole = await generate(service.stub, [2, 7], **wanted)
        client = await in_pieces(service, ids_of([2, 7], **wanted), random.Random(2))
    assert client.ids() == whole.ids()


async def test_an_unseeded_text_goes_on_with_its_seed() -> None:
    async with pipeline(target_model(0.002), draft_model()) as service:
        client = Client(service.stub, ids_of([1], max_tokens=60))
        await client.read(5)
        seed = client.started.seed
        await client.is_left(service)
        await client.read()
    assert client.started.seed == seed
    assert len(client.ids()) == 60


async def test_characters_that_a_break_falls_into_are_whole(tmp_path: Path) -> None:
    """Ids 10 and 11 are the two bytes of an é."""
    wordy(tmp_path, [*"abcdefghij", "Ã", "©"])
    async with pipeline(target_model(0.001), draft_model(), tokenizer_folder=tmp_path) as service:
        for prompt in range(6):
            fields: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0}
            whole = await generate(service.stub, [prompt], **fields)
            client = await in_pieces(service, ids_of([prompt], **fields), random.Random(prompt), most=3)
            assert [token.text for token in client.choices[0]] == [token.text for token in whole.choices[0]]
            assert client.finished[0].text == whole.finished[0].text


async def test_a_complete_request_says_the_same_again_from_wherever_it_is_asked() -> None:
    async with pipeline(target_model(), draft_model()) as service:
        client = Client(service.stub, ids_of([3], n=2, max_tokens=20, request_id="r"))
        await client.read()
        for start in (0, 7, 20):
            again = Client(service.stub, GenerateRequest())
            again.request.CopyFrom(client.request)
            again.request.resume_from[:] = [start, 0]
            again.choices = [client.choices[0][:start], []]
            await again.read()
            assert again.choices == client.choices
            assert (again.finished, again.usage) == (client.finished, client.usage)
            assert again.started == client.started
        totals = service.coordinator._service.totals()
        await all_is_free(service)
    assert (totals.num_requests, totals.num_completion_tokens) == (1, 40)


async def test_finished_choices_are_not_begun_again() -> None:
    """One slot: the choices take turns, and the stream breaks while the second runs."""
    async with pipeline(target_model(0.002, num_slots=1), draft_model()) as service:
        client = Client(service.stub, ids_of([3], n=3, max_tokens=12, temperature=0.0, num_draft_tokens=0))
        await client.read(1 + 12 + 1 + 4)
        assert [len(said) for said in client.choices] == [12, 4, 0]
        await client.is_left(service)
        await client.read()
        await all_is_free(service)
    assert {client.ids(choice) for choice in range(3)} == {greedy([3], 12)}
    assert sorted(client.finished) == [0, 1, 2]
    assert client.usage is not None
    assert client.usage.num_completion_tokens == 36
    assert client.usage.num_rounds == 36, "no round counts that was not committed"


# ---- who reads


async def test_a_newer_stream_takes_over_and_the_older_one_ends() -> None:
    """A client may come back before the coordinator knows that its connection is dead."""
    async with pipeline(target_model(0.005), draft_model()) as service:
        client = Client(service.stub, ids_of([1], max_tokens=60, temperature=0.0, request_id="r"))
        first = service.stub.Generate(client.request, timeout=SOON)
        for _ in range(4):
            await first.read()
        client.request.resume_from[:] = [0]
        reading = asyncio.create_task(client.read())
        error = await failure_of(first, [])
        assert error.code() is grpc.StatusCode.ABORTED
        await reading
        assert client.ids() == greedy([1], 60)
        assert num_sessions(service) == 1, "it decoded all of it"
        await all_is_free(service)


async def test_a_client_that_is_gone_frees_its_slots_and_can_come_back() -> None:
    async with pipeline(target_model(0.005), draft_model()) as service:
        client = Client(service.stub, ids_of([1], n=3, max_tokens=80, temperature=0.0))
        await client.read(10)
        await all_is_free(service, within=A_MOMENT)
        await client.read()
        await all_is_free(service)
    assert {client.ids(choice) for choice in range(3)} == {greedy([1], 80)}


async def test_where_there_is_no_room_a_request_waits_to_be_resumed() -> None:
    async with pipeline(target_model(0.003, num_slots=1), None, max_waiting_sessions=0) as service:
        client = Client(service.stub, ids_of([1], max_tokens=40, temperature=0.0))
        await client.read(5)
        await all_is_free(service)
        other = asyncio.create_task(generate(service.stub, [2], max_tokens=60, temperature=0.0))
        await eventually(lambda: service.target.num_slots_used == 1)
        error = await error_of(service.stub.Generate(client.request, timeout=SOON))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await other).ids() == greedy([2], 60)
        await all_is_free(service)
        await client.read()
    assert client.ids() == greedy([1], 40)


async def test_what_failed_says_how_far_it_came_and_goes_on_from_there() -> None:
    async with deployment(Worker("target", TARGET, latency=0.003), target_patience_seconds=0.2) as d:
        client = Client(d.stub, ids_of([1], n=2, max_tokens=60, temperature=0.0, request_id="r"))
        reading = asyncio.create_task(client.read())
        await eventually(lambda: len(client.choices[0]) > 10 < len(client.choices[1]))
        await d.target.stop()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reading
        info = ErrorInfo()
        assert any(detail.Unpack(info) for detail in details_of(caught.value).details)
        counts = ",".join(str(len(said)) for said in client.choices)
        assert (info.reason, info.metadata["num_committed_tokens"]) == ("INTERRUPTED", counts)
        await d.target.start()
        client.request.resume_from[:] = [len(said) for said in client.choices]
        for _ in range(20):  # until it is found again
            with contextlib.suppress(grpc.aio.AioRpcError):
                await client.read()
                break
            client.request.resume_from[:] = [len(said) for said in client.choices]
        assert {client.ids(choice) for choice in range(2)} == {greedy([1], 60)}
        await d.all_is_free()


# ---- what is refused


def refused_field(error: grpc.aio.AioRpcError) -> str:
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    bad = BadRequest()
    assert any(detail.Unpack(bad) for detail in details_of(error).details)
    return str(bad.field_violations[0].field)


async def test_the_same_id_with_another_body_is_refused() -> None:
    changes = {
        "seed": 9,
        "max_tokens": 31,
        "temperature": 0.5,
        "n": 1,
        "text": "x",
        "ignore_end_tokens": True,
    }
    async with pipeline(target_model(), draft_model()) as service:
        client = Client(service.stub, ids_of([3], n=2, max_tokens=30, temperature=0.0))
        await client.read(6)
        for name, value in changes.items():
            other = GenerateRequest()
            other.CopyFrom(client.request)
            setattr(other, name, value)
            error = await error_of(service.stub.Generate(other, timeout=SOON))
            assert refused_field(error) == "request_id"
            assert client.request.request_id in str(error.details())
        await client.read()
    assert client.ids(1) == greedy([3], 30)


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ([1], "has 1 entries; the request has 2 choices"),
        ([1, 1, 1], "has 3 entries; the request has 2 choices"),
        ([1, 31], "is 31 for choice 1, of which 30 tokens are committed"),
        ([2**32 - 1, 0], "is 4294967295 for choice 0, of which 30 tokens are committed"),
    ],
)
async def test_a_place_that_cannot_be_is_refused(start: list[int], words: str) -> None:
    async with pipeline(target_model(), draft_model()) as service:
        client = Client(service.stub, ids_of([3], n=2, max_tokens=30, request_id="r"))
        await client.read()
        client.request.resume_from[:] = start
        error = await error_of(service.stub.Generate(client.request, timeout=SOON))
    assert refused_field(error) == "resume_from"
    assert error.details() == f"resume_from {words}"


@pytest.mark.parametrize("name", ["", "never", "x" * 100_000])
async def test_an_unknown_request_is_not_found(name: str) -> None:
    async with pipeline(target_model(), None) as service:
        request = ids_of([3], request_id=name, resume_from=[0])
        error = await error_of(service.stub.Generate(request, timeout=SOON))
    assert error.code() is grpc.StatusCode.NOT_FOUND


async def test_without_resume_from_a_request_of_a_name_that_is_over_is_a_new_one() -> None:
    async with pipeline(target_model(), None) as service:
        for prompt in (3, 3, 4):
            result = await generate(service.stub, [prompt], max_tokens=9, temperature=0.0, request_id="r")
            assert result.ids() == greedy([prompt], 9)
        assert len(service.coordinator._service._kept) == 1


# ---- what is kept is bounded


async def test_the_oldest_are_forgotten_first() -> None:
    async with pipeline(target_model(0.002), None, max_kept_requests=2) as service:
        clients = [Client(service.stub, ids_of([i], max_tokens=50, temperature=0.0)) for i in range(3)]
        for client in clients:
            await client.read(3)
            await client.is_left(service)
        error = await error_of(service.stub.Generate(clients[0].request, timeout=SOON))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        for i, client in enumerate(clients[1:], 1):
            await client.read()
            assert client.ids() == greedy([i], 50)


async def test_what_is_not_asked_for_in_time_is_forgotten() -> None:
    async with pipeline(target_model(0.002), None, resume_seconds=0.1) as service:
        client = Client(service.stub, ids_of([1], max_tokens=50))
        await client.read(3)
        await client.is_left(service)
        kept = service.coordinator._service._kept
        assert len(kept) == 1
        await eventually(lambda: len(kept) == 0)
        error = await error_of(service.stub.Generate(client.request, timeout=SOON))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert kept.num_tokens == 0


async def test_where_nothing_is_kept_nothing_can_be_resumed() -> None:
    async with pipeline(target_model(0.002), None, resume_seconds=0) as service:
        client = Client(service.stub, ids_of([1], max_tokens=50))
        await client.read(3)
        await client.is_left(service)
        error = await error_of(service.stub.Generate(client.request, timeout=SOON))
    assert error.code() is grpc.StatusCode.NOT_FOUND


async def test_aborting_what_waits_to_be_resumed_forgets_it() -> None:
    async with pipeline(target_model(0.002), None) as service:
        client = Client(service.stub, ids_of([1], max_tokens=50))
        await client.read(3)
        await client.is_left(service)
        name = client.request.request_id
        assert not (await service.stub.Abort(AbortRequest(request_id=name))).aborted
        error = await error_of(service.stub.Generate(client.request, timeout=SOON))
    assert error.code() is grpc.StatusCode.NOT_FOUND


async def test_an_aborted_request_stays_aborted() -> None:
    async with pipeline(target_model(0.005), None) as service:
        client = Client(service.stub, ids_of([1], n=2, max_tokens=500, request_id="r", temperature=0.0))
        reading = asyncio.create_task(client.read())
        await eventually(lambda: len(client.choices[1]) > 3)
        assert (await service.stub.Abort(AbortRequest(request_id="r"))).aborted
        await reading
        before = [client.ids(choice) for choice in range(2)]
        await client.read()
        assert [client.ids(choice) for choice in range(2)] == before
        assert {one.reason for one in client.finished.values()} == {FINISH_REASON_ABORT}
        await all_is_free(service)


@dataclass
class Thing:
    num_tokens: int


async def test_tokens_are_bounded_over_all_that_is_kept() -> None:
    kept: KeptRequests[Thing] = KeptRequests(KeepSettings(60.0, max_requests=100, max_tokens=10))
    for name, size in [("a", 4), ("b", 4), ("c", 2)]:
        kept.keep(name, Thing(size))
    assert (len(kept), kept.num_tokens) == (3, 10)
    kept.keep("d", Thing(1))
    assert kept.get("a") is None
    assert (len(kept), kept.num_tokens) == (3, 7)
    kept.keep("e", Thing(11))  # larger than all that may be kept
    assert (len(kept), kept.num_tokens) == (0, 0)
    kept.keep("f", Thing(3))
    kept.forget("f")
    kept.forget("never")
    assert (len(kept), kept.num_tokens) == (0, 0)
