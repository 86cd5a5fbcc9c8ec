"""What sessions count, and how it is said in the public messages. Arithmetic only."""

from dataclasses import dataclass, field, fields

from protos.control_pb2 import Totals
from protos.inference_pb2 import RoundTimes, Usage


@dataclass(slots=True)
class Tally:
    """What a request counts. Tokens cut by an end token or max_tokens are neither completed nor accepted."""

    num_completion_tokens: int = 0
    num_rounds: int = 0
    num_drafts: int = 0  # rounds with at least one draft token
    num_draft_tokens: int = 0
    num_accepted_per_pos: list[int] = field(default_factory=list)
    num_q_bytes: int = 0
    num_fallbacks: int = 0  # rounds that went without drafts because the drafter failed
    num_unusable_rows: int = 0  # rows of q that were judged as one-hot
    num_judged_tokens: int = 0  # draft tokens up to the first rejection of their round
    sum_min_pq: float = 0.0  # over judged tokens
    num_redraw_mismatches: int = 0
    num_migrations: int = 0
    num_timed_rounds: int = 0  # see RoundTimes
    draft_ns: int = 0
    wire_ns: int = 0
    target_ns: int = 0
    total_ns: int = 0

    @property
    def num_accepted_tokens(self) -> int:
        """Of all draft positions."""
        return sum(self.num_accepted_per_pos)

    def count_accepted(self, num_drafts: int, positions: list[int]) -> None:
        """Of K draft tokens those at `positions` were accepted and committed."""
        per_pos = self.num_accepted_per_pos
        per_pos.extend([0] * (num_drafts - len(per_pos)))
        for i in positions:
            per_pos[i] += 1

    def add(self, other: "Tally") -> None:
        """Sum up."""
        for name in (f.name for f in fields(self) if f.name != "num_accepted_per_pos"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.num_accepted_per_pos.extend(
            [0] * (len(other.num_accepted_per_pos) - len(self.num_accepted_per_pos))
        )
        for i, count in enumerate(other.num_accepted_per_pos):
            self.num_accepted_per_pos[i] += count


def usage_of(tally: Tally, num_prompt_tokens: int) -> Usage:
    """The request's account. A rate of nothing is absent."""
    usage = Usage(
        num_prompt_tokens=num_prompt_tokens,
        num_completion_tokens=tally.num_completion_tokens,
        num_rounds=tally.num_rounds,
        num_drafts=tally.num_drafts,
        num_draft_tokens=tally.num_draft_tokens,
        num_accepted_tokens=tally.num_accepted_tokens,
        num_accepted_tokens_per_pos=tally.num_accepted_per_pos,
        num_q_bytes=tally.num_q_bytes,
        num_fallbacks=tally.num_fallbacks,
        num_unusable_rows=tally.num_unusable_rows,
        num_judged_tokens=tally.num_judged_tokens,
        num_redraw_mismatches=tally.num_redraw_mismatches,
        num_migrations=tally.num_migrations,
        times=RoundTimes(
            num_rounds=tally.num_timed_rounds,
            draft_ns=tally.draft_ns,
            wire_ns=tally.wire_ns,
            target_ns=tally.target_ns,
            total_ns=tally.total_ns,
        ),
    )
    if tally.num_draft_tokens:
        usage.acceptance_rate = tally.num_accepted_tokens / tally.num_draft_tokens
        usage.mean_acceptance_length = 1.0 + tally.num_accepted_tokens / tally.num_drafts
    if tally.num_judged_tokens:
        usage.mean_min_pq = tally.sum_min_pq / tally.num_judged_tokens
    return usage


def totals_of(tally: Tally, num_requests: int) -> Totals:
    """The account of all requests."""
    return Totals(
        num_requests=num_requests,
        num_completion_tokens=tally.num_completion_tokens,
        num_rounds=tally.num_rounds,
        num_drafts=tally.num_drafts,
        num_draft_tokens=tally.num_draft_tokens,
        num_accepted_tokens=tally.num_accepted_tokens,
        num_fallbacks=tally.num_fallbacks,
        num_unusable_rows=tally.num_unusable_rows,
        num_redraw_mismatches=tally.num_redraw_mismatches,
        num_migrations=tally.num_migrations,
    )
