"""What every engine must do: say what the plain model says, whatever lies in a slot's place or beside it."""

import random

import numpy as np
import pytest

from tests.engines import (
    ENGINES,
    MAX_LENGTH,
    NUM_SLOTS,
    ONE_EACH,
    WINDOWED,
    MakePair,
    Pair,
    same,
    some,
)
from tests.tiny_models import VOCAB_SIZE, WINDOW
from workers.language_model import Feed, LanguageModel


@pytest.fixture(params=ENGINES)
def pair(request: pytest.FixtureRequest) -> Pair:
    return ENGINES[request.param]()


@pytest.fixture(params=ONE_EACH)
def make(request: pytest.FixtureRequest) -> MakePair:
    return ENGINES[request.param]


@pytest.fixture
def simple(make: MakePair) -> Pair:
    return make()


@pytest.fixture
def draw() -> random.Random:
    return random.Random(7)


def test_it_is_a_language_model(simple: Pair) -> None:
    engine: LanguageModel = simple.engine
    assert (engine.num_slots, engine.max_length, engine.vocab_size) == (NUM_SLOTS, MAX_LENGTH, VOCAB_SIZE)
    assert engine.output_ids is None


def test_a_whole_sequence_gets_the_plain_models_logits(pair: Pair, draw: random.Random) -> None:
    tokens = some(draw, 4 * WINDOW)
    logits = pair.feed(1, 0, tokens)
    assert logits.dtype == np.float32
    same(logits, pair.expected(tokens))


def test_a_prompt_in_chunks_gets_the_logits_of_one_piece(pair: Pair, draw: random.Random) -> None:
    tokens = some(draw, 30)
    for chunk in (1, 2, 7, 29):
        pieces = [pair.feed(0, i, tokens[i : i + chunk]) for i in range(0, len(tokens), chunk)]
        same(np.concatenate(pieces), pair.expected(tokens))


def test_a_session_gets_the_same_logits_alone_and_beside_any_others(pair: Pair, draw: random.Random) -> None:
    prompt, block = some(draw, 13), some(draw, 5)
    expected = pair.expected(prompt + block, len(block))
    for _ in range(12):
        slots = draw.sample(range(NUM_SLOTS), draw.randint(1, NUM_SLOTS))
        prompts = {slot: some(draw, draw.randint(1, 25)) for slot in slots} | {slots[0]: prompt}
        blocks = {slot: some(draw, draw.randint(1, 9)) for slot in slots} | {slots[0]: block}
        pair.engine.forward([Feed(slot, 0, prompts[slot], 0) for slot in slots])
        draw.shuffle(slots)
        feeds = [Feed(slot, len(prompts[slot]), blocks[slot], len(blocks[slot])) for slot in slots]
        logits = pair.engine.forward(feeds)
        mine = next(i for i, feed in enumerate(feeds) if feed.tokens is block)
        same(logits[mine], expected)


def test_logits_never_depend_on_later_tokens(pair: Pair, draw: random.Random) -> None:
    prompt = some(draw, 10)
    expected = pair.expected(prompt)
    for length in (1, 3, 20):
        same(pair.feed(2, 0, prompt + some(draw, length))[: len(prompt)], expected)


def test_neighbours_that_share_a_prefix_do_not_see_each_other(pair: Pair, draw: random.Random) -> None:
    prompt, tails = some(draw, 12), [some(draw, 4) for _ in range(NUM_SLOTS)]
    pair.engine.forward([Feed(slot, 0, prompt, 0) for slot in range(NUM_SLOTS)])
    logits = pair.engine.forward([Feed(slot, len(prompt), tail, 4) for slot, tail in enumerate(tails)])
    for tail, rows in zip(tails, logits, strict=True):
        same(rows, pair.expected(prompt + tail, 4))


@pytest.mark.parametrize("seed", range(5))
def test_after_any_feeds_and_rollbacks_a_slot_is_as_if_freshly_prefilled(pair: Pair, seed: int) -> None:
    """Against caches trimmed one too many or too few: output right, later tokens wrong."""
    draw = random.Random(seed)
    kept: list[list[int]] = [[] for _ in range(NUM_SLOTS)]
    for _ in range(25):
        for slot in range(NUM_SLOTS):
            if draw.random() < 0.3:
                length = draw.randint(0, MAX_LENGTH)
                pair.engine.truncate(slot, length)
                kept[slot] = kept[slot][:length]
        feeds = []
        for slot in draw.sample(range(NUM_SLOTS), draw.randint(1, NUM_SLOTS)):
            start = len(kept[slot]) if draw.random() < 0.6 else draw.randint(0, len(kept[slot]))
            start = min(start, MAX_LENGTH - 1)
            tokens = some(draw, draw.randint(1, min(12, MAX_LENGTH - start)))
            kept[slot] = kept[slot][:start] + tokens
            feeds.append(Feed(slot, start, tokens, draw.randint(0, len(tokens))))
        for feed, logits in zip(feeds, pair.engine.forward(feeds), strict=True):
            same(logits, pair.expected(kept[feed.slot], feed.num_logits))


@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_stays_right_after_a_rollback_across_its_edge(name: str, draw: random.Random) -> None:
    pair = ENGINES[name]()
    for kept in range(1, 2 * WINDOW + 2):
        tokens, again = some(draw, 2 * WINDOW + 3), some(draw, 3)
        pair.feed(0, 0, tokens, 0)
        pair.engine.truncate(0, kept)
        same(pair.feed(0, kept, again), pair.expected(tokens[:kept] + again, len(again)))
        same(pair.feed(0, kept + 3, again[:1]), pair.expected(tokens[:kept] + again + again[:1], 1))


def test_a_slot_can_be_filled_to_its_last_position_and_no_further(pair: Pair, draw: random.Random) -> None:
    tokens = some(draw, MAX_LENGTH)
    same(pair.feed(3, 0, tokens), pair.expected(tokens))
    with pytest.raises(
        ValueError, match=r"1 tokens of slot 3 from start 48 are not in 1\.\.0 \(max_length 48\)"
    ):
        pair.feed(3, MAX_LENGTH, [1])
    same(pair.feed(3, MAX_LENGTH - 1, tokens[-1:]), pair.expected(tokens, 1))


def test_a_freed_slot_shows_its_next_user_nothing(pair: Pair, draw: random.Random) -> None:
    pair.feed(1, 0, some(draw, MAX_LENGTH), 0)
    pair.engine.truncate(1, 0)
    tokens = some(draw, 9)
    same(pair.feed(1, 0, tokens), pair.expected(tokens))
    with pytest.raises(ValueError, match=r"start 10 of slot 1 is not in 0\.\.9"):
        pair.feed(1, 10, [1])


def test_a_new_feed_below_the_held_length_shortens_the_slot(simple: Pair, draw: random.Random) -> None:
    simple.feed(0, 0, some(draw, 20), 0)
    simple.feed(0, 5, [1, 2], 0)
    with pytest.raises(ValueError, match=r"start 8 of slot 0 is not in 0\.\.7"):
        simple.feed(0, 8, [1])


def test_a_truncated_slot_holds_exactly_what_was_kept(simple: Pair, draw: random.Random) -> None:
    tokens = some(draw, 20)
    for kept in (19, 7, 1, 0):
        simple.feed(0, 0, tokens, 0)
        simple.engine.truncate(0, kept)
        with pytest.raises(ValueError, match=rf"start {kept + 1} of slot 0 is not in 0\.\.{kept}"):
            simple.feed(0, kept + 1, [1])
        same(simple.feed(0, kept, [1]), simple.expected([*tokens[:kept], 1], 1))


def test_truncate_leaves_shorter_slots_alone(simple: Pair, draw: random.Random) -> None:
    tokens = some(draw, 6)
    simple.feed(0, 0, tokens, 0)
    simple.engine.truncate(0, 20)
    with pytest.raises(ValueError, match=r"start 7 of slot 0 is not in 0\.\.6"):
        simple.feed(0, 7, [1])
    same(simple.feed(0, 6, [1]), simple.expected([*tokens, 1], 1))


def test_a_copied_prefix_goes_on_as_if_freshly_prefilled_and_leaves_its_source_alone(
    pair: Pair, draw: random.Random
) -> None:
    """Whatever lay in the slot, and however long the prefix is beside a window."""
    tokens = some(draw, 3 * WINDOW)
    for length in (1, WINDOW - 1, WINDOW + 1, len(tokens)):
        pair.feed(3, 0, tokens, 0)
        pair.feed(0, 0, some(draw, MAX_LENGTH), 0)
        pair.engine.copy(3, 0, length)
        mine, theirs = some(draw, 5), some(draw, 2)
        logits = pair.engine.forward(
            [Feed(0, length, mine, len(mine)), Feed(3, len(tokens), theirs, len(theirs))]
        )
        same(logits[0], pair.expected(tokens[:length] + mine, len(mine)))
        same(logits[1], pair.expected(tokens + theirs, len(theirs)))


def test_a_copy_outlives_its_source_and_copies_of_copies_are_right(pair: Pair, draw: random.Random) -> None:
    tokens, others = some(draw, 20), some(draw, 20)
    pair.feed(0, 0, tokens, 0)
    pair.engine.copy(0, 1, 15)
    pair.engine.copy(1, 2, 10)  # before any pass
    pair.engine.truncate(0, 0)
    pair.feed(0, 0, others, 0)
    pair.engine.copy(0, 1, 20)
    same(pair.feed(2, 10, [5, 6]), pair.expected([*tokens[:10], 5, 6], 2))
    same(pair.feed(1, 20, [7]), pair.expected([*others, 7], 1))


def test_a_slot_holds_what_was_copied_and_no_more(simple: Pair, draw: random.Random) -> None:
    simple.feed(0, 0, some(draw, 20), 0)
    simple.feed(1, 0, some(draw, 30), 0)
    for length in (7, 0):
        simple.engine.copy(0, 1, length)
        with pytest.raises(ValueError, match=rf"start {length + 1} of slot 1 is not in 0\.\.{length}"):
            simple.feed(1, length + 1, [1])
    tokens = some(draw, 9)
    same(simple.feed(1, 0, tokens), simple.expected(tokens))


@pytest.mark.parametrize(
    ("source", "slot", "length", "message"),
    [
        (4, 0, 1, r"slot 4 is not in 0\.\.3"),
        (0, -1, 1, r"slot -1 is not in 0\.\.3"),
        (0, 0, 1, "slot 0 is to be copied onto itself"),
        (0, 1, 4, r"length 4 is not in 0\.\.3, what slot 0 holds"),
        (0, 1, -1, r"length -1 is not in 0\.\.3, what slot 0 holds"),
    ],
)
def test_a_copy_that_cannot_be_is_refused_and_changes_nothing(
    source: int, slot: int, length: int, message: str, simple: Pair
) -> None:
    simple.feed(0, 0, [1, 2, 3], 0)
    simple.feed(1, 0, [4, 5], 0)
    with pytest.raises(ValueError, match=message):
        simple.engine.copy(source, slot, length)
    same(simple.feed(0, 3, [7]), simple.expected([1, 2, 3, 7], 1))
    same(simple.feed(1, 2, [7]), simple.expected([4, 5, 7], 1))


def test_each_feed_gets_logits_for_as_many_last_positions_as_it_wants(
    pair: Pair, draw: random.Random
) -> None:
    wanted = [2, 0, 6, 1]
    sequences = [some(draw, 6) for _ in wanted]
    feeds = [Feed(slot, 0, sequences[slot], num) for slot, num in enumerate(wanted)]
    logits = pair.engine.forward(feeds)
    for tokens, num, rows in zip(sequences, wanted, logits, strict=True):
        assert rows.shape == (num, VOCAB_SIZE)
        same(rows, pair.expected(tokens, num))


def test_no_feeds_no_logits(simple: Pair) -> None:
    assert simple.engine.forward([]) == []


GOOD = Feed(0, 10, [1, 2, 3], 3)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Feed(4, 0, [1], 1), r"slot 4 is not in 0\.\.3"),
        (Feed(-1, 0, [1], 1), r"slot -1 is not in 0\.\.3"),
        (Feed(0, 10, [4], 1), "slot 0 is fed twice"),
        (Feed(1, 1, [1], 1), r"start 1 of slot 1 is not in 0\.\.0"),
        (Feed(1, -1, [1], 1), r"start -1 of slot 1 is not in 0\.\.0"),
        (Feed(1, 0, [], 0), r"0 tokens of slot 1 from start 0 are not in 1\.\.48"),
        (Feed(1, 0, [1] * 49, 1), r"49 tokens of slot 1 from start 0 are not in 1\.\.48"),
        (Feed(1, 0, [1, 260, 2], 1), r"token 260 of slot 1 is not in 0\.\.259"),
        (Feed(1, 0, [1, -1, 2], 1), r"token -1 of slot 1 is not in 0\.\.259"),
        (Feed(1, 0, [1, 2], 3), r"num_logits 3 of slot 1 is not in 0\.\.2"),
        (Feed(1, 0, [1, 2], -1), r"num_logits -1 of slot 1 is not in 0\.\.2"),
    ],
)
def test_a_refused_pass_names_the_fault_and_changes_nothing(
    bad: Feed, message: str, simple: Pair, draw: random.Random
) -> None:
    tokens = some(draw, 20)
    simple.feed(0, 0, tokens, 0)
    with pytest.raises(ValueError, match=message):
        simple.engine.forward([GOOD, bad])
    same(simple.feed(0, 20, [7]), simple.expected([*tokens, 7], 1))
    with pytest.raises(ValueError, match=r"start 1 of slot 1 is not in 0\.\.0"):
        simple.feed(1, 1, [1])


def test_bad_truncates_are_refused(simple: Pair) -> None:
    with pytest.raises(ValueError, match=r"slot 4 is not in 0\.\.3"):
        simple.engine.truncate(4, 0)
    with pytest.raises(ValueError, match="length -1 of slot 0 is below 0"):
        simple.engine.truncate(0, -1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_slots": 0}, "num_slots 0 is below 1"),
        ({"max_length": 0}, "max_length 0 is below 1"),
        ({"max_length": 129}, "max_length 129 exceeds the 128 positions of "),
    ],
)
def test_bad_sizes_are_refused(make: MakePair, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize("max_length", [1, 2, 5])
def test_one_short_slot_is_enough(make: MakePair, max_length: int) -> None:
    pair = make(num_slots=1, max_length=max_length)
    tokens = list(range(max_length))
    same(pair.feed(0, 0, tokens), pair.expected(tokens))
