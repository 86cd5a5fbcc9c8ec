"""Committing verdicts: what is appended, where a block is cut, why a session ends, and what is counted."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from coordinator.draft_length import draft_limit
from coordinator.sessions import Lap, Seat, Session
from coordinator.usage import Tally
from protos.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    ORIGIN_ACCEPTED,
    ORIGIN_BONUS,
    ORIGIN_PLAIN,
    ORIGIN_RECOVERED,
    Origin,
)
from protos.prefix import TokenPrefix
from protos.wire import pack_tokens
from protos.worker_pb2 import RULE_TOKEN, Sampling, VerifyResult

END = 9
PROMPT = [1, 2, 3]
KEPT, RECOVERED, BONUS, PLAIN = ORIGIN_ACCEPTED, ORIGIN_RECOVERED, ORIGIN_BONUS, ORIGIN_PLAIN


def session(**fields: Any) -> Session:
    prompt = fields.pop("prompt", PROMPT)
    values: dict[str, Any] = {
        "id": "c/1",
        "choice": 0,
        "seed": 1,
        "tokens": TokenPrefix(prompt),
        "num_prompt_tokens": len(prompt),
        "max_tokens": 100,
        "max_length": 1000,
        "end_token_ids": frozenset({END}),
        "sampling": Sampling(temperature=1.0, top_p=1.0),
        "rule": RULE_TOKEN,
        "num_draft_tokens": 4,
        "tally": Tally(),
    }
    return Session(**{**values, **fields})


def commit(
    one: Session, drafts: Sequence[int], num_accepted: int, token: int, num_q_bytes: int = 0
) -> list[tuple[int, "Origin"]]:
    return one.commit(drafts, num_q_bytes, VerifyResult(num_accepted=num_accepted, token=token))


def generated(one: Session) -> list[int]:
    return one.tokens.since(one.num_prompt_tokens)


# ---- origins


@pytest.mark.parametrize(
    ("drafts", "num_accepted", "token", "block"),
    [
        ([], 0, 7, [(7, PLAIN)]),
        ([4, 5, 6], 3, 7, [(4, KEPT), (5, KEPT), (6, KEPT), (7, BONUS)]),
        ([4, 5, 6], 2, 7, [(4, KEPT), (5, KEPT), (7, RECOVERED)]),
        ([4, 5, 6], 0, 7, [(7, RECOVERED)]),
        ([4], 1, 7, [(4, KEPT), (7, BONUS)]),
        ([0, 0], 1, 0, [(0, KEPT), (0, RECOVERED)]),
        ([0], 1, 0, [(0, KEPT), (0, BONUS)]),
        ([], 0, 0, [(0, PLAIN)]),
    ],
)
def test_each_committed_token_says_where_it_came_from(
    drafts: list[int], num_accepted: int, token: int, block: list[tuple[int, "Origin"]]
) -> None:
    one = session()
    assert commit(one, drafts, num_accepted, token) == block
    assert generated(one) == [token for token, _ in block]
    assert one.finish_reason is None


# ---- end tokens


@pytest.mark.parametrize(
    ("drafts", "num_accepted", "token", "kept"),
    [
        ([4, END, 6, 7], 4, 8, [4, END]),  # accepted inside the block: what follows was never said
        ([4, END, 6, 7], 2, 8, [4, END]),  # the last accepted one: the recovered token is cut
        ([END], 1, END, [END]),  # the bonus behind it is cut, though an end token too
        ([END, END], 2, 5, [END]),
        ([4, 5], 1, END, [4, END]),  # as recovered token
        ([4, 5], 2, END, [4, 5, END]),  # as bonus token
        ([], 0, END, [END]),  # in a plain round
    ],
)
def test_an_end_token_ends_the_text_wherever_it_stands_in_the_block(
    drafts: list[int], num_accepted: int, token: int, kept: list[int]
) -> None:
    one = session()
    block = commit(one, drafts, num_accepted, token)
    assert [token for token, _ in block] == kept
    assert generated(one) == kept
    assert one.finish_reason == FINISH_REASON_STOP


@pytest.mark.parametrize(("drafts", "num_accepted"), [([END, 5], 0), ([4, END], 1), ([4, 5, END], 1)])
def test_an_end_token_of_the_draft_that_the_target_rejected_ends_nothing(
    drafts: list[int], num_accepted: int
) -> None:
    one = session()
    commit(one, drafts, num_accepted, 7)
    assert one.finish_reason is None
    assert generated(one) == [*drafts[:num_accepted], 7]


def test_an_end_token_in_the_prompt_ends_nothing() -> None:
    one = session(prompt=[END, 1])
    commit(one, [], 0, 5)
    assert one.finish_reason is None


def test_without_end_tokens_the_text_goes_on_behind_them() -> None:
    """What `ignore_end_tokens` comes down to."""
    one = session(end_token_ids=frozenset())
    commit(one, [4, END], 2, END)
    assert generated(one) == [4, END, END]
    assert one.finish_reason is None


def test_token_id_0_can_be_an_end_token_and_is_none_otherwise() -> None:
    one = session(end_token_ids=frozenset({0}))
    assert commit(one, [4, 0, 5], 3, 6) == [(4, KEPT), (0, KEPT)]
    assert one.finish_reason == FINISH_REASON_STOP
    other = session()
    commit(other, [0, 0, 0], 3, 0)
    assert other.finish_reason is None
    assert generated(other) == [0, 0, 0, 0]


def test_one_of_several_end_tokens_is_enough() -> None:
    one = session(end_token_ids=frozenset({7, 8}))
    commit(one, [4, 8, 7], 3, 5)
    assert generated(one) == [4, 8]


# ---- max_tokens and the context's end


def test_max_tokens_ends_the_text_with_the_token_that_reaches_it() -> None:
    one = session(max_tokens=3)
    commit(one, [4], 1, 5)
    assert (one.finish_reason, one.num_remaining) == (None, 1)
    commit(one, [], 0, 6)
    assert one.finish_reason == FINISH_REASON_LENGTH
    assert generated(one) == [4, 5, 6]


def test_a_block_that_ends_exactly_at_max_tokens_is_kept_whole() -> None:
    one = session(max_tokens=3)
    commit(one, [4, 5], 2, 6)
    assert generated(one) == [4, 5, 6]
    assert one.finish_reason == FINISH_REASON_LENGTH


def test_a_block_is_charged_for_what_it_committed_not_for_what_was_drafted() -> None:
    one = session(max_tokens=5)
    commit(one, [4, 5, 6, 7], 0, 8)
    assert (one.num_remaining, one.finish_reason) == (4, None)


def test_max_tokens_inside_a_block_cuts_what_follows() -> None:
    one = session(max_tokens=2)
    assert commit(one, [4, 5, 6], 3, 7) == [(4, KEPT), (5, KEPT)]
    assert one.finish_reason == FINISH_REASON_LENGTH
    assert one.num_remaining == 0
    assert one.tally.num_completion_tokens == 2


def test_an_end_token_behind_max_tokens_was_never_said() -> None:
    one = session(max_tokens=2)
    commit(one, [4, 5, END], 3, 7)
    assert generated(one) == [4, 5]
    assert one.finish_reason == FINISH_REASON_LENGTH


@pytest.mark.parametrize(
    ("drafts", "num_accepted", "token"), [([4, END], 2, 7), ([4], 1, END), ([4], 0, END)]
)
def test_an_end_token_that_is_also_the_last_allowed_one_is_a_stop(
    drafts: list[int], num_accepted: int, token: int
) -> None:
    one = session(max_tokens=1 if num_accepted == 0 else 2)
    commit(one, drafts, num_accepted, token)
    assert generated(one)[-1] == END
    assert one.finish_reason == FINISH_REASON_STOP


def test_the_context_s_end_ends_the_text() -> None:
    one = session(max_length=5)
    assert one.num_remaining == 2
    commit(one, [4], 1, 5)
    assert one.finish_reason == FINISH_REASON_LENGTH
    assert len(one.tokens) == 5


def test_the_nearer_of_max_tokens_and_the_context_s_end_counts() -> None:
    assert session(max_tokens=2, max_length=100).num_remaining == 2
    assert session(max_tokens=100, max_length=4).num_remaining == 1


# ---- counts


def test_counts_add_up_over_rounds() -> None:
    one = session()
    commit(one, [4, 5, 6], 2, 7, num_q_bytes=30)
    commit(one, [], 0, 7)
    commit(one, [4], 1, 7, num_q_bytes=10)
    commit(one, [4, 5], 0, 7, num_q_bytes=20)
    tally = one.tally
    assert tally.num_completion_tokens == len(generated(one)) == 7
    assert (tally.num_rounds, tally.num_drafts, tally.num_draft_tokens) == (4, 3, 6)
    assert tally.num_accepted_per_pos == [2, 1, 0]
    assert tally.num_q_bytes == 60


def test_plain_rounds_draft_nothing_and_know_no_position() -> None:
    one = session()
    commit(one, [], 0, 7)
    assert (one.tally.num_drafts, one.tally.num_draft_tokens) == (0, 0)
    assert one.tally.num_accepted_per_pos == []


def test_what_an_end_token_cuts_counts_as_neither_completed_nor_accepted() -> None:
    one = session()
    commit(one, [4, END, 6, 7], 4, 8)
    assert one.tally.num_completion_tokens == 2
    assert one.tally.num_accepted_per_pos == [1, 1, 0, 0]


def test_an_end_token_as_first_draft_counts_once() -> None:
    one = session()
    commit(one, [END, 5], 2, 8)
    assert one.tally.num_completion_tokens == 1
    assert one.tally.num_accepted_per_pos == [1, 0]


def test_choices_of_a_request_share_their_tally() -> None:
    tally = Tally()
    for choice in range(3):
        commit(session(choice=choice, tally=tally), [4, 5], choice, 6)
    assert (tally.num_rounds, tally.num_drafts, tally.num_draft_tokens) == (3, 3, 6)
    assert tally.num_accepted_per_pos == [2, 1]
    assert tally.num_completion_tokens == 6


def test_for_any_blocks_counts_are_consistent_and_limits_hold() -> None:
    generator = random.Random(7)
    for _ in range(500):
        one = session(max_tokens=generator.randint(1, 12), max_length=generator.randint(4, 16))
        said: list[int] = []
        while one.finish_reason is None:
            k = min(generator.randint(0, 5), draft_limit(one.num_remaining, len(one.tokens), 14))
            drafts = [generator.randrange(10) for _ in range(k)]
            block = commit(one, drafts, generator.randint(0, k), generator.randrange(10))
            assert block, "every round commits something"
            said += [token for token, _ in block]
        assert generated(one) == said
        assert END not in said[:-1]
        assert (one.finish_reason == FINISH_REASON_STOP) == (said[-1] == END)
        assert len(said) <= one.max_tokens
        assert len(one.tokens) <= one.max_length
        tally = one.tally
        assert tally.num_completion_tokens == len(said)
        assert sum(tally.num_accepted_per_pos) <= tally.num_draft_tokens
        assert all(count <= tally.num_drafts for count in tally.num_accepted_per_pos)
        assert tally.num_accepted_per_pos == sorted(tally.num_accepted_per_pos, reverse=True)


# ---- the draft key


def test_the_draft_key_is_not_the_seed_and_does_not_hold_it() -> None:
    for seed in (0, 1, 2**32, 2**64 - 1):
        key = session(seed=seed).draft_key
        assert len(key) == 16
        assert key[:8] != seed.to_bytes(8, "little") != key[8:]
        assert key[:8] != seed.to_bytes(8, "big") != key[8:]


def test_draft_keys_differ_between_seeds_and_repeat_for_one_seed() -> None:
    seeds = [*range(100), 2**63, 2**64 - 1]
    keys = [session(seed=seed).draft_key for seed in seeds]
    assert len(set(keys)) == len(seeds)
    assert keys == [session(seed=seed).draft_key for seed in seeds]


# ---- where workers are believed to stand


def test_a_seat_of_this_life_is_sent_only_what_it_lacks() -> None:
    one = session(round=5)
    commit(one, [4, 5], 2, 6)
    state = Seat(epoch=77, length=4).state(one, 77, 1.5)
    assert (state.session, state.epoch, state.round, state.base_length) == ("c/1", 77, 5, 6)
    assert (state.start, state.start_hash) == (4, one.tokens.hash_at(4))
    assert state.tokens == pack_tokens([5, 6])
    assert state.timeout_ns == 1_500_000_000


def test_a_seat_of_an_earlier_life_holds_nothing() -> None:
    state = Seat(epoch=77, length=3).state(session(), 78, 1.0)
    assert (state.epoch, state.start, state.start_hash) == (78, 0, 0)
    assert state.tokens == pack_tokens(PROMPT)


@pytest.mark.parametrize("length", [4, 10**6, -1])
def test_a_worker_that_claims_a_length_that_cannot_be_is_sent_everything(length: int) -> None:
    """Guards against a faulty worker's answer that ends the request: the belief is wrong, the text is not."""
    state = Seat(epoch=77, length=length).state(session(), 77, 1.0)
    assert (state.start, state.tokens) == (0, pack_tokens(PROMPT))


# ---- draft length


# ---- times


def test_a_drafter_that_says_any_time_had_its_task_no_longer_than_that_was_away() -> None:
    """Guards against sums that no message can hold: the request would fail at its end."""
    lap = Lap()
    lap.count_draft(100, 30)
    lap.count_draft(100, 2**64 - 1)
    assert (lap.draft_ns, lap.wire_ns) == (130, 70)
