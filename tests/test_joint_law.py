"""The tree of prefixes, its cells and the three tests, against enumeration and simulation. No server runs."""

import itertools
from collections import defaultdict

import numpy as np
import pytest
from scipy import stats

from cluster.joint_law import (
    Kind,
    LawTree,
    Partition,
    Row,
    Tokens,
    acceptance_p_value,
    chi_square,
    pairs_p_value,
    total_variation,
)
from tests.laws import plain_law, random_table
from workers.sampling import SamplingSettings, probabilities

V, D, END = 5, 3, 4
PROMPT = (1, 2)
TABLE = random_table(V, 11, spread=1.5)
SETTINGS = SamplingSettings(top_k=4)


def row_behind(prefix: Tokens) -> Row:
    p = probabilities(np.asarray(TABLE((*PROMPT, *prefix)))[None], SETTINGS)[0]
    return Row(np.flatnonzero(p), p[p > 0.0])


def grown(least_mass: float, end_token_ids: tuple[int, ...] = ()) -> LawTree:
    tree = LawTree(depth=D, least_mass=least_mass, end_token_ids=end_token_ids)
    while (prefix := tree.next_prefix()) is not None:
        tree.add(prefix, row_behind(prefix))
    return tree


def up_to_end(sequence: Tokens) -> Tokens:
    """What generation makes of it when END ends a text."""
    return sequence[: sequence.index(END) + 1] if END in sequence else sequence


@pytest.mark.parametrize("end_token_ids", [(), (END,)])
@pytest.mark.parametrize("least_node", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("least_cell", [0.0, 0.01, 0.1, 0.6])
def test_a_cells_mass_is_that_of_the_sequences_in_it(
    least_node: float, least_cell: float, end_token_ids: tuple[int, ...]
) -> None:
    partition = grown(least_node, end_token_ids).partition(least_cell)
    masses: dict[int, float] = defaultdict(float)
    for sequence, mass in plain_law(TABLE, PROMPT, V, D, SETTINGS).items():
        masses[partition.index_of(up_to_end(sequence) if end_token_ids else sequence)] += mass
    enumerated = [masses[i] for i in range(len(partition.cells))]
    assert enumerated == pytest.approx(partition.masses.tolist(), abs=1e-12)
    assert partition.masses.sum() == pytest.approx(1.0, abs=1e-12)
    positive = partition.masses[partition.masses > 0.0]
    assert positive.size == 1 or positive.min() >= least_cell


def test_rows_are_asked_for_by_p_alone_from_the_likeliest_on() -> None:
    law = plain_law(TABLE, PROMPT, V, D, SETTINGS)

    def mass_of(prefix: Tokens) -> float:
        return sum(mass for sequence, mass in law.items() if sequence[: len(prefix)] == prefix)

    tree = LawTree(depth=D, least_mass=0.05, end_token_ids=(END,))
    asked: list[Tokens] = []
    while (prefix := tree.next_prefix()) is not None:
        tree.add(prefix, row_behind(prefix))
        asked.append(prefix)
    prefixes = [p for n in range(D) for p in itertools.product(range(V), repeat=n) if END not in p]
    assert set(asked) == {prefix for prefix in prefixes if mass_of(prefix) >= 0.05}
    masses = [mass_of(prefix) for prefix in asked]
    assert masses == sorted(masses, reverse=True)


def test_a_sequence_that_is_cut_short_has_no_cell() -> None:
    partition = grown(0.0).partition(0.0)
    with pytest.raises(ValueError, match="cut short"):
        partition.index_of((0, 1))


@pytest.mark.parametrize(
    ("sample", "is_whole"),
    [((), False), ((0, 1), False), ((0, 1, 2), True), ((0, 1, 2, 3), True), ((0, END), True), ((END,), True)],
)
def test_a_sequence_is_whole_with_all_its_tokens_or_an_end_token(sample: Tokens, is_whole: bool) -> None:
    assert grown(0.0, (END,)).is_whole(sample) is is_whole


def test_rows_are_as_far_apart_as_their_probabilities() -> None:
    first = Row(np.array([0, 2, 3]), np.array([0.5, 0.3, 0.2]))
    second = Row(np.array([0, 1, 3]), np.array([0.4, 0.4, 0.2]))
    assert total_variation(first, second) == pytest.approx(0.4)
    assert total_variation(first, first) == 0.0


def test_a_token_without_probability_lies_in_no_cell_that_begins_with_it() -> None:
    partition = grown(0.0).partition(0.0)
    [impossible] = set(range(V)) - set(row_behind(()).ids.tolist())
    assert partition.cells[partition.index_of((impossible, 0, 0))].kind is not Kind.BEGINS


def test_the_p_value_of_a_row_is_uniform_where_samples_follow_it() -> None:
    rng = np.random.default_rng(3)
    masses = grown(0.05).partition(0.02).masses
    p_values = [chi_square(rng.multinomial(800, masses / masses.sum()), masses).p_value for _ in range(400)]
    assert stats.kstest(p_values, "uniform").pvalue > 1e-3


def test_chi_square_sees_a_law_that_is_off_and_leaves_out_what_cannot_occur() -> None:
    masses = np.array([0.5, 0.3, 0.2, 0.0])
    right, wrong = np.array([500, 300, 200, 0]), np.array([560, 300, 140, 0])
    assert chi_square(right, masses) == chi_square(right + np.array([0, 0, 0, 7]), masses)
    assert chi_square(right, masses).p_value == pytest.approx(1.0)
    expected = 60**2 / 500 + 60**2 / 200
    assert chi_square(wrong, masses).statistic == pytest.approx(expected)
    assert chi_square(wrong, masses).degrees_of_freedom == 2
    assert chi_square(np.array([9]), np.array([1.0])).p_value == 1.0


def test_neighbours_that_share_their_numbers_agree_too_often() -> None:
    rng = np.random.default_rng(4)
    masses = np.array([0.4, 0.3, 0.2, 0.1])
    alone = rng.choice(4, p=masses, size=1000)
    assert pairs_p_value(alone.tolist(), masses) > 1e-3
    assert pairs_p_value(np.repeat(alone[:500], 2).tolist(), masses) < 1e-10
    assert pairs_p_value([], masses) == 1.0


def test_acceptance_is_compared_with_its_chances() -> None:
    chances = [(100, 0.9), (100, 0.5), (100, 0.1)]
    deviation = np.sqrt(9 + 25 + 9)
    assert acceptance_p_value(150, chances) == 1.0
    assert acceptance_p_value(177, chances) == pytest.approx(2 * stats.norm.sf(27 / deviation))
    assert acceptance_p_value(123, chances) == pytest.approx(2 * stats.norm.sf(27 / deviation))


def test_accepted_tokens_that_an_end_token_cut_off_may_be_missing_but_not_extra() -> None:
    chances = [(300, 0.5)]
    assert acceptance_p_value(130, chances, num_unseen=20) == 1.0
    assert acceptance_p_value(170, chances, num_unseen=20) == acceptance_p_value(170, chances)


def test_tokens_that_are_kept_for_sure_must_all_be_kept() -> None:
    assert acceptance_p_value(50, [(50, 1.0)]) == 1.0
    assert acceptance_p_value(49, [(50, 1.0)]) == 0.0


def test_a_partition_without_rows_has_one_cell() -> None:
    assert Partition([()], [], 0).counts([(1, 2)]).tolist() == [1]
