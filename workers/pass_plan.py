"""How much of each task goes into the next pass, so that prompts are read fast and nobody waits long for it.

Knows numbers of tokens and what passes take; no model, slot or task.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from protos.pass_cost import PassCost, PassShape

MIN_PREFILL_TOKENS = 32  # the oldest prefill moves on at least this fast, however busy decoding is
_HARDLY_LONGER = 1.1  # times as long
_NEAR_BEST = 1.1  # passes are large enough when a row takes no more than this times what it can take


@dataclass(frozen=True, slots=True)
class Pending:
    """What one task has yet to feed."""

    start: int  # positions that its slot holds
    num_tokens: int  # at least 1
    num_logits: int  # wanted of the last ones, all in one pass
    decodes: bool  # a round of a session that was answered before

    @property
    def is_short(self) -> bool:
        """Whether one small piece is all of it."""
        return self.num_tokens <= MIN_PREFILL_TOKENS

    def piece(self, size: int) -> int:
        """How many tokens a piece of `size` has: fewer or more where wanted positions must stay together."""
        if size >= self.num_tokens:
            return self.num_tokens
        size = min(size, self.num_tokens - self.num_logits)
        return size if size > 0 else self.num_tokens


@dataclass(frozen=True, slots=True)
class PassBounds:
    """How large a pass may become for what does not decode."""

    max_rows: int
    max_seconds: float
    seconds_of: Callable[[PassShape], float]

    def piece(self, shape: PassShape, task: Pending) -> int:
        """How many tokens of the task can join a pass; 0 when not even a small piece can."""
        limit = min(task.num_tokens, self.max_rows - shape.num_rows)
        room = bisect_right(
            range(1, limit + 1),
            self.max_seconds,
            key=lambda n: self.seconds_of(shape.with_feed(task.start, n)),
        )
        size = task.piece(room)
        return size if size <= room and size >= min(MIN_PREFILL_TOKENS, task.num_tokens) else 0


def plan_pass(tasks: Sequence[Pending], bounds: PassBounds) -> list[int]:
    """How many tokens each task feeds, 0 when it waits. `tasks` are the oldest first.

    In every pass are all that decode, whole, and at least a small piece of the oldest other task. Within the
    bounds come first those so short that they are through at once, then the others, the oldest first. What
    makes the pass of those that decode hardly longer is within them, however long that is.
    """
    sizes = [task.num_tokens if task.decodes else 0 for task in tasks]
    shape = PassShape()
    for task in tasks:
        if task.decodes:
            shape = shape.with_feed(task.start, task.num_tokens)
    others = [i for i, task in enumerate(tasks) if not task.decodes]
    if not others:
        return sizes
    if shape.num_rows:
        hardly_longer = _HARDLY_LONGER * bounds.seconds_of(shape)
        bounds = replace(bounds, max_seconds=max(bounds.max_seconds, hardly_longer))
    first = others.pop(0)
    oldest, least = tasks[first], tasks[first].piece(MIN_PREFILL_TOKENS)
    for i in [i for i in others if tasks[i].is_short]:
        sizes[i] = bounds.piece(shape.with_feed(oldest.start, least), tasks[i])
        shape = _joined(shape, tasks[i], sizes[i])
    sizes[first] = max(least, bounds.piece(shape, oldest))
    shape = _joined(shape, oldest, sizes[first])
    for i in [i for i in others if not tasks[i].is_short]:
        sizes[i] = bounds.piece(shape, tasks[i])
        shape = _joined(shape, tasks[i], sizes[i])
    return sizes


def fast_rows(cost: PassCost | None, max_rows: int) -> int:
    """The fewest rows with which a pass reads prompts at about the best rate, up to `max_rows`.

    All of them while no pass was half as large: its rate is to be found out.
    """
    if cost is None or 2 * cost.rows[-1] <= max_rows:
        return max_rows
    choices = [*(rows for rows in cost.rows if MIN_PREFILL_TOKENS <= rows < max_rows), max_rows]
    row_seconds = [cost.pass_seconds(PassShape(rows, 0, 1)) / rows for rows in choices]
    enough = _NEAR_BEST * min(row_seconds)
    return next(rows for rows, seconds in zip(choices, row_seconds, strict=True) if seconds <= enough)


def _joined(shape: PassShape, task: Pending, size: int) -> PassShape:
    return shape.with_feed(task.start, size) if size else shape
