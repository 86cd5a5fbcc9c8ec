"""Uniforms are a function of their counter: repeatable, distinct, uniform, independent.

The statistics have fixed counters, so they pass or fail for good.
"""

import hashlib
import itertools
import struct
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from workers.randomness import Purpose, uniform

KEY = bytes(range(32))
NUM = 8000


def test_the_same_counter_gives_the_same_number() -> None:
    counter = (KEY, 3, 100, 102, Purpose.ACCEPT)
    assert uniform(*counter) == uniform(*counter)


def test_another_process_gives_the_same_number() -> None:
    program = (
        "from workers.randomness import Purpose, uniform\n"
        "print(uniform(bytes(range(32)), 3, 100, 102, Purpose.ACCEPT).hex())"
    )
    for hash_seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(filter(None, sys.path))}
        run = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert run.stdout.strip() == uniform(KEY, 3, 100, 102, Purpose.ACCEPT).hex()


def test_changing_any_field_changes_the_number() -> None:
    counters = itertools.product(
        [KEY, KEY[:-1], KEY[:-1] + b"\xff", b"\x00" + KEY[1:] + b"\x00"],
        [0, 1, 2, 256, 2**32 - 1],
        [0, 1, 2, 256, 2**32, 2**40],
        [0, 1, 2, 256, 2**32, 2**40],
        Purpose,
    )
    numbers = [uniform(*counter) for counter in counters]
    assert len(set(numbers)) == len(numbers) == 4 * 5 * 6 * 6 * 4


def test_the_purposes_are_the_four_decisions() -> None:
    assert [purpose.name for purpose in Purpose] == ["DRAFT", "ACCEPT", "RECOVER", "BONUS"]
    assert len({purpose.value for purpose in Purpose}) == 4


def test_a_number_has_53_bits_on_the_half_open_interval() -> None:
    numbers = [uniform(KEY, 0, 10, position, Purpose.DRAFT) * 2.0**53 for position in range(NUM)]
    assert all(number.is_integer() and 0 <= number < 2**53 for number in numbers)
    bits = np.array([[int(number) >> bit & 1 for bit in range(53)] for number in numbers])
    deviation = np.abs(bits.mean(axis=0) - 0.5) * 2 * NUM**0.5  # standard deviations, bit by bit
    assert deviation.max() < 4.5


@pytest.mark.parametrize(("digest", "number"), [(b"\xff" * 8, 1.0 - 2.0**-53), (bytes(8), 0.0)])
def test_the_extreme_digests_stay_below_one(
    digest: bytes, number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = SimpleNamespace(digest=lambda: digest)
    monkeypatch.setattr(hashlib, "blake2b", lambda *_, **__: fake)
    assert uniform(KEY, 0, 0, 0, Purpose.ACCEPT) == number


@pytest.mark.parametrize("purpose", Purpose)
def test_the_numbers_of_a_purpose_are_uniform(purpose: Purpose) -> None:
    numbers = [uniform(KEY, 0, position // 4, position, purpose) for position in range(NUM)]
    assert stats.kstest(numbers, "uniform").pvalue > 1e-3


Stream = Callable[[int], float]
STREAMS: dict[str, Stream] = {
    **{
        purpose.name.lower(): lambda i, purpose=purpose: uniform(KEY, 0, i, i, purpose)  # type: ignore[misc]
        for purpose in Purpose
    },
    "another choice": lambda i: uniform(KEY, 1, i, i, Purpose.ACCEPT),
    "another base length": lambda i: uniform(KEY, 0, i + 1, i, Purpose.ACCEPT),
    "the next position": lambda i: uniform(KEY, 0, i, i + 1, Purpose.ACCEPT),
    "another key": lambda i: uniform(KEY[::-1], 0, i, i, Purpose.ACCEPT),
}


def test_any_two_streams_are_uncorrelated_and_jointly_uniform() -> None:
    numbers = {name: np.array([stream(i) for i in range(NUM)]) for name, stream in STREAMS.items()}
    for (first, a), (second, b) in itertools.combinations(numbers.items(), 2):
        table, _, _ = np.histogram2d(a, b, bins=8, range=[[0, 1], [0, 1]])
        assert stats.chisquare(table.ravel()).pvalue > 1e-4, (first, second)
        assert abs(np.corrcoef(a, b)[0, 1]) < 4.5 / NUM**0.5, (first, second)
        assert not (a == b).any(), (first, second)


def test_one_stream_is_not_correlated_with_its_own_past() -> None:
    numbers = np.array([uniform(KEY, 0, 7, position, Purpose.ACCEPT) for position in range(NUM)])
    for lag in (1, 2, 3, 4, 8):
        assert abs(np.corrcoef(numbers[:-lag], numbers[lag:])[0, 1]) < 4.5 / NUM**0.5


@pytest.mark.parametrize("length", [1, 8, 16, 32, 64])
def test_keys_of_up_to_64_bytes_count_in_full(length: int) -> None:
    key = bytes(length)
    changed_last = key[:-1] + b"\x01"
    numbers = {uniform(each, 0, 1, 1, Purpose.DRAFT) for each in (key, changed_last, b"\x01" + key[1:])}
    assert len(numbers) == (2 if length == 1 else 3)


def test_a_longer_key_of_the_same_bytes_is_another_key() -> None:
    assert uniform(b"a", 0, 1, 1, Purpose.DRAFT) != uniform(b"a\x00", 0, 1, 1, Purpose.DRAFT)


def test_what_does_not_fit_the_counter_is_refused_instead_of_wrapped() -> None:
    for choice, base_length, position in [(2**32, 0, 0), (-1, 0, 0), (0, 2**64, 0), (0, 0, -1)]:
        with pytest.raises(struct.error):
            uniform(KEY, choice, base_length, position, Purpose.DRAFT)
    with pytest.raises(ValueError, match="64"):
        uniform(bytes(65), 0, 0, 0, Purpose.DRAFT)
