"""Which tokens a slot stands for: a task that fits is cut back and fed, one that does not touches nothing.

Guards against the rollback faults of this field: a cache cut one token too long or too short, a last token
that is not fed again, and a late task that works in another session's slot.
"""

from collections.abc import Sequence

import grpc
import numpy as np
import pytest
from google.rpc.error_details_pb2 import BadRequest, RetryInfo

from protos.prefix import TokenPrefix
from protos.status import TaskError
from protos.wire import pack_tokens
from protos.worker_pb2 import SessionState, TaskReply, VerifyResult
from workers.language_model import Feed
from workers.slots import MIN_SHARED_TOKENS, Slot, SlotTable
from workers.table_model import TableModel

V = 10  # vocabulary
EPOCH = 77
LEASE = 60.0


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 0.001  # no two events at the same time
        return self.now


class Bench:
    """A slot table, the model whose cache it cuts, and the clock that it reads."""

    def __init__(
        self, num_slots: int = 2, max_length: int = 12, min_shared: float = MIN_SHARED_TOKENS
    ) -> None:
        self.model = TableModel(lambda _: np.zeros(V), V, num_slots=num_slots, max_length=max_length)
        self.clock = Clock()
        self.slots = SlotTable(
            self.model, epoch=EPOCH, lease_seconds=LEASE, clock=self.clock, min_shared=min_shared
        )

    def feed(self, slot: Slot, tokens: Sequence[int]) -> None:
        """What a pass does."""
        self.model.forward([Feed(slot.index, len(slot.tokens), tokens, 0)])
        slot.tokens.extend(tokens)

    def hold(self, session: str, tokens: Sequence[int], **options: int) -> Slot:
        """Bring a session to some tokens, as a task does that feeds all it is told to."""
        slot, missing = self.slots.enter(state(tokens, session, **options), 0)
        self.feed(slot, missing)
        self.slots.leave(slot)
        return slot

    def held(self, slot: Slot) -> list[int]:
        """What the slot stands for, in the table and in the model alike."""
        assert slot.tokens.since(0) == self.model._slots[slot.index]
        return slot.tokens.since(0)


def state(
    tokens: Sequence[int], session: str = "a", start: int = 0, round: int = 1, epoch: int = EPOCH
) -> SessionState:
    """A session that stands at `tokens`, sent from `start` on."""
    return SessionState(
        session=session,
        epoch=epoch,
        round=round,
        base_length=len(tokens),
        start=start,
        start_hash=TokenPrefix(tokens).hash_at(min(start, len(tokens))),
        tokens=pack_tokens(tokens[start:]),
    )


def changed(before: SessionState, **fields: object) -> SessionState:
    after = SessionState()
    after.CopyFrom(before)
    for name, value in fields.items():
        setattr(after, name, value)
    return after


def refusal(bench: Bench, asked: SessionState, num_ahead: int = 0) -> TaskError:
    with pytest.raises(TaskError) as caught:
        bench.slots.enter(asked, num_ahead)
    return caught.value


# Entering.


def test_a_new_session_is_fed_all_its_tokens() -> None:
    bench = Bench()
    slot, missing = bench.slots.enter(state([1, 2, 3]), 0)
    assert (slot.session, slot.busy, missing, bench.held(slot)) == ("a", True, [1, 2, 3], [])
    assert bench.slots.num_used == 1


@pytest.mark.parametrize("start", [1, 2, 3])
def test_an_unknown_session_is_asked_for_its_tokens_from_the_beginning(start: int) -> None:
    bench = Bench()
    error = refusal(bench, state([1, 2, 3], start=start))
    assert (error.code, error.worker_length) == (grpc.StatusCode.FAILED_PRECONDITION, 0)
    assert bench.slots.num_used == 0


def test_a_gap_is_answered_with_the_length_held_and_changes_nothing() -> None:
    bench = Bench()
    slot = bench.hold("a", [1, 2, 3])
    error = refusal(bench, state([1, 2, 3, 4, 5], start=4))
    assert (error.code, error.worker_length) == (grpc.StatusCode.FAILED_PRECONDITION, 3)
    assert bench.held(slot) == [1, 2, 3]
    assert not slot.busy


@pytest.mark.parametrize("start", [1, 2, 3])
def test_tokens_that_follow_other_ones_are_answered_with_length_zero(start: int) -> None:
    bench = Bench()
    slot = bench.hold("a", [9, 2, 3])
    error = refusal(bench, state([1, 2, 3, 4], start=start))
    assert (error.code, error.worker_length) == (grpc.StatusCode.FAILED_PRECONDITION, 0)
    assert bench.held(slot) == []
    assert not slot.busy
    assert bench.slots.enter(state([1, 2, 3, 4]), 0)[1] == [1, 2, 3, 4]


def test_a_first_token_under_a_wrong_hash_is_refused_though_nothing_lies_before_it() -> None:
    bench = Bench()
    error = refusal(bench, changed(state([1, 2]), start_hash=5))
    assert (error.code, error.worker_length) == (grpc.StatusCode.FAILED_PRECONDITION, 0)


@pytest.mark.parametrize(
    ("length", "start"), [(length, start) for length in range(1, 7) for start in range(length + 1)]
)
def test_the_cache_is_cut_to_the_committed_tokens_and_the_last_is_always_fed_again(
    length: int, start: int
) -> None:
    committed = [1, 2, 3, 4, 5, 6]
    bench = Bench()
    slot = bench.hold("a", committed)
    entered, missing = bench.slots.enter(state(committed[:length], start=start), 0)
    assert entered is slot
    assert bench.held(slot) == committed[: length - 1]  # absolute: be at L-1, whatever was held
    assert missing == [committed[length - 1]]


@pytest.mark.parametrize("start", range(4))
@pytest.mark.parametrize(
    ("committed", "kept"),
    [
        ([1, 2, 3, 8, 9], 3),  # the first draft token was rejected
        ([1, 2, 3, 4, 9], 4),  # the second one was
        ([1, 2, 3, 4, 5, 6], 5),  # all that was held was committed
        ([1, 2, 3, 4, 5, 6, 7], 5),
    ],
)
def test_draft_tokens_are_kept_as_far_as_they_were_committed(
    committed: list[int], kept: int, start: int
) -> None:
    bench = Bench()
    slot = bench.hold("a", [1, 2, 3, 4, 5])  # 4 and 5 were drafts
    _, missing = bench.slots.enter(state(committed, start=start), 0)
    assert bench.held(slot) == committed[:kept]
    assert missing == committed[kept:]


def test_tokens_sent_again_from_an_earlier_start_replace_those_that_differ() -> None:
    bench = Bench()
    slot = bench.hold("a", [1, 2, 3, 4, 5])
    _, missing = bench.slots.enter(state([1, 7, 3, 4, 5]), 0)
    assert bench.held(slot) == [1]
    assert missing == [7, 3, 4, 5]


def test_equal_tokens_of_another_session_share_nothing() -> None:
    bench = Bench()
    bench.hold("a", [1, 2, 3])
    error = refusal(bench, state([1, 2, 3, 4], session="b", start=3))
    assert error.worker_length == 0


@pytest.mark.parametrize(
    ("field", "asked", "num_ahead", "problem"),
    [
        ("state.session", state([1], session=""), 0, "is empty"),
        ("state.base_length", state([]), 0, "is 0 with 0 positions ahead"),
        ("state.base_length", state([1] * 13), 0, "is 13"),
        ("state.base_length", state([1] * 12), 1, "is 12 with 1 positions ahead; a session takes 1 to 12"),
        ("state.base_length", state([1] * 8), 5, "is 8 with 5 positions ahead"),
        ("state.tokens", changed(state([1, 2]), base_length=3), 0, "are 2 from 0 on; base_length is 3"),
        ("state.tokens", changed(state([1, 2]), base_length=1), 0, "are 2 from 0 on; base_length is 1"),
        ("state.tokens", changed(state([1, 2]), start=1), 0, "are 2 from 1 on; base_length is 2"),
        ("state.tokens", changed(state([1, 2]), tokens=b"\1\0\0\0\2"), 0, "is 5 bytes long"),
        ("state.tokens", state([1, 10]), 0, "has token id 10; ids lie below 10"),
        ("state.tokens", state([1, 0xFFFFFFFF]), 0, "has token id 4294967295"),
    ],
)
def test_a_state_that_cannot_be_is_refused_by_name_and_takes_no_slot(
    field: str, asked: SessionState, num_ahead: int, problem: str
) -> None:
    bench = Bench()
    bench.hold("other", [1])
    error = refusal(bench, asked, num_ahead)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert problem in error.message
    (detail,) = error.details
    assert isinstance(detail, BadRequest)
    assert [violation.field for violation in detail.field_violations] == [field]
    assert bench.slots.num_used == 1


def test_a_prompt_that_fills_the_context_exactly_fits() -> None:
    bench = Bench()
    slot = bench.hold("a", [1] * 12)
    assert len(bench.held(slot)) == 12


def test_drafts_up_to_the_last_position_fit() -> None:
    slot, _ = Bench().slots.enter(state([1] * 8), 4)
    assert slot.busy


# Who has which slot.


def test_a_busy_session_is_unavailable_for_a_moment_and_is_left_alone() -> None:
    bench = Bench()
    slot, missing = bench.slots.enter(state([1, 2, 3]), 0)
    bench.feed(slot, missing)
    for asked in (state([1, 2, 3, 4]), state([1, 2, 3, 4], start=2), state([9], round=2)):
        error = refusal(bench, asked)
        assert error.code is grpc.StatusCode.UNAVAILABLE
        assert isinstance(error.details[0], RetryInfo)
        assert bench.held(slot) == [1, 2, 3]


def test_the_idle_session_that_was_used_least_recently_gives_way() -> None:
    bench = Bench(num_slots=3)
    for session in "abc":
        bench.hold(session, [1, 2])
    bench.hold("a", [1, 2])
    bench.hold("d", [1])
    assert refusal(bench, state([1, 2, 3], session="b", start=2)).worker_length == 0
    for session in "ac":
        slot, _ = bench.slots.enter(state([1, 2, 3], session=session, start=2), 0)
        assert bench.held(slot) == [1, 2]
    assert bench.slots.num_used == 3


def test_a_session_at_work_does_not_give_way_however_old_it_is() -> None:
    bench = Bench(num_slots=2)
    old, missing = bench.slots.enter(state([1, 2], session="old"), 0)
    bench.feed(old, missing)
    bench.hold("idle", [1])
    bench.hold("new", [3])
    assert bench.held(old) == [1, 2]
    assert refusal(bench, state([1, 2], session="idle", start=1)).worker_length == 0


def test_without_an_idle_slot_a_new_session_is_told_when_to_come_back() -> None:
    bench = Bench(num_slots=2)
    slots = [bench.slots.enter(state([1], session=session), 0)[0] for session in "ab"]
    error = refusal(bench, state([1], session="c"))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    (retry,) = error.details
    assert isinstance(retry, RetryInfo)
    assert retry.retry_delay.ToTimedelta().total_seconds() > 0
    bench.slots.leave(slots[0])
    assert bench.slots.enter(state([1], session="c"), 0)[0].index == slots[0].index


def test_a_slot_given_away_holds_nothing_of_its_former_session() -> None:
    bench = Bench(num_slots=1)
    bench.hold("a", [1, 2, 3])
    slot, missing = bench.slots.enter(state([1, 2, 3], session="b"), 0)
    assert bench.held(slot) == []
    assert missing == [1, 2, 3]


def test_a_refused_task_costs_no_other_session_its_slot() -> None:
    bench = Bench(num_slots=1)
    slot = bench.hold("a", [1, 2, 3])
    refusal(bench, state([1, 2, 3], session="b", start=1))
    refusal(bench, changed(state([1, 2, 3], session="b"), start_hash=5))
    refusal(bench, state([V], session="b"))
    assert bench.held(slot) == [1, 2, 3]
    assert bench.slots.enter(state([1, 2, 3, 4], start=3), 0)[1] == [4]


def test_a_lease_ends_for_idle_sessions_only_and_not_before_its_time() -> None:
    bench = Bench(num_slots=3)
    bench.hold("silent", [1])
    bench.slots.enter(state([1], session="working"), 0)
    bench.clock.now += LEASE - 1.0
    bench.hold("fresh", [1])
    bench.slots.expire()
    assert bench.slots.num_used == 3
    bench.clock.now += 2.0
    bench.slots.expire()
    assert bench.slots.num_used == 2
    assert refusal(bench, state([1, 2], session="silent", start=1)).worker_length == 0
    assert bench.slots.enter(state([1, 2], session="fresh", start=1), 0)[1] == [2]


def test_a_lease_is_counted_from_the_end_of_the_last_task() -> None:
    bench = Bench()
    slot, _ = bench.slots.enter(state([1]), 0)
    bench.clock.now += LEASE + 1.0
    bench.slots.leave(slot)
    bench.slots.expire()
    assert bench.slots.num_used == 1


def test_a_released_slot_is_free_and_empty() -> None:
    bench = Bench(num_slots=1)
    slot = bench.hold("a", [1, 2])
    bench.slots.release("a")
    assert bench.slots.num_used == 0
    assert bench.model._slots[slot.index] == []
    assert bench.hold("b", [3]).index == slot.index


def test_releasing_twice_or_what_is_unknown_frees_no_slot_twice() -> None:
    bench = Bench(num_slots=2)
    bench.hold("a", [1])
    for session in ("a", "a", "unknown"):
        bench.slots.release(session)
    indices = {bench.slots.enter(state([1], session=session), 0)[0].index for session in "bc"}
    assert indices == {0, 1}
    assert refusal(bench, state([1], session="d")).code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_busy_slot_that_is_released_is_given_away_when_its_task_leaves_and_not_before() -> None:
    bench = Bench(num_slots=1)
    slot, missing = bench.slots.enter(state([1, 2]), 0)
    bench.slots.release("a")
    assert refusal(bench, state([1], session="b")).code is grpc.StatusCode.RESOURCE_EXHAUSTED
    bench.feed(slot, missing)
    bench.slots.leave(slot)
    assert bench.model._slots[slot.index] == []
    assert bench.hold("b", [3]).index == slot.index


def test_a_session_that_comes_back_while_its_released_task_works_gets_another_slot() -> None:
    bench = Bench(num_slots=2)
    first, _ = bench.slots.enter(state([1, 2]), 0)
    bench.slots.release("a")
    second, missing = bench.slots.enter(state([1, 2]), 0)
    assert second.index != first.index
    assert missing == [1, 2]
    bench.slots.leave(first)
    assert bench.slots.num_used == 1
    assert second.busy
    assert bench.slots.enter(state([1], session="b"), 0)[0].index == first.index


# Rounds that were answered before.


def answer(bench: Bench, tokens: Sequence[int], round: int, key: bytes) -> TaskReply:
    reply = TaskReply(verify=VerifyResult(token=round))
    bench.hold("a", tokens, round=round).remember(state(tokens, round=round), key, reply)
    return reply


def test_a_round_is_answered_once_and_its_reply_is_given_again() -> None:
    bench = Bench()
    assert bench.slots.answered(state([1, 2]), b"x") is None
    reply = answer(bench, [1, 2], 1, b"x")
    for start in (0, 1, 2):  # however much is sent along
        assert bench.slots.answered(state([1, 2], start=start), b"x") is reply
    assert bench.slots.answered(state([1, 2, 3], round=2), b"x") is None
    assert bench.slots.answered(state([1, 2], session="b"), b"x") is None


@pytest.mark.parametrize(
    ("asked", "key"),
    [
        pytest.param(state([1, 2], round=5), b"y", id="another proposal"),
        pytest.param(state([1, 2], round=4), b"x", id="an older round"),
        pytest.param(state([1, 2], round=5, epoch=EPOCH + 1), b"x", id="another life"),
        pytest.param(state([1, 2, 3], round=6, epoch=0), b"x", id="a new round in another life"),
        pytest.param(state([1, 3], round=5), b"x", id="other tokens, as from a coordinator of the same name"),
        pytest.param(state([2, 2], round=5, start=1), b"x", id="other tokens before the start"),
        pytest.param(state([1, 2, 3], round=5), b"x", id="more tokens"),
        pytest.param(state([1], round=5), b"x", id="fewer tokens"),
    ],
)
def test_another_question_about_an_answered_round_is_aborted_and_touches_nothing(
    asked: SessionState, key: bytes
) -> None:
    bench = Bench()
    reply = answer(bench, [1, 2], 5, b"x")
    with pytest.raises(TaskError) as caught:
        bench.slots.answered(asked, key)
    assert caught.value.code is grpc.StatusCode.ABORTED
    assert bench.slots.answered(state([1, 2], round=5), b"x") is reply
    slot, _ = bench.slots.enter(state([1, 2, 3], round=6, start=2), 0)
    assert bench.held(slot) == [1, 2]


# All of it together.


@pytest.mark.parametrize("seed", range(12))
def test_slots_stand_for_what_was_fed_through_any_course_of_events(seed: int) -> None:
    """Sessions grow, are cut, resent, evicted, released and expired; every refusal's length leads back in."""
    random = np.random.default_rng(seed)
    bench = Bench(num_slots=3, max_length=40)
    truths = {session: [int(random.integers(V))] for session in "abcde"}
    believed = dict.fromkeys(truths, 0)
    at_work: dict[str, tuple[Slot, list[int]]] = {}
    seen: set[str] = set()
    for step in range(400):
        session = str(random.choice(list(truths)))
        event = random.choice(["enter", "enter", "enter", "leave", "leave", "release", "expire"])
        if event == "enter" and session not in at_work:
            truth = truths[session]
            keep = int(random.integers(1, len(truth) + 1)) if random.random() < 0.3 else len(truth)
            del truth[keep:]
            truth += random.integers(0, V, size=int(random.integers(0, 4))).tolist()
            del truth[39:]
            start = min(believed[session], len(truth))
            try:
                slot, missing = bench.slots.enter(state(truth, session, start=start, round=step), 1)
            except TaskError as error:
                seen.add(error.code.name)
                believed[session] = start if error.worker_length is None else error.worker_length
                continue
            assert slot.session == session
            assert bench.held(slot) + missing == truth
            assert missing[-1:] == truth[-1:]
            assert slot.index not in {other.index for other, _ in at_work.values()}
            believed[session] = len(truth)
            at_work[session] = slot, missing
        elif event == "leave" and session in at_work:
            slot, missing = at_work.pop(session)
            drafts = random.integers(0, V, size=1).tolist()
            bench.feed(slot, (missing + drafts)[: int(random.integers(0, len(missing) + 2))] or missing)
            bench.held(slot)
            bench.slots.leave(slot)
        elif event == "release" and random.random() < 0.3:
            seen.add("released at work" if session in at_work else "released")
            bench.slots.release(session)
        elif event == "expire" and random.random() < 0.1:
            bench.clock.now += LEASE * random.random()
            bench.slots.expire()
        working = {slot.index for slot, _ in at_work.values()}
        assert len(working) == len(at_work)
        assert bench.slots.num_used <= 3
    assert seen >= {"RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "released", "released at work"}
    for slot, _ in at_work.values():
        bench.slots.leave(slot)
    for session in truths:
        bench.slots.release(session)
    assert bench.slots.num_used == 0
    assert bench.slots.emptied(3) == (0, 1, 2)
    assert bench.model._slots == [[], [], []]
    assert len({bench.slots.enter(state([1], session=name), 0)[0].index for name in "xyz"}) == 3


def test_sessions_stand_in_the_lowest_free_slots() -> None:
    """Neighbouring slots share a call of attention."""
    bench = Bench(num_slots=4)
    assert [bench.hold(name, [1, 2]).index for name in "abcd"] == [0, 1, 2, 3]
    for name in "cab":
        bench.slots.release(name)
    assert [bench.hold(name, [1, 2]).index for name in "efg"] == [0, 1, 2]
