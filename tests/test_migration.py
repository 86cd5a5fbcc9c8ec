"""Sessions whose target is lost go on at another one: the same text, the same law, a bounded number of times.

Guards against tokens that are lost, repeated or drawn anew on the way, verdicts that depend on who gives
them, targets that are overrun by those that another one held, and sessions that wander for ever.
"""

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo

from coordinator import migrating
from coordinator.server import CoordinatorConfig, CoordinatorServer
from coordinator.sessions import Session
from coordinator.verifying import Verifier
from protos import inference_pb2_grpc
from protos.worker_pb2 import VerifyResult, VerifyTask
from tests import test_law
from tests.laws import assert_follows
from tests.pipelines import generate, pipeline
from tests.test_faults import Proxy, Worker, failure_of, rest_of
from tests.test_service import DRAFT, TARGET, details_of, greedy, ids_of, read_tokens, target_model
from tests.test_worker_client import eventually

PROMPT = [1, 2]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost connection is waited for a moment only."""
    monkeypatch.setattr(migrating, "HOLD_SECONDS", 0.05)


@dataclass
class Fleet:
    stub: Any
    coordinator: CoordinatorServer
    targets: Sequence[Worker]
    draft: Worker | None

    @property
    def verifiers(self) -> Sequence[Verifier]:
        return self.coordinator._service._choices._verifiers.workers

    def used(self) -> list[int]:
        """Slots that each target's sessions have, as the coordinator believes."""
        return [verifier.num_sessions for verifier in self.verifiers]

    def busiest(self) -> Worker:
        used = self.used()
        return self.targets[used.index(max(used))]

    async def all_is_free(self) -> None:
        workers = [*self.targets, *([self.draft] if self.draft is not None else [])]
        await eventually(lambda: all(worker.num_slots_used == 0 for worker in workers))
        assert set(self.used()) == {0}


@contextlib.asynccontextmanager
async def fleet(
    targets: Sequence[Worker],
    draft: Worker | None = None,
    proxies: Sequence[Proxy] = (),
    **coordinator: Any,
) -> AsyncIterator[Fleet]:
    """Several targets, the first ones behind proxies; keyword arguments go into the CoordinatorConfig."""
    async with contextlib.AsyncExitStack() as stack:
        addresses: dict[str, list[str]] = {"targets": [], "drafts": []}
        for i, target in enumerate(targets):
            address = await target.start()
            stack.push_async_callback(target.stop)
            if i < len(proxies):
                address = await proxies[i].start(address)
                stack.push_async_callback(proxies[i].stop)
            addresses["targets"].append(address)
        if draft is not None:
            addresses["drafts"].append(await draft.start())
            stack.push_async_callback(draft.stop)
        settings = {"num_draft_tokens": 3, **addresses, **coordinator}
        server = CoordinatorServer(CoordinatorConfig(**settings))
        address = await server.start()
        stack.push_async_callback(server.stop, 0.1)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        yield Fleet(inference_pb2_grpc.InferenceStub(channel), server, targets, draft)


def two_targets(latency: float = 0.003, **fields: Any) -> list[Worker]:
    return [Worker("target", TARGET, latency=latency, **fields) for _ in range(2)]


# ---- the text goes on


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
async def test_a_text_goes_on_at_another_target_without_a_token_lost_or_repeated(
    num_draft_tokens: int,
) -> None:
    async with fleet(two_targets(latency=0.006), Worker("draft", DRAFT)) as f:
        call = f.stub.Generate(
            ids_of(PROMPT, max_tokens=120, temperature=0.0, num_draft_tokens=num_draft_tokens), timeout=20
        )
        said = await read_tokens(call, 20)
        lost = f.busiest()
        await lost.stop()
        usage = await rest_of(call, said)
        assert tuple(said) == greedy(PROMPT, 120)
        assert (usage.num_completion_tokens, usage.num_migrations) == (120, 1)
        assert f.coordinator._service.totals().num_migrations == 1
        await f.all_is_free()


async def test_a_seeded_text_is_the_same_wherever_it_is_verified() -> None:
    fields: dict[str, Any] = {"max_tokens": 200, "seed": 77, "num_draft_tokens": 0}
    async with pipeline(target_model(), None) as service:
        undisturbed = await generate(service.stub, PROMPT, **fields)
    async with fleet(two_targets(latency=0.01)) as f:
        call = f.stub.Generate(ids_of(PROMPT, **fields), timeout=20)
        said = await read_tokens(call, 15)
        for _ in range(2):  # there and back
            lost = f.busiest()
            await lost.stop()
            said += await read_tokens(call, 20)
            await lost.start()
            await eventually(lambda: all(verifier.is_ready for verifier in f.verifiers))
        usage = await rest_of(call, said)
    assert tuple(said) == undisturbed.ids()
    assert usage.num_migrations >= 1


@pytest.mark.parametrize("rule", ["token", "block"])
async def test_sequences_follow_the_law_whenever_targets_die(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Targets die by turns, each after a number of rounds from a seed, and come back with nothing."""
    dice, num_asked = random.Random(11), 0
    ask = Verifier.ask

    async def counted(verifier: Verifier, session: Session, task: VerifyTask) -> VerifyResult:
        nonlocal num_asked
        num_asked += 1
        return await ask(verifier, session, task)

    async def some_rounds() -> None:
        until = num_asked + dice.randint(100, 300)
        await eventually(lambda: num_asked >= until, within=60)

    async def kill(targets: Sequence[Worker]) -> None:
        while True:
            for target in targets:
                await some_rounds()
                await target.stop()
                await asyncio.sleep(0.1)
                await target.start()

    monkeypatch.setattr(Verifier, "ask", counted)
    shape: dict[str, Any] = {"vocab_size": test_law.V, "num_slots": 128}
    targets = [Worker("target", test_law.TARGET, **shape) for _ in range(2)]
    draft = Worker("draft", test_law.GOOD, **shape)
    samples: list[tuple[int, ...]] = []
    num_migrations = 0
    async with fleet(targets, draft, rule=rule, num_draft_tokens=2, num_groups=2, max_migrations=1000) as f:
        killer = asyncio.create_task(kill(targets))
        num_choices, num_tokens = test_law.NUM_CHOICES, test_law.NUM_TOKENS
        for seed in range(0, 1024 // num_choices, 2):
            for result in await asyncio.gather(
                *(
                    generate(f.stub, test_law.PROMPT, max_tokens=num_tokens, n=num_choices, seed=5000 + s)
                    for s in (seed, seed + 1)
                )
            ):
                samples.extend(result.ids(choice) for choice in range(num_choices))
                num_migrations += result.usage.num_migrations
        killer.cancel()
        await asyncio.gather(killer, return_exceptions=True)
    assert num_migrations > 50
    assert_follows(samples, test_law.law_of(test_law.PROMPT))


async def test_whoever_is_asked_a_round_gets_the_same_proposal(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[tuple[str, int], list[tuple[str, bytes, bytes]]] = defaultdict(list)
    ask = Verifier.ask

    async def noted(verifier: Verifier, session: Session, task: VerifyTask) -> VerifyResult:
        proposal = task.proposal
        asked[session.id, session.round].append((verifier.client.address, proposal.tokens, proposal.rows))
        return await ask(verifier, session, task)

    monkeypatch.setattr(Verifier, "ask", noted)
    async with fleet(two_targets(), Worker("draft", DRAFT)) as f:
        running = [asyncio.create_task(generate(f.stub, [i], max_tokens=80, seed=i)) for i in range(6)]
        await eventually(lambda: len(asked) > 40)
        await f.targets[0].stop()
        await asyncio.gather(*running)
    moved = [asks for asks in asked.values() if len({address for address, _, _ in asks}) > 1]
    assert any(tokens for asks in moved for _, tokens, _ in asks), "a proposal moved with its session"
    for asks in moved:
        assert len({(tokens, rows) for _, tokens, rows in asks}) == 1


async def test_a_silent_target_is_left_though_its_connection_stands() -> None:
    proxies = [Proxy("target"), Proxy("target")]
    async with fleet(two_targets(), proxies=proxies, verify_timeout_seconds=0.15) as f:
        call = f.stub.Generate(ids_of(PROMPT, max_tokens=60, temperature=0.0), timeout=20)
        said = await read_tokens(call, 15)
        proxies[f.targets.index(f.busiest())].on_reply = lambda _: []
        usage = await rest_of(call, said)
        assert tuple(said) == greedy(PROMPT, 60)
        assert usage.num_migrations >= 1
        await f.all_is_free()


async def test_a_connection_that_is_back_at_once_moves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrating, "HOLD_SECONDS", 5.0)
    proxies = [Proxy("target"), Proxy("target")]
    async with fleet(two_targets(), proxies=proxies) as f:
        call = f.stub.Generate(ids_of(PROMPT, max_tokens=60, temperature=0.0), timeout=20)
        said = await read_tokens(call, 15)
        proxies[f.targets.index(f.busiest())].cut()
        usage = await rest_of(call, said)
        assert tuple(said) == greedy(PROMPT, 60)
        assert usage.num_migrations == 0


# ---- room for those that come


async def test_a_target_that_is_left_is_not_overrun() -> None:
    """Two slots each, two sessions each, and more that wait."""
    targets = two_targets(num_slots=2)
    async with fleet(targets, Worker("draft", DRAFT)) as f:

        async def text(number: int, num_tokens: int) -> None:
            result = await generate(f.stub, [number], max_tokens=num_tokens, temperature=0.0)
            assert result.ids() == greedy([number], num_tokens)

        first = [asyncio.create_task(text(i, 100 + 5 * i)) for i in range(4)]
        await eventually(lambda: [target.num_slots_used for target in targets] == [2, 2])
        later = [asyncio.create_task(text(i, 5)) for i in range(4, 8)]
        await eventually(lambda: f.coordinator._service.num_waiting_sessions == 4)
        await targets[0].stop()
        most = 0
        while not all(task.done() for task in (*first, *later)):
            most = max(most, f.used()[1])
            await asyncio.sleep(0.005)
        await asyncio.gather(*first, *later)
        assert most == 2
        await f.all_is_free()


async def test_moves_have_an_end_and_the_error_says_how_far_the_text_came() -> None:
    async with fleet(two_targets(), max_migrations=1, target_patience_seconds=0.4) as f:
        call = f.stub.Generate(ids_of(PROMPT, n=2, max_tokens=4000, temperature=0.0), timeout=20)
        said = await read_tokens(call, 20)
        await f.targets[0].stop()
        await eventually(lambda: f.used() == [0, 2])
        await f.targets[0].start()
        await eventually(lambda: f.verifiers[0].is_ready)
        await f.targets[1].stop()
        error = await failure_of(call, said)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        info = ErrorInfo()
        assert any(detail.Unpack(info) for detail in details_of(error).details)
        counts = list(map(int, info.metadata["num_committed_tokens"].split(",")))
        assert sum(counts) == len(said)
        assert min(counts) > 0
        assert f.coordinator._service.totals().num_migrations <= 2, "each choice once"


async def test_a_lost_target_that_is_back_is_used_again_where_moving_is_over() -> None:
    async with fleet(two_targets(), max_migrations=0) as f:
        call = f.stub.Generate(ids_of(PROMPT, max_tokens=60, temperature=0.0), timeout=20)
        said = await read_tokens(call, 15)
        lost = f.busiest()
        await lost.stop()
        await asyncio.sleep(0.2)
        await lost.start()
        usage = await rest_of(call, said)
        assert tuple(said) == greedy(PROMPT, 60)
        assert usage.num_migrations == 0
