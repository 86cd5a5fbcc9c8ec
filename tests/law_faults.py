"""Ways in which a deployment silently stops being exact, each put into a running pipeline by a patch.

Knows our code's seams and the pipeline of the tests; measures nothing. In the usual pair p and q are drawn
anew behind every prefix, and 2 of 3 judged draft tokens are kept: the better a pair, the better it hides
faults. Two faults of the block rule move the law of such a pair by next to nothing; they are put where they
matter.
"""

import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import coordinator.choices
import coordinator.decoding
import workers.counts
import workers.jobs
import workers.verification
from cluster.check_law import Endpoints
from coordinator.drafting import Drafter
from coordinator.migrating import Target
from coordinator.sessions import Session
from protos.wire import pack_tokens, unpack_tokens
from protos.worker_pb2 import Proposal, TaskReply, VerifyResult
from tests.dense_rows import block_chances, residual, verify
from tests.laws import random_table
from tests.pipelines import pipeline
from workers.counts import CountRow, quantise, quantise_full
from workers.distributions import Distribution, FloatArray, IntArray, Rows
from workers.jobs import DraftJob, VerifyJob
from workers.language_model import Feed, Logits
from workers.randomness import Purpose, uniform
from workers.rows import read_rows, write_rows
from workers.sampling import SamplingSettings, probabilities
from workers.table_model import NextLogits, TableModel
from workers.verification import Rule, Uniforms, Verdict, draw

V = 16
TOP_K = 8
CONTROL_TOKEN = "for control"
TARGET_SECONDS = 0.004  # of a pass, so that the drafter has taken in the prompt by the second round, as usual
_TABLE = random_table(V, 1, spread=1.5)
_NOISE = random_table(V, 2, spread=1.3)

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Pair:
    """A target and a drafter, by their laws, and the prompt that a check samples behind."""

    target: NextLogits
    draft: NextLogits
    vocab_size: int = V
    prompt: tuple[int, ...] = (1, 2)
    num_draft_tokens: int = 3
    end_token_ids: tuple[int, ...] = ()


def usual_target(prefix: tuple[int, ...]) -> NDArray[np.floating]:
    """One likely token behind the prompt, as behind a good prompt for a check; anything behind that."""
    logits = np.array(_TABLE(prefix))
    if prefix == (1, 2):
        logits[logits.argmax()] += 3.5
    return logits


def usual_draft(prefix: tuple[int, ...]) -> NDArray[np.floating]:
    """The target with noise."""
    return np.asarray(usual_target(prefix) + _NOISE(prefix))


def ending(table: NextLogits) -> NextLogits:
    """The same with an end token, id 0, that every fifth token is."""

    def next_logits(prefix: tuple[int, ...]) -> NDArray[np.floating]:
        logits = np.array(table(prefix))
        logits[0] = np.log(np.exp(logits[1:]).sum() / 4)
        return logits

    return next_logits


def constant(*weights: float) -> NextLogits:
    """The same law everywhere."""
    return lambda _: np.log(np.array(weights))


def by_turns(first: Sequence[float], odd: Sequence[float], even: Sequence[float]) -> NextLogits:
    """One law behind two tokens, another behind any odd number of them, and one behind other even ones."""

    def next_logits(prefix: tuple[int, ...]) -> NDArray[np.floating]:
        weights = first if len(prefix) == 2 else odd if len(prefix) % 2 else even
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(np.array(weights)))

    return next_logits


USUAL = Pair(usual_target, usual_draft)
ENDING = Pair(ending(usual_target), ending(usual_draft), end_token_ids=(0,))
# A drafter that is too sure of itself. Reused numbers move the law of two tokens by 0.084 here.
TOO_SURE = Pair(constant(0.6, 0.4), constant(0.99, 0.01), 2, (0, 1), 2)
# The first draft weighs 1/2 for sure, the second is mostly impossible: so blocks are often cut between
# them, where the residual is (0, 0, 0.15), and p - q would be (0, 0.35, 0.3). Total variation 0.08.
CUT_BETWEEN = Pair(
    by_turns((0.0, 1.0, 0.0), (0.5, 0.5, 0.0), (0.0, 0.7, 0.3)),
    by_turns((0.0, 1.0, 0.0), (1.0, 0.0, 0.0), (0.65, 0.35, 0.0)),
    3,
    (0, 1),
    2,
)


@dataclass(frozen=True)
class Fault:
    """A patch, and the deployment that it is put into."""

    patch: Patch
    rule: str = "token"
    pair: Pair = USUAL
    model: type[TableModel] = TableModel  # of the target
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def prompt(self) -> tuple[int, ...]:
        """What a check samples behind."""
        return self.pair.prompt


@contextlib.asynccontextmanager
async def deployment(fault: Fault) -> AsyncIterator[Endpoints]:
    """The pair with the fault in it, and where to ask it."""
    pair = fault.pair
    with pytest.MonkeyPatch.context() as patched:
        fault.patch(patched)
        async with pipeline(
            fault.model(
                pair.target, pair.vocab_size, num_slots=128, latency_seconds=lambda _: TARGET_SECONDS
            ),
            TableModel(pair.draft, pair.vocab_size, num_slots=128),
            end_token_ids=pair.end_token_ids,
            control_token=CONTROL_TOKEN,
            rule=fault.rule,
            **{"num_draft_tokens": pair.num_draft_tokens} | fault.config,
        ) as running:
            yield Endpoints(running.address, (running.target_address,), CONTROL_TOKEN, fault.rule == "token")


def both(*patches: Patch) -> Patch:
    """One after the other."""

    def patch(patched: pytest.MonkeyPatch) -> None:
        for each in patches:
            each(patched)

    return patch


def nothing(_: pytest.MonkeyPatch) -> None:
    """No fault."""


def unnoticed(patched: pytest.MonkeyPatch) -> None:
    """The target does not draw the draft tokens again."""
    patched.setattr(VerifyJob, "_num_mismatches", lambda job: 0)


# --- drawn from another distribution than shipped ---------------------------------------------------------


@dataclass(frozen=True, eq=False)
class MisdrawnRow(CountRow):
    """Ships its counts and draws from others."""

    drawn_from: CountRow

    def draw(self, coin: float) -> int:
        """By the other counts."""
        return self.drawn_from.draw(coin)


def over_all(probabilities: FloatArray, ids: IntArray) -> FloatArray:
    """Written out, [V]."""
    row = np.zeros(V)
    row[ids] = probabilities
    return row


def shipped_instead(make: Callable[[FloatArray, int], tuple[CountRow, CountRow]]) -> Patch:
    """From q and the support: the row that is shipped, and the one that is drawn from."""

    def row(q: FloatArray, support: int, ids: IntArray) -> CountRow:
        shipped, drawn = make(over_all(q, ids), support)
        return MisdrawnRow(shipped.ids, shipped.counts, shipped.total, drawn)

    return lambda patched: patched.setattr(workers.jobs, "quantise", row)


def sharper(q: FloatArray, support: int) -> tuple[CountRow, CountRow]:
    return quantise(q, support), quantise(q**2 / (q**2).sum(), support)


def greedy(q: FloatArray, support: int) -> tuple[CountRow, CountRow]:
    return quantise(q, support), quantise(np.eye(q.size)[q.argmax()], support)


def truncated(q: FloatArray, _: int) -> tuple[CountRow, CountRow]:
    """Four ids in the shipped row, and a trace of the others, as the verification divides by it."""
    kept = np.where(q >= np.sort(q)[-4], q, np.where(q > 0.0, 1e-4, 0.0))
    return quantise(kept / kept.sum(), 64), quantise_full(q)


def in_float16(patched: pytest.MonkeyPatch) -> None:
    """The ratio in float16, the draw in integers."""
    patched.setattr(
        workers.counts.CountRow,
        "q",
        property(lambda row: (row.counts / row.total).astype(np.float16).astype(np.float64)),
    )


def float16(value: float) -> float:
    """The nearest number of 11 bits."""
    return float(np.float16(value))


def bfloat16(value: float) -> float:
    """The nearest number of 8 bits, the half-way ones away from zero."""
    bits = int(np.float32(value).view(np.uint32)) + 0x8000 & 0xFFFF0000
    return float(np.uint32(bits).view(np.float32))


def drawn_in(rounded: Callable[[float], float]) -> Patch:
    """The draw with rounded running sums, the ratio with the counts that are shipped."""

    class Rounded(CountRow):
        def draw(self, coin: float) -> int:
            sums = list(itertools.accumulate(self.q, lambda total, q: rounded(total + rounded(q))))
            index = int(np.searchsorted(sums, coin, side="right"))
            return int(self.ids[min(index, self.ids.size - 1)])

    def row(q: FloatArray, support: int, ids: IntArray) -> CountRow:
        honest = quantise(q, support, ids)
        return Rounded(honest.ids, honest.counts, honest.total)

    return lambda patched: patched.setattr(workers.jobs, "quantise", row)


def not_left_alone(patched: pytest.MonkeyPatch) -> None:
    """The drafter is asked on after a fault that was noticed, so that rare ones can be counted."""
    patched.setattr(Drafter, "blame", lambda drafter, session, fault: None)


@dataclass(frozen=True, eq=False)
class ChosenByP(CountRow):
    """Draws twice and takes the token that p likes better."""

    p: FloatArray

    def draw(self, coin: float) -> int:
        """By p, after the draws."""
        both = [super(ChosenByP, self).draw(u) for u in (coin, (coin + 0.5) % 1.0)]
        return max(both, key=lambda token: float(self.p[token]) / self.q_of(token))


def choosing_by_p(patched: pytest.MonkeyPatch) -> None:
    """Of two prepared continuations the one that p likes better is sent."""
    advance = DraftJob.advance

    def choose(job: DraftJob, logits: Logits) -> TaskReply | None:
        target = usual_target(tuple(job.slot.tokens.since(0)))
        p = probabilities(np.asarray(target)[None], SamplingSettings(top_k=TOP_K))[0]

        def row(q: Distribution) -> CountRow:
            honest = quantise(q.probabilities, 64, q.ids)
            return ChosenByP(honest.ids, honest.counts, honest.total, p)

        job._make_row = row
        return advance(job, logits)

    patched.setattr(DraftJob, "advance", choose)


# --- drawn and not used -----------------------------------------------------------------------------------


def cutting(keep: Callable[[list[int], list[CountRow]], int]) -> Patch:
    """Only the first tokens of a proposal are sent on, as many as `keep` says after seeing them."""
    propose = Drafter.propose

    async def cut(drafter: Drafter, session: Session, num_draft_tokens: int) -> Proposal:
        proposal = await propose(drafter, session, num_draft_tokens)
        if not proposal.tokens:
            return proposal
        tokens = unpack_tokens(proposal.tokens, "tokens")
        rows, _ = read_rows(proposal.rows, tokens, V)
        n = keep(tokens, rows)
        return Proposal(tokens=pack_tokens(tokens[:n]), rows=write_rows(rows[:n], V)) if n else Proposal()

    return lambda patched: patched.setattr(Drafter, "propose", cut)


def before_unlikely(tokens: list[int], rows: list[CountRow]) -> int:
    return [*(row.q_of(token) < 0.15 for token, row in zip(tokens, rows, strict=True)), True].index(True)


def while_probable(tokens: list[int], rows: list[CountRow]) -> int:
    """K ends where the proposal's joint q falls below a tenth."""
    joint = np.cumprod([row.q_of(token) for token, row in zip(tokens, rows, strict=True)])
    return int((joint >= 0.1).sum())


def late_ones_lost(tokens: list[int], _: list[CountRow]) -> int:
    """Proposals that begin with a high id come late, and late ones are dropped."""
    return 0 if tokens[0] >= V // 2 else len(tokens)


# --- who shares a number with whom ------------------------------------------------------------------------


def keyed(number: Callable[[bytes, int, int, int, Purpose], float]) -> Patch:
    """Another key of the uniforms, at both ends."""
    return lambda patched: patched.setattr(workers.jobs, "uniform", number)


def instead(wrong: Purpose, right: Purpose, shift: int = 0) -> Callable[..., float]:
    """The numbers of one purpose are those of another, at a position shifted."""

    def number(key: bytes, choice: int, base: int, position: int, purpose: Purpose) -> float:
        if purpose is wrong:
            return uniform(key, choice, base, position + shift, right)
        return uniform(key, choice, base, position, purpose)

    return number


def one_stream(key: bytes, choice: int, base: int, position: int, _: Purpose) -> float:
    """Whatever is decided at a position, the number is the same."""
    return uniform(key, choice, base, position, Purpose.DRAFT)


def with_the_seed(number: Patch) -> Patch:
    """The drafter's key is the seed, too."""

    def patch(patched: pytest.MonkeyPatch) -> None:
        number(patched)
        patched.setattr(Session, "draft_key", property(lambda session: session.seed.to_bytes(8, "little")))

    return patch


# --- judged wrongly ---------------------------------------------------------------------------------------


def judged(judge: Callable[..., Verdict]) -> Patch:
    """By a judge of rows that are written out, `[K+1, V]`."""

    def instead(p: Rows, q: Sequence[CountRow], *others: Any) -> Verdict:
        rows = [over_all(p[i].probabilities, p[i].ids) for i in range(len(q) + 1)]
        return judge(np.array(rows), q, *others)

    return lambda patched: patched.setattr(workers.jobs, "verify", instead)


def recovered_from_p(
    p: FloatArray, q: Sequence[CountRow], tokens: Sequence[int], uniforms: Uniforms, rule: Rule
) -> Verdict:
    verdict = verify(p, q, tokens, uniforms, rule)
    if verdict.num_accepted == len(tokens):
        return verdict
    return Verdict(
        verdict.num_accepted, draw(p[verdict.num_accepted], uniforms.recover[verdict.num_accepted])
    )


def cut_at(n: int, scale: float, p: FloatArray, q: Sequence[CountRow], uniforms: Uniforms) -> Verdict:
    """What follows n kept tokens, as it should be: the bonus behind all, or the recovered one."""
    if n == len(q):
        return Verdict(n, draw(p[n], uniforms.bonus))
    weights = residual(p[n], q[n], scale)
    return Verdict(n, draw(weights if weights.any() else p[n], uniforms.recover[n]))


def swapped(
    p: FloatArray, q: Sequence[CountRow], tokens: Sequence[int], uniforms: Uniforms, rule: Rule
) -> Verdict:
    """p and q change places in the ratio."""
    kept = [u * p[i, x] < q[i].q_of(x) for i, (x, u) in enumerate(zip(tokens, uniforms.accept, strict=True))]
    n = [*kept, False].index(False)
    return cut_at(n, 1.0, p, q, uniforms)


def clamped(
    p: FloatArray, q: Sequence[CountRow], tokens: Sequence[int], uniforms: Uniforms, rule: Rule
) -> Verdict:
    """The residual is not normalised, and the search for the recovered token stops at the last id."""
    verdict = verify(p, q, tokens, uniforms, rule)
    n = verdict.num_accepted
    if n == len(tokens):
        return verdict
    cumulative = np.cumsum(residual(p[n], q[n], 1.0))
    return Verdict(n, min(int(np.searchsorted(cumulative, uniforms.recover[n], side="right")), V - 1))


def first_failure(
    p: FloatArray, q: Sequence[CountRow], tokens: Sequence[int], uniforms: Uniforms, _: Rule
) -> Verdict:
    """The block rule that stops at the first coin that fails."""
    chances = block_chances(p, q, tokens)
    kept = [u < chance for u, (chance, _) in zip(uniforms.accept, chances, strict=True)]
    n = [*kept, False].index(False)
    return cut_at(n, [1.0, *(weight for _, weight in chances)][n], p, q, uniforms)


def plain_residual(
    p: FloatArray, q: Sequence[CountRow], tokens: Sequence[int], uniforms: Uniforms, rule: Rule
) -> Verdict:
    """The block rule with the residual p - q."""
    return cut_at(verify(p, q, tokens, uniforms, rule).num_accepted, 1.0, p, q, uniforms)


# --- rounds and sessions ----------------------------------------------------------------------------------


def rejections_drawn_again(patched: pytest.MonkeyPatch) -> None:
    """A verdict that rejects everything seems lost every other time, and the round is done plainly."""
    ask, coins = Target.verify, random.Random(1)

    async def again(target: Target, session: Session, proposal: Proposal) -> VerifyResult:
        result = await ask(target, session, proposal)
        if proposal.tokens and not result.num_accepted and coins.random() < 0.5:
            session.round += 1
            return await ask(target, session, Proposal())
        return result

    patched.setattr(Target, "verify", again)


def another_proposals_verdict(patched: pytest.MonkeyPatch) -> None:
    """The verdict is on a proposal that was drawn before, with the same rows and another first token."""
    propose, commit, coins = Drafter.propose, Session.commit, random.Random(1)
    others: dict[str, int] = {}

    async def remember(drafter: Drafter, session: Session, num_draft_tokens: int) -> Proposal:
        proposal = await propose(drafter, session, num_draft_tokens)
        if proposal.tokens:
            rows, _ = read_rows(proposal.rows, unpack_tokens(proposal.tokens, "tokens"), V)
            others[session.id] = rows[0].draw(coins.random())
        return proposal

    def mixed(session: Session, drafts: Sequence[int], num_bytes: int, verdict: VerifyResult) -> Any:
        if drafts:
            drafts = [others[session.id], *drafts[1:]]
        return commit(session, drafts, num_bytes, verdict)

    patched.setattr(Drafter, "propose", remember)
    patched.setattr(Session, "commit", mixed)


def from_scratch(patched: pytest.MonkeyPatch) -> None:
    """In each round three of ten sessions are killed, and their texts begun anew with other numbers."""
    ask, coins = Target.verify, random.Random(1)
    decode = coordinator.decoding.decode

    async def verify_or_die(target: Target, session: Session, proposal: Proposal) -> VerifyResult:
        if coins.random() < 0.3:
            raise ConnectionError("killed")
        return await ask(target, session, proposal)

    async def restart(session: Session, drafter: Any, target: Target, policy: Any, emit: Any) -> None:
        while session.finish_reason is None:
            emitted: list[Any] = []
            try:
                await decode(session, drafter, target, policy, emitted.extend)
            except ConnectionError:
                session.tokens.truncate(session.num_prompt_tokens)
                session.seed += 1 << 40
                session.id += "'"
                session.round = 0
                session.target_seat.length = session.draft_seat.length = 0
        emit(emitted)

    patched.setattr(Target, "verify", verify_or_die)
    patched.setattr(coordinator.choices, "decode", restart)


def zero_is_none(patched: pytest.MonkeyPatch) -> None:
    """An accepted token 0 is taken for none."""
    commit = Session.commit

    def without(session: Session, drafts: Sequence[int], num_bytes: int, verdict: VerifyResult) -> Any:
        kept = [token for token in drafts[: verdict.num_accepted] if token]
        cut = VerifyResult()
        cut.CopyFrom(verdict)
        cut.num_accepted = len(kept)
        return commit(session, [*kept, *drafts[verdict.num_accepted :]], num_bytes, cut)

    patched.setattr(Session, "commit", without)


# --- p is not the target's --------------------------------------------------------------------------------


class SeesDrafts(TableModel):
    """A hole in the causal mask: a tenth of p is the token that is fed next."""

    def _feed(self, feed: Feed) -> Logits:
        logits = super()._feed(feed)
        for i in range(feed.num_logits - 1):
            p = probabilities(logits[i : i + 1], SamplingSettings())[0]
            following = feed.tokens[len(feed.tokens) - feed.num_logits + i + 1]
            logits[i] = np.log(0.9 * p + 0.1 * np.eye(V)[following])
        return logits


class SeesNeighbours(TableModel):
    """A tenth of each row is the pass's first row."""

    def forward(self, feeds: Sequence[Feed]) -> list[Logits]:
        every = super().forward(feeds)
        first = next((logits[:1] for logits in every if len(logits)), None)
        return every if first is None else [np.asarray(0.9 * logits + 0.1 * first) for logits in every]


class SharesScale(TableModel):
    """Logits of four bits, with one scale for the whole pass."""

    def forward(self, feeds: Sequence[Feed]) -> list[Logits]:
        every = super().forward(feeds)
        scale = max((float(np.abs(logits).max()) for logits in every if logits.size), default=1.0) / 7
        return [np.asarray(np.round(logits / scale) * scale, dtype=np.float32) for logits in every]


# --- all of them ------------------------------------------------------------------------------------------

FAULTS = {
    "drawn at half the temperature": Fault(both(shipped_instead(sharper), unnoticed)),
    "greedy draft with a soft q": Fault(both(shipped_instead(greedy), unnoticed)),
    "drawn from all of q, shipped truncated": Fault(both(shipped_instead(truncated), unnoticed)),
    "drawn at half the temperature, redrawn by the target": Fault(shipped_instead(sharper)),
    "drawn in bfloat16, redrawn by the target": Fault(both(drawn_in(bfloat16), not_left_alone)),
    "drawn in float16, redrawn by the target": Fault(both(drawn_in(float16), not_left_alone)),
    "the ratio in float16": Fault(in_float16),
    "a drawn token dropped for its low q": Fault(cutting(before_unlikely)),
    "K chosen after the draws": Fault(cutting(while_probable)),
    "late proposals dropped, late by their tokens": Fault(cutting(late_ones_lost)),
    "of two prepared draws the one that p likes": Fault(both(choosing_by_p, unnoticed)),
    "draft, accept, recover and bonus share numbers": Fault(with_the_seed(keyed(one_stream))),
    "accept and recover share numbers": Fault(keyed(instead(Purpose.RECOVER, Purpose.ACCEPT))),
    "accept and bonus share numbers": Fault(keyed(instead(Purpose.BONUS, Purpose.ACCEPT, -1))),
    "draft and accept share numbers": Fault(with_the_seed(keyed(instead(Purpose.ACCEPT, Purpose.DRAFT)))),
    "draft and recover share numbers": Fault(with_the_seed(keyed(instead(Purpose.RECOVER, Purpose.DRAFT)))),
    "draft and bonus share numbers": Fault(with_the_seed(keyed(instead(Purpose.BONUS, Purpose.DRAFT, -1)))),
    "uniforms keyed by position alone, block rule": Fault(
        keyed(lambda key, choice, base, position, purpose: uniform(key, choice, 0, position, purpose)),
        rule="block",
        pair=TOO_SURE,
    ),
    "the samples of a request share their keys": Fault(
        keyed(lambda key, choice, base, position, purpose: uniform(key, 0, base, position, purpose))
    ),
    "every two samples share their keys": Fault(
        keyed(lambda key, choice, base, position, purpose: uniform(key, choice // 2, base, position, purpose))
    ),
    "p and q swapped in the ratio": Fault(judged(swapped)),
    "recovered from p": Fault(judged(recovered_from_p)),
    "recovered from p, block rule": Fault(judged(recovered_from_p), rule="block"),
    "residual not normalised, search clamped to the last id": Fault(judged(clamped)),
    "block rule stops at the first failure": Fault(judged(first_failure), rule="block"),
    "block rule with the residual p - q": Fault(judged(plain_residual), rule="block", pair=CUT_BETWEEN),
    "rejections drawn again every other time": Fault(rejections_drawn_again),
    "proposal B answered with the verdict on A": Fault(another_proposals_verdict),
    "killed texts begun anew": Fault(from_scratch, pair=ENDING),
    "token 0 taken for none": Fault(zero_is_none),
    "p sees the draft that it judges": Fault(nothing, model=SeesDrafts),
    "p sees its neighbours": Fault(nothing, model=SeesNeighbours),
    "one scale for the batch": Fault(nothing, model=SharesScale),
}
SOUND = {
    "sound, token rule": Fault(nothing),
    "sound, block rule": Fault(nothing, rule="block"),
    "sound, token rule, with an end token": Fault(nothing, pair=ENDING),
}
