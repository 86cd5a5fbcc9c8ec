"""Spans as boxes on lanes: who worked on what together, when, and how busy each lane was. Arithmetic only.

A span says when the coordinator asked and had the answer, and how long the task waited and was worked on in
between, but not when, as the clocks of two machines do not compare. Tasks that began in one pass began at one
moment, so each narrows it down; the middle of what is left is taken. For a task alone that splits the wire's
time in halves.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from protos.control_pb2 import Span


@dataclass(frozen=True, slots=True)
class Task:
    """A span with its place in time, in ns of the coordinator's clock, those at the worker estimated."""

    session: str  # without the coordinator's name
    round: int
    num_draft_tokens: int
    num_sent_tokens: int
    num_tokens: int
    asked_ns: int
    arrived_ns: int
    begun_ns: int
    ready_ns: int
    answered_ns: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Tasks that a worker worked on together, from their first pass to the last of their answers."""

    begun_ns: int
    ready_ns: int
    slack_ns: int  # by how much both may be off
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class Lane:
    """One worker, in the order of time."""

    role: str
    address: str
    batches: tuple[Batch, ...]
    rows: tuple[int, ...]  # on which of a lane's rows each of them is drawn: those of a row do not overlap
    busy_share: float  # of the window
    wire_share: float  # of the window, in which any task was on its way there or back


@dataclass(frozen=True, slots=True)
class Window:
    """The lanes of some time."""

    begun_ns: int
    ended_ns: int
    lanes: tuple[Lane, ...]  # drafters, then targets
    groups: tuple[tuple[str, ...], ...]  # sessions that are mostly worked on together
    num_tokens: int  # that verdicts gave in it

    @property
    def seconds(self) -> float:
        """Its length."""
        return (self.ended_ns - self.begun_ns) / 1e9


def window(spans: Iterable[Span], seconds: float, *, skipped_seconds: float = 0.0) -> Window:
    """At most so many seconds of the spans, from the first question on, or from later.

    Tasks that begin or end within it are in it. Without spans it is empty.
    """
    timed = [span for span in spans if span.HasField("times")]
    begun = min((span.asked_ns for span in timed), default=0) + int(1e9 * skipped_seconds)
    last = max((span.answered_ns for span in timed), default=0)
    ended = max(begun, min(begun + int(1e9 * seconds), last))
    workers: dict[tuple[str, str], list[Span]] = {}
    for span in timed:
        if span.asked_ns < ended and span.answered_ns > begun:
            workers.setdefault((span.role, span.address), []).append(span)
    lanes = tuple(_lane(*key, workers[key], begun, ended) for key in sorted(workers))
    tasks = [
        task for lane in lanes if lane.role == "target" for batch in lane.batches for task in batch.tasks
    ]
    return Window(
        begun_ns=begun,
        ended_ns=ended,
        lanes=lanes,
        groups=groups([batch for lane in lanes if lane.role == "target" for batch in lane.batches]),
        num_tokens=sum(task.num_tokens for task in tasks if begun < task.answered_ns <= ended),
    )


def batches(spans: Iterable[Span]) -> list[Batch]:
    """What one worker's spans were worked on in, in the order of time."""
    by_pass: dict[int, list[Span]] = {}
    for span in spans:
        by_pass.setdefault(span.times.first_pass, []).append(span)
    found: list[Batch] = []
    for together in by_pass.values():
        together.sort(key=_earliest)
        members: list[Span] = []
        for span in together:
            # A worker in another life counts its passes anew: those cannot have begun at one moment.
            if members and _earliest(span) > min(map(_latest, members)):
                found.append(_batch(members))
                members = []
            members.append(span)
        found.append(_batch(members))
    return sorted(found, key=lambda batch: batch.begun_ns)


def groups(together: Sequence[Batch]) -> tuple[tuple[str, ...], ...]:
    """Sessions that are in the same batch more often than not, joined; in the order of their first batch."""
    where: dict[str, set[int]] = {}
    for i, batch in enumerate(together):
        for task in batch.tasks:
            where.setdefault(task.session, set()).add(i)
    group = {session: [session] for session in where}
    for one, other in combinations(where, 2):
        if group[one] is group[other]:
            continue
        shared = len(where[one] & where[other])
        if 2 * shared > len(where[one] | where[other]):
            group[one] += group[other]
            for session in group[other]:
                group[session] = group[one]
    return tuple(dict.fromkeys(tuple(members) for members in group.values()))


def covered_share(intervals: Iterable[tuple[int, int]], begun: int, ended: int) -> float:
    """The share of what lies from `begun` to `ended` that any of the intervals covers."""
    covered, reached = 0, begun
    for start, end in sorted(intervals):
        start, end = max(start, reached), min(end, ended)
        if end > start:
            covered += end - start
            reached = end
    return covered / (ended - begun) if ended > begun else 0.0


def _lane(role: str, address: str, spans: Sequence[Span], begun: int, ended: int) -> Lane:
    found = batches(spans)
    tasks = [task for batch in found for task in batch.tasks]
    on_wire = [
        *((task.asked_ns, task.arrived_ns) for task in tasks),
        *((task.ready_ns, task.answered_ns) for task in tasks),
    ]
    return Lane(
        role=role,
        address=address,
        batches=tuple(found),
        rows=tuple(_rows(found)),
        busy_share=covered_share([(batch.begun_ns, batch.ready_ns) for batch in found], begun, ended),
        wire_share=covered_share(on_wire, begun, ended),
    )


def _rows(together: Iterable[Batch]) -> Iterable[int]:
    """The first row whose last batch is over, as far as one can tell."""
    free_ns: list[int] = []
    for batch in together:
        begun = batch.begun_ns + batch.slack_ns
        row = next((i for i, ns in enumerate(free_ns) if ns <= begun), len(free_ns))
        free_ns[row : row + 1] = [batch.ready_ns - batch.slack_ns]
        yield row


def _batch(spans: Sequence[Span]) -> Batch:
    earliest, latest = max(map(_earliest, spans)), min(map(_latest, spans))
    begun = (earliest + latest) // 2
    tasks = tuple(_task(span, begun) for span in spans)
    return Batch(begun, max(task.ready_ns for task in tasks), max(0, latest - earliest) // 2, tasks)


def _task(span: Span, begun_ns: int) -> Task:
    times = span.times
    return Task(
        session=span.session.rpartition("/")[2],
        round=span.round,
        num_draft_tokens=span.num_draft_tokens,
        num_sent_tokens=span.num_sent_tokens,
        num_tokens=span.num_tokens,
        asked_ns=span.asked_ns,
        arrived_ns=max(span.asked_ns, begun_ns - times.queue_ns),
        begun_ns=begun_ns,
        ready_ns=min(span.answered_ns, begun_ns + times.total_ns - times.queue_ns),
        answered_ns=span.answered_ns,
    )


def _earliest(span: Span) -> int:
    """When the task can have begun at the earliest: it was there at once."""
    return int(span.asked_ns + span.times.queue_ns)


def _latest(span: Span) -> int:
    """And at the latest: its answer was there at once. Not before the earliest, however clocks run."""
    return max(_earliest(span), int(span.answered_ns - (span.times.total_ns - span.times.queue_ns)))
