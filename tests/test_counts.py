"""q as integers: what is drawn, shipped, computed with and redrawn are the same numbers.

The laws are exact: every threshold of a draw is enumerated, no sample is taken.
"""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from workers.counts import FULL_TOTAL, SPARSE_TOTAL, CountRow, one_hot, quantise, quantise_full
from workers.distributions import FloatArray, IntArray
from workers.sampling import SamplingSettings, probabilities

ALMOST_ONE = 1.0 - 2.0**-53


def distribution(seed: int, size: int, temperature: float = 1.0) -> FloatArray:
    logits = 4.0 * np.random.default_rng(seed).normal(size=(1, size))
    (row,) = probabilities(logits, SamplingSettings(temperature=temperature))
    return np.asarray(row)


DISTRIBUTIONS = [
    pytest.param(distribution(1, 5), id="few columns"),
    pytest.param(distribution(2, 64), id="as many columns as support"),
    pytest.param(distribution(3, 65), id="one column more than support"),
    pytest.param(distribution(4, 1000), id="wide"),
    pytest.param(distribution(5, 50_000, 0.3), id="peaked"),
    pytest.param(np.full(3, 1 / 3), id="thirds"),
    pytest.param(np.full(1000, 1e-3), id="flat"),
    pytest.param(np.array([1e-300, 1.0, 0.0, 1e-9]), id="nearly one token"),
    pytest.param(np.array([0.5, 0.5 - 1e-16]), id="float noise"),
    pytest.param(distribution(6, 40) * (1.0 + 1e-9), id="sum above one"),
    pytest.param(distribution(7, 40) * (1.0 - 1e-9), id="sum below one"),
    pytest.param(np.concatenate([np.zeros(5), distribution(8, 90), np.zeros(5)]), id="zeros at both ends"),
]


def exact_shares(weights: FloatArray, total: int) -> list[Fraction]:
    exact = [Fraction(float(weight)) for weight in weights]
    scale = total / sum(exact, Fraction(0))
    return [weight * scale for weight in exact]


def counts_by_id(row: CountRow) -> dict[int, int]:
    return dict(zip(row.ids.tolist(), row.counts.tolist(), strict=True))


def assert_well_formed(row: CountRow, total: int) -> None:
    assert row.total == total
    assert int(row.counts.sum()) == total
    assert row.counts.min() > 0
    assert (np.diff(row.ids) > 0).all()
    assert row.ids.size == row.counts.size
    assert row.ids.dtype == row.counts.dtype == np.int64


def assert_largest_remainder(row: CountRow, columns: IntArray, weights: FloatArray) -> None:
    """Each count is its share rounded down or up, and those rounded up have the largest remainders."""
    counts = counts_by_id(row)
    up: list[Fraction] = []
    down: list[Fraction] = []
    for column, share in zip(columns.tolist(), exact_shares(weights, row.total), strict=True):
        count = counts.get(column, 0)
        assert abs(count - share) < 1
        (up if count > share else down).append(share - int(share))
    assert min(up, default=Fraction(1)) >= max(down, default=Fraction(0)) - Fraction(1, 10**6)


@pytest.mark.parametrize("weights", DISTRIBUTIONS)
@pytest.mark.parametrize("support", [1, 2, 64, 4096])
def test_quantise_rounds_the_likeliest_columns_by_largest_remainder(
    weights: FloatArray, support: int
) -> None:
    row = quantise(weights, support)
    assert_well_formed(row, SPARSE_TOTAL)
    assert row.ids.size <= support
    # the columns that may be kept: the likeliest ones, ties at the border being free
    border = np.sort(weights)[-support] if support < weights.size else 0.0
    assert (weights[row.ids] >= border).all()
    assert (weights[row.ids] > 0.0).all()
    certain = np.flatnonzero(weights > border)
    at_border = np.setdiff1d(row.ids, certain)
    columns = np.sort(np.concatenate([certain, at_border]))
    missing = min(support, weights.size) - columns.size  # columns at the border that got no count
    kept = np.concatenate([weights[columns], np.full(missing, border)])
    absent = np.arange(-missing, 0)
    assert_largest_remainder(row, np.concatenate([columns, absent]), kept)


@pytest.mark.parametrize("weights", DISTRIBUTIONS)
def test_quantise_full_rounds_every_column_by_largest_remainder(weights: FloatArray) -> None:
    row = quantise_full(weights)
    assert_well_formed(row, FULL_TOTAL)
    assert (weights[row.ids] > 0.0).all()
    if weights.size <= 1000:
        assert_largest_remainder(row, np.arange(weights.size), weights)
    dense = np.zeros(weights.size)
    dense[row.ids] = row.q
    assert np.abs(dense - weights / weights.sum()).max() < 2.0**-31 * (1 + 1e-6)


def test_totals_fit_the_wire() -> None:
    assert (SPARSE_TOTAL, FULL_TOTAL) == (2**15, 2**31)


def test_three_equal_columns_differ_by_one_count() -> None:
    assert sorted(quantise(np.full(3, 1 / 3), 64).counts.tolist()) == [10922, 10923, 10923]


def test_the_support_holds_the_likeliest_columns_in_the_order_of_their_ids() -> None:
    weights = np.array([0.05, 0.3, 0.1, 0.0, 0.35, 0.2])
    row = quantise(weights, 3)
    assert row.ids.tolist() == [1, 4, 5]
    assert row.q == pytest.approx([0.3 / 0.85, 0.35 / 0.85, 0.2 / 0.85], abs=2.0**-15)


def test_columns_that_get_no_count_leave_the_support() -> None:
    row = quantise(np.array([1e-300, 1.0 - 1e-9, 0.0, 1e-9]), 64)
    assert counts_by_id(row) == {1: SPARSE_TOTAL}


@pytest.mark.parametrize("quantiser", [lambda weights: quantise(weights, 64), quantise_full])
@pytest.mark.parametrize("token", [0, 3, 6])
def test_a_law_of_one_token_stays_one(token: int, quantiser: type) -> None:
    weights = np.zeros(7)
    weights[token] = 1.0
    row = quantiser(weights)
    assert row.ids.tolist() == [token]
    assert row.q.tolist() == [1.0]
    assert {row.draw(uniform) for uniform in (0.0, 0.5, ALMOST_ONE)} == {token}


def test_quantising_is_a_function() -> None:
    for seed in range(20):
        weights = distribution(seed, 300)
        weights[::7] = weights[0]  # ties
        first, second = quantise(weights, 16), quantise(weights.copy(), 16)
        assert counts_by_id(first) == counts_by_id(second)


def test_quantising_leaves_its_argument_alone() -> None:
    weights = distribution(9, 100)
    before = weights.copy()
    weights.flags.writeable = False
    quantise(weights, 8)
    quantise_full(weights)
    assert np.array_equal(weights, before)


def test_output_ids_name_the_columns() -> None:
    """A drafter with a vocabulary of its own: column c stands for output_ids[c]."""
    weights = distribution(10, 50)
    output_ids = np.arange(50) * 3 + 7
    for plain, named in (
        (quantise(weights, 8), quantise(weights, 8, output_ids)),
        (quantise_full(weights), quantise_full(weights, output_ids)),
    ):
        assert named.ids.tolist() == output_ids[plain.ids].tolist()
        assert named.counts.tolist() == plain.counts.tolist()
        assert named.q_of(int(output_ids[plain.ids[0]])) == plain.q[0]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(quantise(distribution(11, 5), 64), id="few"),
        pytest.param(quantise(distribution(12, 1000), 64), id="64 of 1000"),
        pytest.param(quantise(np.full(7, 1 / 7), 64), id="flat"),
        pytest.param(quantise(np.array([1e-3, 0.999]), 64), id="peaked"),
        pytest.param(CountRow(np.array([0, 9]), np.array([1, 7]), 8), id="small total"),
        pytest.param(one_hot(0), id="one-hot"),
    ],
)
def test_a_draw_has_exactly_the_law_of_the_counts(row: CountRow) -> None:
    """All thresholds are enumerated, at both ends of their uniforms: each id gets its count of them."""
    cell = 1.0 / row.total
    for offset in (0.0, cell - 2.0**-53):
        tokens = [row.draw(threshold * cell + offset) for threshold in range(row.total)]
        ids, counts = np.unique(tokens, return_counts=True)
        assert ids.tolist() == row.ids.tolist()
        assert counts.tolist() == row.counts.tolist()
        assert (np.diff(tokens) >= 0).all()


def test_a_full_row_changes_its_token_exactly_at_the_running_counts() -> None:
    row = quantise_full(distribution(13, 2000))
    start = 0
    for token, count in counts_by_id(row).items():
        end = start + count
        assert row.draw(start / FULL_TOTAL) == row.draw(end / FULL_TOTAL - 2.0**-53) == token
        start = end
    assert start == FULL_TOTAL


def test_the_edges_of_a_draw_are_the_first_and_the_last_id() -> None:
    for row in (quantise(distribution(14, 500), 64), quantise_full(distribution(15, 500))):
        assert row.draw(0.0) == row.ids[0]
        assert row.draw(ALMOST_ONE) == row.ids[-1]
        assert isinstance(row.draw(0.3), int)


def test_q_of_is_the_count_over_the_total_and_zero_elsewhere() -> None:
    row = CountRow(np.array([2, 3, 8]), np.array([1, 5, 2]), 8)
    expected = {2: 1 / 8, 3: 5 / 8, 8: 2 / 8}
    assert {token: row.q_of(token) for token in range(12)} == {
        token: expected.get(token, 0.0) for token in range(12)
    }
    assert row.q.tolist() == [1 / 8, 5 / 8, 2 / 8]


def test_q_is_exact() -> None:
    for row in (quantise(distribution(16, 300), 64), quantise_full(distribution(17, 300))):
        exact = [Fraction(int(count), row.total) for count in row.counts]
        assert [Fraction(float(value)) for value in row.q] == exact
        assert sum(exact) == 1


@pytest.mark.parametrize("token", [0, 1, 151_935])
def test_a_one_hot_row_is_certain_of_its_token(token: int) -> None:
    row = one_hot(token)
    assert row.q_of(token) == 1.0
    assert row.q_of(token + 1) == 0.0
    assert row.q_of(token - 1) == 0.0
    assert [row.draw(uniform) for uniform in (0.0, 0.5, ALMOST_ONE)] == [token] * 3


@pytest.mark.parametrize("quantiser", [lambda *args: quantise(args[0], 64, args[1]), quantise_full])
def test_a_row_of_the_first_columns_names_their_ids(quantiser: Callable[..., CountRow]) -> None:
    """A target that knows fewer ids than the drafter cuts the columns, not the list of their ids."""
    row = quantiser(np.array([0.25, 0.75]), np.array([0, 2, 5]))
    assert row.ids.tolist() == [0, 2]
