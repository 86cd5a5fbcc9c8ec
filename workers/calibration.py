"""Passes over nothing, from which a cost model learns before anybody waits for an answer.

Knows how to run a model on slots that nobody uses, for how long, and in what order; not when it is idle.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from protos.pass_cost import PassShape
from workers.cost_model import CostModel
from workers.language_model import Feed, LanguageModel

logger = logging.getLogger(__name__)

QUIET_SECONDS = 3.0  # without work, before passes that take longer than a decoding step


@dataclass(frozen=True, slots=True)
class _Trial:
    """A pass: as many slots, with as many rows each, all of them scored or none."""

    num_slots: int
    num_rows: int
    scored: bool = True
    start: int = 0  # behind what the trial before it left in the first slot

    @property
    def is_quick(self) -> bool:
        return self.num_slots * self.num_rows <= 8


# Twice, since the first pass of a kind can be a slow one; then upwards, until the time is up.
_TRIALS = (
    *(_Trial(1, num_rows) for _ in range(2) for num_rows in (1, 2, 4)),
    _Trial(1, 8),
    _Trial(4, 1),
    _Trial(1, 16),
    _Trial(4, 4),
    *(_Trial(1, num_rows, scored=False) for num_rows in (32, 64, 128)),
    *(_Trial(1, 256, scored=False, start=start) for start in range(0, 2048, 256)),
)


class Calibration:
    """The trials of one model. Only the model's thread may run them."""

    def __init__(self, model: LanguageModel, cost_model: CostModel, max_rows: int, seconds: float) -> None:
        """Passes of up to `max_rows`; none begins that is expected to end after `seconds` of them in all."""
        self._model = model
        self._cost_model = cost_model
        self._seconds_left = seconds
        self._trials = [
            trial
            for trial in _TRIALS
            if trial.num_slots <= model.num_slots
            and trial.num_slots * trial.num_rows <= max_rows
            and trial.start + trial.num_rows <= model.max_length
            and seconds
        ]
        self._slots: tuple[int, ...] = ()  # those that hold something
        self._num_held = 0  # positions of the first one

    @property
    def num_slots(self) -> int:
        """How many the next trial takes; 0 when there is none."""
        return self._trials[0].num_slots if self._trials else 0

    def is_due(self, idle_seconds: float, num_free_slots: int) -> bool:
        """Whether there is a trial for a worker that has had nothing to do for so long."""
        if not self._trials or self._trials[0].num_slots > num_free_slots:
            return False
        return self._trials[0].is_quick or idle_seconds >= QUIET_SECONDS

    def run_trial(self, free_slots: Sequence[int]) -> None:
        """Run the next one on slots that are empty, at least as many as it needs. A failure ends them all."""
        trial = self._trials.pop(0)
        slots = tuple(free_slots[: trial.num_slots])
        if trial.start != self._num_held or (trial.start and slots != self._slots):
            self.clear()
            return  # what it goes on from was cleared, or the free slots are others
        feeds = [
            Feed(slot, trial.start, (0,) * trial.num_rows, trial.num_rows if trial.scored else 0)
            for slot in slots
        ]
        shape = PassShape()
        for feed in feeds:
            shape = shape.with_feed(feed.start, trial.num_rows)
        cost = self._cost_model.cost
        if cost is not None and cost.pass_seconds(shape) > self._seconds_left:
            self._trials.clear()
            return
        self._slots, self._num_held = slots, trial.start + trial.num_rows
        try:
            seconds = self._run(feeds)
        except Exception:
            logger.exception("a pass that measures what passes take failed; no more of them are run")
            self._trials.clear()
        else:
            self._seconds_left -= seconds
            self._cost_model.observe(shape, seconds)
        if not self._trials or self._trials[0].start != self._num_held:
            self.clear()

    def clear(self) -> None:
        """Leave the slots empty, as sessions find them."""
        for slot in self._slots:
            self._model.truncate(slot, 0)
        self._slots, self._num_held = (), 0

    def _run(self, feeds: Sequence[Feed]) -> float:
        began = time.perf_counter()
        self._model.forward(feeds)
        return time.perf_counter() - began
