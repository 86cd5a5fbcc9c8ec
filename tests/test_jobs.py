"""What a draft or verify task makes of its logits: coins of its own round, rows that redraw, caches that fit.

The models are tables, so every draw and verdict is predicted by `drafts_of` and `verdict_of`, which know the
law, the coins' counters and the pure functions, but no slot, job or pass.

K draft tokens, L base length, V vocabulary.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import cache
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np
import pytest
from google.rpc.error_details_pb2 import BadRequest

import workers.jobs
from protos.limits import MAX_DRAFT_TOKENS
from protos.prefix import TokenPrefix
from protos.status import TaskError
from protos.wire import digest, pack_tokens, unpack_tokens
from protos.worker_pb2 import (
    ENCODING_FULL,
    ENCODING_ONE_HOT,
    ENCODING_SPARSE,
    RULE_BLOCK,
    RULE_TOKEN,
    DraftTask,
    Proposal,
    QRow,
    QRows,
    Sampling,
    SessionState,
    TaskReply,
    VerifyTask,
)
from tests.dense_rows import verify
from workers.counts import CountRow, one_hot, quantise, quantise_full
from workers.distributions import Distribution, FloatArray
from workers.jobs import DraftJob, Job, VerifyJob, settings_of
from workers.language_model import Feed, Logits
from workers.passes import PassLoop
from workers.randomness import Purpose, uniform
from workers.rows import read_rows, write_rows
from workers.sampling import SamplingSettings, distribution, probabilities
from workers.slots import SlotTable
from workers.table_model import TableModel
from workers.verification import Rule, Uniforms, Verdict
from workers.work import Work

V = 12
EPOCH = 5
SUPPORT = 6
PLAIN = SamplingSettings()
PROMPT = [3, 1, 4, 1, 5]
DRAFT_KEY = b"the drafter's own key"
SEED = 0xFEDCBA9876543210
RULES = {RULE_TOKEN: Rule.TOKEN, RULE_BLOCK: Rule.BLOCK}
both_rules = pytest.mark.parametrize("rule", RULES)

Prefix = tuple[int, ...]
Law = Callable[[Prefix], FloatArray]


def law(seed: int, spread: float = 1.5, size: int = V) -> Law:
    """Logits that depend on every token of the prefix."""

    @cache
    def next_logits(prefix: Prefix) -> FloatArray:
        return np.asarray(spread * np.random.default_rng([seed, *prefix]).normal(size=size))

    return next_logits


def near(base: Law, seed: int) -> Law:
    """A drafter's law: like the target's, not quite."""
    noise = law(seed, 0.7)
    return lambda prefix: base(prefix) + noise(prefix)


TARGET = law(1)
DRAFT = near(TARGET, 2)


def q_of(next_logits: Law, prefix: Sequence[int], settings: SamplingSettings) -> FloatArray:
    return np.asarray(probabilities(next_logits(tuple(prefix)).astype(np.float32)[None], settings)[0])


def drafts_of(
    next_logits: Law,
    prefix: Sequence[int],
    num: int,
    make_row: Callable[[FloatArray], CountRow] = lambda q: quantise(q, SUPPORT),
    settings: SamplingSettings = PLAIN,
    choice: int = 0,
) -> tuple[list[int], list[CountRow]]:
    """What a drafter must propose behind a prefix."""
    tokens: list[int] = []
    rows: list[CountRow] = []
    for position in range(len(prefix), len(prefix) + num):
        rows.append(make_row(q_of(next_logits, [*prefix, *tokens], settings)))
        tokens.append(rows[-1].draw(uniform(DRAFT_KEY, choice, len(prefix), position, Purpose.DRAFT)))
    return tokens, rows


def verdict_of(
    prefix: Sequence[int],
    tokens: Sequence[int],
    rows: Sequence[CountRow],
    rule: "RuleNumber" = RULE_TOKEN,
    *,
    next_logits: Law = TARGET,
    settings: SamplingSettings = PLAIN,
    seed: int = SEED,
    choice: int = 0,
) -> Verdict:
    """What the target must say of a proposal."""
    p = np.stack([q_of(next_logits, [*prefix, *tokens[:i]], settings) for i in range(len(tokens) + 1)])

    def coin(offset: int, purpose: Purpose) -> float:
        length = len(prefix)
        return uniform(seed.to_bytes(8, "little"), choice, length, length + offset, purpose)

    coins = Uniforms(
        accept=[coin(i, Purpose.ACCEPT) for i in range(len(tokens))],
        recover=[coin(i, Purpose.RECOVER) for i in range(len(tokens))],
        bonus=coin(len(tokens), Purpose.BONUS),
    )
    return verify(p, rows, tokens, coins, RULES[rule])


def overlap_of(
    prefix: Sequence[int],
    tokens: Sequence[int],
    rows: Sequence[CountRow],
    num_accepted: int,
    settings: SamplingSettings = PLAIN,
) -> float:
    """What a verdict must say of how alike p and q are, up to the cut."""
    p = [q_of(TARGET, [*prefix, *tokens[:i]], settings) for i in range(len(tokens))][: num_accepted + 1]
    return sum(float(np.minimum(p_row[row.ids], row.q).sum()) for p_row, row in zip(p, rows, strict=False))


RuleNumber = Any  # the generated enum has no type at run time


def state(
    tokens: Sequence[int], *, session: str = "a", round: int = 1, start: int = 0, epoch: int = EPOCH
) -> SessionState:
    return SessionState(
        session=session,
        epoch=epoch,
        round=round,
        base_length=len(tokens),
        start=start,
        start_hash=TokenPrefix(tokens).hash_at(start),
        tokens=pack_tokens(tokens[start:]),
        timeout_ns=10**11,
    )


def draft_task(where: SessionState, num_draft_tokens: int, **fields: Any) -> DraftTask:
    defaults: dict[str, Any] = {
        "sampling": Sampling(temperature=1.0, top_p=1.0),
        "draft_key": DRAFT_KEY,
        "encoding": ENCODING_SPARSE,
        "support": SUPPORT,
        "vocab_size": V,
    }
    return DraftTask(state=where, num_draft_tokens=num_draft_tokens, **{**defaults, **fields})


def verify_task(
    where: SessionState, tokens: Sequence[int] = (), rows: Sequence[CountRow] = (), **fields: Any
) -> VerifyTask:
    proposal = fields.pop("proposal", Proposal(tokens=pack_tokens(tokens), rows=write_rows(rows, V)))
    defaults: dict[str, Any] = {
        "digest": digest(proposal),
        "sampling": Sampling(temperature=1.0, top_p=1.0),
        "seed": SEED,
        "draft_key": DRAFT_KEY,
        "rule": RULE_TOKEN,
    }
    return VerifyTask(state=where, proposal=proposal, **{**defaults, **fields})


class StrictTable(TableModel):
    """Holds the worker to what it may ask of a model; a lenient double would hide a wrong cut."""

    def forward(self, feeds: Sequence[Feed]) -> list[Logits]:
        assert len({feed.slot for feed in feeds}) == len(feeds) > 0
        for feed in feeds:
            assert feed.start <= len(self._slots[feed.slot])
            assert 0 <= feed.num_logits <= len(feed.tokens) > 0
        return super().forward(feeds)


class Bench:
    """A worker without its sockets: model, slots, jobs and passes."""

    def __init__(
        self,
        next_logits: Law,
        *,
        num_slots: int = 4,
        max_length: int = 64,
        max_pass_tokens: int = 256,
        out_of_time: Callable[[], bool] = lambda: False,
        output_ids: Sequence[int] | None = None,
    ) -> None:
        self.fed: list[list[int]] = []  # tokens of each feed of each pass

        def note(lengths: Sequence[int]) -> float:
            self.fed.append(list(lengths))
            return 0.0

        self.model = StrictTable(
            next_logits,
            V,
            num_slots=num_slots,
            max_length=max_length,
            latency_seconds=note,
            output_ids=None if output_ids is None else np.asarray(output_ids),
        )
        self.slots = SlotTable(self.model, epoch=EPOCH, lease_seconds=60.0, clock=time.monotonic)
        self.out_of_time = out_of_time
        self.passes = PassLoop(self.model, self.slots, self._open, max_pass_tokens=max_pass_tokens)

    def _open(self, work: Work) -> Job:
        if isinstance(work.task, DraftTask):
            return DraftJob(work.task, self.slots, self.model, lambda: self.out_of_time())
        assert isinstance(work.task, VerifyTask)
        return VerifyJob(work.task, self.slots, self.model)

    async def __aenter__(self) -> Self:
        self._running = asyncio.create_task(self.passes.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.cancel()
        await asyncio.wait([self._running])

    async def ask(self, *tasks: DraftTask | VerifyTask) -> list[TaskReply]:
        """Answers of tasks that arrive together."""
        futures: list[asyncio.Future[TaskReply]] = []
        for task in tasks:
            future: asyncio.Future[TaskReply] = asyncio.get_running_loop().create_future()
            key = task.digest if isinstance(task, VerifyTask) else str(task.num_draft_tokens).encode()
            self.passes.submit(Work(task, key, future.set_result))
            futures.append(future)
        answers = asyncio.gather(*futures)
        self._running.add_done_callback(lambda _: answers.cancel())  # no answer comes from a loop that ended
        return await asyncio.wait_for(answers, 30)

    async def refusal(self, task: DraftTask | VerifyTask) -> TaskError:
        (reply,) = await self.ask(task)
        assert reply.HasField("error"), reply
        return TaskError.from_status(reply.error)

    def held(self, session: str = "a") -> list[int]:
        """What a session's slot holds, in the table and in the model alike."""
        slot = self.slots._by_session[session]
        assert slot.tokens.since(0) == self.model._slots[slot.index]
        assert not slot.busy
        return slot.tokens.since(0)


def proposed(reply: TaskReply) -> tuple[list[int], list[CountRow]]:
    assert reply.HasField("draft"), reply
    tokens = unpack_tokens(reply.draft.proposal.tokens, "tokens")
    rows, num_unusable = read_rows(reply.draft.proposal.rows, tokens, V)
    assert num_unusable == 0
    return tokens, rows


def judged(reply: TaskReply) -> Verdict:
    assert reply.HasField("verify"), reply
    return Verdict(reply.verify.num_accepted, reply.verify.token)


def same(rows: Sequence[CountRow], others: Sequence[CountRow]) -> bool:
    def plain(row: CountRow) -> tuple[list[int], list[float]]:
        return row.ids.tolist(), row.q.tolist()  # a row of one id arrives as one-hot

    return [plain(row) for row in rows] == [plain(row) for row in others]


def named(error: TaskError) -> str:
    """The field of an INVALID_ARGUMENT."""
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT, error.message
    (detail,) = error.details
    assert isinstance(detail, BadRequest)
    (violation,) = detail.field_violations
    return str(violation.field)


# Drafting.

ROW_MAKERS: dict[int, Callable[[FloatArray], CountRow]] = {
    ENCODING_SPARSE: lambda q: quantise(q, SUPPORT),
    ENCODING_FULL: quantise_full,
    ENCODING_ONE_HOT: lambda q: one_hot(int(q.argmax())),
}


@pytest.mark.parametrize("encoding", ROW_MAKERS)
@pytest.mark.parametrize("choice", [0, 3])
async def test_each_draft_is_drawn_from_its_shipped_row_by_the_coin_of_its_place(
    encoding: int, choice: int
) -> None:
    async with Bench(DRAFT) as bench:
        for round, length in enumerate((1, 3, 5), start=1):
            prefix = PROMPT[:length]
            task = draft_task(state(prefix, round=round), 4, encoding=encoding, choice=choice)
            (reply,) = await bench.ask(task)
            tokens, rows = proposed(reply)
            expected = drafts_of(DRAFT, prefix, 4, ROW_MAKERS[encoding], choice=choice)
            assert (tokens, same(rows, expected[1])) == (expected[0], True)


async def test_a_position_drafted_again_from_another_base_length_meets_another_coin() -> None:
    flat = law(3, spread=0.0)
    async with Bench(flat) as bench:
        (first,) = await bench.ask(draft_task(state(PROMPT), 8, support=V))
        tokens, _ = proposed(first)
        (second,) = await bench.ask(draft_task(state([*PROMPT, tokens[0]], round=2), 7, support=V))
        assert proposed(second)[0] != tokens[1:]


async def test_a_drafters_settings_shape_q() -> None:
    sampling = Sampling(temperature=0.5, top_k=3, top_p=0.9, min_p=0.05)
    settings = SamplingSettings(0.5, 3, 0.9, 0.05)
    async with Bench(DRAFT) as bench:
        (reply,) = await bench.ask(draft_task(state(PROMPT), 5, sampling=sampling))
        tokens, rows = proposed(reply)
        expected = drafts_of(DRAFT, PROMPT, 5, settings=settings)
        assert (tokens, same(rows, expected[1])) == (expected[0], True)


async def test_a_drafter_with_fewer_ids_proposes_these_alone() -> None:
    output_ids = np.array([2, 3, 7, 11])
    narrow = law(4, size=4)
    async with Bench(narrow, output_ids=output_ids.tolist()) as bench:
        for round, (encoding, make_row) in enumerate(
            {
                ENCODING_SPARSE: lambda q: quantise(q, SUPPORT, output_ids),
                ENCODING_FULL: lambda q: quantise_full(q, output_ids),
                ENCODING_ONE_HOT: lambda q: one_hot(int(output_ids[q.argmax()])),
            }.items(),
            start=1,
        ):
            (reply,) = await bench.ask(draft_task(state(PROMPT, round=round), 4, encoding=encoding))
            tokens, rows = proposed(reply)
            expected = drafts_of(narrow, PROMPT, 4, make_row)
            assert (tokens, same(rows, expected[1])) == (expected[0], True)


@pytest.mark.parametrize("encoding", [ENCODING_SPARSE, ENCODING_ONE_HOT])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, top_p=1.0),
        Sampling(temperature=0.0, top_p=1.0),
        Sampling(temperature=0.7, top_k=5, top_p=1.0),
        Sampling(temperature=1.3, top_k=1000, top_p=1.0),
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=1.0, top_p=1.0, min_p=0.1),
        Sampling(temperature=0.7, top_k=50, top_p=0.95, min_p=0.02),
    ],
    ids=lambda sampling: " ".join(str(sampling).split()),
)
def test_columns_that_a_row_drops_do_not_change_what_is_left_of_it(sampling: Sampling, encoding: int) -> None:
    """They are not computed; the row is still what all of q gives."""
    size, output_ids = 3000, np.arange(3000) * 3
    model = TableModel(lambda _: np.zeros(size), 3 * size, output_ids=output_ids)
    slots = SlotTable(model, epoch=EPOCH, lease_seconds=60.0, clock=time.monotonic)
    settings = settings_of(sampling)
    for seed in range(25):
        logits = 4.0 * np.random.default_rng(seed).normal(size=(1, size)).astype(np.float32)
        fields = {"sampling": sampling, "encoding": encoding, "support": 64, "vocab_size": 3 * size}
        job = DraftJob(draft_task(state([1]), 1, **fields), slots, model, lambda: False)
        reply = job.advance(logits)
        assert reply is not None
        tokens = unpack_tokens(reply.draft.proposal.tokens, "tokens")
        rows, _ = read_rows(reply.draft.proposal.rows, tokens, 3 * size)
        q = probabilities(logits, settings)[0]
        likeliest = one_hot(int(output_ids[q.argmax()]))
        expected = quantise(q, 64, output_ids) if encoding == ENCODING_SPARSE else likeliest
        assert same(rows, [expected])
        slots.leave(job.slot)


async def test_a_target_makes_no_row_behind_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FloatArray] = []

    def noted(logits: FloatArray, settings: SamplingSettings) -> Distribution:
        made.append(logits)
        return distribution(logits, settings)

    monkeypatch.setattr(workers.jobs, "distribution", noted)
    outcomes = set()
    async with Bench(TARGET) as bench:
        for round in range(1, 31):
            prefix = [*PROMPT, round % V]
            tokens, rows = drafts_of(DRAFT, prefix, 4)
            made.clear()
            (reply,) = await bench.ask(verify_task(state(prefix, round=round), tokens, rows))
            num_accepted = reply.verify.num_accepted
            wanted = [TARGET((*prefix, *tokens[:i])).astype(np.float32) for i in range(num_accepted + 1)]
            assert np.array_equal(made, wanted)
            outcomes.add(num_accepted)
    assert len(outcomes) > 2


async def test_a_prefill_brings_the_cache_up_to_date_and_draws_nothing() -> None:
    async with Bench(DRAFT) as bench:
        (reply,) = await bench.ask(draft_task(state(PROMPT), 0))
        assert reply.draft.proposal == Proposal()
        assert bench.held() == PROMPT
        (reply,) = await bench.ask(draft_task(state([*PROMPT, 9], round=2, start=5), 2))
        assert proposed(reply)[0] == drafts_of(DRAFT, [*PROMPT, 9], 2)[0]
        assert bench.fed == [[5], [1], [1]]


async def test_the_last_draft_is_not_fed_and_the_others_stay_for_the_next_round() -> None:
    async with Bench(DRAFT) as bench:
        (reply,) = await bench.ask(draft_task(state(PROMPT), 3))
        tokens, _ = proposed(reply)
        assert bench.held() == PROMPT + tokens[:2]
        committed = [*PROMPT, *tokens, 9]  # all accepted: the last draft and the bonus are missing
        await bench.ask(draft_task(state(committed, round=2, start=5), 1))
        assert bench.fed[-1] == [2]
        assert bench.held() == committed


@pytest.mark.parametrize("num_drawn", range(5))
async def test_a_drafter_out_of_time_sends_what_it_drew(num_drawn: int) -> None:
    asked = 0

    def out_of_time() -> bool:
        nonlocal asked
        asked += 1
        return asked > num_drawn

    async with Bench(DRAFT, out_of_time=out_of_time) as bench:
        (reply,) = await bench.ask(draft_task(state(PROMPT), 4))
        tokens, rows = proposed(reply)
        expected = drafts_of(DRAFT, PROMPT, num_drawn)
        assert (tokens, same(rows, expected[1])) == (expected[0], True)
        assert asked == min(num_drawn + 1, 4)  # before every draw, and not behind the last
        held = bench.held()
        bench.out_of_time = lambda: False
        (reply,) = await bench.ask(draft_task(state([*PROMPT, 9], round=2), 2))
        assert held[:5] == PROMPT
        assert proposed(reply)[0] == drafts_of(DRAFT, [*PROMPT, 9], 2)[0]


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("num_before", range(3))
async def test_a_drafter_that_cannot_compute_a_row_sends_the_tokens_before_it(
    num_before: int, broken: float
) -> None:
    def next_logits(prefix: Prefix) -> FloatArray:
        logits = DRAFT(prefix).copy()
        if len(prefix) == len(PROMPT) + num_before:
            logits[4] = broken
        return logits

    async with Bench(next_logits) as bench:
        (reply,) = await bench.ask(draft_task(state(PROMPT), 4))
        assert proposed(reply)[0] == drafts_of(DRAFT, PROMPT, num_before)[0]


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("num_draft_tokens", {"num_draft_tokens": MAX_DRAFT_TOKENS + 1}),
        ("num_draft_tokens", {"num_draft_tokens": 2**32 - 1}),
        ("support", {"support": 0}),
        ("support", {"support": 4097}),
        ("encoding", {"encoding": 0}),
        ("encoding", {"encoding": 9}),
        ("sampling.temperature", {"sampling": Sampling(temperature=-1.0, top_p=1.0)}),
        ("sampling.temperature", {"sampling": Sampling(temperature=float("nan"), top_p=1.0)}),
        ("sampling.top_p", {"sampling": Sampling(temperature=1.0)}),
        ("sampling.min_p", {"sampling": Sampling(temperature=1.0, top_p=1.0, min_p=1.5)}),
        ("draft_key", {"draft_key": bytes(65)}),
    ],
)
async def test_a_draft_task_that_cannot_be_is_refused_by_name_and_takes_no_slot(
    field: str, fields: dict[str, Any]
) -> None:
    async with Bench(DRAFT) as bench:
        task = draft_task(state(PROMPT), fields.pop("num_draft_tokens", 2), **fields)
        assert named(await bench.refusal(task)) == field
        assert bench.slots.num_used == 0
        assert bench.fed == []


async def test_drafts_fill_the_drafters_context_to_its_last_position_and_not_beyond() -> None:
    async with Bench(DRAFT, max_length=8) as bench:
        (reply,) = await bench.ask(draft_task(state(PROMPT), 4))  # the fourth is not fed
        assert proposed(reply)[0] == drafts_of(DRAFT, PROMPT, 4)[0]
        assert len(bench.held()) == 8
        assert named(await bench.refusal(draft_task(state(PROMPT, round=2), 5))) == "state.base_length"
        full = [*PROMPT, 1, 2, 3]
        (reply,) = await bench.ask(draft_task(state(full, round=3), 1))
        assert proposed(reply)[0] == drafts_of(DRAFT, full, 1)[0]
        assert named(await bench.refusal(draft_task(state([*full, 1], round=4), 0))) == "state.base_length"


# Verifying.


@both_rules
@pytest.mark.parametrize("num_drafts", [0, 1, 4])
async def test_a_verdict_is_that_of_the_pure_function_with_the_coins_of_its_round(
    num_drafts: int, rule: int
) -> None:
    seen = set()
    async with Bench(TARGET) as bench:
        for round in range(1, 121):
            prefix = [*PROMPT, round % V]
            choice = round % 3
            tokens, rows = drafts_of(DRAFT, prefix, num_drafts, choice=choice)
            task = verify_task(
                state(prefix, round=round), tokens, rows, rule=rule, choice=choice, seed=SEED + round
            )
            (reply,) = await bench.ask(task)
            expected = verdict_of(prefix, tokens, rows, rule, choice=choice, seed=SEED + round)
            assert judged(reply) == expected
            overlap = overlap_of(prefix, tokens, rows, expected.num_accepted)
            assert reply.verify.sum_min_pq == pytest.approx(overlap, abs=1e-14)
            assert reply.verify.digest == task.digest
            assert (reply.verify.num_unusable_rows, reply.verify.num_redraw_mismatches) == (0, 0)
            assert bench.held() == prefix + tokens[: expected.num_accepted]
            seen.add(expected.num_accepted)
    assert seen == set(range(num_drafts + 1))  # every outcome was met


async def test_the_targets_settings_shape_p() -> None:
    sampling = Sampling(temperature=0.7, top_k=4, top_p=0.8, min_p=0.1)
    settings = SamplingSettings(0.7, 4, 0.8, 0.1)
    async with Bench(TARGET) as bench:
        for round in range(1, 21):
            prefix = [*PROMPT, round % V]
            tokens, rows = drafts_of(DRAFT, prefix, 3)
            (reply,) = await bench.ask(
                verify_task(state(prefix, round=round), tokens, rows, sampling=sampling)
            )
            expected = verdict_of(prefix, tokens, rows, settings=settings)
            assert judged(reply) == expected
            overlap = overlap_of(prefix, tokens, rows, expected.num_accepted, settings)
            assert reply.verify.sum_min_pq == pytest.approx(overlap, abs=1e-14)


async def test_a_greedy_target_follows_its_likeliest_tokens() -> None:
    greedy = [*PROMPT]
    for _ in range(5):
        greedy.append(int(TARGET(tuple(greedy)).argmax()))
    drafts = greedy[5:9]
    async with Bench(TARGET) as bench:
        rows = [one_hot(token) for token in drafts]
        sampling = Sampling(temperature=0.0, top_p=1.0)
        (reply,) = await bench.ask(verify_task(state(PROMPT), drafts, rows, sampling=sampling))
        assert judged(reply) == Verdict(4, greedy[9])


async def test_a_long_prompt_in_pieces_gives_the_verdict_of_one_pass() -> None:
    prompt = np.random.default_rng(5).integers(0, V, size=200).tolist()
    tokens, rows = drafts_of(DRAFT, prompt, 4)
    task = verify_task(state(prompt), tokens, rows)
    async with Bench(TARGET, max_length=256, max_pass_tokens=33) as pieces:
        async with Bench(TARGET, max_length=256) as whole:
            (one,), (other,) = await pieces.ask(task), await whole.ask(task)
        assert judged(one) == judged(other) == verdict_of(prompt, tokens, rows)
        assert len(pieces.fed) > 5
        assert max(sum(lengths) for lengths in pieces.fed) <= 33
        assert pieces.held() == whole.held()


@pytest.mark.parametrize("max_pass_tokens", range(1, 42, 5))
async def test_drafts_are_scored_in_one_piece_wherever_a_prefill_is_cut(max_pass_tokens: int) -> None:
    prompt = np.random.default_rng(6).integers(0, V, size=41).tolist()
    tokens, rows = drafts_of(DRAFT, prompt, 6)
    async with Bench(TARGET, max_pass_tokens=max_pass_tokens) as bench:
        (reply,) = await bench.ask(verify_task(state(prompt), tokens, rows))
        assert judged(reply) == verdict_of(prompt, tokens, rows)


ROW_OF_2 = quantise(np.eye(V)[2] * 0.5 + 0.5 / V, V)


async def test_the_same_proposal_again_gets_the_same_reply_and_nothing_is_computed() -> None:
    tokens, rows = drafts_of(DRAFT, PROMPT, 4)
    async with Bench(TARGET) as bench:
        task = verify_task(state(PROMPT), tokens, rows)
        (first,) = await bench.ask(task)
        fed, held = list(bench.fed), bench.held()
        for start in (0, 2, 5):
            again = verify_task(state(PROMPT, start=start), tokens, rows)
            (second,) = await bench.ask(again)
            assert second == first  # with the times that it took then
            assert (bench.fed, bench.held()) == (fed, held)


@pytest.mark.parametrize(
    "later",
    [
        pytest.param(verify_task(state(PROMPT, round=7), [1, 2], [one_hot(1), ROW_OF_2]), id="other rows"),
        pytest.param(verify_task(state(PROMPT, round=7), [1], [one_hot(1)]), id="fewer drafts"),
        pytest.param(verify_task(state(PROMPT, round=7)), id="no drafts"),
        pytest.param(verify_task(state(PROMPT, round=6), [1, 2], [one_hot(1), one_hot(2)]), id="older round"),
        pytest.param(verify_task(state(PROMPT[:3], round=1)), id="much older round"),
        pytest.param(
            verify_task(state(PROMPT, round=7, epoch=EPOCH + 1), [1, 2], [one_hot(1), one_hot(2)]),
            id="other life",
        ),
        pytest.param(verify_task(state([*PROMPT, 2], round=8, epoch=0)), id="next round in another life"),
        pytest.param(verify_task(state([2] * 5, round=7), [1, 2], [one_hot(1), one_hot(2)]), id="other text"),
    ],
)
async def test_a_stale_task_is_aborted_and_touches_nothing(later: VerifyTask) -> None:
    async with Bench(TARGET) as bench:
        asked = verify_task(state(PROMPT, round=7), [1, 2], [one_hot(1), one_hot(2)])
        (first,) = await bench.ask(asked)
        fed, held = list(bench.fed), bench.held()
        assert (await bench.refusal(later)).code is grpc.StatusCode.ABORTED
        assert (bench.fed, bench.held()) == (fed, held)
        assert await bench.ask(asked) == [first]


async def test_a_draft_round_asked_again_gets_the_same_proposal_and_nothing_is_drawn() -> None:
    async with Bench(DRAFT) as bench:
        (first,) = await bench.ask(draft_task(state(PROMPT), 3))
        fed = list(bench.fed)
        assert await bench.ask(draft_task(state(PROMPT), 3)) == [first]
        assert (await bench.refusal(draft_task(state(PROMPT), 4))).code is grpc.StatusCode.ABORTED
        assert bench.fed == fed


async def test_an_evicted_round_asked_again_gets_the_same_verdict_by_the_same_coins() -> None:
    tokens, rows = drafts_of(DRAFT, PROMPT, 4)
    async with Bench(TARGET, num_slots=1) as bench:
        (first,) = await bench.ask(verify_task(state(PROMPT), tokens, rows))
        await bench.ask(verify_task(state([1], session="b")))
        error = await bench.refusal(verify_task(state(PROMPT, start=4), tokens, rows))
        assert error.worker_length == 0
        (again,) = await bench.ask(verify_task(state(PROMPT), tokens, rows))
        assert judged(again) == judged(first)


@both_rules
@pytest.mark.parametrize("position", range(4))
async def test_a_token_that_its_row_does_not_give_is_counted_and_keeps_its_row(
    position: int, rule: int
) -> None:
    with_row, without = [], []
    async with Bench(TARGET) as bench:
        for round in range(1, 41):
            prefix = [*PROMPT, round % V]
            tokens, rows = drafts_of(DRAFT, prefix, 4)
            other = next(int(x) for x in rows[position].ids if x != tokens[position])
            tokens[position] = other  # as if another generator had drawn it
            _, tail = drafts_of(DRAFT, [*prefix, *tokens[: position + 1]], 0), rows[position + 1 :]
            for i, row in enumerate(tail, start=position + 1):  # the rows behind it still give their tokens
                tokens[i] = row.draw(uniform(DRAFT_KEY, 0, len(prefix), len(prefix) + i, Purpose.DRAFT))
            (reply,) = await bench.ask(
                verify_task(state(prefix, round=round), tokens, rows, rule=rule, seed=SEED + round)
            )
            assert (reply.verify.num_redraw_mismatches, reply.verify.num_unusable_rows) == (1, 0)
            expected = verdict_of(prefix, tokens, rows, rule, seed=SEED + round)
            assert judged(reply) == expected
            with_row.append(expected)
            one_hot_there = [*rows[:position], one_hot(other), *rows[position + 1 :]]
            without.append(verdict_of(prefix, tokens, one_hot_there, rule, seed=SEED + round))
    assert with_row != without  # the two can be told apart


async def test_drafts_under_another_key_are_all_mismatches_where_they_differ() -> None:
    tokens, rows = drafts_of(DRAFT, PROMPT, 6)
    async with Bench(TARGET) as bench:
        (reply,) = await bench.ask(verify_task(state(PROMPT), tokens, rows, draft_key=b"another key"))
        redrawn = [
            row.draw(uniform(b"another key", 0, 5, 5 + i, Purpose.DRAFT)) for i, row in enumerate(rows)
        ]
        num_different = sum(mine != theirs for mine, theirs in zip(redrawn, tokens, strict=True))
        assert reply.verify.num_redraw_mismatches == num_different > 0


@both_rules
@pytest.mark.parametrize("position", range(3))
async def test_an_unusable_row_is_counted_and_judged_as_one_hot_there_alone(position: int, rule: int) -> None:
    with_row, without = [], []
    async with Bench(TARGET) as bench:
        for round in range(1, 31):
            prefix = [*PROMPT, round % V]
            tokens, rows = drafts_of(DRAFT, prefix, 3)
            messages = list(QRows.FromString(write_rows(rows, V)).rows)
            messages[position] = QRow()
            proposal = Proposal(tokens=pack_tokens(tokens), rows=QRows(rows=messages).SerializeToString())
            (reply,) = await bench.ask(
                verify_task(state(prefix, round=round), proposal=proposal, rule=rule, seed=SEED + round)
            )
            assert (reply.verify.num_redraw_mismatches, reply.verify.num_unusable_rows) == (0, 1)
            judged_rows = [*rows[:position], one_hot(tokens[position]), *rows[position + 1 :]]
            expected = verdict_of(prefix, tokens, judged_rows, rule, seed=SEED + round)
            assert judged(reply) == expected
            without.append(expected)
            with_row.append(verdict_of(prefix, tokens, rows, rule, seed=SEED + round))
    assert with_row != without


def broken_at(length: int, first: int) -> Law:
    """The target's law, with a NaN behind prefixes of one length that begin with one token."""

    def next_logits(prefix: Prefix) -> FloatArray:
        logits = TARGET(prefix).copy()
        if len(prefix) == length and prefix[0] == first:
            logits[0] = np.nan
        return logits

    return next_logits


@both_rules
async def test_a_target_row_that_must_be_sampled_and_cannot_be_fails_its_task_alone(rule: int) -> None:
    well = [4, *PROMPT]
    async with Bench(broken_at(5, PROMPT[0])) as bench:
        tokens, rows = drafts_of(DRAFT, well, 2)
        failed, answered = await bench.ask(
            verify_task(state(PROMPT, session="ill"), [1], [one_hot(1)], rule=rule),
            verify_task(state(well, session="well"), tokens, rows, rule=rule),
        )
        assert bench.fed == [[8, 6]] or bench.fed == [[6, 8]]  # one pass
        assert failed.error.code == grpc.StatusCode.INTERNAL.value[0]
        assert "ill" in failed.error.message
        assert bench.passes.num_broken_rows == 1
        assert judged(answered) == verdict_of(well, tokens, rows, rule)
        longer = [*PROMPT, 2]  # the session itself goes on where the model can
        (reply,) = await bench.ask(verify_task(state(longer, session="ill", round=2), rule=rule))
        assert judged(reply) == verdict_of(longer, [], [], rule)


@both_rules
async def test_a_target_row_behind_drafts_that_is_not_finite_cuts_the_block_before_it(rule: int) -> None:
    broken = broken_at(len(PROMPT) + 2, PROMPT[0])
    outcomes = set()
    async with Bench(broken) as bench:
        for round in range(1, 31):
            tokens, rows = drafts_of(DRAFT, PROMPT, 4, choice=round)
            task = verify_task(state(PROMPT, round=round), tokens, rows, rule=rule, choice=round)
            (reply,) = await bench.ask(task)
            try:
                expected = verdict_of(PROMPT, tokens, rows, rule, next_logits=broken, choice=round)
            except ArithmeticError:
                assert reply.error.code == grpc.StatusCode.INTERNAL.value[0]
                outcomes.add("failed")
            else:
                assert judged(reply) == expected
                outcomes.add(str(expected.num_accepted))
    assert outcomes == {"0", "1", "failed"}


@pytest.mark.parametrize(
    ("field", "task"),
    [
        ("digest", verify_task(state(PROMPT), [1], [one_hot(1)], digest=b"x" * 16)),
        ("digest", verify_task(state(PROMPT), [1], [one_hot(1)], digest=b"")),
        ("digest", verify_task(state(PROMPT), [1], [one_hot(1)], digest=digest(Proposal()))),
        ("proposal.tokens", verify_task(state(PROMPT), [V], [one_hot(V)])),
        ("proposal.tokens", verify_task(state(PROMPT), [1] * 65, [one_hot(1)] * 65)),
        ("proposal.tokens", verify_task(state(PROMPT), proposal=Proposal(tokens=b"abc"))),
        ("proposal.rows", verify_task(state(PROMPT), [1, 2], [one_hot(1)])),
        ("proposal.rows", verify_task(state(PROMPT), [], [one_hot(1)])),
        (
            "proposal.rows",
            verify_task(state(PROMPT), proposal=Proposal(tokens=pack_tokens([1]), rows=b"\xff")),
        ),
        ("rule", verify_task(state(PROMPT), rule=0)),
        ("rule", verify_task(state(PROMPT), rule=3)),
        ("sampling.temperature", verify_task(state(PROMPT), sampling=Sampling(temperature=101, top_p=1))),
        ("sampling.top_p", verify_task(state(PROMPT), sampling=Sampling(temperature=1))),
        ("draft_key", verify_task(state(PROMPT), [1], [one_hot(1)], draft_key=bytes(65))),
        ("state.tokens", verify_task(state([V]))),
        ("state.base_length", verify_task(state([]))),
    ],
)
async def test_a_verify_task_that_cannot_be_is_refused_by_name_and_takes_no_slot(
    field: str, task: VerifyTask
) -> None:
    async with Bench(TARGET, max_length=128) as bench:
        assert named(await bench.refusal(task)) == field
        assert bench.slots.num_used == 0
        assert bench.fed == []


async def test_a_block_fills_the_targets_context_to_its_last_position_and_not_beyond() -> None:
    tokens, rows = drafts_of(DRAFT, PROMPT, 4)
    async with Bench(TARGET, max_length=8) as bench:
        (reply,) = await bench.ask(verify_task(state(PROMPT), tokens[:3], rows[:3]))
        assert judged(reply) == verdict_of(PROMPT, tokens[:3], rows[:3])
        error = await bench.refusal(verify_task(state(PROMPT, round=2), tokens, rows))
        assert named(error) == "state.base_length"
        assert "is 5 with 4 positions ahead; a session takes 1 to 8" in error.message


async def test_a_prompt_that_fills_the_targets_context_exactly_gets_its_next_token() -> None:
    prompt = [*PROMPT, 1, 2, 3]
    async with Bench(TARGET, max_length=8) as bench:
        (reply,) = await bench.ask(verify_task(state(prompt)))
        assert judged(reply) == verdict_of(prompt, [], [])
        assert named(await bench.refusal(verify_task(state([*prompt, 1], round=2)))) == "state.base_length"


async def test_as_many_drafts_as_are_allowed_are_judged() -> None:
    async with Bench(DRAFT, max_length=128) as drafter, Bench(DRAFT, max_length=128) as target:
        (proposal,) = await drafter.ask(draft_task(state(PROMPT), MAX_DRAFT_TOKENS, encoding=ENCODING_FULL))
        tokens, rows = proposed(proposal)
        assert len(tokens) == MAX_DRAFT_TOKENS
        (reply,) = await target.ask(verify_task(state(PROMPT), proposal=proposal.draft.proposal))
        assert judged(reply) == verdict_of(PROMPT, tokens, rows, next_logits=DRAFT)


# Both workers through long texts.


class Text:
    """A session as its coordinator sees it: committed tokens, and what each worker is believed to hold."""

    def __init__(self, name: str, prompt: list[int]) -> None:
        self.name = name
        self.tokens = prompt
        self.round = 0
        self.seats = {"draft": 0, "target": 0}

    def state(self, worker: str) -> SessionState:
        return state(self.tokens, session=self.name, round=self.round, start=self.seats[worker])


@both_rules
@pytest.mark.parametrize("seed", range(4))
async def test_after_any_course_of_rounds_both_workers_hold_the_committed_text(seed: int, rule: int) -> None:
    """Accepted, rejected, cut short, repeated, resynchronised and evicted: each must have happened.

    A cache that was cut wrongly shows three times: in the slot, in the drafts and in the verdicts.
    """
    random = np.random.default_rng(seed)
    seen: set[str] = set()
    patience = 0

    def out_of_time() -> bool:
        nonlocal patience
        patience -= 1
        return patience < 0

    async def ask(bench: Bench, text: Text, worker: str, task: DraftTask | VerifyTask) -> TaskReply:
        while True:
            (reply,) = await bench.ask(task)
            if reply.HasField("error"):
                length = TaskError.from_status(reply.error).worker_length
                assert length is not None, reply.error.message
                assert length < text.seats[worker]
                seen.add("evicted" if length == 0 else "out of step")
                text.seats[worker] = length
                task.state.CopyFrom(text.state(worker))
                continue
            if random.random() < 0.2:  # a lost answer
                assert await bench.ask(task) == [reply]
                seen.add("repeated")
            text.seats[worker] = len(text.tokens)
            return reply

    texts = [Text(name, random.integers(0, V, size=int(random.integers(1, 9))).tolist()) for name in "abcde"]
    async with (
        Bench(DRAFT, num_slots=2, max_length=90, out_of_time=out_of_time) as drafter,
        Bench(TARGET, num_slots=3, max_length=100, max_pass_tokens=40) as target,
    ):
        for _ in range(120):
            text = texts[int(random.integers(len(texts)))]
            if len(text.tokens) > 80:
                continue
            text.round += 1
            for worker in text.seats:  # a coordinator's belief may be wrong
                if random.random() < 0.15:
                    text.seats[worker] = int(random.choice([0, 1, len(text.tokens)]))
            k = int(random.integers(0, 6))
            tokens: list[int] = []
            rows: list[CountRow] = []
            if random.random() < 0.8:
                patience = int(random.integers(0, 6)) if random.random() < 0.3 else 1000
                reply = await ask(drafter, text, "draft", draft_task(text.state("draft"), k))
                tokens, rows = proposed(reply)
                expected = drafts_of(DRAFT, text.tokens, len(tokens))
                assert (tokens, same(rows, expected[1])) == (expected[0], True)
                if len(tokens) < k:
                    seen.add("cut short")
                held = drafter.held(text.name)
                assert held in ([*text.tokens, *tokens], [*text.tokens, *tokens[:-1]])
            task = verify_task(text.state("target"), tokens, rows, rule=rule)
            reply = await ask(target, text, "target", task)
            verdict = judged(reply)
            assert verdict == verdict_of(text.tokens, tokens, rows, rule)
            assert reply.verify.num_redraw_mismatches == 0
            accepted = tokens[: verdict.num_accepted]
            assert target.held(text.name) == text.tokens + accepted
            seen.add("plain" if not tokens else "accepted" if accepted == tokens else "rejected")
            text.tokens += [*accepted, verdict.token]
        for text in texts:
            text.round += 1
            await ask(drafter, text, "draft", draft_task(text.state("draft"), 0))
            assert drafter.held(text.name) == text.tokens
            await ask(target, text, "target", verify_task(text.state("target")))
            assert target.held(text.name) == text.tokens
    assert seen >= {"accepted", "rejected", "plain", "cut short", "repeated", "evicted", "out of step"}
