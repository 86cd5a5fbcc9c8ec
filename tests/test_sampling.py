"""The settings mean what transformers' own processors mean, and what has no distribution is not given one.

transformers' warpers are run in the order of its `generate`: temperature, top-k, top-p, min-p.
"""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from workers.distributions import FloatArray
from workers.sampling import NUM_GROUPS, SamplingSettings, distribution, probabilities

INFINITY = math.inf


def by_transformers(logits: NDArray[np.floating], settings: SamplingSettings) -> FloatArray:
    """Each row alone, in float64."""
    warpers = LogitsProcessorList()
    warpers.append(TemperatureLogitsWarper(float(settings.temperature)))
    if settings.top_k:
        warpers.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1.0:
        warpers.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p > 0.0:
        warpers.append(MinPLogitsWarper(settings.min_p))
    no_ids = torch.LongTensor(1, 0)
    scores = [torch.from_numpy(np.asarray(row, dtype=np.float64))[None] for row in logits]
    laws = [warpers(no_ids, row).softmax(dim=-1).numpy() for row in scores]
    return np.concatenate(laws)


def random_logits(seed: int, num_rows: int, size: int, spread: float = 3.0) -> FloatArray:
    """Rows of normal logits; every other row has minus infinity in a fifth of its places."""
    generator = np.random.default_rng(seed)
    logits = spread * generator.normal(size=(num_rows, size))
    removed = generator.random((num_rows, size)) < 0.2
    removed[::2] = False
    removed[:, generator.integers(size)] = False
    logits[removed] = -INFINITY
    return logits


ALONE = [
    *(SamplingSettings(temperature=value) for value in (0.05, 0.7, 1.0, 1.5, 100.0)),
    *(SamplingSettings(top_k=value) for value in (1, 2, 4, 50, 1_000_000)),
    *(SamplingSettings(top_p=value) for value in (1e-9, 0.1, 0.5, 0.9, 0.999)),
    *(SamplingSettings(min_p=value) for value in (0.001, 0.05, 0.5, 1.0)),
]
TOGETHER = [
    SamplingSettings(temperature, top_k, top_p, min_p)
    for temperature in (0.6, 1.7)
    for top_k in (3, 40)
    for top_p in (0.5, 0.95)
    for min_p in (0.02, 0.3)
]


@pytest.mark.parametrize("settings", [*ALONE, *TOGETHER], ids=repr)
def test_the_law_is_that_of_transformers(settings: SamplingSettings) -> None:
    for size in (5, 63, 1000):
        logits = random_logits(size, 6, size)
        found, wanted = probabilities(logits, settings), by_transformers(logits, settings)
        assert ((found > 0.0) == (wanted > 0.0)).all()
        assert found == pytest.approx(wanted, rel=1e-12, abs=0.0)


@pytest.mark.parametrize("settings", [SamplingSettings(), SamplingSettings(0.8, 50, 0.9, 0.05), TOGETHER[-1]])
def test_the_law_is_that_of_transformers_for_a_whole_vocabulary(settings: SamplingSettings) -> None:
    logits = random_logits(1, 4, 50_000)
    found, wanted = probabilities(logits, settings), by_transformers(logits, settings)
    assert ((found > 0.0) == (wanted > 0.0)).all()
    assert np.allclose(found, wanted, rtol=1e-11, atol=0.0)


def test_the_order_of_the_settings_matters_and_is_transformers() -> None:
    """Temperature before top-p, top-k before top-p, top-p before min-p: each swap would keep other tokens."""
    logits = np.log([[0.4, 0.3, 0.2, 0.1]])
    # after top-k = 3 the masses are 4/9, 3/9, 2/9: top-p = 0.76 keeps two of them, and three of the four
    assert np.count_nonzero(probabilities(logits, SamplingSettings(top_k=3, top_p=0.76))) == 2
    assert np.count_nonzero(probabilities(logits, SamplingSettings(top_p=0.76))) == 3
    # temperature 1/2 squares: 16/30, 9/30, 4/30, 1/30
    assert np.count_nonzero(probabilities(logits, SamplingSettings(temperature=0.5, top_p=0.75))) == 2
    assert np.count_nonzero(probabilities(logits, SamplingSettings(temperature=0.5, min_p=0.5))) == 2
    assert np.count_nonzero(probabilities(logits, SamplingSettings(min_p=0.5))) == 3


@pytest.mark.parametrize("size", [5, 1000, 50_000])
def test_temperature_zero_is_the_likeliest_token(size: int) -> None:
    logits = random_logits(2, 5, size)
    found = probabilities(logits, SamplingSettings(temperature=0.0, top_k=3, top_p=0.5, min_p=0.1))
    assert (found.argmax(axis=1) == logits.argmax(axis=1)).all()
    assert ((found == 0.0) | (found == 1.0)).all()
    assert (found.sum(axis=1) == 1.0).all()


def test_temperature_zero_takes_the_first_of_equals() -> None:
    found = probabilities(np.array([[1.0, 3.0, 3.0], [0.0, 0.0, 0.0]]), SamplingSettings(temperature=0.0))
    assert found.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_ties_with_the_kth_logit_stay() -> None:
    logits = np.array([[1.0, 2.0, 2.0, 2.0, 0.0], [5.0, 5.0, 1.0, 1.0, 1.0]])
    settings = SamplingSettings(top_k=2)
    found = probabilities(logits, settings)
    assert (found > 0.0).tolist() == [[False, True, True, True, False], [True, True, False, False, False]]
    assert found == pytest.approx(by_transformers(logits, settings), rel=1e-14, abs=0.0)


@pytest.mark.parametrize("size", [NUM_GROUPS, NUM_GROUPS + 1, 2 * NUM_GROUPS, 10_000])
@pytest.mark.parametrize("top_k", [1, 50, NUM_GROUPS - 1, NUM_GROUPS, NUM_GROUPS + 1])
def test_ties_stay_in_a_large_vocabulary_too(size: int, top_k: int) -> None:
    """Logits of few bits, as a bfloat16 model gives them: many equal the k-th."""
    logits = np.round(4.0 * random_logits(8, 2, size)) / 4.0
    settings = SamplingSettings(top_k=top_k)
    found, wanted = probabilities(logits, settings), by_transformers(logits, settings)
    assert ((found > 0.0) == (wanted > 0.0)).all()
    assert np.allclose(found, wanted, rtol=1e-12, atol=0.0)


def kept_by_sorting(weights: FloatArray, top_p: float) -> NDArray[np.bool_]:
    """Top-p by its definition: the least likely go, of equals the first, while their sum is at most 1 - p."""
    ascending = np.argsort(weights, kind="stable")
    dropped = np.cumsum(weights[ascending]) <= 1.0 - top_p
    dropped[-1] = False
    kept = np.ones(weights.size, dtype=bool)
    kept[ascending[dropped]] = False
    return kept


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("digits", [0, 1, 6])
@pytest.mark.parametrize("top_p", [1e-300, 1e-3, 0.3, 0.5, 0.9, 0.95, 0.999, 1.0 - 1e-12])
def test_top_p_keeps_what_a_sort_of_everything_would_keep(spread: float, digits: int, top_p: float) -> None:
    """From flat rows to sure ones, and with many equals, of which the highest ids stay."""
    for size in (2, 64, 3000):
        logits = np.round(random_logits(9, 3, size, spread), digits)
        whole = probabilities(logits, SamplingSettings())
        for row, weights in zip(logits, whole, strict=True):
            law = distribution(row, SamplingSettings(top_p=top_p))
            kept = kept_by_sorting(weights, top_p)
            assert law.ids.tolist() == np.flatnonzero(kept).tolist()
            expected = weights[kept] / weights[kept].sum()
            assert np.allclose(law.probabilities, expected, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(
    ("settings", "num_ids"),
    [
        (SamplingSettings(), 50_000),
        (SamplingSettings(temperature=0.0), 1),
        (SamplingSettings(temperature=0.0, top_k=50), 1),
        (SamplingSettings(top_k=50), 50),
        (SamplingSettings(0.7, 50, 0.95, 0.1), 5),
    ],
)
def test_a_distribution_names_the_kept_ids_alone(settings: SamplingSettings, num_ids: int) -> None:
    """So that what is done with it need not touch the others."""
    logits = random_logits(1, 1, 50_000)
    law = distribution(logits[0], settings)
    dense = probabilities(logits, settings)[0]
    assert law.ids.size == num_ids
    assert (np.diff(law.ids) > 0).all()
    assert law.at(np.arange(50_000)).tolist() == dense.tolist()


def test_fewer_possible_tokens_than_top_k() -> None:
    logits = np.array([[1.0, -INFINITY, -INFINITY, 1.0]])
    assert probabilities(logits, SamplingSettings(top_k=3)).tolist() == [[0.5, 0.0, 0.0, 0.5]]


def test_minus_infinity_is_never_possible() -> None:
    logits = random_logits(3, 8, 200)
    for settings in (*ALONE, *TOGETHER, SamplingSettings(temperature=0.0)):
        assert (probabilities(logits, settings)[logits == -INFINITY] == 0.0).all()


BAD_ROWS = {
    "nan": [0.0, math.nan, 1.0],
    "nan behind the peak": [math.nan, 5.0, 1.0],
    "plus infinity": [0.0, INFINITY, 1.0],
    "both infinities": [-INFINITY, INFINITY, 1.0],
    "nan and infinity": [math.nan, INFINITY, 1.0],
    "nothing possible": [-INFINITY] * 3,
}


@pytest.mark.parametrize("bad", BAD_ROWS.values(), ids=BAD_ROWS)
@pytest.mark.parametrize(
    "settings", [SamplingSettings(), SamplingSettings(temperature=0.0), SamplingSettings(0.7, 2, 0.9, 0.1)]
)
def test_a_row_without_a_distribution_becomes_nan_and_its_neighbours_do_not(
    bad: list[float], settings: SamplingSettings
) -> None:
    good = [0.3, 0.2, -1.0]
    found = probabilities(np.array([good, bad, good]), settings)
    assert np.isnan(found[1]).all()
    alone = probabilities(np.array([good]), settings)[0]
    assert np.array_equal(found[0], alone)
    assert np.array_equal(found[2], alone)


@pytest.mark.parametrize("settings", [SamplingSettings(), *TOGETHER], ids=repr)
def test_a_row_does_not_depend_on_its_neighbours(settings: SamplingSettings) -> None:
    """Bit for bit: p of a position depends on its own logits only."""
    logits = random_logits(4, 7, 500)
    logits[3] *= 1000.0
    together = probabilities(logits, settings)
    for row, found in zip(logits, together, strict=True):
        assert np.array_equal(probabilities(row[None], settings)[0], found)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-6, 100.0])
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_extreme_temperatures_give_distributions_without_warnings(temperature: float, scale: float) -> None:
    logits = random_logits(5, 4, 100) * scale
    found = probabilities(logits, SamplingSettings(temperature=temperature))
    assert found.sum(axis=1) == pytest.approx(np.ones(4), abs=1e-14)
    assert (found.argmax(axis=1) == logits.argmax(axis=1)).all()
    if temperature < 1e-5 or scale > 1.0:
        assert found.max(axis=1) == pytest.approx(np.ones(4), abs=1e-14)


def test_a_tiny_temperature_shares_between_equals() -> None:
    found = probabilities(np.array([[2.0, 1.0, 2.0]]), SamplingSettings(temperature=1e-300))
    assert found.tolist() == [[0.5, 0.0, 0.5]]


def test_large_logits_do_not_overflow() -> None:
    found = probabilities(np.array([[1e4, 1e4 - 1.0, -1e4]]), SamplingSettings())
    assert found[0] == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.e), 0.0], abs=1e-15)


def test_strict_settings_leave_the_likeliest_token() -> None:
    logits = random_logits(6, 5, 300)
    for settings in (SamplingSettings(top_k=1), SamplingSettings(top_p=1e-300), SamplingSettings(min_p=1.0)):
        found = probabilities(logits, settings)
        assert (found.argmax(axis=1) == logits.argmax(axis=1)).all()
        assert (np.count_nonzero(found, axis=1) == 1).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_logits_of_any_precision_give_float64_and_stay_as_they_were(dtype: type[np.floating]) -> None:
    logits = np.array([[0.5, -1.25, 3.0]], dtype=dtype)
    before = logits.copy()
    found = probabilities(logits, SamplingSettings(0.7, 2, 0.9, 0.1))
    assert found.dtype == np.float64
    assert np.array_equal(found, probabilities(before.astype(np.float64), SamplingSettings(0.7, 2, 0.9, 0.1)))
    assert np.array_equal(logits, before)


def test_every_row_sums_to_one() -> None:
    for settings in (*ALONE, *TOGETHER):
        found = probabilities(random_logits(7, 4, 2000), settings)
        assert np.abs(found.sum(axis=1) - 1.0).max() < 1e-14
        assert (found >= 0.0).all()


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("temperature", -0.1, "100"),
        ("temperature", 100.5, "100"),
        ("temperature", math.nan, "100"),
        ("temperature", math.inf, "100"),
        ("top_k", -1, "0"),
        ("top_p", 0.0, "1"),
        ("top_p", -0.5, "1"),
        ("top_p", 1.01, "1"),
        ("top_p", math.nan, "1"),
        ("min_p", -0.01, "1"),
        ("min_p", 1.01, "1"),
        ("min_p", math.nan, "1"),
    ],
)
def test_a_refusal_names_the_field_the_value_and_the_limit(field: str, value: float, limit: str) -> None:
    with pytest.raises(ValueError, match=field) as refusal:
        SamplingSettings(**{field: value})  # type: ignore[arg-type]
    message = str(refusal.value)
    assert str(value) in message
    assert limit in message.replace(str(value), "")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (0.0, 5e-324, 100.0)),
        *(("top_k", value) for value in (0, 1)),
        *(("top_p", value) for value in (5e-324, 1.0)),
        *(("min_p", value) for value in (0.0, 1.0)),
    ],
)
def test_the_limits_themselves_are_allowed(field: str, value: float) -> None:
    assert getattr(SamplingSettings(**{field: value}), field) == value  # type: ignore[arg-type]
