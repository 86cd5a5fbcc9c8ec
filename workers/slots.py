"""Which session lives in which slot, which tokens the slot stands for, and what it last answered.

Knows sessions, slots and the rules by which a task fits a slot; runs no model but cuts its cache. A slot is
the worker's copy of a truth that the coordinator holds, so any of it may be lost: an idle slot is given away,
least recently used first, and a session that comes back is told to send its tokens again.

A task that lacks many tokens takes over those that another slot holds, of a session that is there or over,
and waits for those that another task is about to feed. Only what a coordinator has sent as committed is taken
over: what a slot holds beyond it are drafts, and what came of them is not known here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from protos.prefix import TokenPrefix
from protos.status import TaskError
from protos.wire import unpack_tokens
from protos.worker_pb2 import SessionState, TaskReply
from workers.language_model import LanguageModel
from workers.prefix_sharing import PrefixCounts, longest
from workers.vacant_slots import Holding, VacantSlots

MIN_SHARED_TOKENS = 16  # fewer are computed as fast as they are looked for, and join the others' pass


@dataclass(frozen=True, slots=True)
class Ahead:
    """A task that is about to feed tokens which another one waits for."""

    slot: "Slot"
    wanted: TokenPrefix  # by which the task is known
    length: int  # what the other one can take over then

    @property
    def is_done(self) -> bool:
        """Whether the tokens are there, or the task has ended without them."""
        return self.slot.wanted is not self.wanted or len(self.slot.tokens) >= self.length


@dataclass(slots=True, eq=False)
class Slot:
    """One sequence in the model's cache."""

    index: int
    session: str
    tokens: TokenPrefix = field(default_factory=TokenPrefix)  # what the cached positions stand for
    num_committed: int = 0  # of the tokens, at most: what lies behind are drafts
    busy: bool = False  # a job works in it
    wanted: TokenPrefix | None = None  # what the job takes in, where it lacks much: it may be taken over
    num_taken: int = 0  # of them, those that were
    ahead: Ahead | None = None  # for which the job waits
    touched: float = 0.0
    last_round: int = 0
    last_length: int = 0  # L of the last round
    last_key: bytes = b""  # what it was asked
    last_reply: TaskReply | None = None  # what it was answered

    @property
    def holding(self) -> Holding:
        """What others may take over."""
        return Holding(self.index, self.tokens, min(len(self.tokens), self.num_committed))

    def remember(self, state: SessionState, key: bytes, reply: TaskReply) -> None:
        """A round was answered. Its first L tokens stay in the slot until the session's next task."""
        self.last_round, self.last_length = state.round, state.base_length
        self.last_key, self.last_reply = key, reply

    def stood_at(self, state: SessionState) -> bool:
        """Whether these are the committed tokens that the last round was answered for."""
        sent = unpack_tokens(state.tokens, "state.tokens")
        return (
            state.start + len(sent) == state.base_length == self.last_length
            and state.start <= len(self.tokens)
            and self.tokens.hash_at(state.start) == state.start_hash
            and self.tokens.common_length(state.start, sent) == state.base_length
        )


class SlotTable:
    """The slots of one model."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        epoch: int,
        lease_seconds: float,
        clock: Callable[[], float],
        min_shared: float = MIN_SHARED_TOKENS,
    ) -> None:
        """`epoch` names this life of the worker; a slot idle for `lease_seconds` is freed.

        Prefixes of at least `min_shared` tokens are taken over; math.inf: none.
        """
        self._model = model
        self._epoch = epoch
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._min_shared = min_shared
        self._vacant = VacantSlots(model, min_shared)
        self._by_session: dict[str, Slot] = {}
        self.counts = PrefixCounts()

    @property
    def num_used(self) -> int:
        """Slots that hold a session."""
        return len(self._by_session)

    @property
    def free(self) -> tuple[int, ...]:
        """Slots that hold no session, ascending."""
        return self._vacant.slots

    def emptied(self, num_slots: int) -> tuple[int, ...]:
        """Slots that hold nothing, ascending: at least so many, or all. Costs prefixes, the oldest first."""
        return self._vacant.emptied(num_slots)

    def answered_within(self, seconds: float) -> bool:
        """Whether a session was answered so lately that its next round is to be expected."""
        since = self._clock() - seconds
        return any(slot.last_reply and slot.touched >= since for slot in self._by_session.values())

    def answered(self, state: SessionState, key: bytes) -> TaskReply | None:
        """The reply of a round that was answered before, so that asking twice changes nothing.

        Raises TaskError(ABORTED) for another life, an older round, or another question for the same round:
        other drafts, or other tokens before them, as from a second coordinator that uses the same name.
        """
        if state.epoch != self._epoch:
            raise TaskError.other_life(f"epoch is {state.epoch}; this worker lives in {self._epoch}")
        slot = self._by_session.get(state.session)
        if slot is None or state.round > slot.last_round:
            return None
        if state.round < slot.last_round:
            raise TaskError.stale(f"round is {state.round}; the session is past {slot.last_round}")
        if key != slot.last_key or not slot.stood_at(state):
            raise TaskError.stale(f"round {state.round} was answered already for other tokens or drafts")
        return slot.last_reply

    def enter(self, state: SessionState, num_ahead: int, num_again: int = 1) -> tuple[Slot, list[int]]:
        """Cut the session's slot back to what it shares with the committed tokens, and mark it busy.

        Returns the slot and the committed tokens that are still to be fed: at least the last `num_again`, by
        default x_{L-1}. Where the slot waits for another one, `catch_up` tells how many of them need not be.
        `num_ahead` positions behind them must fit too. Raises TaskError: INVALID_ARGUMENT for a state that
        cannot be, FAILED_PRECONDITION when tokens are missing before `start`, RESOURCE_EXHAUSTED without a
        slot, UNAVAILABLE while another task of the session is worked on.
        """
        sent = self._validate(state, num_ahead)
        slot = self._by_session.get(state.session)
        held = slot.tokens if slot else TokenPrefix()
        if state.start > len(held):
            raise TaskError.out_of_step(
                len(held), f"start is {state.start}; this session holds {len(held)} tokens"
            )
        if slot is not None and slot.busy:
            raise TaskError.unavailable(f"session {state.session} has another task at work", 0.05)
        if held.hash_at(state.start) != state.start_hash:
            if slot is not None:
                self.cut(slot, 0)
            raise TaskError.out_of_step(0, f"start_hash does not match the {state.start} tokens held")
        num_held = len(held)
        slot = slot or self._claim(state.session, sent)
        shared = min(slot.tokens.common_length(state.start, sent), state.base_length - num_again)
        missing = (
            slot.tokens.since(shared)[: max(state.start - shared, 0)] + sent[max(shared - state.start, 0) :]
        )
        self.cut(slot, shared)
        slot.num_committed, slot.num_taken = state.base_length, 0
        num_lacking = state.base_length - num_again - min(num_held, shared)
        if num_lacking >= self._min_shared:
            self._count_prefill(slot, num_lacking, num_lacking + num_again - len(missing))
            wanted = TokenPrefix((slot.tokens.since(0) + missing)[: state.base_length - num_again])
            del missing[: self._share(slot, wanted)]
            slot.wanted = wanted  # for others to wait for, now that nothing can fail
        slot.busy = True
        slot.touched = self._clock()
        return slot, missing

    def catch_up(self, slot: Slot) -> int:
        """How many of the tokens that were still to be fed the slot has taken over, now that they are there.

        What it waits for has an end: a slot that others wait for never waits itself.
        """
        if slot.wanted is None or slot.ahead is None or not slot.ahead.is_done:
            return 0
        return self._share(slot, slot.wanted)

    def _share(self, slot: Slot, wanted: TokenPrefix) -> int:
        """Take over what another slot holds of the tokens wanted, and find the task to wait for.

        Returns how many were taken over.
        """
        slot.ahead = None
        num_held = len(slot.tokens)
        others = [
            other.holding
            for other in self._by_session.values()
            if len(other.tokens) > num_held and other is not slot
        ]
        source, length = longest(wanted, [*others, *self._vacant.holdings])
        num_taken = length - num_held
        if source is not None and num_taken >= self._min_shared:
            self.cut(slot, 0)  # so that it holds what it stands for, should the engine fail
            self._model.copy(source.slot, slot.index, length)
            slot.tokens.extend(source.tokens.since(0)[:length])
            self._vacant.use(source.slot, length, self._clock())
            self._count_taken(slot, num_taken)
        else:
            num_taken = 0
        if slot.last_reply is None:  # who was answered before is decoding, and waits for nobody
            slot.ahead = self._ahead_of(slot, wanted)
        return num_taken

    def _ahead_of(self, slot: Slot, wanted: TokenPrefix) -> Ahead | None:
        """The task that will feed most of the tokens wanted, where that is worth waiting for."""
        num_held = len(slot.tokens)
        others = [
            (wanted.common_by_hash(other.wanted), other, other.wanted)
            for other in self._by_session.values()
            if other.wanted is not None and other.ahead is None
            if len(other.tokens) >= num_held and other is not slot
        ]
        length, other, theirs = max(others, key=itemgetter(0), default=(0, slot, wanted))
        if length - num_held < self._min_shared or len(other.tokens) >= length:
            return None
        return Ahead(other, theirs, length)

    def _count_prefill(self, slot: Slot, num_lacking: int, num_taken: int) -> None:
        self.counts.num_prefills += 1
        self.counts.num_prefill_tokens += num_lacking
        self._count_taken(slot, num_taken)

    def _count_taken(self, slot: Slot, num_tokens: int) -> None:
        if num_tokens:
            self.counts.num_hits += not slot.num_taken
            self.counts.num_cached_tokens += num_tokens
            slot.num_taken += num_tokens

    def cut(self, slot: Slot, length: int) -> None:
        """Keep the first `length` positions of a slot at most."""
        slot.tokens.truncate(length)
        self._model.truncate(slot.index, length)

    def leave(self, slot: Slot) -> None:
        """The job in the slot is over; a slot whose session was released meanwhile is free now."""
        slot.busy, slot.wanted, slot.ahead = False, None, None
        slot.touched = self._clock()
        if self._by_session.get(slot.session) is not slot:
            self._vacate(slot)

    def release(self, session: str) -> None:
        """The session is over. A busy slot is freed when its job leaves."""
        slot = self._by_session.pop(session, None)
        if slot is not None and not slot.busy:
            self._vacate(slot)

    def expire(self) -> None:
        """Free the slots of sessions that nobody has asked for during a lease."""
        limit = self._clock() - self._lease_seconds
        for slot in [s for s in self._by_session.values() if not s.busy and s.touched < limit]:
            self.release(slot.session)

    def _validate(self, state: SessionState, num_ahead: int) -> list[int]:
        """The tokens sent, when the state can be."""
        sent = unpack_tokens(state.tokens, "state.tokens")
        if not state.session:
            raise TaskError.invalid("state.session", "is empty")
        if not 1 <= state.base_length <= self._model.max_length - num_ahead:
            raise TaskError.invalid(
                "state.base_length",
                f"is {state.base_length} with {num_ahead} positions ahead; "
                f"a session takes 1 to {self._model.max_length}",
            )
        if state.start + len(sent) != state.base_length:
            raise TaskError.invalid(
                "state.tokens", f"are {len(sent)} from {state.start} on; base_length is {state.base_length}"
            )
        check_ids(sent, "state.tokens", self._model.vocab_size)
        return sent

    def _claim(self, session: str, committed: Sequence[int]) -> Slot:
        if not self._vacant.slots:
            idle = [slot for slot in self._by_session.values() if not slot.busy]
            if not idle:
                raise TaskError.exhausted(f"all {self._model.num_slots} slots are at work", 1.0)
            self.release(min(idle, key=lambda slot: slot.touched).session)
        index, tokens = self._vacant.take(committed)
        slot = Slot(index, session, tokens, touched=self._clock())
        self._by_session[session] = slot
        return slot

    def _vacate(self, slot: Slot) -> None:
        self.cut(slot, slot.num_committed)
        self._vacant.put(slot.index, slot.tokens, slot.touched)


def check_ids(tokens: Sequence[int], field_name: str, vocab_size: int) -> None:
    """Raise TaskError(INVALID_ARGUMENT) naming the first token id outside the vocabulary."""
    for token in tokens:
        if token >= vocab_size:
            raise TaskError.invalid(field_name, f"has token id {token}; ids lie below {vocab_size}")
