"""A distribution over some ids answers for all of them, and rows on demand are made once, when looked at."""

import numpy as np
import pytest

from workers.distributions import Distribution, RowsOnDemand

ROW = Distribution(np.array([2, 3, 8]), np.array([0.5, 0.0, 0.5]))


def test_ids_that_are_not_among_its_own_have_no_probability() -> None:
    expected = [0.5 if token in (2, 8) else 0.0 for token in range(12)]
    assert [ROW.of(token) for token in range(12)] == expected
    assert ROW.at(np.arange(12)).tolist() == expected
    assert ROW.at(np.array([8])).tolist() == [0.5]
    assert ROW.at(np.array([0, 9])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("asked", [[0], [2], [0, 1], [2, 3, 8], [1, 3, 5, 8, 9], [11]])
def test_ids_are_found_where_they_stand(asked: list[int]) -> None:
    ids = np.array(asked)
    index, found = ROW.find(ids)
    assert ROW.ids[index].tolist() == ids[found].tolist() == [i for i in asked if i in (2, 3, 8)]


@pytest.mark.parametrize(
    ("probabilities", "usable"),
    [
        ([0.25, 0.75], True),
        ([0.0, 5e-324], True),
        ([0.0, 0.0], False),
        ([np.nan, 1.0], False),
        ([np.inf, 0.0], False),
    ],
)
def test_what_has_no_finite_mass_is_not_usable(probabilities: list[float], usable: bool) -> None:
    assert Distribution(np.array([0, 1]), np.array(probabilities)).usable is usable


def test_rows_on_demand_are_made_once_and_only_where_they_are_looked_at() -> None:
    made: list[int] = []

    def make(position: int) -> Distribution:
        made.append(position)
        return Distribution(np.array([position]), np.ones(1))

    rows = RowsOnDemand(make)
    assert [rows[i].ids.tolist() for i in (3, 1, 3, 1)] == [[3], [1], [3], [1]]
    assert made == [3, 1]
