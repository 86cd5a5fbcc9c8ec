"""Sessions take over committed prefixes of others, wait for those on their way, and say the same as ever.

Guards against drafts that become another session's prefix, tokens of one session in the slot of another,
tasks that wait for each other or for somebody who is gone, and prompts that are computed twice.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import pytest

from protos.prefix import TokenPrefix
from protos.status import TaskError
from protos.worker_pb2 import PrefixCache, TaskReply
from tests.engines import decoder_pair
from tests.laws import random_table
from tests.pipelines import Generated, generate, pipeline
from tests.test_jobs import DRAFT, draft_task, drafts_of, judged, proposed, verdict_of, verify_task
from tests.test_slots import LEASE, Bench, V, refusal, state
from tests.test_worker_server import Gate, at, plain, serving, until
from tests.tiny_models import tiny_llama
from workers.language_model import LanguageModel
from workers.prefix_sharing import PrefixCounts, longest
from workers.server import WorkerConfig
from workers.slots import MIN_SHARED_TOKENS, Slot
from workers.table_model import TableModel
from workers.vacant_slots import Holding

SYSTEM = np.random.default_rng(1).integers(V, size=20).tolist()


def bench_of(num_slots: int = 4, max_length: int = 64, **options: float) -> Bench:
    return Bench(num_slots, max_length, **options)


def finish(bench: Bench, slot: Slot, missing: Sequence[int]) -> None:
    """A task feeds what is left and is answered."""
    bench.feed(slot, missing)
    slot.last_reply = TaskReply()
    bench.slots.leave(slot)


def outcome(bench: Bench, session: str, how: str) -> None:
    """What may have become of a session whose prefix is taken over."""
    if how == "over":
        bench.slots.release(session)
    elif how == "silent for long":
        bench.clock.now += LEASE + 1.0
        bench.slots.expire()
        assert bench.slots.num_used == 0
    elif how == "at work":
        bench.slots.enter(state([*SYSTEM, 1, 2], session, round=2), 0)


# Slots.


@pytest.mark.parametrize("how", ["idle", "at work", "over", "silent for long"])
def test_a_session_takes_over_the_prefix_that_it_shares_with_another(how: str) -> None:
    bench = bench_of()
    first = bench.hold("a", [*SYSTEM, 1, 2, 3])
    outcome(bench, "a", how)
    slot, missing = bench.slots.enter(state([*SYSTEM, 1, 9, 9], "b"), 0)
    assert bench.held(slot) == [*SYSTEM, 1]
    assert missing == [9, 9]
    finish(bench, slot, missing)
    if how in ("idle", "at work"):
        assert bench.held(first)[: len(SYSTEM)] == SYSTEM
        assert slot.index != first.index
    else:
        assert bench.slots.num_used == 1
        third, missing = bench.slots.enter(state([*SYSTEM, 1, 2, 3, 4], "c"), 0)  # it is kept for others
        assert (bench.held(third), missing) == ([*SYSTEM, 1, 2, 3], [4])


def test_the_longest_prefix_is_taken() -> None:
    bench = bench_of(num_slots=8)
    for i, session in enumerate("abcd"):
        bench.hold(session, [*SYSTEM, *range(i + 1), 9])
    slot, missing = bench.slots.enter(state([*SYSTEM, *range(3), 7], "e"), 0)
    assert bench.held(slot) == [*SYSTEM, 0, 1, 2]
    assert missing == [7]


def test_the_last_token_is_fed_again_though_all_are_there() -> None:
    bench = bench_of()
    bench.hold("a", SYSTEM)
    slot, missing = bench.slots.enter(state(SYSTEM, "b"), 0)
    assert bench.held(slot) == SYSTEM[:-1]
    assert missing == SYSTEM[-1:]
    other, missing = bench.slots.enter(state(SYSTEM, "c"), 0, num_again=3)
    assert (bench.held(other), missing) == (SYSTEM[:-3], SYSTEM[-3:])


@pytest.mark.parametrize("how", ["idle", "over", "silent for long"])
def test_drafts_that_nobody_has_committed_are_no_prefix(how: str) -> None:
    """Though the very same tokens are asked for: what came of them is the first session's affair."""
    bench = bench_of()
    slot = bench.hold("a", SYSTEM)
    slot, missing = bench.slots.enter(state([*SYSTEM, 1], round=2, start=len(SYSTEM)), 3)
    finish(bench, slot, [*missing, 7, 7, 7])
    outcome(bench, "a", how)
    slot, missing = bench.slots.enter(state([*SYSTEM, 1, 7, 7, 7, 5], "b"), 0)
    assert bench.held(slot) == [*SYSTEM, 1]
    assert missing == [7, 7, 7, 5]


def test_drafts_of_a_task_at_work_are_no_prefix() -> None:
    bench = bench_of()
    slot = bench.hold("a", SYSTEM)
    slot, missing = bench.slots.enter(state([*SYSTEM, 1], round=2), 3)
    bench.feed(slot, [*missing, 7, 7, 7])
    slot, missing = bench.slots.enter(state([*SYSTEM, 1, 7, 7, 7, 5], "b"), 0)
    assert bench.held(slot) == [*SYSTEM, 1]


def test_a_session_that_lost_its_slot_takes_over_what_it_shares() -> None:
    bench = bench_of(num_slots=1)
    bench.hold("a", [*SYSTEM, 1])
    bench.hold("b", [*SYSTEM, 2])
    assert refusal(bench, state([*SYSTEM, 1, 3], "a", start=21)).worker_length == 0
    slot, missing = bench.slots.enter(state([*SYSTEM, 1, 3], "a"), 0)
    assert (bench.held(slot), missing) == (SYSTEM, [1, 3])


def test_a_session_whose_slot_holds_less_takes_over_the_rest() -> None:
    bench = bench_of()
    bench.hold("a", SYSTEM[:2])
    bench.hold("b", SYSTEM)
    slot, missing = bench.slots.enter(state([*SYSTEM, 5], "a", round=2), 0)
    assert (bench.held(slot), missing) == (SYSTEM, [5])


@pytest.mark.parametrize("extra", [0, 1])
def test_prefixes_are_worth_it_from_some_length_on(extra: int) -> None:
    bench = bench_of()
    bench.hold("a", SYSTEM)
    shared = MIN_SHARED_TOKENS - 1 + extra
    other = [*SYSTEM[:shared], (SYSTEM[shared] + 1) % V, 1, 2]
    slot, _ = bench.slots.enter(state(other, "b"), 0)
    assert bench.held(slot) == (SYSTEM[:shared] if extra else [])


def test_switched_off_nothing_is_taken_over_or_kept() -> None:
    bench = bench_of(min_shared=math.inf)
    bench.hold("a", SYSTEM)
    slot, missing = bench.slots.enter(state(SYSTEM, "b"), 0)
    assert (bench.held(slot), missing) == ([], SYSTEM)
    bench.slots.leave(slot)
    bench.slots.release("a")
    bench.slots.release("b")
    assert bench.model._slots == [[], [], [], []]
    assert bench.slots.counts == PrefixCounts()


def test_hashes_that_meet_give_nobody_the_tokens_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash is no secret, so tokens can be found whose hash is that of others."""

    def all_meet(mine: TokenPrefix, other: TokenPrefix) -> int:
        return min(len(mine), len(other))

    monkeypatch.setattr(TokenPrefix, "common_by_hash", all_meet)
    bench = bench_of()
    bench.hold("a", SYSTEM)
    forged = [(token + 1) % V for token in SYSTEM]
    slot, missing = bench.slots.enter(state(forged, "b"), 0)
    assert (bench.held(slot), missing) == ([], forged)


@pytest.mark.parametrize("seed", range(3))
def test_the_longest_prefix_by_hash_is_the_longest_by_its_tokens(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(50):
        texts = random.integers(2, size=(8, 12)).tolist()
        lengths = random.integers(13, size=8).tolist()
        wanted = random.integers(2, size=int(random.integers(1, 13))).tolist()
        holdings = [Holding(i, TokenPrefix(text), lengths[i]) for i, text in enumerate(texts)]
        source, length = longest(TokenPrefix(wanted), holdings)
        common = [
            next(
                (i for i, (a, b) in enumerate(zip(text[:n], wanted, strict=False)) if a != b),
                min(n, len(wanted)),
            )
            for text, n in zip(texts, lengths, strict=True)
        ]
        assert source is not None
        assert length == max(common) == common[source.slot]
    assert longest(TokenPrefix([1]), []) == (None, 0)


def test_what_is_asked_and_taken_is_counted_and_rounds_are_not() -> None:
    bench = bench_of()
    slot = bench.hold("a", SYSTEM)
    assert bench.slots.counts == PrefixCounts(1, 0, 19, 0)
    slot, missing = bench.slots.enter(state([*SYSTEM, 1, 2], round=2, start=20), 0)
    finish(bench, slot, missing)
    assert bench.slots.counts == PrefixCounts(1, 0, 19, 0)
    bench.hold("b", [*SYSTEM, 3])
    assert bench.slots.counts == PrefixCounts(2, 1, 39, 20)
    bench.slots.release("b")
    bench.hold("c", [*SYSTEM, 3, 4])  # goes on where b stood
    assert bench.slots.counts == PrefixCounts(3, 2, 60, 41)


# Waiting.


def test_a_session_waits_for_the_prefix_that_another_is_about_to_feed() -> None:
    bench = bench_of()
    first, missing = bench.slots.enter(state([*SYSTEM, 1, 2], "a"), 0)
    second, rest = bench.slots.enter(state([*SYSTEM, 1, 3, 4], "b"), 0)
    assert (first.ahead, second.ahead is not None) == (None, True)
    bench.feed(first, missing[:20])
    assert bench.slots.catch_up(second) == 0
    bench.feed(first, missing[20:])
    assert bench.slots.catch_up(second) == 21
    assert bench.held(second) + rest[21:] == [*SYSTEM, 1, 3, 4]
    assert second.ahead is None
    assert bench.slots.counts == PrefixCounts(2, 1, 21 + 22, 21)
    assert bench.slots.catch_up(second) == 0


@pytest.mark.parametrize("how", ["fails", "is released"])
def test_when_the_one_ahead_is_gone_the_next_takes_its_place(how: str) -> None:
    bench = bench_of()
    slots = {name: bench.slots.enter(state([*SYSTEM, *SYSTEM, 5], name), 0)[0] for name in "abc"}
    bench.feed(slots["a"], SYSTEM)
    if how == "is released":
        bench.slots.release("a")
    bench.slots.leave(slots["a"])
    assert bench.slots.catch_up(slots["b"]) == 20  # what there was
    assert slots["b"].ahead is None
    assert bench.slots.catch_up(slots["c"]) == 20
    assert slots["c"].ahead is not None
    assert slots["c"].ahead.slot is slots["b"]
    bench.feed(slots["b"], SYSTEM)
    assert bench.slots.catch_up(slots["c"]) == 20


def test_whoever_is_ahead_may_begin_again_with_other_tokens() -> None:
    bench = bench_of()
    first, _ = bench.slots.enter(state([*SYSTEM, 1], "a"), 0)
    second, _ = bench.slots.enter(state([*SYSTEM, 2], "b"), 0)
    bench.slots.leave(first)
    bench.slots.enter(state([9] * 30, "a", round=2), 0)
    assert bench.slots.catch_up(second) == 0
    assert second.ahead is None


def test_no_chains_of_waiting_and_two_prompts_have_an_end() -> None:
    """Who is waited for does not wait: the second prompt's first session leads the others of its kind."""
    bench = bench_of(num_slots=6)
    entered = {
        name: bench.slots.enter(state([*SYSTEM, *tail], name), 0)
        for name, tail in {"a": [1] * 20, "b": [2] * 20, "c": [2] * 20, "d": [2] * 20}.items()
    }
    slots = {name: slot for name, (slot, _) in entered.items()}
    assert {name for name, slot in slots.items() if slot.ahead} == set("bcd")
    for slot in slots.values():
        if slot.ahead:
            assert slot.ahead.slot is slots["a"]
    bench.feed(slots["a"], SYSTEM)
    assert [bench.slots.catch_up(slots[name]) for name in "bcd"] == [20, 20, 20]
    leaders = [ahead.slot if (ahead := slots[name].ahead) else None for name in "bcd"]
    assert leaders == [None, slots["b"], slots["b"]]


def test_a_session_that_decodes_waits_for_nobody() -> None:
    bench = bench_of()
    slot, missing = bench.slots.enter(state([1, 2], "b"), 0)
    finish(bench, slot, missing)
    bench.slots.enter(state([1, 2, *SYSTEM], "a"), 0)
    slot, missing = bench.slots.enter(state([1, 2, *SYSTEM], "b", round=2), 0)
    assert slot.ahead is None
    assert missing == SYSTEM


@pytest.mark.parametrize("seed", range(8))
def test_slots_hold_committed_prefixes_of_their_own_session_through_any_course_of_events(seed: int) -> None:
    """Beside a plain list of all that was ever committed: nothing else is taken over; somebody can work."""
    random = np.random.default_rng(seed)
    bench = bench_of(num_slots=4, max_length=40, min_shared=3)
    stems = [random.integers(V, size=8).tolist() for _ in range(2)]
    committed: set[tuple[int, ...]] = set()
    truths: dict[str, list[int]] = {}
    at_work: dict[str, tuple[Slot, list[int]]] = {}
    rounds = num_shared = num_waited = 0
    for _ in range(1000):
        session = str(random.choice(list("abcdef")))
        event = random.choice(["enter", "enter", "work", "work", "release", "release", "expire", "empty"])
        if event == "enter" and session not in at_work:
            if random.random() < 0.4:
                stems[int(random.integers(2))] = random.integers(V, size=8).tolist()
            tail = random.integers(V, size=random.integers(1, 6)).tolist()
            truth = truths.setdefault(
                session, [*stems[int(random.integers(2))][: random.integers(4, 9)], *tail]
            )
            truth += random.integers(V, size=random.integers(3)).tolist()
            del truth[39:]
            own = bench.slots._by_session.get(session)
            before = bench.held(own) if own else []
            rounds += 1
            try:
                slot, missing = bench.slots.enter(state(truth, session, round=rounds), 1)
            except TaskError:
                assert len(at_work) == 4  # or its slots are all taken
                continue
            held = bench.held(slot)
            assert held + missing == truth
            assert missing
            if held != before[: len(held)]:
                num_shared += 1
                assert tuple(held) in committed
            committed.update(tuple(truth[:n]) for n in range(1, len(truth) + 1))
            num_waited += slot.ahead is not None
            at_work[session] = slot, missing
        elif event == "work" and at_work:
            for slot, missing in at_work.values():
                del missing[: bench.slots.catch_up(slot)]
            ready = {name: work for name, work in at_work.items() if work[0].ahead is None}
            assert ready, "somebody can always work"
            name = str(random.choice(list(ready)))
            slot, missing = ready[name]
            assert bench.held(slot) + missing == truths[name][: len(slot.tokens) + len(missing)]
            size = int(random.integers(1, min(len(missing), 4) + 1))
            bench.feed(slot, missing[:size])
            del missing[:size]
            if not missing:
                bench.feed(slot, random.integers(V, size=1).tolist())  # a draft
                slot.last_reply = TaskReply()
            if not missing or random.random() < 0.1:  # done, or failed
                bench.slots.leave(slot)
                del at_work[name]
        elif event == "release" and random.random() < (0.3 if session in at_work else 0.8):
            bench.slots.release(session)
            if session not in at_work:
                truths.pop(session, None)
        elif event == "expire" and random.random() < 0.1:
            bench.clock.now += LEASE * random.random()
            bench.slots.expire()
        elif event == "empty" and random.random() < 0.1:
            bench.slots.emptied(1)
        for holding in bench.slots._vacant.holdings:
            assert tuple(holding.tokens.since(0)) in committed
        used = [slot.index for slot in bench.slots._by_session.values()]
        assert len({*used, *bench.slots.free}) == len(used) + len(bench.slots.free)
        assert len(bench.slots.free) + len({*used, *(slot.index for slot, _ in at_work.values())}) == 4
    assert num_shared > 10
    assert num_waited > 1


# Workers over real gRPC.

PROMPT = np.random.default_rng(2).integers(5, size=200).tolist()


def counts_of(prefixes: PrefixCache) -> tuple[int, int, int, int]:
    return (
        prefixes.num_prefills,
        prefixes.num_hits,
        prefixes.num_prefill_tokens,
        prefixes.num_cached_tokens,
    )


async def test_eight_samples_of_one_prompt_feed_it_once() -> None:
    gate = Gate()
    async with serving(gate=gate, max_pass_tokens=64) as worker:
        replies = await worker.connect().ask(*(plain(PROMPT, f"s{i}", choice=i) for i in range(8)))
        for i, reply in enumerate(replies):
            assert judged(reply) == verdict_of(PROMPT, [], [], choice=i)
            assert worker.held(f"s{i}") == PROMPT
        assert sum(map(sum, gate.passes)) == 200 + 7
        assert counts_of(worker.server.status().prefixes) == (8, 7, 8 * 199, 7 * 199)


async def test_samples_of_one_prompt_are_drafted_as_if_each_had_fed_it() -> None:
    gate = Gate()
    async with serving(DRAFT, "draft", gate=gate) as worker:
        tasks = [draft_task(at(PROMPT, f"s{i}"), 3, choice=i) for i in range(4)]
        for i, reply in enumerate(await worker.connect().ask(*tasks)):
            assert proposed(reply)[0] == drafts_of(DRAFT, PROMPT, 3, choice=i)[0]
        assert sum(map(sum, gate.passes)) == 200 + 3 + 4 * 2


async def test_the_next_turn_of_a_chat_feeds_what_is_new() -> None:
    gate = Gate()
    async with serving(gate=gate) as worker:
        stream = worker.connect()
        await stream.ask(plain(PROMPT, "first"))
        await stream.send(released=["first"])
        await until(lambda: worker.server.num_slots_used == 0)
        del gate.passes[:]
        turn = [*PROMPT, 1, 2, 3, 4]
        (reply,) = await stream.ask(plain(turn, "second"))
        assert judged(reply) == verdict_of(turn, [], [])
        assert gate.passes == [[4]]


async def test_drafts_of_one_session_are_judged_anew_in_another() -> None:
    """The second prompt is what the first session's drafts were, and more of them than were kept."""
    async with serving() as worker:
        stream = worker.connect()
        drafts, rows = drafts_of(DRAFT, PROMPT, 4)
        await stream.ask(verify_task(at(PROMPT, "a"), drafts, rows))
        text = [*PROMPT, *drafts, 1]
        (reply,) = await stream.ask(plain(text, "b"))
        assert judged(reply) == verdict_of(text, [], [])
        assert worker.server.status().prefixes.num_cached_tokens == len(PROMPT)


async def test_a_task_that_waits_ends_with_its_time_and_with_its_release() -> None:
    gate = Gate()
    async with serving(gate=gate, max_pass_tokens=32) as worker:
        stream = worker.connect()
        gate.hold()
        first, late, gone = await stream.send(
            plain(PROMPT, "first"),
            verify_task(at(PROMPT, "late", timeout_ns=int(0.3e9))),
            plain(PROMPT, "gone"),
        )
        await gate.entered()
        assert sum(map(sum, gate.passes)) == 32  # the others wait
        await stream.send(released=["gone"])
        await until(lambda: bool(worker.server._passes._released))
        await asyncio.sleep(0.3)
        gate.open()
        assert (await stream.refusal(late)).code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await stream.refusal(gone)).code is grpc.StatusCode.ABORTED
        assert judged(await stream.reply(first)) == verdict_of(PROMPT, [], [])


@pytest.mark.parametrize("how", ["released", "failed"])
async def test_when_the_first_of_the_samples_is_gone_the_others_go_on(how: str) -> None:
    gate = Gate()
    async with serving(gate=gate, max_pass_tokens=64) as worker:
        stream = worker.connect()
        gate.hold()
        ids = await stream.send(*(plain(PROMPT, f"s{i}", choice=i) for i in range(3)))
        await gate.entered()
        if how == "released":
            await stream.send(released=["s0"])
            await until(lambda: bool(worker.server._passes._released))
            gate.open()
        else:
            gate.fault = RuntimeError("a bad pass")
            gate.step()
            await stream.refusal(ids[0])
            await gate.entered()
            gate.fault = None
            gate.open()
        assert (await stream.reply(ids[0])).HasField("error")
        for i in (1, 2):
            assert judged(await stream.reply(ids[i])) == verdict_of(PROMPT, [], [], choice=i)
        wasted = 64 if how == "failed" else 0
        assert sum(map(sum, gate.passes)) == 200 + 1 + wasted


async def test_decoding_goes_on_beside_samples_that_wait() -> None:
    gate = Gate()
    async with serving(gate=gate, max_pass_tokens=32) as worker:
        stream = worker.connect()
        await stream.ask(plain([1, 2], "quick"))
        gate.hold()
        ids = await stream.send(*(plain(PROMPT, f"s{i}") for i in range(3)))
        await gate.entered()
        (quick,) = await stream.send(plain([1, 2, 3], "quick", 2))
        await until(lambda: len(worker.server._passes._arrived) == 1)
        gate.step()
        await gate.entered()
        gate.step()
        assert judged(await stream.reply(quick)) == verdict_of([1, 2, 3], [], [])
        assert not any(task in stream.order for task in ids)
        gate.open()
        for task in ids:
            await stream.reply(task)


async def test_a_copy_that_fails_fails_its_task_alone() -> None:
    class NoCopies(TableModel):
        def copy(self, source: int, slot: int, length: int) -> None:
            raise RuntimeError("out of memory")

    async with serving(kind=NoCopies) as worker:
        stream = worker.connect()
        first, *others = await stream.send(*(plain(PROMPT, f"s{i}") for i in range(3)))
        assert judged(await stream.reply(first)) == verdict_of(PROMPT, [], [])
        for task in [
            *others,
            *await stream.send(plain(PROMPT, "s3")),
            *await stream.send(plain(PROMPT, "s4")),
        ]:
            assert (await stream.refusal(task)).code is grpc.StatusCode.INTERNAL
        (reply,) = await stream.ask(plain([*PROMPT, 1], "s0", 2))
        assert judged(reply) == verdict_of([*PROMPT, 1], [], [])


async def test_switched_off_each_session_feeds_its_own() -> None:
    gate = Gate()
    async with serving(gate=gate, min_shared_tokens=None) as worker:
        await worker.connect().ask(*(plain(PROMPT, f"s{i}") for i in range(3)))
        assert sum(map(sum, gate.passes)) == 600
        assert not worker.server.status().HasField("prefixes")


async def test_passes_that_measure_cost_no_more_than_the_oldest_prefix() -> None:
    gate = Gate()
    async with serving(gate=gate, num_slots=4) as worker:
        stream = worker.connect()
        for name in "abcd":
            await stream.ask(plain([int(name, 16) - 9, *PROMPT], name))
        await stream.send(released=list("abcd"))
        await until(lambda: worker.server.num_slots_used == 0)
        assert worker.server._slots.free == (0, 1, 2, 3)
        assert worker.server._slots.emptied(1) == (0,)
        assert len(list(worker.server._slots._vacant.holdings)) == 3


# The whole pipeline: the same outputs with and without.


def tables() -> tuple[LanguageModel, LanguageModel]:
    target = random_table(V, 1, spread=2.0)
    noise = random_table(V, 2, spread=1.0)
    return (
        TableModel(target, V, num_slots=6, max_length=256),
        TableModel(lambda prefix: target(prefix) + noise(prefix), V, num_slots=6, max_length=256),
    )


def decoders() -> tuple[LanguageModel, LanguageModel]:
    sizes = {"num_slots": 6, "max_length": 128}
    return decoder_pair(tiny_llama(0), **sizes).engine, decoder_pair(tiny_llama(1), **sizes).engine


async def conversation(
    models: tuple[LanguageModel, LanguageModel], min_shared_tokens: int | None, **fields: Any
) -> tuple[list[tuple[int, ...]], list[PrefixCache]]:
    """Four samples beside another user of the same system prompt, then the next turn of either: all ids."""
    worker = WorkerConfig(min_shared_tokens=min_shared_tokens, max_pass_tokens=32)
    async with pipeline(*models, worker=worker) as running:

        async def ask(tail: Sequence[int], **more: Any) -> Generated:
            return await generate(
                running.stub,
                [*SYSTEM, *tail],
                max_tokens=12,
                seed=7,
                ignore_end_tokens=True,
                **fields,
                **more,
            )

        first, second = await asyncio.gather(ask([1, 2, 3], n=4), ask([4, 5]))
        third = await ask([1, 2, 3, *first.ids(2), 6])
        fourth = await ask([4, 5, *second.ids(), 6], n=2)
        assert running.draft is not None
        ids = [
            generated.ids(choice)
            for generated in (first, second, third, fourth)
            for choice in range(len(generated.choices))
        ]
        return ids, [worker.status().prefixes for worker in (running.target, running.draft)]


@pytest.mark.parametrize("make", [tables, decoders])
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"temperature": 0.0}, id="greedy, drafted"),
        pytest.param(
            {"temperature": 1.0, "num_draft_tokens": 0}, id="seeded"
        ),  # with drafts, K hangs on times
    ],
)
async def test_outputs_are_those_without_a_cache(make: Any, fields: dict[str, Any]) -> None:
    expected, without = await conversation(make(), None, **fields)
    ids, prefixes = await conversation(make(), 4, **fields)
    assert ids == expected
    assert not any(counted.num_hits for counted in without)
    assert prefixes[0].num_hits >= 6  # all but the first, and maybe the other user
    if fields["temperature"] == 0.0:
        assert prefixes[1].num_hits >= 4
