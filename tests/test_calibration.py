"""Passes over nothing: in order, in their time, on free slots alone, and no trace of them stays.

The clock is the test's: a pass takes what its law says.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest

from protos.pass_cost import PassCost, PassShape
from tests.laws import random_table
from tests.test_jobs import StrictTable
from workers.calibration import QUIET_SECONDS, Calibration
from workers.cost_model import CostModel
from workers.language_model import Feed, Logits

V = 5
LAW = PassCost((1, 4, 16, 64, 256), (0.010, 0.012, 0.020, 0.050, 0.190), 2e-8, 3e-4)


class Timed(StrictTable):
    """Notes the feeds of each pass, and lets its law pass on the clock."""

    def __init__(
        self, law: PassCost, monkeypatch: pytest.MonkeyPatch, num_slots: int, max_length: int
    ) -> None:
        super().__init__(random_table(V, 1), V, num_slots=num_slots, max_length=max_length)
        self.law, self.seconds = law, 0.0
        self.passes: list[list[Feed]] = []
        self.fault: Exception | None = None
        clock = SimpleNamespace(perf_counter=lambda: self.seconds)
        monkeypatch.setattr("workers.calibration.time", clock)

    def forward(self, feeds: Sequence[Feed]) -> list[Logits]:
        if self.fault is not None:
            raise self.fault
        self.passes.append(list(feeds))
        shape = PassShape()
        for feed in feeds:
            shape = shape.with_feed(feed.start, len(feed.tokens))
        self.seconds += self.law.pass_seconds(shape)
        return super().forward(feeds)

    @property
    def held(self) -> list[int]:
        return [len(tokens) for tokens in self._slots]


Make = Callable[..., Timed]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Make:
    def make(factor: float = 1.0, num_slots: int = 8, max_length: int = 2048) -> Timed:
        law = PassCost(
            LAW.rows,
            tuple(factor * seconds for seconds in LAW.seconds),
            factor * LAW.seconds_per_position,
            factor * LAW.seconds_per_sequence,
        )
        return Timed(law, monkeypatch, num_slots, max_length)

    return make


def run_all(calibration: Calibration, free: Sequence[int], idle_seconds: float = QUIET_SECONDS) -> None:
    while calibration.is_due(idle_seconds, len(free)):
        calibration.run_trial(free)


def test_a_fast_model_is_measured_in_all_its_sizes_and_left_empty(timed: Make) -> None:
    model, cost_model = timed(), CostModel()
    run_all(Calibration(model, cost_model, 256, 5.0), range(8))
    assert model.held == [0] * 8
    cost = cost_model.cost
    assert cost is not None
    assert cost.rows[-1] == 256
    for shape in (
        PassShape(1, 1, 1),
        PassShape(4, 10, 1),
        PassShape(64, 2080, 1),
        PassShape(256, 400_000, 1),
    ):
        assert cost.pass_seconds(shape) == pytest.approx(model.law.pass_seconds(shape), rel=0.1)
    sizes = [[len(feed.tokens) for feed in feeds] for feeds in model.passes]
    assert sizes[:3] == [[1], [2], [4]]  # what decides on the first tokens comes first
    assert max(feed.start for feeds in model.passes for feed in feeds) > 1000
    assert max(map(len, sizes)) > 1


@pytest.mark.parametrize(("factor", "seconds"), [(1.0, 2.0), (5.0, 2.0), (100.0, 2.0), (1.0, 0.03)])
def test_it_ends_in_time_however_slow_the_model(timed: Make, factor: float, seconds: float) -> None:
    model = timed(factor)
    run_all(Calibration(model, CostModel(), 256, seconds), range(8))
    first = model.law.pass_seconds(PassShape(1, 1, 1))  # nobody knows it before
    assert 0 < model.seconds <= max(1.2 * seconds, first)
    assert model.held == [0] * 8


def test_without_time_nothing_runs(timed: Make) -> None:
    model = timed()
    run_all(Calibration(model, CostModel(), 256, 0.0), range(8))
    assert model.passes == []


def test_before_it_is_quiet_only_passes_like_decoding_steps_run(timed: Make) -> None:
    model = timed()
    calibration = Calibration(model, CostModel(), 256, 5.0)
    run_all(calibration, range(8), idle_seconds=0.0)
    sizes = [[len(feed.tokens) for feed in feeds] for feeds in model.passes]
    assert sizes == [[1], [2], [4], [1], [2], [4], [8], [1] * 4]
    assert calibration.is_due(QUIET_SECONDS, 8)


def test_it_fits_the_model_and_the_bound_of_a_pass(timed: Make) -> None:
    model = timed(num_slots=2, max_length=100)
    run_all(Calibration(model, CostModel(), 48, 5.0), range(2))
    assert max(sum(len(feed.tokens) for feed in feeds) for feeds in model.passes) == 32
    assert {len(feeds) for feeds in model.passes} == {1}


def test_slots_that_are_not_free_are_left_alone(timed: Make) -> None:
    model = timed()
    model.forward([Feed(slot, 0, (1, 2, 3), 0) for slot in range(7)])
    del model.passes[:]
    calibration = Calibration(model, CostModel(), 256, 5.0)
    run_all(calibration, [7])
    assert {feed.slot for feeds in model.passes for feed in feeds} == {7}
    assert model.held == [3] * 7 + [0]
    assert not calibration.is_due(QUIET_SECONDS, 0)


def test_a_session_that_comes_meanwhile_finds_its_slot_empty_and_is_not_written_over(timed: Make) -> None:
    model = timed()
    calibration = Calibration(model, CostModel(), 256, 60.0)
    while model.held[0] < 512:
        calibration.run_trial(range(8))
    calibration.clear()
    assert model.held == [0] * 8
    model.forward([Feed(0, 0, (1, 2, 3), 0)])
    run_all(calibration, range(1, 8))
    assert model.held == [3] + [0] * 7


def test_a_pass_that_fails_ends_them_all(timed: Make, caplog: pytest.LogCaptureFixture) -> None:
    model, cost_model = timed(), CostModel()
    calibration = Calibration(model, cost_model, 256, 5.0)
    model.fault = RuntimeError("out of memory")
    calibration.run_trial(range(8))
    assert "out of memory" in caplog.text
    assert not calibration.is_due(QUIET_SECONDS, 8)
    assert cost_model.cost is None
