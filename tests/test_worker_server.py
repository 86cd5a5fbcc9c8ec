"""A worker over real gRPC: one fault answers for one task, passes mix sessions, and nothing ends the worker.

The model is a table behind a gate: a test holds a pass, lets things arrive meanwhile, and lets it go.
"""

import asyncio
import contextlib
import itertools
import re
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import RetryInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import worker_pb2_grpc
from protos.pass_cost import PassCost
from protos.prefix import TokenPrefix
from protos.status import TaskError
from protos.wire import PROTOCOL_VERSION, pack_tokens, seal, unseal
from protos.worker_pb2 import (
    ENCODING_FULL,
    DraftTask,
    HandshakeRequest,
    Proposal,
    Sampling,
    Sealed,
    SessionState,
    TaskBatch,
    TaskReply,
    VerifyTask,
    WorkerInfo,
)
from tests.test_jobs import (
    DRAFT,
    PROMPT,
    TARGET,
    Law,
    Prefix,
    StrictTable,
    V,
    draft_task,
    drafts_of,
    judged,
    proposed,
    verdict_of,
    verify_task,
)
from workers.counts import quantise_full
from workers.language_model import Feed, Logits
from workers.server import ModelIdentity, Role, WorkerConfig, WorkerServer
from workers.table_model import TableModel

code = grpc.StatusCode
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
PATIENCE = 20.0  # seconds until a test gives up; none waits for it to pass


class Gate:
    """Stands in every pass of a table model: notes the lengths of its feeds, holds it, or makes it fail."""

    def __init__(self) -> None:
        self.passes: list[list[int]] = []
        self.fault: Exception | None = None
        self._held = False
        self._entered = threading.Semaphore(0)
        self._permits = threading.Semaphore(0)

    def __call__(self, lengths: Sequence[int]) -> float:
        self.passes.append(list(lengths))
        if self._held:
            self._entered.release()
            self._permits.acquire(timeout=PATIENCE)
        if self.fault is not None:
            raise self.fault
        return 0.0

    def hold(self) -> None:
        """From now on each pass waits for a step."""
        self._held = True

    async def entered(self) -> None:
        """Until a pass waits."""
        assert await asyncio.to_thread(self._entered.acquire, timeout=PATIENCE)

    def step(self) -> None:
        """Let the waiting pass go; the next one waits again."""
        self._permits.release()

    def open(self) -> None:
        """Let the waiting pass go, and all behind it."""
        self._held = False
        self._permits.release()


class Stream:
    """A coordinator's end of a stream, raw: it sends what the test says and keeps all replies in order."""

    def __init__(self, call: Any, epoch: int, generation: int) -> None:
        self._call = call
        self._epoch = epoch
        self._generation = generation
        self._ids = itertools.count(1)
        self._replies: dict[int, asyncio.Future[TaskReply]] = {}
        self.order: list[int] = []  # task ids as they were answered
        self.batches: list[list[int]] = []  # the same, a message at a time
        self.generations: set[int] = set()
        self.costs: list[PassCost] = []
        self._reader = asyncio.create_task(self._read())

    async def send(self, *tasks: Message | Sealed, released: Sequence[str] = ()) -> list[int]:
        """One message; returns the ids of its tasks. Epochs are filled in where a task names none."""
        batch = TaskBatch(generation=self._generation, released_sessions=released)
        ids = []
        for task in tasks:
            if not isinstance(task, Sealed):
                assert isinstance(task, DraftTask | VerifyTask)
                task.state.epoch = task.state.epoch or self._epoch
                task = seal(next(self._ids), task)
            batch.tasks.append(task)
            ids.append(task.task_id)
        await self._call.write(batch)
        return ids

    async def reply(self, task_id: int) -> TaskReply:
        return await asyncio.wait_for(asyncio.shield(self._future(task_id)), PATIENCE)

    async def ask(self, *tasks: Message) -> list[TaskReply]:
        """Replies of tasks that travel in one message."""
        return [await self.reply(task_id) for task_id in await self.send(*tasks)]

    async def refusal(self, task_id: int) -> TaskError:
        reply = await self.reply(task_id)
        assert reply.HasField("error"), reply
        return TaskError.from_status(reply.error)

    async def half_close(self) -> None:
        await self._call.done_writing()

    async def ended(self) -> None:
        """Until the worker has closed the stream."""
        await asyncio.wait_for(asyncio.shield(self._reader), PATIENCE)

    async def cut(self) -> None:
        """As when the network breaks."""
        self._call.cancel()
        await asyncio.wait([self._reader])

    def _future(self, task_id: int) -> asyncio.Future[TaskReply]:
        return self._replies.setdefault(task_id, asyncio.get_running_loop().create_future())

    async def _read(self) -> None:
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            async for batch in self._call:
                self.generations.add(batch.generation)
                if batch.HasField("cost"):
                    self.costs.append(PassCost.from_message(batch.cost))
                self.batches.append([sealed.task_id for sealed in batch.replies])
                for sealed in batch.replies:
                    self.order.append(sealed.task_id)
                    self._future(sealed.task_id).set_result(unseal(sealed, TaskReply))  # twice would raise


class Worker:
    """A running worker, and ways to reach it."""

    def __init__(
        self, role: Role, server: WorkerServer, model: TableModel, channel: grpc.aio.Channel
    ) -> None:
        self.server = server
        self.model = model
        self._generations = itertools.count(1)
        self._streams: list[Stream] = []
        self._health = health_pb2_grpc.HealthStub(channel)
        stub: Any
        if role == "draft":
            stub = worker_pb2_grpc.DraftStub(channel)
            self._open_stream = stub.Propose
        else:
            stub = worker_pb2_grpc.TargetStub(channel)
            self._open_stream = stub.Verify
        self._handshake = stub.Handshake

    def connect(self) -> Stream:
        stream = Stream(self._open_stream(), self.server.epoch, next(self._generations))
        self._streams.append(stream)
        return stream

    async def shake_hands(self, version: int = PROTOCOL_VERSION) -> WorkerInfo:
        request = HandshakeRequest(protocol_version=version, coordinator="c/1")
        info: WorkerInfo = await self._handshake(request, timeout=PATIENCE)
        return info

    async def health(self, service: str = "") -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        return int((await self._health.Check(request, timeout=PATIENCE)).status)

    def held(self, session: str) -> list[int]:
        """What the slot of an idle session holds, in the table and in the model alike."""
        slot = self.server._slots._by_session[session]
        assert slot.tokens.since(0) == self.model._slots[slot.index]
        assert not slot.busy
        return slot.tokens.since(0)

    async def close(self) -> None:
        for stream in self._streams:
            await stream.cut()
        await self.server.stop(0.1)


@contextlib.asynccontextmanager
async def serving(
    next_logits: Law = TARGET,
    role: Role = "target",
    *,
    gate: Gate | None = None,
    num_slots: int = 8,
    max_length: int = 512,
    kind: type[TableModel] = StrictTable,
    **config: Any,
) -> AsyncIterator[Worker]:
    """Gates see the tasks' passes alone, and time bounds none, unless `config` says so."""
    gate = gate or Gate()
    config = {"calibration_seconds": 0.0, "max_step_seconds": 1e6, **config}
    model = kind(next_logits, V, num_slots=num_slots, max_length=max_length, latency_seconds=gate)
    server = WorkerServer(
        role, model, ModelIdentity("a table", "f1", (2, 3), "float32"), WorkerConfig(**config)
    )
    address = await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        worker = Worker(role, server, model, channel)
        try:
            yield worker
        finally:
            gate.open()
            await worker.close()


def at(tokens: Sequence[int], session: str, round: int = 1, start: int = 0, **fields: int) -> SessionState:
    """Where a session stands; the stream fills in the epoch."""
    defaults = {"timeout_ns": int(PATIENCE * 1e9)}
    return SessionState(
        session=session,
        round=round,
        base_length=len(tokens),
        start=start,
        start_hash=TokenPrefix(tokens).hash_at(start),
        tokens=pack_tokens(tokens[start:]),
        **{**defaults, **fields},
    )


def plain(tokens: Sequence[int], session: str, round: int = 1, **fields: Any) -> VerifyTask:
    """A decoding step without drafts."""
    return verify_task(at(tokens, session, round), **fields)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - the worker tells nobody
            await asyncio.sleep(0.005)


# Who the worker is, and how it is.


async def test_a_handshake_tells_what_a_coordinator_must_know() -> None:
    async with serving(task_credits=17, byte_credits=1 << 20) as worker:
        assert await worker.shake_hands() == WorkerInfo(
            protocol_version=PROTOCOL_VERSION,
            epoch=worker.server.epoch,
            model="a table",
            vocab_size=V,
            tokenizer_fingerprint="f1",
            max_length=512,
            end_token_ids=[2, 3],
            dtype="float32",
            num_slots=8,
            task_credits=17,
            byte_credits=1 << 20,
        )


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1])
async def test_another_protocol_version_is_refused_in_words_that_say_both(version: int) -> None:
    async with serving() as worker:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.shake_hands(version)
        assert caught.value.code() is code.FAILED_PRECONDITION
        details = caught.value.details()
        assert details is not None
        assert f"is {version}" in details
        assert f"speaks {PROTOCOL_VERSION}" in details


async def test_every_life_of_a_worker_has_its_own_epoch() -> None:
    async with serving() as one, serving() as other:
        assert one.server.epoch != other.server.epoch
        task = plain(PROMPT, "s")
        task.state.epoch = other.server.epoch
        stream = one.connect()
        assert (await stream.refusal(*await stream.send(task))).code is code.ABORTED


def test_a_target_that_scores_a_part_of_the_vocabulary_is_refused() -> None:
    model = TableModel(TARGET, V, output_ids=np.array([1, 2]))
    with pytest.raises(ValueError, match="scores 2 ids only"):
        WorkerServer("target", model, ModelIdentity("t", "", (), "float32"), WorkerConfig())


async def test_health_and_handshakes_are_answered_while_a_pass_runs() -> None:
    gate = Gate()
    async with serving(gate=gate) as worker:
        stream = worker.connect()
        gate.hold()
        (task,) = await stream.send(plain(PROMPT, "s"))
        await gate.entered()
        for service in ("", "outrider.v1.Target"):
            assert await worker.health(service) == SERVING
        assert (await worker.shake_hands()).epoch == worker.server.epoch
        assert stream.order == []  # the pass runs still
        gate.open()
        assert judged(await stream.reply(task)) == verdict_of(PROMPT, [], [])


async def test_a_drafter_serves_no_target_and_its_health_says_so() -> None:
    async with serving(DRAFT, "draft") as worker:
        assert await worker.health("outrider.v1.Draft") == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.health("outrider.v1.Target")
        assert caught.value.code() is code.NOT_FOUND


# Many sessions in one pass.


async def test_tasks_that_arrive_while_a_pass_runs_share_the_next_one_whatever_stream_they_came_by() -> None:
    gate = Gate()
    async with serving(gate=gate, num_slots=16) as worker:
        one, other = worker.connect(), worker.connect()
        gate.hold()
        await one.send(plain([1], "first"))
        await gate.entered()
        texts = {f"s{i}": [i, *PROMPT[: i % 4], i] for i in range(9)}
        tasks = {name: plain(text, name) for name, text in texts.items()}
        sent = [(one, await one.send(*[tasks[f"s{i}"] for i in range(4)]))]
        sent += [(other, await other.send(*[tasks[f"s{i}"] for i in range(4, 9)]))]
        await until(lambda: len(worker.server._passes._arrived) == 9)
        gate.open()
        replies = [await stream.reply(task_id) for stream, ids in sent for task_id in ids]
        assert len(gate.passes) == 2
        assert sorted(gate.passes[1]) == sorted(len(text) for text in texts.values())
        for text, reply in zip(texts.values(), replies, strict=True):
            assert judged(reply) == verdict_of(text, [], [])
            assert reply.verify.times.queue_ns > 0
            assert reply.verify.times.pass_ns > 0
        assert one.generations == {1}
        assert other.generations == {2}


async def overlapping(
    worker: Worker, gate: Gate, streams: Sequence[Stream], first: Sequence[Message], second: Sequence[Message]
) -> list[TaskReply]:
    """Answers of tasks of which the second part joins while the first part's pass runs."""
    gate.hold()
    sent = [(streams[0], task_id) for task_id in await streams[0].send(*first)]
    await gate.entered()
    sent += [(streams[1], task_id) for task_id in await streams[1].send(*second)]
    await until(lambda: len(worker.server._passes._arrived) == len(second))
    gate.open()
    return [await stream.reply(task_id) for stream, task_id in sent]


@pytest.mark.parametrize("seed", range(4))
async def test_answers_are_never_joined_to_another_session_while_sessions_come_and_go(seed: int) -> None:
    """Rows of different lengths, three and more in a pass, that join and leave it while others stay."""
    random = np.random.default_rng(seed)
    target_gate, draft_gate = Gate(), Gate()
    async with (
        serving(TARGET, gate=target_gate, num_slots=6, max_pass_tokens=24) as target,
        serving(DRAFT, "draft", gate=draft_gate, num_slots=6, max_pass_tokens=24) as drafter,
    ):
        target_streams = [target.connect(), target.connect()]
        draft_streams = [drafter.connect(), drafter.connect()]
        texts: dict[str, list[int]] = {}
        for round in range(1, 16):
            for name in [name for name in texts if random.random() < 0.25]:
                del texts[name]
                await target_streams[0].send(released=[name])
                await draft_streams[1].send(released=[name])
            while len(texts) < 6:
                prompt = random.integers(0, V, size=int(random.integers(1, 30))).tolist()
                texts[f"r{round} {len(texts)} {random.random()}"] = prompt
            names = [str(name) for name in random.permutation(list(texts))]
            cut = int(random.integers(1, 6))
            seeds = {name: int(random.integers(1 << 62)) for name in names}
            wanted = {name: int(random.integers(0, 6)) for name in names}
            drafts = [draft_task(at(texts[name], name, round), wanted[name]) for name in names]
            proposals = await overlapping(drafter, draft_gate, draft_streams, drafts[:cut], drafts[cut:])
            drafted = dict(zip(names, map(proposed, proposals), strict=True))
            for name in names:
                assert drafted[name][0] == drafts_of(DRAFT, texts[name], wanted[name])[0]
            judges = [
                verify_task(at(texts[name], name, round), *drafted[name], seed=seeds[name]) for name in names
            ]
            replies = await overlapping(target, target_gate, target_streams, judges[:cut], judges[cut:])
            for name, reply in zip(names, replies, strict=True):
                verdict = judged(reply)
                assert verdict == verdict_of(texts[name], *drafted[name], seed=seeds[name])
                texts[name] += [*drafted[name][0][: verdict.num_accepted], verdict.token]
        for gate in (target_gate, draft_gate):
            assert max(map(len, gate.passes)) >= 3
            assert max(map(sum, gate.passes)) > 20


async def test_one_bad_task_answers_for_itself_and_the_stream_goes_on() -> None:
    damaged = seal(901, plain(PROMPT, "damaged"))
    damaged.crc32c ^= 1
    noise = seal(902, plain(PROMPT, "noise"))
    noise.body = b"\xff" + noise.body
    tokens, rows = drafts_of(DRAFT, PROMPT, 3)
    bad: dict[str, tuple[Message, grpc.StatusCode]] = {
        "token id": (plain([*PROMPT, V], "token"), code.INVALID_ARGUMENT),
        "draft id": (
            verify_task(
                at(PROMPT, "draft"), proposal=Proposal(tokens=pack_tokens([V]), rows=b"\x0a\x02\x1a\x00")
            ),
            code.INVALID_ARGUMENT,
        ),
        "checksum": (damaged, code.DATA_LOSS),
        "noise": (noise, code.DATA_LOSS),
        "sampling": (
            plain(PROMPT, "sampling", sampling=Sampling(temperature=-1, top_p=1)),
            code.INVALID_ARGUMENT,
        ),
        "rule": (plain(PROMPT, "rule", rule=9), code.INVALID_ARGUMENT),
        "K": (verify_task(at(PROMPT, "k"), [1] * 65, [rows[0]] * 65), code.INVALID_ARGUMENT),
        "digest": (verify_task(at(PROMPT, "digest"), tokens, rows, digest=b""), code.INVALID_ARGUMENT),
        "gap": (verify_task(at(PROMPT, "gap", start=2)), code.FAILED_PRECONDITION),
        "life": (verify_task(at(PROMPT, "life", epoch=1)), code.ABORTED),
        "empty": (VerifyTask(state=SessionState(timeout_ns=10**9)), code.INVALID_ARGUMENT),
        "no state": (seal(903, VerifyTask()), code.ABORTED),
    }
    async with serving() as worker:
        stream = worker.connect()
        batch: list[Message] = []
        for task, _ in bad.values():
            batch += [task, verify_task(at(PROMPT, f"good {len(batch)}"), tokens, rows)]
        ids = await stream.send(*batch)
        for (name, (_, expected)), task_id in zip(bad.items(), ids[::2], strict=True):
            assert (await stream.refusal(task_id)).code is expected, name
        for task_id in ids[1::2]:
            reply = await stream.reply(task_id)
            if reply.HasField("error"):  # twelve sessions share eight slots
                assert TaskError.from_status(reply.error).code is code.RESOURCE_EXHAUSTED
            else:
                assert judged(reply) == verdict_of(PROMPT, tokens, rows)
        (after,) = await stream.ask(plain(PROMPT, "after"))
        assert judged(after) == verdict_of(PROMPT, [], [])
        assert sorted(stream.order) == sorted({*ids, *stream.order})  # each was answered once


async def test_without_a_free_slot_a_task_is_told_when_to_come_back_and_the_others_go_on() -> None:
    async with serving(num_slots=3) as worker:
        stream = worker.connect()
        replies = await stream.ask(*[plain([i], f"s{i}") for i in range(5)])
        for i in range(3):
            assert judged(replies[i]) == verdict_of([i], [], [])
        for reply in replies[3:]:
            error = TaskError.from_status(reply.error)
            assert error.code is code.RESOURCE_EXHAUSTED
            assert isinstance(error.details[0], RetryInfo)


async def test_more_tasks_in_flight_than_the_credit_are_refused_until_answers_are_back() -> None:
    gate = Gate()
    async with serving(gate=gate, task_credits=3) as worker:
        stream, neighbour = worker.connect(), worker.connect()
        gate.hold()
        ids = await stream.send(*[plain([i], f"s{i}") for i in range(5)])
        for task_id in ids[3:]:
            error = await stream.refusal(task_id)
            assert error.code is code.RESOURCE_EXHAUSTED
            assert "credit is 3" in error.message
            assert isinstance(error.details[0], RetryInfo)
        await gate.entered()
        (other,) = await neighbour.send(plain([9], "n"))  # has credit of its own
        gate.open()
        for task_id in ids[:3]:
            judged(await stream.reply(task_id))
        judged(await neighbour.reply(other))
        assert all(reply.HasField("verify") for reply in await stream.ask(plain([3], "s3"), plain([4], "s4")))


async def test_more_bytes_in_flight_than_the_credit_are_refused_and_a_lone_task_is_not() -> None:
    size = verify_task(at([1] * 100, "s", epoch=1)).ByteSize()
    async with serving(byte_credits=size * 2) as worker:
        stream = worker.connect()
        replies = await stream.ask(*[plain([1] * 100, f"{i}") for i in range(3)])
        assert [reply.WhichOneof("outcome") for reply in replies] == ["verify", "verify", "error"]
        assert TaskError.from_status(replies[2].error).code is code.RESOURCE_EXHAUSTED
        (alone,) = await stream.ask(plain([1] * 300, "long"))
        assert judged(alone) == verdict_of([1] * 300, [], [])


async def test_replies_that_do_not_fit_one_message_travel_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message over the cap ends the stream for everybody."""
    gate = Gate()
    async with serving(DRAFT, "draft", gate=gate) as worker:
        stream = worker.connect()
        gate.hold()
        tasks = [draft_task(at([i], f"s{i}"), 4, encoding=ENCODING_FULL) for i in range(6)]
        ids = await stream.send(*tasks)
        await gate.entered()
        row_bytes = 4 * V
        monkeypatch.setattr("workers.task_stream.MAX_BATCH_BYTES", 12 * row_bytes)  # two replies, not three
        gate.open()
        for i, task_id in enumerate(ids):
            reply = await stream.reply(task_id)
            assert proposed(reply)[0] == drafts_of(DRAFT, [i], 4, quantise_full)[0]
        assert sorted(len(batch) for batch in stream.batches) == [2, 2, 2]


async def test_a_long_prompt_goes_in_pieces_and_decoding_sessions_are_in_every_pass_beside_it() -> None:
    gate = Gate()
    async with serving(gate=gate, max_pass_tokens=40, max_length=1024) as worker:
        stream = worker.connect()
        text = list(PROMPT)
        for reply in await stream.ask(plain(text, "quick")):
            text.append(judged(reply).token)
        prompt = np.random.default_rng(1).integers(0, V, size=800).tolist()
        gate.hold()
        del gate.passes[:]
        (long,) = await stream.send(plain(prompt, "long"))
        await gate.entered()
        for round in range(2, 10):
            (quick,) = await stream.send(plain(text, "quick", round))
            await until(lambda: len(worker.server._passes._arrived) == 1)
            gate.step()  # the pass that ran when it came
            await gate.entered()
            gate.step()  # the next one answers it
            verdict = judged(await stream.reply(quick))
            assert verdict == verdict_of(text, [], [])
            text.append(verdict.token)
            await gate.entered()
        gate.open()
        assert judged(await stream.reply(long)) == verdict_of(prompt, [], [])
        assert all(sum(lengths) <= 40 for lengths in gate.passes)
        assert len(gate.passes) == 21  # 800 tokens of the prompt and 8 beside them, 40 a pass


async def test_a_full_house_of_decoding_sessions_does_not_stop_a_prefill() -> None:
    gate = Gate()
    async with serving(gate=gate, max_pass_tokens=4) as worker:
        stream = worker.connect()
        await stream.ask(*[plain([i], f"s{i}") for i in range(7)])
        gate.hold()
        del gate.passes[:]
        (long,) = await stream.send(plain([1] * 96, "long"))
        await gate.entered()
        for i in range(7):
            await stream.send(plain([i, 1], f"s{i}", 2))
        await until(lambda: len(worker.server._passes._arrived) == 7)
        gate.open()
        assert judged(await stream.reply(long)) == verdict_of([1] * 96, [], [])
        assert gate.passes == [[32], [32] + [1] * 7, [32]]


# Leaving early.


async def test_a_release_frees_the_slot_of_a_running_prefill_within_one_pass() -> None:
    gate = Gate()
    async with serving(gate=gate, num_slots=1, max_pass_tokens=32) as worker:
        stream = worker.connect()
        gate.hold()
        (long,) = await stream.send(plain([1] * 320, "long"))
        await gate.entered()
        (next_in,) = await stream.send(plain(PROMPT, "next"), released=["long"])
        await until(lambda: len(worker.server._passes._arrived) == 1)
        gate.step()
        await gate.entered()
        assert gate.passes == [[32], [len(PROMPT)]]
        gate.open()
        assert (await stream.refusal(long)).code is code.ABORTED
        assert judged(await stream.reply(next_in)) == verdict_of(PROMPT, [], [])


async def test_a_release_overtakes_the_tasks_that_wait() -> None:
    gate = Gate()
    async with serving(gate=gate) as worker:
        stream = worker.connect()
        gate.hold()
        (first,) = await stream.send(plain([1], "first"))
        await gate.entered()
        waiting = await stream.send(plain([2], "gone"), plain([3], "stays"))
        await stream.send(released=["gone", "unknown"])
        assert (await stream.refusal(waiting[0])).code is code.ABORTED  # at once, though a pass runs
        gate.open()
        judged(await stream.reply(first))
        judged(await stream.reply(waiting[1]))
        assert gate.passes == [[1], [1]]
        assert worker.server.num_slots_used == 2


async def test_a_session_that_was_released_can_start_again() -> None:
    async with serving() as worker:
        stream = worker.connect()
        (before,) = await stream.ask(plain(PROMPT, "s", round=5))
        (again,) = await stream.send(plain(PROMPT, "s", round=1), released=["s"])
        assert judged(await stream.reply(again)) == judged(before)


async def test_a_task_whose_time_is_up_in_the_queue_costs_no_pass() -> None:
    gate = Gate()
    async with serving(gate=gate) as worker:
        stream = worker.connect()
        gate.hold()
        (first,) = await stream.send(plain([1], "first"))
        await gate.entered()
        late, fine = await stream.send(verify_task(at([2], "late", timeout_ns=1)), plain([3], "fine"))
        await until(lambda: len(worker.server._passes._arrived) == 2)
        gate.open()
        assert (await stream.refusal(late)).code is code.DEADLINE_EXCEEDED
        judged(await stream.reply(first))
        judged(await stream.reply(fine))
        assert gate.passes == [[1], [1]]
        (retried,) = await stream.ask(plain([2], "late"))
        assert judged(retried) == verdict_of([2], [], [])


async def test_a_drafter_whose_time_is_up_in_the_queue_answers_without_drafts() -> None:
    async with serving(DRAFT, "draft") as worker:
        stream = worker.connect()
        (reply,) = await stream.ask(draft_task(at(PROMPT, "s", timeout_ns=1), 4))
        assert proposed(reply) == ([], [])
        assert worker.held("s") == PROMPT


@pytest.mark.parametrize("busy", [False, True])
async def test_a_silent_coordinators_slots_are_freed_by_their_lease(busy: bool) -> None:
    async with serving(lease_seconds=0.05) as worker:
        silent, other = worker.connect(), worker.connect()
        await silent.ask(plain(PROMPT, "s"))
        text = [1]
        async with asyncio.timeout(PATIENCE):
            while "s" in worker.server._slots._by_session:
                if busy:  # the worker is never idle for long
                    text.append(judged((await other.ask(plain(text, "other", round=len(text))))[0]).token)
                    del text[200:]
                await asyncio.sleep(0.01)


# Draining.


async def test_a_draining_worker_answers_what_runs_refuses_what_comes_and_says_so() -> None:
    gate = Gate()
    async with serving(gate=gate) as worker:
        stream = worker.connect()
        gate.hold()
        (running,) = await stream.send(plain(PROMPT, "running"))
        await gate.entered()
        (queued,) = await stream.send(plain([1], "queued"))
        await until(lambda: len(worker.server._passes._arrived) == 1)
        stopping = asyncio.create_task(worker.server.stop(PATIENCE))
        await asyncio.sleep(0)
        (late,) = await stream.send(plain([2], "late"))
        error = await stream.refusal(late)
        assert error.code is code.UNAVAILABLE
        assert isinstance(error.details[0], RetryInfo)
        assert await worker.health() == await worker.health("outrider.v1.Target") == NOT_SERVING
        assert not stopping.done()
        gate.open()
        assert judged(await stream.reply(running)) == verdict_of(PROMPT, [], [])
        assert judged(await stream.reply(queued)) == verdict_of([1], [], [])
        await asyncio.wait_for(stopping, PATIENCE)
        await stream.ended()


async def test_an_idle_worker_stops_at_once() -> None:
    async with serving() as worker:
        stream = worker.connect()
        await stream.ask(plain(PROMPT, "s"))
        await asyncio.wait_for(worker.server.stop(60.0), 5.0)


async def test_a_half_closed_stream_still_gets_what_it_is_owed() -> None:
    gate = Gate()
    async with serving(gate=gate) as worker:
        stream = worker.connect()
        gate.hold()
        ids = await stream.send(plain([1], "a"), plain([2], "b"))
        await gate.entered()
        await stream.half_close()
        assert await worker.health() == SERVING  # a round trip: the worker has seen the end
        gate.open()
        for task_id in ids:
            judged(await stream.reply(task_id))
        await stream.ended()


# Messages twice, late, or by two senders.


async def test_a_task_asked_again_takes_over_the_job_at_work_and_its_verdict_is_kept() -> None:
    gate = Gate()
    tokens, rows = drafts_of(DRAFT, PROMPT, 4)
    async with serving(gate=gate) as worker:
        stream = worker.connect()
        task = verify_task(at(PROMPT, "s"), tokens, rows)
        first, second = await stream.send(task, task)
        assert (await stream.refusal(first)).code is code.ABORTED
        reply = await stream.reply(second)
        assert judged(reply) == verdict_of(PROMPT, tokens, rows)
        held = worker.held("s")
        assert await stream.ask(task) == [reply]
        assert (len(gate.passes), worker.held("s")) == (1, held)


async def test_rounds_out_of_order_leave_the_later_one_standing() -> None:
    async with serving() as worker:
        stream = worker.connect()
        later, earlier = await stream.send(plain([1, 2, 3], "s", 2), plain([1, 2], "s", 1))
        verdict = judged(await stream.reply(later))
        assert verdict == verdict_of([1, 2, 3], [], [])
        assert (await stream.refusal(earlier)).code is code.UNAVAILABLE
        (earlier,) = await stream.send(plain([1, 2], "s", 1))
        assert (await stream.refusal(earlier)).code is code.ABORTED
        assert worker.held("s") == [1, 2, 3]


async def test_two_coordinators_with_one_session_id_never_get_each_others_tokens() -> None:
    """Plain steps have equal proposals, so only tokens and coins tell the two apart."""
    async with serving() as worker:
        one, other = worker.connect(), worker.connect()
        mine, theirs = [1, 2, 3], [4, 5, 6]
        (reply,) = await one.ask(plain(mine, "s", seed=1))
        assert judged(reply) == verdict_of(mine, [], [], seed=1)
        for text, seed in ((theirs, 1), (mine, 2), (theirs, 2), ([*mine, 1], 1), (mine[:2], 1)):
            (task,) = await other.send(plain(text, "s", seed=seed))
            assert (await other.refusal(task)).code is code.ABORTED
        (task,) = await other.send(plain(mine, "s", seed=1, sampling=Sampling(temperature=0.1, top_p=1)))
        assert (await other.refusal(task)).code is code.ABORTED
        assert await one.ask(plain(mine, "s", seed=1)) == [reply]
        for round in range(2, 12):  # turns: whoever comes is served from its own tokens or sent away
            for stream, text, seed in ((one, mine, 1), (other, theirs, 2)):
                for start in (len(text), 0):
                    (task,) = await stream.send(
                        verify_task(at(text, "s", round, start=start if round % 3 else 0), seed=seed)
                    )
                    answer = await stream.reply(task)
                    if answer.HasField("error"):
                        assert TaskError.from_status(answer.error).code in (
                            code.ABORTED,
                            code.FAILED_PRECONDITION,
                        )
                        continue
                    assert judged(answer) == verdict_of(text, [], [], seed=seed)
                    text.append(judged(answer).token)
                    break


async def test_after_a_reconnect_the_round_in_flight_is_computed_once_and_its_verdict_is_there() -> None:
    gate = Gate()
    tokens, rows = drafts_of(DRAFT, PROMPT, 4)
    async with serving(gate=gate) as worker:
        stream = worker.connect()
        gate.hold()
        tasks = [verify_task(at([*PROMPT, i], f"s{i}"), *drafts_of(DRAFT, [*PROMPT, i], 4)) for i in range(3)]
        await stream.send(tasks[0])
        await gate.entered()
        await stream.send(*tasks[1:])
        await until(lambda: len(worker.server._passes._arrived) == 2)
        await stream.cut()
        again = worker.connect()
        (early,) = await again.send(tasks[0])
        await until(lambda: len(worker.server._passes._arrived) == 3)
        gate.open()
        assert judged(await again.reply(early)) == verdict_of(
            [*PROMPT, 0], *drafts_of(DRAFT, [*PROMPT, 0], 4)
        )
        await asyncio.wait_for(worker.server._passes.drained(), PATIENCE)
        for i, reply in enumerate(await again.ask(*tasks)):
            drafted = drafts_of(DRAFT, [*PROMPT, i], 4)
            assert judged(reply) == verdict_of([*PROMPT, i], *drafted)
        assert len(gate.passes) == 2
        assert again.generations == {2}
    assert tokens
    assert rows


# Faults of the model.


def fault_of(error: TaskError) -> str:
    """The id that an INTERNAL error names; its message has no trace."""
    assert error.code is code.INTERNAL
    found = re.fullmatch(r"[a-z ]+; the worker's log has it as fault ([0-9a-f]{12})", error.message)
    assert found, error.message
    return found[1]


async def test_a_feed_that_breaks_its_pass_costs_its_own_task_and_leaves_slots_that_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The fault strikes in the middle of a pass: some slots of it were fed, some were not."""
    poison = [7, 7, 7]

    def next_logits(prefix: Prefix) -> Any:
        if list(prefix) == poison:
            raise RuntimeError("a secret of the model")
        return TARGET(prefix)

    gate = Gate()
    texts = {name: [i, *PROMPT] for i, name in enumerate(["a", "b", "c"])}
    async with serving(next_logits, gate=gate) as worker:
        stream = worker.connect()
        for name, text in texts.items():
            text.append(judged((await stream.ask(plain(text, name)))[0]).token)
        gate.hold()
        (first,) = await stream.send(plain([9], "first"))
        await gate.entered()
        drafted = {name: drafts_of(DRAFT, text, 2) for name, text in texts.items()}
        tasks = [verify_task(at(text, name, 2), *drafted[name]) for name, text in texts.items()]
        ids = await stream.send(*tasks[:2], plain(poison, "poison"), tasks[2])
        await until(lambda: len(worker.server._passes._arrived) == 4)
        gate.open()
        judged(await stream.reply(first))
        assert fault_of(await stream.refusal(ids[2])) in caplog.text
        assert "a secret of the model" in caplog.text
        assert await worker.health() == SERVING
        replies = [await stream.reply(task_id) for task_id in (ids[0], ids[1], ids[3])]
        for (name, text), reply in zip(texts.items(), replies, strict=True):
            verdict = judged(reply)
            assert verdict == verdict_of(text, *drafted[name])
            assert worker.held(name) == text + drafted[name][0][: verdict.num_accepted]


async def test_a_prefill_that_failed_half_way_goes_on_from_what_is_held() -> None:
    gate = Gate()
    prompt = np.random.default_rng(3).integers(0, V, size=100).tolist()
    async with serving(gate=gate, max_pass_tokens=32) as worker:
        stream = worker.connect()
        gate.hold()
        (task,) = await stream.send(plain(prompt, "s"))
        await gate.entered()
        gate.step()
        await gate.entered()
        gate.fault = RuntimeError("out of memory")
        gate.step()
        fault_of(await stream.refusal(task))
        gate.fault = None
        assert worker.held("s") == prompt[:32]
        (retried,) = await stream.send(plain(prompt, "s"))
        await gate.entered()
        gate.open()
        assert judged(await stream.reply(retried)) == verdict_of(prompt, [], [])
        assert gate.passes == [[32], [32], [32], [32], [4]]


class Forgetful(TableModel):
    """Loses the last array of each pass, and all of a pass over one feed."""

    def forward(self, feeds: Sequence[Feed]) -> list[Logits]:
        return super().forward(feeds)[:-1]


class Narrow(TableModel):
    """Returns fewer rows than were wanted."""

    def forward(self, feeds: Sequence[Feed]) -> list[Logits]:
        return [logits[:-1] for logits in super().forward(feeds)]


@pytest.mark.parametrize("kind", [Forgetful, Narrow])
async def test_a_model_that_breaks_its_contract_fails_tasks_and_not_the_worker(
    kind: type[TableModel],
) -> None:
    async with serving(kind=kind) as worker:
        stream = worker.connect()
        for session in ("a", "a", "b"):
            for task_id in await stream.send(plain(PROMPT, session), plain(PROMPT, f"{session}2")):
                fault_of(await stream.refusal(task_id))
        assert await worker.health() == SERVING


class Stuck(TableModel):
    """Cannot free a slot."""

    def truncate(self, slot: int, length: int) -> None:
        if length == 0:
            raise RuntimeError("the slot is stuck")


async def test_a_worker_whose_loop_ends_stops_serving_instead_of_pretending() -> None:
    async with serving(kind=Stuck) as worker:
        stream = worker.connect()
        await stream.ask(verify_task(at(PROMPT, "s")))
        await stream.send(released=["s"])
        await stream.ended()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.shake_hands()
        assert caught.value.code() is code.UNAVAILABLE


async def test_a_drafters_pass_that_fails_costs_its_own_tasks_alone() -> None:
    gate = Gate()
    async with serving(DRAFT, "draft", gate=gate) as worker:
        stream = worker.connect()
        gate.fault = RuntimeError("no")
        for task_id in await stream.send(draft_task(at(PROMPT, "a"), 2), draft_task(at([1], "b"), 2)):
            fault_of(await stream.refusal(task_id))
        gate.fault = None
        replies = await stream.ask(draft_task(at(PROMPT, "a"), 2), draft_task(at([1], "b"), 2))
        assert proposed(replies[0])[0] == drafts_of(DRAFT, PROMPT, 2)[0]
        assert proposed(replies[1])[0] == drafts_of(DRAFT, [1], 2)[0]


async def test_a_task_that_runs_beside_one_that_fails_alone_is_answered() -> None:
    def next_logits(prefix: Prefix) -> Any:
        logits = TARGET(prefix).copy()
        if prefix[0] == 7:
            logits[:] = np.nan
        return logits

    async with serving(next_logits) as worker:
        stream = worker.connect()
        ids = await stream.send(plain([7], "ill"), plain([1], "a"), plain([2], "b"))
        assert (await stream.refusal(ids[0])).code is code.INTERNAL
        assert judged(await stream.reply(ids[1])) == verdict_of([1], [], [])
        assert judged(await stream.reply(ids[2])) == verdict_of([2], [], [])
