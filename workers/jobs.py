"""One task at work: which tokens it wants fed next, and what it makes of their logits.

Knows sampling, rows and verification, and the slot it works in. Does not know which pass it is part of, which
stream it came by, or who else is in the pass.

K draft tokens, L base length, V vocabulary, C logit columns.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from protos.limits import MAX_DRAFT_TOKENS, MAX_SUPPORT
from protos.status import TaskError
from protos.wire import MAX_MESSAGE_BYTES, digest, pack_tokens, unpack_tokens
from protos.worker_pb2 import (
    ENCODING_FULL,
    ENCODING_ONE_HOT,
    ENCODING_SPARSE,
    RULE_BLOCK,
    RULE_TOKEN,
    DraftResult,
    DraftTask,
    ProbabilityRow,
    Proposal,
    Sampling,
    ScoreReply,
    SessionState,
    TaskReply,
    VerifyResult,
    VerifyTask,
)
from workers.counts import CountRow, one_hot, quantise, quantise_full
from workers.distributions import Distribution, Rows, RowsOnDemand
from workers.language_model import Drawn, Draws, LanguageModel, Logits
from workers.randomness import Purpose, uniform
from workers.rows import read_rows, write_rows
from workers.sampling import SamplingSettings, distribution
from workers.slots import Slot, SlotTable, check_ids
from workers.verification import Rule, Uniforms, UnusableTarget, Verdict, verify

MAX_KEY_BYTES = 64  # of the hash behind `uniform`
BYTES_PER_PROBABILITY = 12  # an id and a float64


@dataclass(frozen=True, slots=True)
class ScoreTask:
    """A ScoreRequest in the loop: tokens to take in as a session of their own, and how many rows of p."""

    state: SessionState
    num_rows: int
    sampling: Sampling


Task = DraftTask | VerifyTask | ScoreTask


class Job(ABC):
    """A task that has entered its slot. Fed until it answers.

    `pending` are the tokens still to be fed, in order; the logits of the last `num_logits` of them are
    wanted, all in one pass.
    """

    slot: Slot
    pending: list[int]
    num_logits: int
    num_broken_rows = 0  # of p that were looked at and are no distribution

    @abstractmethod
    def advance(self, logits: Logits) -> TaskReply | None:
        """Take the wanted logits `[num_logits, C]`: the answer, or None when `pending` has more to feed.

        Raises TaskError when the task cannot be answered.
        """


class DraftJob(Job):
    """Draws up to K tokens one after another, each from the very counts that it ships."""

    def __init__(
        self, task: DraftTask, slots: SlotTable, model: LanguageModel, out_of_time: Callable[[], bool]
    ) -> None:
        """Enter the slot; `out_of_time` is asked before each draw. Raises TaskError."""
        if task.num_draft_tokens > MAX_DRAFT_TOKENS:
            raise TaskError.invalid(
                "num_draft_tokens", f"is {task.num_draft_tokens}; the limit is {MAX_DRAFT_TOKENS}"
            )
        _check_key(task.draft_key)
        self._make_row = _row_maker(task)
        self._settings = _draft_settings(task)
        self._task = task
        self._out_of_time = out_of_time
        self._num_columns = _num_columns(task, model)
        self._output_ids = model.output_ids
        self._tokens: list[int] = []
        self._rows: list[CountRow] = []
        self.slot, self.pending = slots.enter(task.state, max(task.num_draft_tokens - 1, 0))
        self.num_logits = 1 if task.num_draft_tokens else 0

    def advance(self, logits: Logits) -> TaskReply | None:
        """Draw one token, unless time is up or the row is no distribution."""
        if self._task.num_draft_tokens == 0 or self._out_of_time():
            return self._reply()
        q = distribution(logits[0, : self._num_columns], self._settings)
        if not q.usable:
            return self._reply()  # the tokens before a row that cannot be computed are good
        if self._output_ids is not None:
            q = Distribution(self._output_ids[q.ids], q.probabilities)
        row = self._make_row(q)
        self._tokens.append(row.draw(self._coin(len(self._tokens))))
        self._rows.append(row)
        self.pending = self._tokens[-1:]
        return self._reply() if len(self._tokens) == self._task.num_draft_tokens else None

    def draws(self, most: int) -> Draws | None:
        """All at once, but for whole rows, which are left to the host."""
        num_draws = min(self._task.num_draft_tokens, most)
        if self._tokens or num_draws < 1 or self._task.encoding == ENCODING_FULL or self._out_of_time():
            return None
        support = 1 if self._task.encoding == ENCODING_ONE_HOT else self._task.support
        coins = [self._coin(i) for i in range(num_draws)]
        return Draws(self._settings, support, self._num_columns, coins)

    def take(self, drawn: Sequence[Drawn]) -> TaskReply:
        """The proposal, as if drawn here."""
        self._tokens = [one.token for one in drawn]
        self._rows = [one.row for one in drawn]
        return self._reply()

    def _coin(self, index: int) -> float:
        base_length = self._task.state.base_length
        key, choice = self._task.draft_key, self._task.choice
        return uniform(key, choice, base_length, base_length + index, Purpose.DRAFT)

    def _reply(self) -> TaskReply:
        rows = write_rows(self._rows, self._task.vocab_size)
        proposal = Proposal(tokens=pack_tokens(self._tokens), rows=rows)
        return TaskReply(draft=DraftResult(proposal=proposal))


class VerifyJob(Job):
    """Scores L.. in one go, judges the proposal and rolls the slot back to what was kept."""

    def __init__(self, task: VerifyTask, slots: SlotTable, model: LanguageModel) -> None:
        """Read the proposal and enter the slot. Raises TaskError."""
        self._tokens = unpack_tokens(task.proposal.tokens, "proposal.tokens")
        if len(self._tokens) > MAX_DRAFT_TOKENS:
            raise TaskError.invalid(
                "proposal.tokens", f"are {len(self._tokens)}; the limit is {MAX_DRAFT_TOKENS}"
            )
        check_ids(self._tokens, "proposal.tokens", model.vocab_size)
        if task.digest != digest(task.proposal):
            raise TaskError.invalid("digest", "is not that of the proposal")
        _check_key(task.draft_key)
        self._rows, self._num_unusable = read_rows(task.proposal.rows, self._tokens, model.vocab_size)
        self._rule = _rule_of(task)
        self._settings = settings_of(task.sampling)
        self._task = task
        self._slots = slots
        self.slot, committed = slots.enter(task.state, len(self._tokens))
        self.pending = committed + self._tokens
        self.num_logits = len(self._tokens) + 1

    def advance(self, logits: Logits) -> TaskReply:
        """Accept, recover or draw the bonus, and cut the cache behind the accepted tokens."""
        p = RowsOnDemand(lambda position: self._row(logits[position]))
        try:
            verdict = verify(p, self._rows, self._tokens, self._uniforms(), self._rule)
        except UnusableTarget as error:
            raise TaskError.internal(f"session {self.slot.session}: {error}") from None
        self._slots.cut(self.slot, self._task.state.base_length + verdict.num_accepted)
        result = VerifyResult(
            digest=self._task.digest,
            num_accepted=verdict.num_accepted,
            token=verdict.token,
            num_unusable_rows=self._num_unusable,
            num_redraw_mismatches=self._num_mismatches(),
            sum_min_pq=self._sum_min_pq(p, verdict),
        )
        return TaskReply(verify=result)

    def _row(self, logits: Logits) -> Distribution:
        """Of p, `[C]` logits."""
        row = distribution(logits, self._settings)
        self.num_broken_rows += not row.usable
        return row

    def _sum_min_pq(self, p: Rows, verdict: Verdict) -> float:
        """Over the accepted positions and the one behind them: by the token rule, all that were judged."""
        judged = self._rows[: verdict.num_accepted + 1]
        return sum(float(np.minimum(p[i].at(row.ids), row.q).sum()) for i, row in enumerate(judged))

    def _num_mismatches(self) -> int:
        """How many tokens are not what their row gives for the draft key.

        They keep their row: a drafter with coins of its own may still have drawn from it, and judging only
        some of its tokens as one-hot would bias. It is the coordinator's to leave such a drafter alone.
        """
        base_length = self._task.state.base_length
        key, choice = self._task.draft_key, self._task.choice
        return sum(
            row.draw(uniform(key, choice, base_length, base_length + i, Purpose.DRAFT)) != token
            for i, (row, token) in enumerate(zip(self._rows, self._tokens, strict=True))
        )

    def _uniforms(self) -> Uniforms:
        key = self._task.seed.to_bytes(8, "little")
        base_length, num_drafts = self._task.state.base_length, len(self._tokens)

        def draw(offset: int, purpose: Purpose) -> float:
            return uniform(key, self._task.choice, base_length, base_length + offset, purpose)

        return Uniforms(
            accept=[draw(i, Purpose.ACCEPT) for i in range(num_drafts)],
            recover=[draw(i, Purpose.RECOVER) for i in range(num_drafts)],
            bonus=draw(num_drafts, Purpose.BONUS),
        )


class ScoreJob(Job):
    """The rows of p behind given tokens, exactly as a verification would see them."""

    def __init__(self, task: ScoreTask, slots: SlotTable, model: LanguageModel) -> None:
        """Enter the slot. Raises TaskError."""
        limit = min(
            task.state.base_length, MAX_MESSAGE_BYTES // 2 // (BYTES_PER_PROBABILITY * model.vocab_size)
        )
        if not 1 <= task.num_rows <= limit:
            raise TaskError.invalid("num_rows", f"is {task.num_rows}; it must lie in 1..{limit}")
        self._settings = settings_of(task.sampling)
        self.slot, self.pending = slots.enter(task.state, 0, task.num_rows)
        self.num_logits = task.num_rows

    def advance(self, logits: Logits) -> TaskReply:
        """All rows at once."""
        rows = [_positive(distribution(row, self._settings)) for row in logits]
        return TaskReply(score=ScoreReply(rows=rows))


def _positive(p: Distribution) -> ProbabilityRow:
    if not p.usable:
        raise TaskError.internal("the target's logits give no distribution here")
    possible = p.probabilities > 0.0
    return ProbabilityRow(
        ids=p.ids[possible].astype("<u4").tobytes(),
        probabilities=p.probabilities[possible].astype("<f8").tobytes(),
    )


def _num_columns(task: DraftTask, model: LanguageModel) -> int:
    """The logit columns whose ids the target knows: columns are in the order of their ids."""
    if task.vocab_size < 1:
        raise TaskError.invalid("vocab_size", f"is {task.vocab_size}; it must be at least 1")
    if model.output_ids is None:
        return min(task.vocab_size, model.vocab_size)
    num_columns = int(np.searchsorted(model.output_ids, task.vocab_size))
    if num_columns == 0:
        raise TaskError.invalid(
            "vocab_size", f"is {task.vocab_size}, below every id that this drafter scores"
        )
    return num_columns


def settings_of(message: Sampling) -> SamplingSettings:
    """The settings on the wire; raises TaskError(INVALID_ARGUMENT) naming the field."""
    try:
        return SamplingSettings(message.temperature, message.top_k, message.top_p, message.min_p)
    except ValueError as error:
        field, _, problem = str(error).partition(" ")
        raise TaskError.invalid(f"sampling.{field}", problem) from None


def _check_key(draft_key: bytes) -> None:
    if len(draft_key) > MAX_KEY_BYTES:
        raise TaskError.invalid("draft_key", f"is {len(draft_key)} bytes long; the limit is {MAX_KEY_BYTES}")


def _rule_of(task: VerifyTask) -> Rule:
    rules = {RULE_TOKEN: Rule.TOKEN, RULE_BLOCK: Rule.BLOCK}
    if task.rule not in rules:
        raise TaskError.invalid("rule", f"is {task.rule}; known are {sorted(rules)}")
    return rules[task.rule]


def _draft_settings(task: DraftTask) -> SamplingSettings:
    """Settings that give the same row with less work: what the row's encoding drops need not be computed.

    Only top-p needs the mass of the columns outside the support.
    """
    settings = settings_of(task.sampling)
    if task.encoding == ENCODING_ONE_HOT:
        return replace(settings, temperature=0.0)
    if task.encoding == ENCODING_SPARSE and settings.top_p == 1.0:
        return replace(settings, top_k=min(settings.top_k or task.support, task.support))
    return settings


def _row_maker(task: DraftTask) -> Callable[[Distribution], CountRow]:
    """From q to the row that is drawn from and shipped."""
    if task.encoding == ENCODING_SPARSE:
        support = task.support
        if not 1 <= support <= MAX_SUPPORT:
            raise TaskError.invalid("support", f"is {support}; it must lie in 1..{MAX_SUPPORT}")
        return lambda q: quantise(q.probabilities, support, q.ids)
    if task.encoding == ENCODING_FULL:
        num_bytes = 4 * task.vocab_size * task.num_draft_tokens
        if num_bytes > MAX_MESSAGE_BYTES // 4:
            raise TaskError.invalid("encoding", f"is FULL, which takes {num_bytes} bytes; draft fewer tokens")
        return lambda q: quantise_full(q.probabilities, q.ids)
    if task.encoding == ENCODING_ONE_HOT:
        return lambda q: one_hot(int(q.ids[0]))
    raise TaskError.invalid(
        "encoding", f"is {task.encoding}; known are {ENCODING_SPARSE}, {ENCODING_FULL}, {ENCODING_ONE_HOT}"
    )
