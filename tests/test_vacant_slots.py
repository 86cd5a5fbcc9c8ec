"""What sessions leave behind stays as long as there is room, and what was used last stays longest."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from protos.prefix import TokenPrefix
from workers.language_model import Feed
from workers.table_model import TableModel
from workers.vacant_slots import VacantSlots

V = 10


@dataclass
class Bench:
    """Vacant slots over a model whose slots can be looked into."""

    num_slots: int
    min_kept: float = 2
    now: float = 0.0
    at_work: dict[int, TokenPrefix] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = TableModel(lambda _: np.zeros(V), V, num_slots=self.num_slots)
        self.vacant = VacantSlots(self.model, self.min_kept)

    def begin(self, tokens: list[int]) -> int:
        """A session with these tokens gets a slot and feeds what it lacks."""
        slot, held = self.vacant.take(tokens)
        assert held.since(0) == self.model._slots[slot]
        held.truncate(held.common_length(0, tokens))
        self.model.forward([Feed(slot, len(held), tokens[len(held) :] or tokens[-1:], 0)])
        self.model.truncate(slot, len(tokens))
        self.at_work[slot] = TokenPrefix(tokens)
        return slot

    def end(self, slot: int) -> None:
        self.now += 1.0
        self.vacant.put(slot, self.at_work.pop(slot), self.now)

    def kept(self) -> dict[int, list[int]]:
        """Slots and what they hold, in the book and in the model alike."""
        kept = {held.slot: held.tokens.since(0)[: held.length] for held in self.vacant.holdings}
        assert all(self.model._slots[slot] == tokens for slot, tokens in kept.items())
        empty = set(range(self.num_slots)) - kept.keys() - self.at_work.keys()
        assert not any(self.model._slots[slot] for slot in empty)
        assert self.vacant.slots == tuple(sorted(empty | kept.keys()))
        return kept


def test_a_session_gets_the_lowest_slot_and_what_was_there_moves_to_the_highest() -> None:
    bench = Bench(num_slots=4)
    bench.end(bench.begin([1, 2, 3]))
    assert bench.kept() == {0: [1, 2, 3]}
    assert bench.begin([7, 8]) == 0
    assert bench.kept() == {3: [1, 2, 3]}


def test_a_session_that_goes_on_from_what_is_there_has_it_and_leaves_no_second_copy() -> None:
    bench = Bench(num_slots=4)
    bench.end(bench.begin([1, 2, 3]))
    slot, held = bench.vacant.take([1, 2, 3, 4])
    assert (slot, held.since(0)) == (0, [1, 2, 3])
    assert bench.vacant.slots == (1, 2, 3)


def test_a_session_that_shares_a_part_of_what_is_there_leaves_the_whole_elsewhere() -> None:
    bench = Bench(num_slots=4)
    bench.end(bench.begin([1, 2, 3]))
    assert bench.begin([1, 2, 9]) == 0
    assert bench.kept() == {3: [1, 2, 3]}


def test_without_an_empty_slot_the_prefix_used_least_recently_gives_way() -> None:
    bench = Bench(num_slots=3)
    for slot in [bench.begin([digit] * 3) for digit in (1, 2, 3)]:
        bench.end(slot)
    bench.vacant.use(0, 1, now=10.0)
    bench.begin([8, 8])  # in slot 0, whose prefix takes the place of slot 1's
    assert bench.kept() == {1: [1, 1, 1], 2: [3, 3, 3]}
    bench.begin([9, 9])  # in slot 1
    assert bench.kept() == {2: [1, 1, 1]}
    bench.begin([9, 8])
    assert bench.kept() == {}


def test_the_prefix_that_a_session_is_about_to_take_over_does_not_give_way_to_another() -> None:
    """Three chats in turn on three slots: whoever comes back is the one used least recently."""
    bench = Bench(num_slots=3)
    for slot in [bench.begin([digit] * 3) for digit in (1, 2, 3)]:
        bench.end(slot)
    bench.vacant.use(0, 1, now=10.0)
    bench.begin(
        [2, 2, 2, 2]
    )  # in slot 0; what was there takes the place of slot 2's, used later than slot 1's
    assert bench.kept() == {1: [2, 2, 2], 2: [1, 1, 1]}


def test_a_prefix_that_a_session_has_whole_needs_no_slot_of_its_own() -> None:
    bench = Bench(num_slots=2)
    bench.end(bench.begin([1, 2, 3]))
    bench.vacant.use(0, 2, now=5.0)
    assert bench.kept() == {0: [1, 2, 3]}
    bench.vacant.use(0, 3, now=6.0)
    bench.vacant.use(1, 3, now=6.0)  # a slot that holds nothing: its session is there
    assert bench.kept() == {}


def test_short_prefixes_are_not_kept() -> None:
    bench = Bench(num_slots=2, min_kept=3)
    bench.end(bench.begin([1, 2]))
    assert bench.kept() == {}


def test_whoever_needs_empty_slots_costs_the_oldest_prefixes_and_no_more_than_needed() -> None:
    bench = Bench(num_slots=4)
    for slot in [bench.begin([digit] * 3) for digit in (1, 2, 3)]:
        bench.end(slot)
    assert bench.vacant.emptied(1) == (3,)
    assert len(bench.kept()) == 3
    assert bench.vacant.emptied(2) == (0, 3)
    assert bench.kept() == {1: [2, 2, 2], 2: [3, 3, 3]}
    bench.at_work[1], bench.at_work[2] = TokenPrefix(), TokenPrefix()
    assert bench.vacant.emptied(9) == (0, 1, 2, 3)


def test_a_prefix_that_cannot_be_moved_loses_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(num_slots=2)
    bench.end(bench.begin([1, 2, 3]))

    def fail(*_: int) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(bench.model, "copy", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        bench.vacant.take([7])
    assert bench.kept() == {0: [1, 2, 3]}


@pytest.mark.parametrize("seed", range(6))
def test_what_is_kept_is_what_was_used_last_through_any_course_of_events(seed: int) -> None:
    """Beside a list that knows no slots: the oldest prefix goes when there are more than vacant slots.

    But for the one that the session which comes is about to take over.
    """
    random = np.random.default_rng(seed)
    bench = Bench(num_slots=5)
    expected: list[list[int]] = []  # the least recently used first
    num_lost = num_continued = 0
    for _ in range(400):
        if bench.vacant.slots and (not bench.at_work or random.random() < 0.5):
            lowest = bench.kept().get(bench.vacant.slots[0])
            tokens = random.integers(V, size=random.integers(1, 6)).tolist()
            if lowest and random.random() < 0.3:
                tokens = [*lowest, *tokens]
                expected.remove(lowest)
                num_continued += 1
            elif len(expected) == len(bench.vacant.slots):
                wanted = max(expected, key=lambda kept: TokenPrefix(kept).common_length(0, tokens))
                is_wanted = TokenPrefix(wanted).common_length(0, tokens) >= bench.min_kept
                gone = next(kept for kept in expected if not (is_wanted and kept is wanted) or kept == lowest)
                expected.remove(gone)
                num_lost += 1
            bench.begin(tokens)
        else:
            slot = int(random.choice(list(bench.at_work)))
            tokens = bench.at_work[slot].since(0)
            bench.end(slot)
            expected += [tokens] if len(tokens) >= 2 else []
        by_age = sorted(bench.vacant.holdings, key=lambda held: held.touched)
        assert [held.tokens.since(0) for held in by_age] == expected
        bench.kept()
    assert num_lost > 10
    assert num_continued > 10
