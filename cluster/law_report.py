"""What samples say about the law: the findings of a check, and the verdict that they add up to.

Knows what was scored, sampled and counted, as plain values; no wire, no clock, no terminal. Each finding can
condemn by itself, and none can acquit alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest

from cluster.joint_law import (
    ChiSquare,
    LawTree,
    Partition,
    Tokens,
    acceptance_p_value,
    chi_square,
    pairs_p_value,
)

FALSE_ALARM = 1e-4  # the chance that a sound deployment is condemned, all tests together
NUM_TESTS = 3
LEVEL = FALSE_ALARM / NUM_TESTS
# Samples in a cell: the fewer, the finer the law is seen, and the heavier the far tail of the chi-square. At
# this, 4 to 7 of 100,000 simulated sound checks fell below a level of 3.3.
LEAST_EXPECTED = 12.0
LEAST_DRAFTED = 0.5  # of the compared tokens, for the check to say something about drafting


class Verdict(Enum):
    """What a check finds."""

    CONSISTENT = "consistent"
    INCONSISTENT = "inconsistent"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one request, and what its usage said."""

    samples: tuple[Tokens, ...]  # D tokens each, or fewer up to an end token
    num_verified: int  # of the tokens behind each sample's first: those of rounds with draft tokens
    num_ended: int  # choices that an end token ended, within the D tokens or behind them
    num_cut: int  # choices that stop before their tokens are complete, and not by an end token
    num_accepted_per_pos: tuple[int, ...]  # one for each position of the longest block
    num_draft_tokens: int
    num_judged: int
    mean_min_pq: float
    num_mismatches: int
    num_unusable: int


@dataclass(frozen=True, slots=True)
class Impossible:
    """A token that was sampled where its probability is zero."""

    prefix: Tokens
    token: int


@dataclass(frozen=True, slots=True)
class LawReport:
    """The findings. p-values are of the tests that the text says."""

    num_wanted: int  # samples
    num_samples: int
    depth: int  # D
    num_rows: int  # prefixes whose row was asked for
    num_checked: int  # sampled tokens whose row is known
    num_tokens: int  # sampled tokens
    num_verified: int  # of the num_later: those of rounds with draft tokens
    num_later: int  # sampled tokens behind each sample's first
    impossible: tuple[Impossible, ...]
    partition: Partition
    counts: tuple[int, ...]  # of the cells
    chi_square: ChiSquare
    pairs_p_value: float
    num_judged: int
    num_accepted_per_pos: tuple[int, ...]  # one for each position of the longest block
    expected_accepted: float
    acceptance_p_value: float | None  # None where the rule's chances are not Σ min(p, q)
    num_draft_tokens: int
    num_mismatches: int
    num_unusable: int
    num_cut: int  # samples that stop before their tokens are complete, and not by an end token
    num_targets: int
    differing_targets: tuple[str, ...]  # whose p behind the prompt is not the first one's
    is_drafting: bool  # whether the deployment is meant to draft

    @property
    def num_compared(self) -> int:
        """Samples in cells: all that are not cut within the D tokens."""
        return sum(self.counts)

    @property
    def num_accepted(self) -> int:
        """Of all draft positions."""
        return sum(self.num_accepted_per_pos)

    @property
    def share_verified(self) -> float:
        """Of the tokens behind each sample's first, those that verification produced."""
        return self.num_verified / self.num_later if self.num_later else 0.0

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong, a sentence each."""
        faults = []
        if self.impossible:
            faults.append(f"{len(self.impossible)} sampled tokens have probability zero.")
        if self.chi_square.p_value < LEVEL:
            faults.append("The sampled sequences do not follow p.")
        if self.pairs_p_value < LEVEL:
            faults.append("Samples of one request agree more often than independent ones do.")
        if self.acceptance_p_value is not None and self.acceptance_p_value < LEVEL:
            faults.append("Draft tokens are not kept as often as p and q say.")
        if self.num_mismatches:
            faults.append(f"{self.num_mismatches} draft tokens are not those that their rows give.")
        if self.num_unusable:
            faults.append(f"{self.num_unusable} rows of q were no distributions.")
        if self.num_cut:
            faults.append(f"{self.num_cut} samples end early, without an end token.")
        if self.differing_targets:
            faults.append(
                f"Behind the prompt p of {', '.join(self.differing_targets)} is not that of the first target."
            )
        return tuple(faults)

    @property
    def doubts(self) -> tuple[str, ...]:
        """What keeps the check from saying more, a sentence each."""
        doubts = []
        if self.num_samples < self.num_wanted:
            doubts.append(f"Time was up after {self.num_samples} of {self.num_wanted} samples.")
        if self.is_drafting and self.share_verified < LEAST_DRAFTED:
            doubts.append(
                f"Only {self.share_verified:.0%} of the compared tokens come from rounds with drafts."
            )
        return tuple(doubts)

    @property
    def limits(self) -> tuple[str, ...]:
        """What no check of such a deployment can say, a sentence each."""
        if self.num_draft_tokens:
            return ()
        return ("Nothing was drafted, so this says nothing about verification.",)

    @property
    def verdict(self) -> Verdict:
        """The findings in one word."""
        if self.faults:
            return Verdict.INCONSISTENT
        return Verdict.INCONCLUSIVE if self.doubts else Verdict.CONSISTENT


def report(
    tree: LawTree,
    batches: Sequence[Batch],
    impossible: Sequence[Impossible],
    *,
    depth: int,
    num_wanted: int,
    num_extra_rows: int,
    num_checked: int,
    num_targets: int,
    differing_targets: tuple[str, ...],
    longest_block: int,
    has_token_rule: bool,
) -> LawReport:
    """Compare what was sampled with the tree.

    `num_checked` sampled tokens were looked up in a row of the tree or in one of `num_extra_rows` others;
    `longest_block` is the deployment's K.
    Under another rule than the token rule Σ min(p, q) is not the chance of being kept.
    """
    samples = [sample for batch in batches for sample in batch.samples]
    whole = [[sample for sample in batch.samples if tree.is_whole(sample)] for batch in batches]
    partition = tree.partition(LEAST_EXPECTED / max(sum(map(len, whole)), 1))
    counts = partition.counts(sample for batch in whole for sample in batch)
    pairs = [partition.index_of(sample) for batch in whole for sample in batch[: len(batch) // 2 * 2]]
    chances = [(batch.num_judged, batch.mean_min_pq) for batch in batches]
    per_position = zip_longest(*(batch.num_accepted_per_pos for batch in batches), fillvalue=0)
    num_accepted_per_pos = tuple(map(sum, per_position))
    # A round that an end token cuts may have kept all of its drafts.
    num_unseen = sum(batch.num_ended for batch in batches) * max(depth, longest_block)
    p_value = acceptance_p_value(sum(num_accepted_per_pos), chances, num_unseen)
    return LawReport(
        num_wanted=num_wanted,
        num_samples=len(samples),
        depth=depth,
        num_rows=len(tree.rows) + num_extra_rows,
        num_checked=num_checked,
        num_tokens=sum(map(len, samples)),
        num_verified=sum(batch.num_verified for batch in batches),
        num_later=sum(len(sample[1:]) for sample in samples),
        impossible=tuple(impossible),
        partition=partition,
        counts=tuple(counts.tolist()),
        chi_square=chi_square(counts, partition.masses),
        pairs_p_value=pairs_p_value(pairs, partition.masses),
        num_judged=sum(n for n, _ in chances),
        num_accepted_per_pos=num_accepted_per_pos,
        expected_accepted=sum(n * mean for n, mean in chances),
        acceptance_p_value=p_value if has_token_rule else None,
        num_draft_tokens=sum(batch.num_draft_tokens for batch in batches),
        num_mismatches=sum(batch.num_mismatches for batch in batches),
        num_unusable=sum(batch.num_unusable for batch in batches),
        num_cut=sum(batch.num_cut for batch in batches),
        num_targets=num_targets,
        differing_targets=differing_targets,
        is_drafting=longest_block > 0,
    )
