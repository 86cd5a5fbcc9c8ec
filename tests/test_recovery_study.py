"""The recovery curve says what a record holds: how fast before, how slow behind each blow, and until when."""

from pathlib import Path

import pytest

from cluster.recovery_study import Blow, Record, draw, rates, recoveries


def _record() -> Record:
    """Ten tokens a second, none in 10..13, five in 13..15 and ten again; a second blow at 20 ends it."""
    record = Record(blows=[Blow("drafter-0", 10.0), Blow("target-0", 20.5)])
    for second in range(20):
        speed = 0 if 10 <= second < 13 else 5 if 13 <= second < 15 else 10
        record.tokens += [second + i / 10 for i in range(speed)]
    return record


def test_rates_count_the_tokens_of_whole_bins() -> None:
    assert rates([0.0, 0.5, 1.0, 2.9, 3.1], 3.5) == [2.0, 1.0, 1.0]


def test_a_recovery_is_measured_from_its_blow_until_nine_tenths_are_back() -> None:
    first, second = recoveries(_record(), 25.0)
    assert (first.before, first.lowest, first.seconds) == (10.0, 0.0, 5.0)
    assert (second.before, second.lowest, second.seconds) == (10.0, 0.0, None)


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_the_curve_is_drawn(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"recovery.{kind}"
    draw(_record(), 25.0, "title", file)
    assert file.stat().st_size > 1000
