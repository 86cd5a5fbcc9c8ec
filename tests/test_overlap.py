"""Sessions are split into groups where the closed form says that it pays, and nowhere else."""

from dataclasses import replace

import pytest

from coordinator.overlap import (
    NUM_GROUPS,
    SPLIT_GAIN,
    Load,
    best_groups,
    plain_seconds,
    possible_groups,
    turn_seconds,
)
from protos.pass_cost import PassCost

ALONE = Load(1, 1, length=100, draft_wire_seconds=0.001, target_wire_seconds=0.002)
MANY = Load(16, 16, length=100, draft_wire_seconds=0.001, target_wire_seconds=0.001)


def flat(seconds: float, per_row: float = 0.0) -> PassCost:
    """A pass of one row, and what each further row adds."""
    rows = (1, 2, 4, 8, 16, 32, 64, 1024)
    return PassCost(rows, tuple(seconds + per_row * (n - 1) for n in rows), 0.0, 0.0)


def test_one_groups_turn_is_k_draft_steps_a_verification_and_the_wire() -> None:
    draft, target = flat(0.003), flat(0.04, per_row=0.001)
    assert plain_seconds(target, ALONE) == pytest.approx(0.04 + 0.002)
    for k in range(1, 17):
        seconds = turn_seconds(draft, target, ALONE, k, 1)
        assert seconds == pytest.approx(k * 0.003 + 0.001 + 0.04 + 0.001 * k + 0.002)


def test_rounds_of_many_sessions_are_larger_passes() -> None:
    both = Load(8, 16, length=100, draft_wire_seconds=0.0, target_wire_seconds=0.0)
    seconds = turn_seconds(flat(0.003, per_row=0.001), flat(0.04, per_row=0.001), both, 3, 1)
    assert seconds == pytest.approx(3 * (0.003 + 7 * 0.001) + 0.04 + 63 * 0.001)


def test_the_turn_of_several_groups_is_the_pipelined_bound() -> None:
    """min(M N / (K t_d + t_v + r), N / t_v(B), N / (K t_d(B))), of the M groups' sessions each N tokens."""
    draft, target = flat(0.0005, per_row=0.0005), flat(0.004, per_row=0.0005)  # K = 4: in proportion to rows
    for num_groups in NUM_GROUPS:
        share = -(-16 // num_groups)
        t_d, t_v = 0.0005 * share, 0.0035 + 0.0005 * 5 * share
        expected = max(4 * t_d + t_v + 0.002, num_groups * 4 * t_d, num_groups * t_v)
        assert turn_seconds(draft, target, MANY, 4, num_groups) == pytest.approx(expected)


def test_splitting_pays_where_a_pass_grows_with_its_rows_and_both_sides_take_alike() -> None:
    draft, target = flat(0.00025, per_row=0.00025), flat(0.0002, per_row=0.0002)  # in proportion to rows
    near = replace(MANY, draft_wire_seconds=0.0, target_wire_seconds=0.0)
    assert best_groups(draft, target, near, 4) == 2
    gain = turn_seconds(draft, target, near, 4, 1) / turn_seconds(draft, target, near, 4, 2)
    assert gain == pytest.approx(2.0)


def test_a_long_way_takes_more_groups() -> None:
    draft, target = flat(0.00025, per_row=0.00025), flat(0.0002, per_row=0.0002)
    far = replace(MANY, draft_wire_seconds=0.016)
    assert best_groups(draft, target, far, 4) > 2


@pytest.mark.parametrize(
    ("draft", "target", "load"),
    [
        (flat(0.01), flat(0.04), MANY),  # half the rows take as long
        (flat(0.0001), flat(0.04, per_row=0.001), MANY),  # the target alone is what takes time
        (flat(0.00025, 0.00025), flat(0.0002, 0.0002), replace(MANY, can_overlap=False)),  # the same cores
        (flat(0.00025, 0.00025), flat(0.0002, 0.0002), ALONE),
    ],
)
def test_where_it_does_not_pay_there_is_one_group(draft: PassCost, target: PassCost, load: Load) -> None:
    assert best_groups(draft, target, load, 4) == 1


def test_no_more_groups_than_sessions() -> None:
    assert possible_groups(replace(MANY, num_at_drafter=3)) == [1, 2, 3]
    assert possible_groups(replace(MANY, num_at_drafter=1)) == [1]


def test_the_number_of_groups_is_kept_until_another_is_clearly_better() -> None:
    draft, target = flat(0.001), flat(0.01, per_row=0.0001)
    for last in (1, 2, 3):
        chosen = best_groups(draft, target, MANY, 4, last)
        seconds = [turn_seconds(draft, target, MANY, 4, m) for m in NUM_GROUPS]
        ours = turn_seconds(draft, target, MANY, 4, chosen)
        assert ours < SPLIT_GAIN * min(seconds)
        if turn_seconds(draft, target, MANY, 4, last) < SPLIT_GAIN * min(seconds):
            assert chosen == last
