"""A session: one sequence being generated. Its committed tokens are the only truth; workers hold copies.

Knows tokens, rounds and counts; sends nothing and waits for nothing. Committing a verdict is the one thing
that changes the text, and it happens here.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.acceptance import Likeness
from coordinator.draft_length import DraftLength
from coordinator.usage import Tally
from protos.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    ORIGIN_ACCEPTED,
    ORIGIN_BONUS,
    ORIGIN_PLAIN,
    ORIGIN_RECOVERED,
    FinishReason,
    Origin,
)
from protos.prefix import TokenPrefix
from protos.worker_pb2 import Rule, Sampling, SessionState, VerifyResult


@dataclass(slots=True)
class Lap:
    """The round at hand: the K that was chosen for it, and where its time goes."""

    begun_ns: int = 0
    num_asked: int = 0  # draft tokens
    draft_ns: int = 0  # at the drafter
    target_ns: int = 0  # at the target
    wire_ns: int = 0  # beyond that, from asking to an answer: round trips, attempts that failed, pauses

    def count_draft(self, round_trip_ns: int, worker_ns: int) -> None:
        """An answer of the drafter's, which may say any time, but had the task no longer than it was away."""
        worker_ns = min(worker_ns, round_trip_ns)
        self.draft_ns += worker_ns
        self.wire_ns += round_trip_ns - worker_ns

    def count_target(self, round_trip_ns: int, worker_ns: int) -> None:
        """An answer of the target's."""
        self.target_ns += worker_ns
        self.wire_ns += max(0, round_trip_ns - worker_ns)


@dataclass(slots=True)
class Seat:
    """What one worker is believed to hold of one session. Wrong beliefs cost a message, never a token."""

    epoch: int = 0
    length: int = 0

    def state(self, session: "Session", epoch: int, timeout_seconds: float) -> SessionState:
        """Where the session stands, with the tokens that a worker in this life may lack."""
        start = self.length if self.epoch == epoch else 0
        if not 0 <= start <= len(session.tokens):  # a faulty worker says anything
            start = 0
        return SessionState(
            session=session.id,
            epoch=epoch,
            round=session.round,
            base_length=len(session.tokens),
            start=start,
            start_hash=session.tokens.hash_at(start),
            tokens=session.tokens.pack_since(start),
            timeout_ns=int(timeout_seconds * 1e9),
        )


@dataclass(slots=True, eq=False)
class Session:
    """One sample of one request, from its prompt to its end."""

    id: str  # contains the coordinator's id and life
    choice: int
    seed: int
    tokens: TokenPrefix  # the prompt first
    num_prompt_tokens: int
    max_tokens: int
    max_length: int  # of the target's context
    end_token_ids: frozenset[int]
    sampling: Sampling
    rule: "Rule"
    num_draft_tokens: int  # K wanted; the most, where `draft_length` chooses
    tally: Tally
    draft_length: DraftLength | None = None  # what chooses K; None: it is as wanted
    likeness: Likeness = field(default_factory=Likeness)
    round: int = 0
    num_migrations: int = 0  # from one target to another
    finish_reason: "FinishReason | None" = None
    target_seat: Seat = field(default_factory=Seat)
    draft_seat: Seat = field(default_factory=Seat)
    lap: Lap = field(default_factory=Lap)
    wants_drafts: bool = field(init=False)  # as it began, whatever became of its drafter
    draft_key: bytes = field(init=False)  # from the seed one way: a drafter cannot see the target's coins

    def __post_init__(self) -> None:
        """Fix what was asked for, and the drafter's key."""
        self.wants_drafts = self.num_draft_tokens > 0
        seed = self.seed.to_bytes(8, "little")
        self.draft_key = hashlib.blake2b(seed, digest_size=16, person=b"outrider draft").digest()

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be committed."""
        num_completed = len(self.tokens) - self.num_prompt_tokens
        return min(self.max_tokens - num_completed, self.max_length - len(self.tokens))

    def begin_round(self) -> None:
        """The next round, from now."""
        self.round += 1
        self.lap = Lap(begun_ns=time.monotonic_ns())

    def commit(
        self, drafts: Sequence[int], num_q_bytes: int, verdict: VerifyResult
    ) -> list[tuple[int, "Origin"]]:
        """Append what the round decided, up to an end token or max_tokens; returns it with its origins."""
        block = [(token, ORIGIN_ACCEPTED) for token in drafts[: verdict.num_accepted]]
        block.append((verdict.token, _origin_of_last(len(drafts), verdict.num_accepted)))
        block = block[: self.num_remaining]
        for i, (token, _) in enumerate(block):
            if token in self.end_token_ids:
                block = block[: i + 1]
                self.finish_reason = FINISH_REASON_STOP
                break
        self.tokens.extend(token for token, _ in block)
        if self.finish_reason is None and self.num_remaining <= 0:
            self.finish_reason = FINISH_REASON_LENGTH
        self.tally.num_q_bytes += num_q_bytes
        self._count(len(drafts), verdict, [origin for _, origin in block])
        self._count_time(len(drafts))
        return block

    def _count(self, num_drafts: int, verdict: VerifyResult, origins: Sequence["Origin"]) -> None:
        tally = self.tally
        tally.num_completion_tokens += len(origins)
        tally.num_rounds += 1
        tally.num_drafts += num_drafts > 0
        tally.num_draft_tokens += num_drafts
        tally.num_judged_tokens += min(verdict.num_accepted + 1, num_drafts)
        tally.sum_min_pq += verdict.sum_min_pq
        tally.num_unusable_rows += verdict.num_unusable_rows
        tally.num_redraw_mismatches += verdict.num_redraw_mismatches
        tally.count_accepted(num_drafts, [i for i, origin in enumerate(origins) if origin == ORIGIN_ACCEPTED])

    def _count_time(self, num_drafts: int) -> None:
        """Rounds of the kind asked for; the first of them, which takes in the prompt, is another kind."""
        if self.round > 1 and (self.draft_length is not None or (num_drafts > 0) == self.wants_drafts):
            tally, lap = self.tally, self.lap
            tally.num_timed_rounds += 1
            tally.draft_ns += lap.draft_ns
            tally.target_ns += lap.target_ns
            tally.wire_ns += lap.wire_ns
            tally.total_ns += time.monotonic_ns() - lap.begun_ns


def _origin_of_last(num_drafts: int, num_accepted: int) -> "Origin":
    if num_drafts == 0:
        return ORIGIN_PLAIN
    return ORIGIN_BONUS if num_accepted == num_drafts else ORIGIN_RECOVERED
