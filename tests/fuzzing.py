"""A deployment under fuzzing: every method is sent what is almost right, beside a neighbour's texts.

Knows how messages are sent and counted. The answer to anything must be a result or a refusal; a message that
is lost, another status, or a neighbour's text that differs is a failure.
"""

import asyncio
import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal
from unittest import mock

import grpc
import numpy as np
from google.protobuf.message import DecodeError, Message

from coordinator import drafting
from protos.authorization import metadata
from protos.wire import checksum, digest, unseal
from protos.worker_pb2 import (
    ENCODING_FULL,
    ENCODING_ONE_HOT,
    ENCODING_SPARSE,
    RULE_BLOCK,
    RULE_TOKEN,
    DraftTask,
    QRows,
    ReplyBatch,
    Sealed,
    SessionState,
    TaskBatch,
    TaskReply,
    VerifyTask,
)
from tests.fault_messages import MessageFaults, faulty_clients, unchanged
from tests.fuzz_messages import almost, damaged, mutated
from tests.fuzz_methods import METHODS, REFUSALS_OF_CALLS, REFUSALS_OF_TASKS, STREAMS
from tests.pipelines import Pipeline, generate, pipeline
from tests.test_jobs import draft_task, state, verify_task
from tests.test_service import V, draft_model, greedy, target_model, wordy
from workers.counts import quantise

Role = Literal["draft", "target"]

CONTROL_TOKEN = "for control"
MAX_LENGTH = 64  # so that no text that fuzzing asks for is long
PATIENCE_SECONDS = 20.0  # an answer that takes longer has been lost
NUM_HELD, NUM_ODD = 4, 12  # tasks of a stream: valid ones, then others, some of them in the same sessions
LARGE_REPLIES = [("grpc.max_receive_message_length", 64 << 20)]
ROLES: tuple[Role, ...] = ("draft", "target")


@dataclass
class Findings:
    """What was sent and what came of it."""

    answers: Counter[tuple[str, str]] = field(default_factory=Counter)  # by kind of message and answer
    failures: list[str] = field(default_factory=list)

    @property
    def num_messages(self) -> int:
        """All that were sent."""
        return self.answers.total()

    def take(self, kind: str, answer: str, refusals: frozenset[str], sent: object) -> None:
        """An answer: "OK" or a status."""
        self.answers[kind, answer] += 1
        if answer != "OK" and answer not in refusals:
            self.failures.append(f"{kind} is answered {answer} for {sent!r}")


class Fuzzer:
    """Sends messages to a running deployment."""

    def __init__(
        self, running: Pipeline, channels: dict[str, grpc.aio.Channel], faults: MessageFaults
    ) -> None:
        """`channels` by where a method is; `faults` are those between the coordinator and its drafter."""
        assert running.draft is not None
        self.findings = Findings()
        self.target = running.target
        self._running = running
        self._epochs = {"target": running.target.epoch, "draft": running.draft.epoch}
        self._channels = channels
        self._faults = faults
        self._numbers = itertools.count(1)

    async def run(self, seed: int, first_turn: int, num_turns: int) -> None:
        """So many turns beside a neighbour, each with messages of one kind that follow from seed and turn."""
        neighbour = asyncio.create_task(self._watch_neighbour())
        for turn in range(first_turn, first_turn + num_turns):
            num_before = len(self.findings.failures)
            await self._take_turn(Random(f"{seed}/{turn}"))
            for i in range(num_before, len(self.findings.failures)):
                self.findings.failures[i] += f" (seed {seed}, turn {turn})"
        neighbour.cancel()
        await asyncio.gather(neighbour, return_exceptions=True)
        if not neighbour.cancelled():
            self.findings.failures.append(f"the neighbour has failed: {neighbour.exception()!r}")

    async def _take_turn(self, random: Random) -> None:
        dice = random.random()
        if dice < 0.4:
            await self.stream(random.choice(ROLES), random)
        elif dice < 0.95:
            names = random.choices(tuple(METHODS), k=8)
            await asyncio.gather(*(self.call(name, random) for name in names))
        else:
            await self.rewrite_replies(random)

    def opening(self, name: str, token: str = CONTROL_TOKEN) -> Callable[..., Any]:
        """A method, to be called with bytes for bytes; `token` goes along."""
        method = METHODS.get(name)
        path = f"/outrider.v1.{name}"
        if method is None:
            channel = self._channels[name.partition("/")[0].lower()]
            return functools.partial(channel.stream_stream(path), metadata=metadata(token))
        channel = self._channels[method.where]
        opens: Any = channel.unary_stream if method.is_stream else channel.unary_unary
        return functools.partial(opens(path), metadata=metadata(token))

    async def call(self, name: str, random: Random) -> None:
        """One request to a method, and sometimes a token that is not the one."""
        method = METHODS[name]
        data = almost(random.choice(method.requests), random)
        token = CONTROL_TOKEN if random.random() < 0.8 else random.choice(("", "for contro", "x" * 999))
        call = self.opening(name, token)(data)
        answer = "OK"
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                if method.is_stream:
                    async for _ in call:
                        if name == "Control/Watch":  # it has no end
                            call.cancel()
                            break
                else:
                    await call
        except TimeoutError:
            answer = "nothing"
        except grpc.aio.AioRpcError as error:
            answer = error.code().name
        self.findings.take(name, answer, REFUSALS_OF_CALLS, data)

    async def stream(self, role: Role, random: Random) -> None:
        """Valid tasks, then others on the same stream; all of them are answered, each once."""
        held = [self._task(role, random, [random.randrange(V) for _ in range(3)]) for _ in range(NUM_HELD)]
        odd = [self._odd_task(role, random, held[i].state if i < NUM_HELD else None) for i in range(NUM_ODD)]
        whole = TaskBatch(generation=1, tasks=odd)
        data = whole.SerializeToString()
        if random.random() < 0.1:
            data = damaged(mutated(whole, random).SerializeToString(), random)
        call = self.opening(STREAMS[role])()
        first = TaskBatch(generation=1, tasks=[_sealed(1000 + i, t) for i, t in enumerate(held)])
        answers: Counter[int] = Counter()
        status = "OK"
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await call.write(first.SerializeToString())
                while answers.total() < NUM_HELD:
                    self._take_replies(role, await call.read(), answers)
                await call.write(data)
                await call.done_writing()
                while (replies := await call.read()) is not grpc.aio.EOF:
                    self._take_replies(role, replies, answers)
        except TimeoutError:
            status = "nothing"
        except grpc.aio.AioRpcError as error:
            status = error.code().name
        await self._release(role, [task.state.session for task in held], data)
        expected, wanted = _expected(data)
        expected.update(1000 + i for i in range(NUM_HELD))
        self.findings.take(f"{STREAMS[role]} message", status, frozenset({wanted}), data)
        if wanted == "OK" and answers != expected:
            self.findings.failures.append(f"{STREAMS[role]} answers {answers} of {expected} for {data!r}")

    async def rewrite_replies(self, random: Random) -> None:
        """The drafter's replies to the coordinator are almost right for a while: texts stay what they are."""

        def rewrite(batch: ReplyBatch) -> Sequence[ReplyBatch | None]:
            self.findings.answers["Draft/Propose reply", "OK"] += len(batch.replies)
            replies = [_sealed(s.task_id, unseal(s, TaskReply), random) for s in batch.replies]
            data = ReplyBatch(generation=batch.generation, replies=replies).SerializeToString()
            if random.random() < 0.1:
                data = almost(batch, random)
            try:
                return [ReplyBatch.FromString(data)]
            except DecodeError:
                return [None]

        self._faults.rewrite = rewrite
        try:
            await asyncio.gather(*(self._check_text([i, i + 1]) for i in range(4)))
        finally:
            self._faults.rewrite = unchanged

    def _task(self, role: Role, random: Random, tokens: list[int]) -> DraftTask | VerifyTask:
        """A valid task of a session of its own."""
        where = state(tokens, session=f"fuzz/{next(self._numbers)}", epoch=self._epochs[role])
        if role == "draft":
            encoding = random.choice((ENCODING_SPARSE, ENCODING_FULL, ENCODING_ONE_HOT))
            return draft_task(where, random.randrange(4), encoding=encoding)
        law = np.random.default_rng(random.getrandbits(32))
        rows = [quantise(law.dirichlet(np.ones(V)), 6) for _ in range(random.randrange(4))]
        drafts = [row.draw(random.random()) for row in rows]
        return verify_task(where, drafts, rows, rule=random.choice((RULE_TOKEN, RULE_BLOCK)))

    def _odd_task(self, role: Role, random: Random, held: SessionState | None) -> Sealed:
        """A task that is almost valid, in a new session or behind what one holds."""
        task = self._task(role, random, [random.randrange(V) for _ in range(random.randint(1, 9))])
        if held is not None:
            task.state.CopyFrom(held)
            task.state.round = 2
        if isinstance(task, VerifyTask) and random.random() < 0.4:
            task.proposal.rows = almost(QRows.FromString(task.proposal.rows), random)
            task.digest = digest(task.proposal)
        sealed = _sealed(next(self._numbers), task, random)
        return mutated(sealed, random) if random.random() < 0.15 else sealed

    def _take_replies(self, role: Role, batch: Any, answers: Counter[int]) -> None:
        if not isinstance(batch, bytes):
            raise TimeoutError("the stream has ended")
        for sealed in ReplyBatch.FromString(batch).replies:
            answers[sealed.task_id] += 1
            reply = unseal(sealed, TaskReply)
            code = {c.value[0]: c.name for c in grpc.StatusCode}.get(reply.error.code, "an unknown code")
            answer = code if reply.HasField("error") else "OK"
            self.findings.take(f"{STREAMS[role]} task", answer, REFUSALS_OF_TASKS, reply)

    async def _release(self, role: Role, sessions: list[str], data: bytes) -> None:
        """So that the slots are there for what comes next; what cannot be read is never held."""
        with contextlib.suppress(DecodeError):
            kind = DraftTask if role == "draft" else VerifyTask
            for sealed in TaskBatch.FromString(data).tasks:
                with contextlib.suppress(DecodeError):
                    sessions.append(kind.FromString(sealed.body).state.session)
        call = self.opening(STREAMS[role])()
        await call.write(TaskBatch(generation=1, released_sessions=sessions).SerializeToString())
        await call.done_writing()
        async for _ in call:
            pass

    async def _watch_neighbour(self) -> None:
        for i in itertools.count():
            await self._check_text([i % V, 5, i % 7])

    async def _check_text(self, prompt: list[int]) -> None:
        auto = len(prompt) == 2
        said = await generate(
            self._running.stub, prompt, max_tokens=12, temperature=0.0, auto_draft_tokens=auto
        )
        if said.ids() != greedy(prompt, 12):
            self.findings.failures.append(f"the text behind {prompt} is {said.ids()}")


def _sealed(task_id: int, message: Message, random: Random | None = None) -> Sealed:
    """A message, or with a generator one that is almost it, under the checksum of what it is."""
    body = message.SerializeToString() if random is None else almost(message, random)
    return Sealed(task_id=task_id, body=body, crc32c=checksum(task_id, body))


def _expected(data: bytes) -> tuple[Counter[int], str]:
    """The tasks of a message that must be answered, and how the stream must end."""
    try:
        return Counter(sealed.task_id for sealed in TaskBatch.FromString(data).tasks), "OK"
    except DecodeError:
        return Counter(), "INVALID_ARGUMENT"


@contextlib.asynccontextmanager
async def fuzzed(folder: Path) -> AsyncIterator[Fuzzer]:
    """A deployment to be fuzzed; `folder` is for its tokenizer."""
    wordy(folder, [chr(ord("a") + i) for i in range(V)])
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    all_faults: dict[str, MessageFaults] = {}
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(faulty_clients(all_faults))
        for name in ("FAULT_PAUSE_SECONDS", "GRACE_SECONDS"):  # else it would hardly be asked
            stack.enter_context(mock.patch.object(drafting, name, 0.02))
        running = await stack.enter_async_context(
            pipeline(
                target_model(num_slots=32, max_length=MAX_LENGTH),
                draft_model(num_slots=32, max_length=MAX_LENGTH),
                control_token=CONTROL_TOKEN,
                tokenizer_folder=folder,
                max_choices=4,
                draft_timeout_seconds=0.2,
                draft_prefill_timeout_seconds=0.2,
            )
        )
        addresses = {"coordinator": running.address, "target": running.target_address}
        [addresses["draft"]] = [
            client.address for client in running.coordinator._clients if client.role == "draft"
        ]
        channels = {
            where: await stack.enter_async_context(grpc.aio.insecure_channel(address, options=LARGE_REPLIES))
            for where, address in addresses.items()
        }
        for channel in channels.values():
            stack.push_async_callback(channel.close)
        faults = all_faults.setdefault(addresses["draft"], MessageFaults())
        yield Fuzzer(running, channels, faults)
