"""A cost model finds what passes take from noisy ones, follows a machine that changes, and bears flukes.

Passes are made up from a known cost, with fixed seeds; nothing is timed.
"""

import random
from collections.abc import Callable, Iterator

import pytest

from protos.pass_cost import PassCost, PassShape
from workers.cost_model import CostModel

# Like the demo target's on two cores.
TRUTH = PassCost(
    (1, 2, 4, 8, 16, 32, 64, 128, 256),
    (0.040, 0.0405, 0.041, 0.060, 0.110, 0.160, 0.290, 0.550, 1.100),
    seconds_per_position=1.3e-6,
    seconds_per_sequence=1.5e-3,
)
SHAPES = [
    PassShape(1, 1, 1),
    PassShape().with_feed(500, 4),
    PassShape().with_feed(1800, 1),
    PassShape().with_feed(256, 128),
    PassShape(16, 8000, 4),
]

Noise = Callable[[random.Random], float]


def calm(_: random.Random) -> float:
    return 1.0


def noisy(generator: random.Random) -> float:
    return 1.0 + abs(generator.gauss(0.0, 0.05))


def disturbed(generator: random.Random) -> float:
    """Every tenth pass takes ten times as long."""
    return 10.0 if generator.random() < 0.1 else noisy(generator)


def passes(generator: random.Random) -> Iterator[PassShape]:
    """Rounds of one or many sessions, and chunks of prompts."""
    while True:
        if generator.random() < 0.3:
            yield PassShape().with_feed(
                generator.choice([0, 256, 1000]), generator.choice([32, 64, 100, 256])
            )
            continue
        shape, num_rows = PassShape(), generator.choice([1, 1, 2, 4, 6, 8])
        for _ in range(generator.choice([1, 1, 1, 2, 4, 8, 16])):
            shape = shape.with_feed(generator.randint(10, 1500), num_rows)
        yield shape


def learn(
    model: CostModel, num_passes: int, noise: Noise = calm, *, factor: float = 1.0, seed: int = 0
) -> None:
    generator = random.Random(seed)
    for shape, _ in zip(passes(generator), range(num_passes), strict=False):
        model.observe(shape, factor * TRUTH.pass_seconds(shape) * noise(generator))


def ratio(model: CostModel, shape: PassShape) -> float:
    """Estimated by true seconds."""
    assert model.cost is not None
    return model.cost.pass_seconds(shape) / TRUTH.pass_seconds(shape)


def test_nothing_is_known_before_the_first_pass_and_that_one_is_believed() -> None:
    model = CostModel()
    assert model.cost is None
    model.observe(PassShape(4, 400, 1), 0.041)
    assert model.cost is not None
    assert model.cost.pass_seconds(PassShape(4, 400, 1)) == pytest.approx(0.041, rel=0.02)
    assert model.cost.rows == (1, 4)  # the rows that were seen, and 1


@pytest.mark.parametrize(
    ("noise", "num_passes", "tolerance"), [(calm, 60, 0.05), (noisy, 100, 0.12), (disturbed, 200, 0.25)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_cost_is_found_whatever_disturbs_some_passes(
    noise: Noise, num_passes: int, tolerance: float, shape: PassShape
) -> None:
    model = CostModel()
    learn(model, num_passes, noise)
    assert ratio(model, shape) == pytest.approx(1.0, abs=tolerance)


def test_one_pass_that_hangs_moves_little() -> None:
    model = CostModel()
    learn(model, 100)
    model.observe(PassShape(4, 400, 1), 3600.0)
    for shape in SHAPES:
        assert ratio(model, shape) == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_a_machine_that_becomes_slower_or_faster_is_followed_in_all_it_does(factor: float) -> None:
    """Also where no pass of the kind came since: a chunk of a prompt costs what the rounds say."""
    model = CostModel()
    learn(model, 100, noisy)
    before = [ratio(model, shape) for shape in SHAPES]
    for i in range(60):
        shape = PassShape().with_feed(100 + i, 4)
        model.observe(shape, factor * TRUTH.pass_seconds(shape))
    assert ratio(model, SHAPES[1]) == pytest.approx(factor, rel=0.1)
    for shape, at_first in zip(SHAPES, before, strict=True):
        assert ratio(model, shape) / at_first == pytest.approx(factor, rel=0.3)


def test_a_machine_that_becomes_faster_as_a_text_grows_is_followed_all_the_same() -> None:
    """Longer contexts that seem to cost less than nothing must not stand in the way."""
    model = CostModel()
    for i in range(60):
        shape = PassShape().with_feed(32 * i, 32)
        model.observe(shape, max(0.4, 2.0 - i / 20) * TRUTH.pass_seconds(shape))
    assert ratio(model, PassShape().with_feed(1900, 32)) == pytest.approx(0.4, rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_it_saw_it_tells_a_cost_that_can_be(seed: int) -> None:
    generator = random.Random(seed)
    model = CostModel()
    for shape, _ in zip(passes(generator), range(300), strict=False):
        model.observe(shape, 10.0 ** generator.uniform(-9, 4))
        if model.cost is not None:  # it begins anew where times of all sizes have cost its precision
            PassCost.from_message(model.cost.to_message())  # also in single precision


def test_a_pass_that_took_no_time_at_all_is_borne() -> None:
    model = CostModel()
    for _ in range(3):
        model.observe(PassShape(1, 1, 1), 0.0)
    assert model.cost is not None
    assert 0 < model.cost.pass_seconds(PassShape(1, 1, 1)) < 1e-6


@pytest.mark.parametrize("num_rows", [3, 5, 6, 7, 12])
def test_a_pass_between_two_entries_is_estimated_as_it_was_seen(num_rows: int) -> None:
    model = CostModel()
    for _ in range(100):
        for rows in (1, 2, 4, num_rows):
            shape = PassShape(rows, 0, 1)
            model.observe(shape, TRUTH.pass_seconds(shape))
    assert ratio(model, PassShape(num_rows, 0, 1)) == pytest.approx(1.0, abs=0.02)
