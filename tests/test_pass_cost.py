"""What passes take, as told on the wire: the stated form, and a cost that cannot be is refused by name."""

from dataclasses import replace

import pytest

from protos.pass_cost import PassCost, PassShape

COST = PassCost((1, 4, 16), (0.5, 0.5, 2.0), seconds_per_position=0.25, seconds_per_sequence=0.125)


@pytest.mark.parametrize(
    ("num_rows", "seconds"), [(1, 0.5), (2, 0.5), (4, 0.5), (10, 1.25), (16, 2.0), (24, 3.0), (160, 20.0)]
)
def test_the_table_is_interpolated_and_goes_on_in_proportion(num_rows: int, seconds: float) -> None:
    assert COST.pass_seconds(PassShape(num_rows, 0, 1)) == seconds


def test_a_shape_counts_rows_the_positions_that_each_attends_to_and_sequences() -> None:
    shape = PassShape().with_feed(0, 3).with_feed(10, 1)
    assert shape == PassShape(num_rows=4, num_positions=1 + 2 + 3 + 11, num_sequences=2)
    assert COST.pass_seconds(shape) == 0.5 + 17 * 0.25 + 0.125


def test_it_travels() -> None:
    assert PassCost.from_message(COST.to_message()) == COST


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rows": ()}, "0 rows and 3 seconds"),
        ({"rows": (), "seconds": ()}, "1 to 64"),
        ({"rows": tuple(range(1, 66)), "seconds": (1.0,) * 65}, "1 to 64"),
        ({"seconds": (0.5, 0.5)}, "3 rows and 2 seconds"),
        ({"rows": (2, 4, 16)}, "ascend from 1"),
        ({"rows": (1, 4, 4)}, "ascend from 1"),
        ({"seconds": (0.0, 0.5, 2.0)}, "positive"),
        ({"seconds": (0.5, float("nan"), 2.0)}, "finite"),
        ({"seconds": (0.5, 0.5, float("inf"))}, "finite"),
        ({"seconds": (0.5, 0.4, 2.0)}, "more rows"),
        ({"seconds_per_position": -1.0}, "seconds_per_position is -1.0"),
        ({"seconds_per_sequence": float("nan")}, "seconds_per_sequence is nan"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes: dict[str, tuple[float, ...]], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        replace(COST, **changes)  # type: ignore[arg-type]
