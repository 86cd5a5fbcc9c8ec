"""Drafts drawn on the device are what the host would draw; on a CPU the same code runs uncaptured.

Each token must be the one that its coin selects from the row it is shipped with, whatever rounding made of
the row: the law holds because of that alone. The rows are those of the host up to one count, but for ties.
"""

import asyncio
import random
import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from protos.pass_cost import PassCost
from protos.wire import unpack_tokens
from protos.worker_pb2 import (
    ENCODING_FULL,
    ENCODING_ONE_HOT,
    DraftTask,
    Sampling,
    TaskReply,
)
from tests.engines import MAX_LENGTH, NUM_SLOTS, some
from tests.test_jobs import DRAFT_KEY, EPOCH, draft_task, state
from tests.test_static_passes import Static, needs_gpu, ragged_model, weights_of
from tests.tiny_models import VOCAB_SIZE
from workers.counts import SPARSE_TOTAL, CountRow, quantise
from workers.decoder_model import DecoderModel
from workers.device_draws import Rules, draw, read_draws
from workers.distributions import IntArray
from workers.jobs import DraftJob
from workers.language_model import Draws, Feed
from workers.pass_results import Planned, compute
from workers.passes import PassLoop
from workers.randomness import Purpose, uniform
from workers.rows import read_rows
from workers.sampling import SamplingSettings, distribution
from workers.slots import SlotTable
from workers.work import Work

SETTINGS = [
    SamplingSettings(),
    SamplingSettings(temperature=0.0),
    SamplingSettings(temperature=0.3, top_k=5),
    SamplingSettings(temperature=1.7, top_p=0.8),
    SamplingSettings(top_k=40, top_p=0.6),
    SamplingSettings(top_p=0.95, min_p=0.05),
    SamplingSettings(min_p=0.2),
    SamplingSettings(temperature=1e-3),
]
COINS = [0.0, 2.0**-15, 0.3, 0.5, 1.0 - 2.0**-53]


def test_rows_and_tokens_are_those_of_the_host() -> None:
    generator = np.random.default_rng(7)
    for num_columns in (7, 100, 3000):
        for support in (1, 6, 64):
            coins = [COINS, COINS[:1], COINS[:3], COINS, COINS, COINS, COINS, COINS]
            allowed = [num_columns, num_columns - 2, *[num_columns] * 6]
            wanted = [
                Draws(rule, support, columns, list(row))
                for rule, columns, row in zip(SETTINGS, allowed, coins, strict=True)
            ]
            logits = (3 * generator.normal(size=(len(COINS), len(SETTINGS), num_columns))).astype(np.float32)
            rules = Rules.of(wanted, num_columns, torch.device("cpu"))
            rows = torch.stack([draw(torch.tensor(step), rules, i) for i, step in enumerate(logits)]).numpy()
            for session, (drawn, want) in enumerate(zip(read_draws(rows, wanted), wanted, strict=True)):
                assert len(drawn) == len(want.coins)
                for one, coin, step in zip(drawn, want.coins, logits, strict=False):
                    assert one.token == one.row.draw(coin)
                    assert int(one.row.counts.sum()) == SPARSE_TOTAL
                    assert one.row.counts.min() > 0
                    assert (np.diff(one.row.ids) > 0).all()
                    q = distribution(step[session, : want.num_columns], want.settings)
                    expected = quantise(q.probabilities, support, q.ids)
                    assert np.abs(dense(one.row, num_columns) - dense(expected, num_columns)).max() <= 1


def dense(row: CountRow, size: int) -> IntArray:
    counts = np.zeros(size, dtype=np.int64)
    counts[row.ids] = row.counts
    return counts


def test_a_row_that_is_no_distribution_is_marked() -> None:
    logits = torch.zeros(4, 9)
    logits[0, 3], logits[1, 3] = torch.nan, torch.inf
    logits[2] = -torch.inf
    rules = Rules.of([Draws(SamplingSettings(), 4, 9, [0.5])] * 4, 9, torch.device("cpu"))
    assert draw(logits, rules, 0)[:, -1].tolist() == [0, 0, 0, 1]


class Drafter:
    """A draft worker without its sockets, over any engine."""

    def __init__(self, model: DecoderModel) -> None:
        self.model = model
        self.slots = SlotTable(model, epoch=EPOCH, lease_seconds=60.0, clock=time.monotonic)
        self.passes = PassLoop(model, self.slots, self._open, max_pass_tokens=16)

    def _open(self, work: Work) -> DraftJob:
        assert isinstance(work.task, DraftTask)
        return DraftJob(work.task, self.slots, self.model, work.out_of_time)

    async def ask(self, tasks: Sequence[DraftTask]) -> list[TaskReply]:
        """Answers of tasks that arrive together."""
        futures: list[asyncio.Future[TaskReply]] = []
        running = asyncio.create_task(self.passes.run())
        for task in tasks:
            futures.append(asyncio.get_running_loop().create_future())
            self.passes.submit(Work(task, b"", futures[-1].set_result))
        replies = await asyncio.wait_for(asyncio.gather(*futures), 30)
        running.cancel()
        await asyncio.wait([running])
        self.passes = PassLoop(self.model, self.slots, self._open, max_pass_tokens=16)
        return replies


async def proposals(
    model: DecoderModel, tasks: Sequence[DraftTask]
) -> list[tuple[list[int], list[CountRow]]]:
    replies = await Drafter(model).ask(tasks)
    proposals = [reply.draft.proposal for reply in replies]
    tokens = [unpack_tokens(proposal.tokens, "tokens") for proposal in proposals]
    rows = [read_rows(p.rows, t, VOCAB_SIZE) for p, t in zip(proposals, tokens, strict=True)]
    assert not any(num_unusable for _, num_unusable in rows)
    return [(t, r) for t, (r, _) in zip(tokens, rows, strict=True)]


def tasks_of(draw: random.Random) -> list[DraftTask]:
    """Sessions that differ in prompt, K, settings and encoding; one drafts nothing, one fills up."""
    kinds: list[dict[str, Any]] = [
        {"num_draft_tokens": 5},
        {"num_draft_tokens": 1, "sampling": Sampling(temperature=0.7, top_k=9, top_p=1.0)},
        {"num_draft_tokens": 0},
        {"num_draft_tokens": 4, "encoding": ENCODING_ONE_HOT},
    ]
    lengths = [30, 3, 9, MAX_LENGTH - 3]
    return [
        draft_task(state(some(draw, length), session=name), support=20, vocab_size=VOCAB_SIZE, **kind)
        for name, kind, length in zip("abcd", kinds, lengths, strict=True)
    ]


@pytest.mark.parametrize("family", ["llama", "mistral"])
async def test_a_worker_that_draws_on_its_device_proposes_what_another_does(family: str) -> None:
    tasks = tasks_of(random.Random(7))
    static, ragged = Static(family), ragged_model(family)
    assert static.can_draw
    assert not ragged.can_draw
    ours, theirs = await proposals(static, tasks), await proposals(ragged, tasks)
    for (tokens, rows), (expected, expected_rows), task in zip(ours, theirs, tasks, strict=True):
        assert tokens == expected
        assert len(tokens) == task.num_draft_tokens
        for row, other in zip(rows, expected_rows, strict=True):
            assert np.abs(dense(row, VOCAB_SIZE) - dense(other, VOCAB_SIZE)).max() <= 1
        length = task.state.base_length
        for i, (token, row) in enumerate(zip(tokens, rows, strict=True)):
            coin = uniform(DRAFT_KEY, 0, length, length + i, Purpose.DRAFT)
            assert token == row.draw(coin)


async def test_what_was_drawn_stays_in_the_slot_for_the_next_round() -> None:
    static, ragged = Drafter(Static("llama")), Drafter(ragged_model("llama"))
    prompt = some(random.Random(7), 12)
    for round in range(1, 5):
        task = draft_task(state(prompt, round=round), 6, support=20, vocab_size=VOCAB_SIZE)
        (ours,), (theirs,) = await static.ask([task]), await ragged.ask([task])
        tokens = unpack_tokens(ours.draft.proposal.tokens, "tokens")
        assert tokens == unpack_tokens(theirs.draft.proposal.tokens, "tokens")
        prompt = [*prompt, *tokens[:round], 3]
        assert static.slots.free == ragged.slots.free


def test_sessions_that_are_not_fed_stay_as_they_are() -> None:
    """Others draw, roll back and draw again beside them; rows that pad a pass must touch nobody's cache."""
    draw = random.Random(7)
    static, ragged = Static("llama"), ragged_model("llama")
    texts = [some(draw, 20) for _ in range(NUM_SLOTS)]
    for model in (static, ragged):
        model.forward([Feed(slot, 0, text, 0) for slot, text in enumerate(texts)])
    for _ in range(20):
        fed = draw.sample(range(NUM_SLOTS), 2)
        cut = draw.randint(1, 19)
        for slot in fed:
            texts[slot] = [*texts[slot][:cut], *some(draw, 20 - cut)]
        wanted = [Draws(SamplingSettings(), 20, VOCAB_SIZE, [draw.random() for _ in range(4)]) for _ in fed]
        feeds = [Feed(slot, cut, texts[slot][cut:], 1) for slot in fed]
        assert static.draw(feeds, wanted) is not None
        ragged.forward([Feed(slot, cut, texts[slot][cut:], 0) for slot in fed])
        last = [Feed(slot, 19, texts[slot][19:], 1) for slot in range(NUM_SLOTS)]
        for ours, theirs in zip(static.forward(last), ragged.forward(last), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=5e-5)


async def test_what_the_device_cannot_draw_is_left_to_the_host() -> None:
    """Whole rows; and a session that is not finite, whose neighbours draw as before."""
    draw = random.Random(7)
    prompts = [some(draw, 9) for _ in range(2)]
    whole = draft_task(state(prompts[0]), 2, encoding=ENCODING_FULL, vocab_size=VOCAB_SIZE)
    sound = draft_task(state(prompts[1], session="b"), 3, vocab_size=VOCAB_SIZE)
    ours = await proposals(Static("llama"), [whole, sound])
    assert [tokens for tokens, _ in ours] == [
        tokens for tokens, _ in await proposals(ragged_model("llama"), [whole, sound])
    ]
    config, tensors = weights_of("llama")
    spoilt = next(token for token in range(VOCAB_SIZE) if token not in prompts[1])
    tensors["model.embed_tokens.weight"][spoilt] = torch.nan
    broken = Static("llama", (config, tensors))
    bad = draft_task(state([*prompts[0], spoilt]), 2, vocab_size=VOCAB_SIZE)
    (none, _), (tokens, _) = await proposals(broken, [bad, sound])
    assert none == []
    assert tokens == ours[1][0] or spoilt in ours[1][0]


async def test_no_more_is_drawn_than_there_is_time_for() -> None:
    """Once begun on the device, draws are not stopped."""
    model = Static("llama")
    cost = PassCost((1, 64), (0.1, 0.1), 0.0, 0.0)
    for timeout, expected in ((10.0, 30), (0.75, 7), (0.05, 1)):
        task = draft_task(state([1, 2, 3]), 30, vocab_size=VOCAB_SIZE)
        task.state.timeout_ns = int(timeout * 1e9)
        drafter = Drafter(model)
        work = Work(task, b"", lambda _: None)
        work.job = drafter._open(work)
        feed = Feed(work.job.slot.index, 0, (1, 2, 3), 1)
        neighbour = draft_task(state([1, 2, 3], session="b"), 30, vocab_size=VOCAB_SIZE)
        patient = Work(neighbour, b"", lambda _: None)
        patient.job = drafter._open(patient)
        beside = Feed(patient.job.slot.index, 0, (1, 2, 3), 1)
        plan = [Planned(work, work.job, feed), Planned(patient, patient.job, beside)]
        assert [len(drawn) for drawn in compute(model, plan, cost)] == [expected, expected]


@needs_gpu
@pytest.mark.gpu
def test_no_draw_waits_for_the_host() -> None:
    model = DecoderModel(
        weights_of("llama")[0],
        {name: tensor.cuda() for name, tensor in weights_of("llama")[1].items()},
        num_slots=NUM_SLOTS,
        max_length=MAX_LENGTH,
    )
    feeds = [Feed(0, 0, [1, 2, 3], 1)]
    wanted = [Draws(SamplingSettings(), 20, VOCAB_SIZE, [0.1, 0.5, 0.9])]
    expected = model.draw(feeds, wanted)  # captures
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        again = model.draw(feeds, wanted)
        torch.cuda.set_sync_debug_mode("default")
    assert expected is not None
    assert again is not None
    assert [one.token for one in again[0]] == [one.token for one in expected[0]]
    assert len(waits) == 1
