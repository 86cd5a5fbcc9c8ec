"""Whole pipelines under faults: workers that die, hang, come back, forget, or say what is not so.

Guards against a drafter's fault that reaches a client, a target's return that loses or repeats a token, late
and duplicated answers that are applied, and waits without a bound. At temperature 0 every text must be the
target's own, computed here without any pipeline.
"""

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from coordinator import drafting, handshake, worker_client
from coordinator.drafting import LONGEST_SECONDS, USUAL_MULTIPLE, Drafter, DraftSettings
from coordinator.server import CoordinatorConfig, CoordinatorServer
from coordinator.sessions import Seat, Session
from coordinator.worker_client import WorkerClient
from protos import inference_pb2_grpc
from protos.control_pb2 import CIRCUIT_CLOSED, CIRCUIT_HALF_OPEN, CIRCUIT_OPEN
from protos.inference_pb2 import Usage
from protos.pass_cost import PassCost
from protos.status import DOMAIN, TaskError
from protos.wire import CHANNEL_OPTIONS, PROTOCOL_VERSION, pack_tokens, seal, unpack_tokens, unseal
from protos.worker_pb2 import (
    ENCODING_SPARSE,
    DraftResult,
    DraftTask,
    HandshakeRequest,
    OneHotRow,
    Proposal,
    QRow,
    QRows,
    ReplyBatch,
    Sealed,
    TaskBatch,
    TaskReply,
    VerifyResult,
    VerifyTask,
    WorkerInfo,
)
from tests.pipelines import Generated, generate
from tests.test_service import DRAFT, TARGET, V, details_of, error_of, greedy, ids_of, read_tokens
from tests.test_sessions import session
from tests.test_worker_client import (
    METHODS,
    SOON,
    Role,
    ScriptedWorker,
    eventually,
    is_connected,
    worker_info,
)
from workers.server import ModelIdentity, WorkerConfig, WorkerServer
from workers.table_model import NextLogits, TableModel

PROMPT = [1, 2]
HALF_A_SECOND = 0.5


# ---- workers that die and come back, and something between them and the coordinator


class Worker:
    """One address behind which a worker may live several lives."""

    def __init__(self, role: Role, next_logits: NextLogits, latency: float = 0.0, **fields: Any) -> None:
        self.role = role
        self.identity = fields.pop("identity", ModelIdentity(role, "", (), "table"))
        self.model: dict[str, Any] = {"vocab_size": V, "latency_seconds": lambda _: latency, **fields}
        self.next_logits = next_logits
        self.port = 0
        self.life: WorkerServer | None = None

    async def start(self, **fields: Any) -> str:
        """Begin a life with an empty cache; `fields` of the model may differ from now on."""
        self.model.update(fields)
        model = TableModel(self.next_logits, **self.model)
        config = WorkerConfig(port=self.port, max_pass_tokens=64)
        self.life = WorkerServer(self.role, model, self.identity, config)
        address = await self.life.start()
        self.port = int(address.rpartition(":")[2])
        return address

    async def stop(self) -> None:
        """End at once, whatever is at work."""
        life, self.life = self.life, None
        if life is not None:
            await life.stop(0)

    @property
    def num_slots_used(self) -> int:
        return self.life.num_slots_used if self.life is not None else 0


Damage = Callable[[Sealed], Sequence[Sealed]]


def untouched(sealed: Sealed) -> Sequence[Sealed]:
    return [sealed]


class Proxy:
    """Speaks gRPC on both sides and damages, in between, what the test tells it to."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.on_task: Damage = untouched
        self.on_reply: Damage = untouched
        self.tasks: list[Sealed] = []  # all that came from the coordinator

    async def start(self, upstream: str) -> str:
        service, method = METHODS[self.role]
        options = [*CHANNEL_OPTIONS, *worker_client.RECONNECT_OPTIONS]
        self._channel = grpc.aio.insecure_channel(upstream, options=options)
        self._shake: Any = self._channel.unary_unary(
            f"/{service}/Handshake", HandshakeRequest.SerializeToString, WorkerInfo.FromString
        )
        self._open: Any = self._channel.stream_stream(
            f"/{service}/{method}", TaskBatch.SerializeToString, ReplyBatch.FromString
        )
        handlers: dict[str, Any] = {
            "Handshake": grpc.unary_unary_rpc_method_handler(
                self._handshake, HandshakeRequest.FromString, WorkerInfo.SerializeToString
            ),
            method: grpc.stream_stream_rpc_method_handler(
                self._stream, TaskBatch.FromString, ReplyBatch.SerializeToString
            ),
        }
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        await self._server.stop(0)
        await self._channel.close()

    def say(self, *replies: Sealed) -> None:
        """To the coordinator, out of turn."""
        self._replies.put_nowait(ReplyBatch(generation=self._generation, replies=replies))

    def cut(self) -> None:
        """The connection breaks, both lives go on."""
        self._replies.put_nowait(None)

    async def _handshake(self, request: HandshakeRequest, context: Any) -> WorkerInfo:
        try:
            info: WorkerInfo = await self._shake(request, timeout=SOON)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details())
        return info

    async def _stream(self, batches: AsyncIterator[TaskBatch], context: Any) -> AsyncIterator[ReplyBatch]:
        self._replies: asyncio.Queue[ReplyBatch | None] = asyncio.Queue()
        upstream = self._open()
        pumps = [
            asyncio.create_task(self._pump_tasks(batches, upstream)),
            asyncio.create_task(self._pump_replies(upstream, self._replies)),
        ]
        try:
            while (batch := await self._replies.get()) is not None:
                yield batch
            await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
        finally:
            for pump in pumps:
                pump.cancel()
            upstream.cancel()

    async def _pump_tasks(self, batches: AsyncIterator[TaskBatch], upstream: Any) -> None:
        async for batch in batches:
            self._generation = batch.generation
            self.tasks += batch.tasks
            tasks = [task for sealed in batch.tasks for task in self.on_task(sealed)]
            batch = TaskBatch(
                generation=batch.generation, tasks=tasks, released_sessions=batch.released_sessions
            )
            await upstream.write(batch)

    async def _pump_replies(self, upstream: Any, replies: "asyncio.Queue[ReplyBatch | None]") -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for batch in upstream:
                kept = [reply for sealed in batch.replies for reply in self.on_reply(sealed)]
                replies.put_nowait(ReplyBatch(generation=batch.generation, replies=kept))
        replies.put_nowait(None)


@dataclass
class Deployment:
    stub: Any
    coordinator: CoordinatorServer
    target: Worker
    draft: Worker
    to_target: Proxy
    to_draft: Proxy

    def client(self, proxy: Proxy) -> WorkerClient:
        """The coordinator's end of a proxy."""
        return {client.role: client for client in self.coordinator._clients}[proxy.role]

    async def text(self, num_tokens: int = 40, prompt: Sequence[int] = PROMPT, **fields: Any) -> Generated:
        """A greedy text, checked against the target's own."""
        result = await asyncio.wait_for(
            generate(self.stub, list(prompt), max_tokens=num_tokens, temperature=0.0, **fields), 20
        )
        assert result.ids() == greedy(prompt, num_tokens)
        return result

    async def all_is_free(self) -> None:
        await eventually(lambda: self.target.num_slots_used == self.draft.num_slots_used == 0, 1.0)


@contextlib.asynccontextmanager
async def deployment(
    target: Worker | None = None, draft: Worker | None = None, **coordinator: Any
) -> AsyncIterator[Deployment]:
    """Two workers behind a proxy each; keyword arguments go into the CoordinatorConfig."""
    target = target or Worker("target", TARGET)
    draft = draft or Worker("draft", DRAFT)
    proxies = {"target": Proxy("target"), "draft": Proxy("draft")}
    async with contextlib.AsyncExitStack() as stack:
        addresses: dict[str, list[str]] = {}
        for worker in (target, draft):
            proxy = proxies[worker.role]
            upstream = await worker.start()
            stack.push_async_callback(worker.stop)
            addresses[f"{worker.role}s"] = [await proxy.start(upstream)]
            stack.push_async_callback(proxy.stop)
        settings = {"draft_timeout_seconds": 10.0, **addresses, **coordinator}  # however busy the machine is
        server = CoordinatorServer(CoordinatorConfig(**settings))
        address = await server.start()
        stack.push_async_callback(server.stop, 0.1)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        stub = inference_pb2_grpc.InferenceStub(channel)
        yield Deployment(stub, server, target, draft, proxies["target"], proxies["draft"])


def when(
    condition: Callable[[TaskReply], bool], damage: Callable[[Sealed, TaskReply], Sequence[Sealed]]
) -> Damage:
    """Damage to the replies that meet a condition."""

    def on_reply(sealed: Sealed) -> Sequence[Sealed]:
        reply = unseal(sealed, TaskReply)
        return damage(sealed, reply) if condition(reply) else [sealed]

    return on_reply


def is_proposal(reply: TaskReply) -> bool:
    """Of at least one token."""
    return bool(reply.draft.proposal.tokens)


def says(reply: TaskReply) -> Damage:
    """Every proposal becomes this."""
    return when(is_proposal, lambda sealed, _: [seal(sealed.task_id, reply)])


async def rest_of(call: Any, said: list[int]) -> Usage:
    """Read to the end, adding to what was said; the usage."""
    usage = Usage()
    while (reply := await call.read()) is not grpc.aio.EOF:
        said += [token.id for token in reply.tokens.tokens]
        usage.CopyFrom(reply.usage)
    return usage


async def failure_of(call: Any, said: list[int]) -> grpc.aio.AioRpcError:
    """Read to the failure, adding to what was said."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest_of(call, said)
    return caught.value


# ---- the drafter dies, hangs, comes back


async def test_a_drafter_that_dies_in_mid_text_is_done_without_and_used_again_when_it_is_back() -> None:
    async with deployment(Worker("target", TARGET, latency=0.005)) as d:
        call = d.stub.Generate(ids_of(PROMPT, max_tokens=220, temperature=0.0), timeout=20)
        said = await read_tokens(call, 30)
        await d.draft.stop()
        said += await read_tokens(call, 40)
        num_asked = len(d.to_draft.tasks)
        said += await read_tokens(call, 20)
        assert len(d.to_draft.tasks) == num_asked, "nobody asks the dead"
        await d.draft.start()
        await eventually(lambda: len(d.to_draft.tasks) > num_asked + 3)
        usage = await rest_of(call, said)
        assert tuple(said) == greedy(PROMPT, 220)
        assert usage.num_fallbacks >= 20, "each round that wanted drafts and had none"
        assert usage.num_fallbacks + usage.num_drafts <= usage.num_rounds
        again = await d.text(40)
        assert again.usage.num_drafts > 0
        assert again.usage.num_fallbacks == 0
        await d.all_is_free()


async def test_without_its_drafter_each_round_that_wanted_drafts_is_a_fallback() -> None:
    async with deployment() as d:
        await d.draft.stop()
        await eventually(lambda: not is_connected(d.client(d.to_draft)))
        usage = (await d.text(40)).usage
        assert (usage.num_rounds, usage.num_fallbacks) == (40, 39), "the last round has no room for a draft"


async def test_a_text_that_ends_while_its_workers_are_cut_off_frees_its_slots() -> None:
    async with deployment(Worker("target", TARGET, latency=0.005)) as d:
        call = d.stub.Generate(ids_of(PROMPT, max_tokens=1000, temperature=0.0), timeout=20)
        await read_tokens(call, 30)
        for proxy in (d.to_target, d.to_draft):
            proxy.cut()
        await eventually(lambda: not is_connected(d.client(d.to_target)))
        call.cancel()
        await eventually(lambda: d.target.num_slots_used == d.draft.num_slots_used == 0)


async def test_a_drafter_s_new_life_is_told_the_whole_text() -> None:
    async with deployment(Worker("target", TARGET, latency=0.005)) as d:
        call = d.stub.Generate(ids_of(PROMPT, max_tokens=130, temperature=0.0), timeout=20)
        said = await read_tokens(call, 20)
        await d.draft.stop()
        await d.draft.start()
        assert d.draft.life is not None
        epoch = d.draft.life.epoch
        await rest_of(call, said)
        assert tuple(said) == greedy(PROMPT, 130)
        states = [unseal(sealed, DraftTask).state for sealed in d.to_draft.tasks]
        later = [state for state in states if state.epoch == epoch]
        assert later[0].start == 0
        assert len(later) > 3
        assert all(state.start > 0 for state in later[1:])


async def test_a_hung_drafter_is_waited_for_a_bounded_time_and_not_in_every_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafting, "GRACE_SECONDS", 0.2)
    async with deployment(draft_timeout_seconds=0.1) as d:
        d.to_draft.on_reply = when(is_proposal, lambda *_: [])
        started = time.monotonic()
        result = await d.text(60)
        assert time.monotonic() - started < SOON
        assert result.usage.num_drafts == 0
        assert result.usage.num_fallbacks > 20
        asked = [unseal(sealed, DraftTask).num_draft_tokens for sealed in d.to_draft.tasks]
        assert 1 <= sum(k > 0 for k in asked) < 10
        await d.all_is_free()


async def test_a_drafter_that_hangs_while_it_reads_the_prompt_holds_nothing_up() -> None:
    async with deployment() as d:
        d.to_draft.on_reply = lambda _: []
        started = time.monotonic()
        result = await d.text(40)
        assert time.monotonic() - started < SOON
        assert result.usage.num_drafts == 0
        await d.all_is_free()


async def test_proposals_that_come_too_late_are_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "GRACE_SECONDS", 0.01)
    held: list[Sealed] = []

    def hold(sealed: Sealed, _: TaskReply) -> Sequence[Sealed]:
        held.append(sealed)
        return []

    async with deployment(Worker("target", TARGET, latency=0.005), draft_timeout_seconds=0.03) as d:
        d.to_draft.on_reply = when(is_proposal, hold)
        call = d.stub.Generate(ids_of(PROMPT, max_tokens=250, temperature=0.0), timeout=20)
        said = await read_tokens(call, 60)
        assert held
        monkeypatch.setattr(drafting, "GRACE_SECONDS", SOON)
        d.to_draft.on_reply = untouched
        d.to_draft.say(*held, *held)
        usage = await rest_of(call, said)
        assert tuple(said) == greedy(PROMPT, 250)
        assert d.client(d.to_draft).num_stale_replies >= 2 * len(held)
        assert usage.num_drafts > 0


# ---- the drafter talks nonsense


def drafted(tokens: Sequence[int], num_rows: int | None = None) -> TaskReply:
    rows = [QRow(one_hot=OneHotRow())] * (len(tokens) if num_rows is None else num_rows)
    proposal = Proposal(tokens=pack_tokens(tokens), rows=QRows(rows=rows).SerializeToString())
    return TaskReply(draft=DraftResult(proposal=proposal))


def refusing(error: TaskError) -> TaskReply:
    return TaskReply(error=error.to_status())


def out_of_step(length: str) -> TaskReply:
    info = ErrorInfo(reason="OUT_OF_STEP", domain=DOMAIN, metadata={"length": length})
    return refusing(TaskError(grpc.StatusCode.FAILED_PRECONDITION, "out of step", info))


NONSENSE = {
    "tokens that are no whole numbers": TaskReply(draft=DraftResult(proposal=Proposal(tokens=b"\1\0\0"))),
    "more tokens than asked for": drafted([0] * 9),
    "a token id outside the vocabulary": drafted([1, V]),
    "the largest token id there can be": drafted([2**32 - 1]),
    "rows that do not parse": TaskReply(
        draft=DraftResult(proposal=Proposal(tokens=pack_tokens([1, 2]), rows=b"\xff\xff"))
    ),
    "no rows": drafted([1, 2], num_rows=0),
    "more rows than tokens": drafted([1, 2], num_rows=5),
    "rows without tokens": drafted([], num_rows=2),
    "an answer of no kind": TaskReply(),
    "an answer of the target's kind": TaskReply(verify=VerifyResult(token=1)),
    "an error of code 0": TaskReply(error=Status(code=0, message="fine")),
    "an error of an unknown code": TaskReply(error=Status(code=12345, message="what")),
    "RESOURCE_EXHAUSTED": refusing(TaskError.exhausted("no slot", 1.0)),
    "INTERNAL": refusing(TaskError.internal("a fault")),
    "INVALID_ARGUMENT": refusing(TaskError.invalid("state.tokens", "are wrong")),
    "ABORTED": refusing(TaskError.stale("another round")),
    "out of step, holding nothing": out_of_step("0"),
    "out of step, holding more than there is": out_of_step("1000000"),
    "out of step, holding less than nothing": out_of_step("-5"),
}


@pytest.mark.parametrize("nonsense", NONSENSE)
async def test_a_drafter_s_nonsense_costs_speed_and_nothing_else(nonsense: str) -> None:
    async with deployment() as d:
        d.to_draft.on_reply = says(NONSENSE[nonsense])
        result = await d.text(40)
        assert result.usage.num_drafts == 0
        assert result.usage.num_fallbacks > 0
        await d.all_is_free()


async def test_a_drafter_s_damaged_answers_cost_speed_and_nothing_else() -> None:
    def flip(sealed: Sealed, _: TaskReply) -> Sequence[Sealed]:
        sealed.body = sealed.body[:-1] + bytes([sealed.body[-1] ^ 4])
        return [sealed]

    async with deployment() as d:
        d.to_draft.on_reply = when(is_proposal, flip)
        result = await d.text(40)
        assert (result.usage.num_drafts, result.usage.num_fallbacks > 0) == (0, True)


async def test_nonsense_in_between_spoils_its_own_rounds_only() -> None:
    """Each second proposal has rows that do not parse: the target refuses them, the text goes on."""
    turn = itertools.count()

    def every_second(sealed: Sealed, reply: TaskReply) -> Sequence[Sealed]:
        if next(turn) % 2:
            reply.draft.proposal.rows = b"\xff\xff"
        return [seal(sealed.task_id, reply)]

    async with deployment() as d:
        d.to_draft.on_reply = when(is_proposal, every_second)
        result = await d.text(40)
        assert result.usage.num_drafts >= 1
        assert result.usage.num_fallbacks >= 1


async def test_a_row_that_cannot_be_used_is_no_error() -> None:
    """The target takes the token as one-hot; the drafter may go on."""

    def spoil(sealed: Sealed, reply: TaskReply) -> Sequence[Sealed]:
        num_tokens = len(reply.draft.proposal.tokens) // 4
        reply.draft.proposal.rows = QRows(rows=[QRow()] * num_tokens).SerializeToString()
        return [seal(sealed.task_id, reply)]

    async with deployment() as d:
        d.to_draft.on_reply = when(is_proposal, spoil)
        usage = (await d.text(40)).usage
        assert usage.num_accepted_tokens > 0
        assert usage.num_fallbacks == 0
        assert usage.num_unusable_rows == usage.num_draft_tokens > 0


async def test_a_drafter_whose_tokens_are_not_those_of_its_rows_is_left_alone() -> None:
    swapped = 0

    def swap(sealed: Sealed, reply: TaskReply) -> Sequence[Sealed]:
        nonlocal swapped
        swapped += 1
        tokens = unpack_tokens(reply.draft.proposal.tokens, "tokens")
        reply.draft.proposal.tokens = pack_tokens([(token + 1) % V for token in tokens])
        return [seal(sealed.task_id, reply)]

    async with deployment(encoding="full") as d:
        d.to_draft.on_reply = when(is_proposal, swap)
        first = await generate(d.stub, PROMPT, max_tokens=60, seed=1)
        num_asked = len(d.to_draft.tasks)
        second = await generate(d.stub, PROMPT, max_tokens=20, seed=2)
    assert swapped == 1, "once is enough"
    assert len(d.to_draft.tasks) == num_asked
    assert first.usage.num_fallbacks > 10
    assert second.usage.num_drafts == 0
    assert (len(first.ids()), len(second.ids())) == (60, 20)


# ---- one drafter, many sessions, against a drafter whose every answer is written


@contextlib.asynccontextmanager
async def scripted_drafter() -> AsyncIterator[tuple[ScriptedWorker, Drafter]]:
    worker = ScriptedWorker("draft", worker_info(task_credits=5000, num_slots=5000))
    async with worker.served() as address:
        client = WorkerClient("draft", address, "c")
        await client.start()
        try:
            await eventually(lambda: worker.num_streams == 1)
            yield worker, Drafter(client, DraftSettings(ENCODING_SPARSE, 64, V, 5.0, 5.0))
        finally:
            await client.stop()


def seated(number: int) -> Session:
    """A session that the drafter holds already."""
    return session(id=f"c/{number}", round=1, draft_seat=Seat(epoch=1, length=1))


async def test_sessions_that_fail_together_are_one_failure() -> None:
    """Guards against a pause that grows with the number of sessions instead of the number of failures."""
    async with scripted_drafter() as (worker, drafter):
        asking = [asyncio.create_task(drafter.propose(seated(i), 3)) for i in range(30)]
        await worker.arrived(30)
        worker.hang_up()
        assert await asyncio.gather(*asking) == [Proposal()] * 30
        await eventually(lambda: worker.num_streams == 2)
        await asyncio.sleep(HALF_A_SECOND)
        again = asyncio.create_task(drafter.propose(seated(99), 3))
        sealed = (await worker.arrived(31))[-1]
        worker.answer(seal(sealed.task_id, drafted([4, 5])))
        assert (await again).tokens == pack_tokens([4, 5])


async def test_a_drafter_that_failed_is_tried_by_one_session_at_a_time() -> None:
    """Guards against all sessions waiting for it once more, each time that it is given a chance."""
    async with scripted_drafter() as (worker, drafter):
        asking = asyncio.create_task(drafter.propose(seated(0), 3))
        (sealed,) = await worker.arrived(1)
        worker.answer(seal(sealed.task_id, refusing(TaskError.internal("a fault"))))
        assert await asking == Proposal()
        assert drafter.circuit == CIRCUIT_OPEN
        assert "a fault" in drafter.problem
        await eventually(lambda: drafter.circuit == CIRCUIT_HALF_OPEN)
        sessions = [seated(i) for i in range(1, 6)]
        asking = asyncio.create_task(drafter.propose(sessions[0], 3))
        sealed = (await worker.arrived(2))[1]
        for other in sessions[1:]:
            assert await drafter.propose(other, 3) == Proposal()
            assert other.tally.num_fallbacks == 1
        worker.answer(seal(sealed.task_id, drafted([4])))
        assert (await asking).tokens == pack_tokens([4])
        assert drafter.circuit == CIRCUIT_CLOSED
        all_asking = [asyncio.create_task(drafter.propose(one, 3)) for one in sessions]
        for sealed in (await worker.arrived(7))[2:]:
            worker.answer(seal(sealed.task_id, drafted([5])))
        assert {one.tokens for one in await asyncio.gather(*all_asking)} == {pack_tokens([5])}


@pytest.mark.parametrize("how", ["cancelled", "over before it began"])
async def test_a_trial_that_comes_to_nothing_leaves_room_for_the_next(how: str) -> None:
    async with scripted_drafter() as (worker, drafter):
        drafter.blame(seated(0), "whatever")
        drafter._circuit.open(0.0, "no longer")
        if how == "cancelled":
            trial = asyncio.create_task(drafter.propose(seated(1), 3))
            await worker.arrived(1)
            assert not drafter._circuit.lets_in
            trial.cancel()
            await asyncio.gather(trial, return_exceptions=True)
        else:
            new = session(id="c/1", round=1)
            assert await drafter.propose(new, 3) == Proposal()  # it has to read the prompt first
            assert not drafter._circuit.lets_in
            drafter.forget(new)
        await eventually(lambda: drafter._circuit.lets_in)


async def test_a_proposal_that_usually_takes_longer_is_waited_for_longer() -> None:
    """The configured time is for drafters that are usually faster: a slow one is not a sick one."""
    async with scripted_drafter() as (worker, drafter):
        assert drafter._seconds_for(seated(1), 3) == 5.0
        slow = PassCost((1,), (2.0,), 0.0, 0.0)
        drafter.client.cost = slow
        assert drafter._seconds_for(seated(1), 1) == pytest.approx(USUAL_MULTIPLE * 2.0, abs=0.1)
        assert drafter._seconds_for(seated(1), 3) == LONGEST_SECONDS
        drafter.client.cost = None
        drafter._patience.learn(4.0)
        assert 5.0 < drafter._seconds_for(seated(1), 3) <= LONGEST_SECONDS
        asking = asyncio.create_task(drafter.propose(seated(1), 3))
        (sealed,) = await worker.arrived(1)
        told = unseal(sealed, DraftTask).state.timeout_ns / 1e9
        assert told == pytest.approx(drafter._seconds_for(seated(1), 3), abs=0.01)
        worker.answer(seal(sealed.task_id, drafted([4])))
        await asking


async def test_no_number_of_failures_reaches_a_session() -> None:
    """Guards against a pause that doubles until it is no number any more."""
    async with scripted_drafter() as (worker, drafter):
        asking = [asyncio.create_task(drafter.propose(seated(i), 3)) for i in range(1100)]
        await worker.arrived(1100)
        worker.hang_up()
        assert await asyncio.gather(*asking) == [Proposal()] * 1100


async def test_a_drafter_at_fault_stays_alone_though_another_session_fails_meanwhile() -> None:
    async with scripted_drafter() as (worker, drafter):
        asking = asyncio.create_task(drafter.propose(seated(1), 3))
        (sealed,) = await worker.arrived(1)
        drafter.blame(seated(2), "not the tokens of its rows")
        worker.answer(seal(sealed.task_id, refusing(TaskError.internal("a fault"))))
        assert await asking == Proposal()
        await asyncio.sleep(HALF_A_SECOND)
        other = seated(3)
        assert await drafter.propose(other, 3) == Proposal()
        assert (len(worker.tasks), other.tally.num_fallbacks) == (1, 1)


async def test_a_session_that_ends_during_its_prefill_leaves_nothing_behind() -> None:
    async with scripted_drafter() as (worker, drafter):
        new = session(id="c/1", round=1)
        assert await drafter.propose(new, 3) == Proposal()
        await worker.arrived(1)
        drafter.forget(new)
        await eventually(lambda: worker.released == ["c/1"])
        worker.answer(seal(worker.tasks[0].task_id, refusing(TaskError.stale("the session was released"))))
        await asyncio.sleep(0.05)  # until it is read
        asking = asyncio.create_task(drafter.propose(seated(2), 3))
        sealed = (await worker.arrived(2))[1]  # the drafter has done nothing wrong
        worker.answer(seal(sealed.task_id, drafted([4])))
        assert (await asking).tokens == pack_tokens([4])


# ---- the target dies and comes back


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
async def test_over_a_target_s_death_and_return_no_token_is_lost_or_repeated(num_draft_tokens: int) -> None:
    async with deployment(Worker("target", TARGET, latency=0.003)) as d:
        call = d.stub.Generate(
            ids_of(PROMPT, max_tokens=100, temperature=0.0, num_draft_tokens=num_draft_tokens), timeout=20
        )
        said = await read_tokens(call, 20)
        for _ in range(2):
            await d.target.stop()
            await asyncio.sleep(0.1)
            await d.target.start()
            said += await read_tokens(call, 20)
        usage = await rest_of(call, said)
        assert tuple(said) == greedy(PROMPT, 100)
        assert usage.num_completion_tokens == 100
        await d.all_is_free()


@pytest.mark.parametrize("what", ["restart", "cut"])
async def test_a_seeded_text_is_the_same_whether_or_not_the_target_was_lost(what: str) -> None:
    """A round that is asked again gets the verdict that it had, or would have had."""
    fields: dict[str, Any] = {"max_tokens": 100, "seed": 77, "num_draft_tokens": 0}
    async with deployment(Worker("target", TARGET, latency=0.003)) as d:
        undisturbed = await generate(d.stub, PROMPT, **fields)
        call = d.stub.Generate(ids_of(PROMPT, **fields), timeout=20)
        said = await read_tokens(call, 20)
        for _ in range(3):
            if what == "restart":
                await d.target.stop()
                await d.target.start()
            else:
                d.to_target.cut()
            said += await read_tokens(call, 15)
        await rest_of(call, said)
    assert tuple(said) == undisturbed.ids()


async def test_many_sessions_survive_a_target_s_return_with_fewer_slots() -> None:
    async with deployment(Worker("target", TARGET, latency=0.002)) as d:
        running = [asyncio.create_task(d.text(60, [i])) for i in range(6)]
        await eventually(lambda: d.target.num_slots_used == 6)
        await d.target.stop()
        await d.target.start(num_slots=1)
        await asyncio.gather(*running)
        assert d.target.num_slots_used <= 1
        await d.all_is_free()


async def test_a_target_that_stays_away_ends_requests_with_unavailable_when_patience_ends() -> None:
    async with deployment(Worker("target", TARGET, latency=0.003), target_patience_seconds=0.4) as d:
        call = d.stub.Generate(ids_of(PROMPT, max_tokens=1000), timeout=20)
        said = await read_tokens(call, 10)
        await d.target.stop()
        started = time.monotonic()
        error = await failure_of(call, said)
        assert 0.2 < time.monotonic() - started < 2.0
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        retry = RetryInfo()
        assert any(detail.Unpack(retry) for detail in details_of(error).details)
        error = await error_of(d.stub.Generate(ids_of(PROMPT), timeout=20))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        await d.target.start()
        assert await works_again(d)


async def works_again(d: Deployment) -> bool:
    for _ in range(20):
        with contextlib.suppress(grpc.aio.AioRpcError):
            await d.text(30)
            return True
        await asyncio.sleep(0.1)
    return False


async def test_a_target_that_never_answers_ends_requests_with_unavailable() -> None:
    """The client's own deadline has not passed: DEADLINE_EXCEEDED would say so."""
    async with deployment(verify_prefill_timeout_seconds=0.15, target_patience_seconds=0.3) as d:
        d.to_target.on_reply = lambda _: []
        started = time.monotonic()
        error = await error_of(d.stub.Generate(ids_of(PROMPT), timeout=20))
        assert time.monotonic() - started < 2.0
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        await d.all_is_free()


async def test_patience_begins_when_the_target_is_lost_not_when_the_round_began() -> None:
    """A long prefill takes longer than the patience; the target is lost at its end, and back at once."""
    async with deployment(Worker("target", TARGET, latency=0.03), target_patience_seconds=0.5) as d:
        prompt = [1, 2, 3, 4] * 480  # 30 passes of 64 tokens
        running = asyncio.create_task(d.text(5, prompt, num_draft_tokens=0))
        await asyncio.sleep(0.75)
        await d.target.stop()
        await d.target.start(latency_seconds=lambda _: 0.0)
        await running


async def test_a_connection_that_breaks_in_a_long_prefill_costs_no_patience() -> None:
    """The target goes on with the job at work; the task that is asked again takes it over."""
    async with deployment(Worker("target", TARGET, latency=0.04), target_patience_seconds=0.3) as d:
        prompt = [1, 2, 3, 4] * 480  # 30 passes of 64 tokens, 1.2 s
        running = asyncio.create_task(d.text(5, prompt, num_draft_tokens=0))
        await asyncio.sleep(0.3)
        d.to_target.cut()
        await running
        assert d.target.life is not None


async def test_a_session_beyond_the_drafters_context_gives_its_slot_to_another() -> None:
    target = Worker("target", TARGET, latency=0.002)
    async with deployment(target, Worker("draft", DRAFT, num_slots=1, max_length=24)) as d:
        long = asyncio.create_task(d.text(300, [1]))
        await eventually(lambda: d.target.num_slots_used == 1)
        await asyncio.sleep(0.3)
        assert (await d.text(15, [2])).usage.num_drafts > 0
        assert (await long).usage.num_drafts > 0


async def test_the_pause_grows_for_a_drafter_that_answers_but_draws_nothing() -> None:
    broken = Worker("draft", lambda prefix: np.full(V, np.nan))
    async with deployment(Worker("target", TARGET, latency=0.005), broken) as d:
        usage = (await d.text(400, [1])).usage
        assert usage.num_fallbacks > 350
        tasks = [unseal(sealed, DraftTask) for sealed in d.to_draft.tasks]
        asked = [task for task in tasks if task.num_draft_tokens]
        assert 2 <= len(asked) <= 5, "after 0.2, 0.6, 1.4 and 3 seconds"


async def test_a_target_that_comes_back_as_another_model_is_not_used() -> None:
    async with deployment(Worker("target", TARGET, latency=0.003), target_patience_seconds=0.4) as d:
        call = d.stub.Generate(ids_of(PROMPT, max_tokens=1000, temperature=0.0), timeout=20)
        said = await read_tokens(call, 10)
        await d.target.stop()
        d.target.identity = ModelIdentity("another", "", (), "table")
        d.target.next_logits = DRAFT
        await d.target.start()
        assert (await failure_of(call, said)).code() is grpc.StatusCode.UNAVAILABLE
        assert tuple(said) == greedy(PROMPT, len(said))
        assert d.target.num_slots_used == 0


# ---- the target's answers are damaged, late, twice, or on something else


def every(number: int, damage: Callable[[Sealed], Sequence[Sealed]]) -> Damage:
    turn = itertools.count(1)
    return lambda sealed: damage(sealed) if next(turn) % number == 0 else [sealed]


def on_another_proposal(sealed: Sealed) -> Sequence[Sealed]:
    """The verdict that some other proposal of this round would have had."""
    reply = unseal(sealed, TaskReply)
    reply.verify.digest = bytes(16)
    reply.verify.num_accepted = 0
    reply.verify.token = (reply.verify.token + 1) % V
    return [seal(sealed.task_id, reply)]


def flipped(sealed: Sealed) -> Sequence[Sealed]:
    """One bit of the token, the checksum as it was."""
    reply = unseal(sealed, TaskReply)
    reply.verify.token ^= 1
    return [Sealed(task_id=sealed.task_id, body=reply.SerializeToString(), crc32c=sealed.crc32c)]


TARGET_FAULTS: dict[str, Damage] = {
    "a verdict on another proposal": on_another_proposal,
    "a damaged verdict": flipped,
    "a verdict twice": lambda sealed: [sealed, sealed],
    "no verdict": lambda sealed: [],
    "an answer of no kind": lambda sealed: [seal(sealed.task_id, TaskReply())],
    "an answer of the drafter's kind": lambda sealed: [seal(sealed.task_id, drafted([1]))],
    "no slot": lambda sealed: [seal(sealed.task_id, refusing(TaskError.exhausted("no slot", 0.1)))],
    "another task at work": lambda sealed: [seal(sealed.task_id, refusing(TaskError.unavailable("busy")))],
    "holding nothing": lambda sealed: [seal(sealed.task_id, out_of_step("0"))],
    "holding a little": lambda sealed: [seal(sealed.task_id, out_of_step("1"))],
}


@pytest.mark.parametrize("fault", TARGET_FAULTS)
async def test_a_fault_in_every_fifth_answer_of_the_target_changes_no_token(fault: str) -> None:
    async with deployment(verify_timeout_seconds=0.1, verify_prefill_timeout_seconds=0.1) as d:
        d.to_target.on_reply = every(5, TARGET_FAULTS[fault])
        result = await d.text(30)
        assert result.usage.num_drafts > 0
        await d.all_is_free()


@pytest.mark.parametrize("fault", ["damaged", "twice", "lost"])
async def test_a_fault_in_every_fifth_task_on_its_way_changes_no_token(fault: str) -> None:
    def damage(sealed: Sealed) -> Sequence[Sealed]:
        if fault == "damaged":
            return [Sealed(task_id=sealed.task_id, body=sealed.body[:-1], crc32c=sealed.crc32c)]
        return [sealed] * (2 if fault == "twice" else 0)

    async with deployment(verify_timeout_seconds=0.1, verify_prefill_timeout_seconds=0.1) as d:
        d.to_target.on_task = every(5, damage)
        d.to_draft.on_task = every(3, damage) if fault != "lost" else untouched
        await asyncio.gather(*(d.text(30, [i]) for i in range(3)))
        await d.all_is_free()


async def test_verdicts_that_come_late_are_counted_and_change_nothing() -> None:
    held: list[Sealed] = []

    def hold(sealed: Sealed) -> Sequence[Sealed]:
        held.append(sealed)
        return []

    async with deployment(verify_timeout_seconds=0.08, verify_prefill_timeout_seconds=0.08) as d:
        d.to_target.on_reply = every(4, hold)
        call = d.stub.Generate(ids_of(PROMPT, max_tokens=60, temperature=0.0), timeout=20)
        said = await read_tokens(call, 15)
        await eventually(lambda: len(held) >= 2)
        late = list(held)
        d.to_target.on_reply = untouched
        d.to_target.say(*late[:-1], *late[:-1])
        await rest_of(call, said)
        assert tuple(said) == greedy(PROMPT, 60)
        assert d.client(d.to_target).num_stale_replies >= 2 * len(late[:-1])


@pytest.mark.parametrize(
    "verdict",
    [
        {"num_accepted": 9},
        {"num_accepted": 2**32 - 1},
        {"token": V},
        {"token": 2**32 - 1},
    ],
    ids=str,
)
async def test_a_verdict_that_cannot_be_ends_the_request_and_is_not_committed(
    verdict: dict[str, int],
) -> None:
    def impossible(sealed: Sealed) -> Sequence[Sealed]:
        reply = unseal(sealed, TaskReply)
        for name, value in verdict.items():
            setattr(reply.verify, name, value)
        return [seal(sealed.task_id, reply)]

    async with deployment() as d:
        d.to_target.on_reply = every(4, impossible)
        call = d.stub.Generate(ids_of(PROMPT, max_tokens=60, temperature=0.0), timeout=20)
        said: list[int] = []
        assert (await failure_of(call, said)).code() is grpc.StatusCode.INTERNAL
        assert tuple(said) == greedy(PROMPT, len(said))
        await d.all_is_free()


@pytest.mark.parametrize("lengths", [["3"], ["0"], ["5", "4"], ["0", "1"], ["-1"], ["1000000"]])
async def test_a_target_that_is_never_in_step_ends_the_request(lengths: list[str]) -> None:
    """Guards against asking at once for ever."""
    answers = itertools.cycle(lengths)
    async with deployment(target_patience_seconds=0.3) as d:
        d.to_target.on_reply = lambda sealed: [seal(sealed.task_id, out_of_step(next(answers)))]
        error = await asyncio.wait_for(error_of(d.stub.Generate(ids_of(PROMPT * 3), timeout=20)), 3.0)
        assert error.code() is grpc.StatusCode.INTERNAL
        assert len(d.to_target.tasks) < 20


@pytest.mark.parametrize("answer", ["on another proposal", "of no kind"])
async def test_a_target_that_never_gives_a_verdict_ends_the_request_when_patience_ends(answer: str) -> None:
    damage = on_another_proposal if answer == "on another proposal" else TARGET_FAULTS["an answer of no kind"]
    async with deployment(target_patience_seconds=0.3) as d:
        d.to_target.on_reply = damage
        error = await error_of(d.stub.Generate(ids_of(PROMPT), timeout=20))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert len(d.to_target.tasks) < 20


# ---- workers that forget


async def test_with_fewer_draft_slots_than_sessions_the_later_ones_go_plainly_until_one_is_free() -> None:
    """Guards against sessions that take turns in the slots and prefill more than they draft."""
    async with deployment(Worker("target", TARGET, latency=0.004), Worker("draft", DRAFT, num_slots=2)) as d:
        lengths = [60, 60, 60, 200]
        texts = await asyncio.gather(*(d.text(n, [i, i + 1]) for i, n in enumerate(lengths)))
        states = [unseal(sealed, DraftTask).state for sealed in d.to_draft.tasks]
        told = Counter(state.session for state in states if state.start == 0)
        assert set(told.values()) == {1}, "no session loses its slot to another"
        assert texts[3].usage.num_drafts > 5, "the last one drafts once the first ones are through"
        assert all(text.usage.num_fallbacks == 0 for text in texts)
        await d.all_is_free()


async def test_two_coordinators_share_workers_that_cannot_hold_all_their_sessions() -> None:
    """Both count their sessions from 1 and use the same request ids."""
    target, draft = Worker("target", TARGET, num_slots=3), Worker("draft", DRAFT, num_slots=3)
    async with deployment(target, draft) as one, contextlib.AsyncExitStack() as stack:
        proxy = Proxy("target")
        address = await proxy.start(f"127.0.0.1:{target.port}")
        stack.push_async_callback(proxy.stop)
        server = CoordinatorServer(CoordinatorConfig(targets=(address,), drafts=(f"127.0.0.1:{draft.port}",)))
        address = await server.start()
        stack.push_async_callback(server.stop, 0.1)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        stub = inference_pb2_grpc.InferenceStub(channel)
        two = replace(one, stub=stub, coordinator=server, to_target=proxy)
        await asyncio.gather(
            *(d.text(50, [i, j], request_id=str(i)) for i in range(3) for j, d in enumerate((one, two)))
        )
        names = [
            {unseal(sealed, VerifyTask).state.session for sealed in d.to_target.tasks} for d in (one, two)
        ]
        assert [len(sessions) for sessions in names] == [3, 3]
        assert not names[0] & names[1]
        await one.all_is_free()


# ---- pairs that do not fit


async def refusal_of(target: Worker, draft: Worker) -> TaskError:
    with pytest.raises(TaskError) as caught:
        async with deployment(target, draft):
            pass
    return caught.value


async def test_a_drafter_without_a_tokenizer_and_with_fewer_ids_is_refused_in_words() -> None:
    error = await refusal_of(Worker("target", TARGET), Worker("draft", DRAFT, vocab_size=V - 2))
    assert error.code is grpc.StatusCode.FAILED_PRECONDITION
    assert str(V) in error.message
    assert str(V - 2) in error.message


async def test_a_drafter_whose_vocabulary_is_padded_further_never_proposes_the_padding() -> None:
    """Guards against padding ids that are drawn: here they are what the drafter likes best."""
    padded = Worker("draft", lambda prefix: np.append(DRAFT(prefix), [99.0, 99.0]), vocab_size=V + 2)
    async with deployment(Worker("target", TARGET, latency=0.002), padded) as d:
        usage = (await d.text(60, [1])).usage
        assert usage.num_accepted_tokens > 0
        assert usage.num_fallbacks == 0


async def test_a_session_beyond_the_drafter_goes_on_plainly_and_the_others_with_drafts() -> None:
    """The drafter's vocabulary lacks an id of one prompt: that is no failure of the drafter."""
    identities = [ModelIdentity(name, "same tokenizer", (), "table") for name in ("t", "d")]
    target = Worker("target", lambda prefix: np.append(TARGET(prefix), -np.inf), vocab_size=V + 1)
    target.identity = identities[0]
    draft = Worker("draft", DRAFT, identity=identities[1])
    async with deployment(target, draft) as d:
        beyond, within = await asyncio.gather(d.text(40, [V, 1]), d.text(40, [1, 2]))
        assert (beyond.usage.num_drafts, beyond.usage.num_completion_tokens) == (0, 40)
        assert within.usage.num_fallbacks == 0
        assert within.usage.num_drafts > 5


async def test_a_drafter_that_draws_nothing_is_a_failing_drafter() -> None:
    """Its logits are no numbers. Asked in every round it would cost a pass and a round trip for nothing."""
    broken = Worker("draft", lambda prefix: np.full(V, np.nan))
    async with deployment(Worker("target", TARGET, latency=0.002), broken) as d:
        usage = (await d.text(40, [1])).usage
        assert (usage.num_drafts, usage.num_completion_tokens) == (0, 40)
        assert usage.num_fallbacks > 20


@pytest.mark.parametrize("same", [True, False])
async def test_tokenizers_must_be_the_same_where_both_are_known(same: bool) -> None:
    target = Worker("target", TARGET, identity=ModelIdentity("big", "aaaa1111", (), "table"))
    draft = Worker(
        "draft", DRAFT, identity=ModelIdentity("small", "aaaa1111" if same else "bbbb2222", (), "table")
    )
    if same:
        async with deployment(target, draft) as d:
            await d.text(10)
    else:
        error = await refusal_of(target, draft)
        assert error.code is grpc.StatusCode.FAILED_PRECONDITION
        assert all(word in error.message for word in ("big", "small", "aaaa1111", "bbbb2222", "tokenizer"))


async def test_a_worker_refuses_a_coordinator_of_another_protocol_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handshake, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    error = await refusal_of(Worker("target", TARGET), Worker("draft", DRAFT))
    assert error.code is grpc.StatusCode.FAILED_PRECONDITION
    assert f"protocol_version is {PROTOCOL_VERSION + 1}" in error.message


async def test_a_deployment_whose_drafter_cannot_be_reached_does_not_start() -> None:
    target = Worker("target", TARGET)
    address = await target.start()
    server = CoordinatorServer(CoordinatorConfig(targets=(address,), drafts=("127.0.0.1:9",)))
    with pytest.raises(TaskError) as caught:
        await server.start()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert "127.0.0.1:9" in caught.value.message
    await target.stop()


# ---- everything at once


async def test_under_all_faults_at_once_every_greedy_text_is_the_target_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafting, "GRACE_SECONDS", 0.05)
    generator = random.Random(3)

    def at_random(sealed: Sealed) -> Sequence[Sealed]:
        dice = generator.random()
        if dice < 0.03:
            return []
        if dice < 0.06:
            return [sealed, sealed]
        if dice < 0.09:
            return [Sealed(task_id=sealed.task_id, body=sealed.body + b"\0", crc32c=sealed.crc32c)]
        return [sealed]

    target = Worker("target", TARGET, latency=0.001)
    async with deployment(
        target,
        Worker("draft", DRAFT, num_slots=4),
        verify_timeout_seconds=0.15,
        verify_prefill_timeout_seconds=0.15,
        draft_timeout_seconds=0.05,
        num_draft_tokens=4,
    ) as d:
        for proxy in (d.to_target, d.to_draft):
            proxy.on_task = proxy.on_reply = at_random
        running = [asyncio.create_task(d.text(60, [i, 3, i])) for i in range(8)]
        for action in (d.draft.stop, d.target.stop, d.target.start, d.draft.start):
            await asyncio.sleep(0.2)
            await action()
        d.to_target.cut()
        await asyncio.gather(*running)
        await d.all_is_free()
