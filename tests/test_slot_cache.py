"""Which slots share a call of attention: neighbours that are fed alike, unless much of it would be idle."""

import psutil
import torch

from workers.language_model import Feed
from workers.slot_cache import SlotCache, in_call_order, runs_of


def feed(slot: int, start: int, num_rows: int = 1) -> Feed:
    return Feed(slot, start, [0] * num_rows, num_rows)


def calls(*feeds: Feed) -> list[tuple[int, int, int, int]]:
    """Of each call: first slot, end of slots, rows a slot, positions seen."""
    ordered = [feeds[i] for i in in_call_order(feeds)]
    return [(run.slots.start, run.slots.stop, run.num_rows, run.end) for run in runs_of(ordered)]


def test_sixteen_sessions_that_decode_are_one_call() -> None:
    assert calls(*(feed(slot, 100 + slot % 3, 4) for slot in range(16))) == [(0, 16, 4, 106)]


def test_their_order_in_the_pass_is_of_no_account() -> None:
    assert calls(feed(2, 50), feed(0, 50), feed(1, 50)) == [(0, 3, 1, 51)]


def test_a_slot_between_that_is_not_fed_parts_them() -> None:
    assert calls(feed(0, 50), feed(2, 50)) == [(0, 1, 1, 51), (2, 3, 1, 51)]


def test_other_numbers_of_rows_part_them() -> None:
    assert calls(feed(0, 50, 4), feed(1, 50, 2), feed(2, 50, 4)) == [
        (1, 2, 2, 52),
        (0, 1, 4, 54),
        (2, 3, 4, 54),
    ]


def test_a_long_session_does_not_make_its_neighbours_long() -> None:
    assert calls(feed(0, 20), feed(1, 4000), feed(2, 20)) == [(0, 1, 1, 21), (1, 2, 1, 4001), (2, 3, 1, 21)]


def test_the_rows_of_the_calls_are_those_of_the_pass_in_order() -> None:
    feeds = [feed(0, 9, 2), feed(1, 9, 2), feed(5, 9, 3)]
    assert [(run.rows.start, run.rows.stop) for run in runs_of(feeds)] == [(0, 4), (4, 7)]


def test_slots_that_nobody_fills_take_no_memory() -> None:
    """A worker is given as many slots as might be needed; a gigabyte here."""
    before = psutil.Process().memory_info().rss
    cache = SlotCache(4, 64, 4, 2047, 64, dtype=torch.float32, device=torch.device("cpu"))
    assert psutil.Process().memory_info().rss - before < 100e6
    assert not cache.block[3, 63, 7, 2047].any()
    before = psutil.Process().memory_info().rss
    cache.block[:, :, :, 0] = 1.0  # one position of each
    assert psutil.Process().memory_info().rss - before < 100e6
