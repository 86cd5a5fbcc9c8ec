"""From spans to boxes: tasks of one pass stand together, between question and answer; shares add up."""

import random
from collections.abc import Sequence

import pytest

from cluster.timeline_boxes import Batch, Task, batches, covered_share, groups, window
from protos.control_pb2 import Span
from protos.worker_pb2 import WorkTimes

MS = 10**6


def span(
    asked: int,
    answered: int,
    queue: int,
    work: int,
    *,
    session: str = "c/1",
    first_pass: int = 0,
    role: str = "target",
    **fields: int,
) -> Span:
    """Times in ms; `work` is from the first pass until the answer."""
    times = WorkTimes(queue_ns=queue * MS, total_ns=(queue + work) * MS, first_pass=first_pass)
    return Span(
        role=role,
        address=f"{role}:1",
        session=session,
        asked_ns=asked * MS,
        answered_ns=answered * MS,
        times=times,
        **fields,
    )


def test_a_task_alone_has_its_wires_time_split_in_halves() -> None:
    [batch] = batches([span(100, 130, 4, 16)])
    assert (batch.begun_ns, batch.ready_ns, batch.slack_ns) == (109 * MS, 125 * MS, 5 * MS)
    [task] = batch.tasks
    assert (task.asked_ns, task.arrived_ns, task.ready_ns, task.answered_ns) == (
        100 * MS,
        105 * MS,
        125 * MS,
        130 * MS,
    )
    assert task.session == "1"


def test_tasks_of_one_pass_begin_at_one_moment_that_suits_all() -> None:
    slow_there = span(100, 131, 0, 20, session="c/1", first_pass=7)  # can have begun at 100..111
    slow_back = span(108, 140, 2, 20, session="c/2", first_pass=7)  # at 110..120
    [batch] = batches([slow_there, slow_back])
    assert (batch.begun_ns, batch.slack_ns) == (110_500_000, 500_000)
    assert {task.begun_ns for task in batch.tasks} == {batch.begun_ns}
    assert [task.arrived_ns for task in batch.tasks] == [110_500_000, 108_500_000]


def test_other_passes_and_other_lives_of_a_worker_are_other_batches() -> None:
    spans = [
        span(0, 10, 0, 8, first_pass=1),
        span(1, 20, 5, 8, first_pass=2),
        span(50, 60, 0, 8, first_pass=1),
    ]
    assert [len(batch.tasks) for batch in batches(spans)] == [1, 1, 1]


def test_every_estimate_lies_between_question_and_answer_and_near_the_truth() -> None:
    """Spans made from batches that are known, with wires of any length."""
    rng, spans, truth, now = random.Random(3), [], [], 0
    for number in range(50):
        now += rng.randrange(0, 5 * MS)
        begun, work = now, rng.randrange(1 * MS, 40 * MS)
        for member in range(rng.randrange(1, 6)):
            queue, there, back = (rng.randrange(0, 3 * MS) for _ in range(3))
            times = WorkTimes(queue_ns=queue, total_ns=queue + work, first_pass=number)
            asked, answered = begun - queue - there, begun + work + back
            spans.append(
                Span(session=f"c/{member}", asked_ns=asked + MS * 100, answered_ns=answered + MS * 100)
            )
            spans[-1].times.CopyFrom(times)
        truth.append(begun + 100 * MS)
        now += work
    rng.shuffle(spans)
    found = batches(spans)
    assert len(found) == 50
    for batch, begun in zip(found, truth, strict=True):
        assert abs(batch.begun_ns - begun) <= batch.slack_ns + 1
        for task in batch.tasks:
            moments = (task.asked_ns, task.arrived_ns, task.begun_ns, task.ready_ns, task.answered_ns)
            assert list(moments) == sorted(moments)


def test_times_that_cannot_be_are_drawn_all_the_same() -> None:
    [batch] = batches([span(100, 110, 4, 16)])  # more than the round trip
    [task] = batch.tasks
    assert task.asked_ns <= task.arrived_ns <= task.begun_ns <= task.ready_ns <= task.answered_ns


@pytest.mark.parametrize(
    ("intervals", "share"),
    [
        ([], 0.0),
        ([(0, 10)], 0.1),
        ([(0, 10), (20, 40)], 0.3),
        ([(0, 30), (10, 20), (25, 50)], 0.5),
        ([(-50, 10), (90, 200)], 0.2),
        ([(-50, 200), (10, 20)], 1.0),
        ([(-5, 0), (100, 120)], 0.0),
    ],
)
def test_what_overlaps_or_is_outside_is_not_counted_twice(
    intervals: Sequence[tuple[int, int]], share: float
) -> None:
    assert covered_share(intervals, 0, 100) == pytest.approx(share)
    assert covered_share(reversed(intervals), 0, 100) == pytest.approx(share)
    assert covered_share(intervals, 0, 0) == 0.0


def _batch(*sessions: str) -> Batch:
    return Batch(0, 1, 0, tuple(Task(session, 1, 0, 0, 1, 0, 0, 0, 1, 1) for session in sessions))


def test_sessions_that_are_mostly_together_are_a_group() -> None:
    alternating = [_batch(*"abc"), _batch(*"de")] * 5
    assert groups(alternating) == (("a", "b", "c"), ("d", "e"))
    assert groups([*alternating, _batch(*"abcde")]) == (("a", "b", "c"), ("d", "e"))
    assert groups([_batch("a"), _batch("b")]) == (("a",), ("b",))
    assert groups([_batch(*"abc")]) == (("a", "b", "c"),)
    assert groups([]) == ()


def test_lanes_tell_who_was_busy_in_the_window_only() -> None:
    spans = [
        span(0, 50, 0, 50, role="draft", first_pass=1, num_draft_tokens=4, num_tokens=4),
        span(50, 100, 0, 50, first_pass=1, num_draft_tokens=4, num_tokens=5),
        span(100, 140, 0, 40, role="draft", first_pass=5, num_draft_tokens=4, num_tokens=4),
        span(140, 240, 10, 80, first_pass=2, num_draft_tokens=4, num_tokens=3),
        span(300, 400, 0, 100, first_pass=3, num_tokens=1),
    ]
    seen = window(spans, 0.2)
    assert (seen.seconds, seen.num_tokens) == (0.2, 5)
    assert [(lane.role, lane.address) for lane in seen.lanes] == [
        ("draft", "draft:1"),
        ("target", "target:1"),
    ]
    assert [lane.busy_share for lane in seen.lanes] == pytest.approx([0.45, 0.475])
    assert seen.lanes[1].wire_share == pytest.approx(0.025)
    assert seen.groups == (("1",),)
    later = window(spans, 0.2, skipped_seconds=0.1)
    assert [len(lane.batches) for lane in later.lanes] == [1, 1]
    assert later.num_tokens == 3
    assert window(spans, 60).ended_ns == 400 * MS  # no longer than there was something


def test_only_batches_that_truly_overlap_take_another_row() -> None:
    prompt = span(0, 100, 0, 100, session="c/1", first_pass=1)
    rounds = [
        span(20, 40, 0, 20, session="c/2", first_pass=2),
        span(40, 60, 0, 20, session="c/2", first_pass=3),
    ]
    [lane] = window([prompt, *rounds], 1.0).lanes
    assert lane.rows == (0, 1, 1)
    # The estimates of these two overlap by less than they may be off.
    unsure = [span(0, 40, 0, 20, first_pass=1), span(10, 50, 0, 24, session="c/2", first_pass=2)]
    [lane] = window(unsure, 1.0).lanes
    assert lane.rows == (0, 0)


def test_without_spans_there_is_nothing_to_see() -> None:
    unanswered = Span(role="target", address="h:1", asked_ns=5, answered_ns=9)  # from the worker's memory
    for spans in ([], [unanswered]):
        seen = window(spans, 1.0)
        assert (seen.lanes, seen.groups, seen.num_tokens, seen.seconds) == ((), (), 0, 0.0)
