"""Which session lives in which slot, which tokens the slot stands for, and what it last answered.

Knows sessions, slots and the rules by which a task fits a slot; runs no model but cuts its cache. A slot is
the worker's copy of a truth that the coordinator holds, so any of it may be lost: an idle slot is given away,
least recently used first, and a session that comes back is told to send its tokens again.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protos.prefix import TokenPrefix
from protos.status import TaskError
from protos.wire import unpack_tokens
from protos.worker_pb2 import SessionState, TaskReply
from workers.language_model import LanguageModel


@dataclass(slots=True, eq=False)
class Slot:
    """One sequence in the model's cache."""

    index: int
    session: str
    tokens: TokenPrefix = field(default_factory=TokenPrefix)  # what the cached positions stand for
    busy: bool = False  # a job works in it
    touched: float = 0.0
    last_round: int = 0
    last_length: int = 0  # L of the last round
    last_key: bytes = b""  # what it was asked
    last_reply: TaskReply | None = None  # what it was answered

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
        self, model: LanguageModel, *, epoch: int, lease_seconds: float, clock: Callable[[], float]
    ) -> None:
        """`epoch` names this life of the worker; a slot idle for `lease_seconds` is freed."""
        self._model = model
        self._epoch = epoch
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._free = list(range(model.num_slots))  # a heap: low slots stand together and share calls
        self._by_session: dict[str, Slot] = {}

    @property
    def num_used(self) -> int:
        """Slots that hold a session."""
        return len(self._by_session)

    @property
    def free(self) -> tuple[int, ...]:
        """Slots that hold no session, ascending."""
        return tuple(sorted(self._free))

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
            raise TaskError.stale(f"epoch is {state.epoch}; this worker lives in {self._epoch}")
        slot = self._by_session.get(state.session)
        if slot is None or state.round > slot.last_round:
            return None
        if state.round < slot.last_round:
            raise TaskError.stale(f"round is {state.round}; the session is past {slot.last_round}")
        if key != slot.last_key or not slot.stood_at(state):
            raise TaskError.stale(f"round {state.round} was answered already for other tokens or drafts")
        return slot.last_reply

    def enter(self, state: SessionState, num_ahead: int) -> tuple[Slot, list[int]]:
        """Cut the session's slot back to what it shares with the committed tokens, and mark it busy.

        Returns the slot and the committed tokens that are still to be fed: at least the last one, x_{L-1}.
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
        slot = slot or self._claim(state.session)
        shared = min(slot.tokens.common_length(state.start, sent), state.base_length - 1)
        missing = (
            slot.tokens.since(shared)[: max(state.start - shared, 0)] + sent[max(shared - state.start, 0) :]
        )
        self.cut(slot, shared)
        slot.busy = True
        slot.touched = self._clock()
        return slot, missing

    def cut(self, slot: Slot, length: int) -> None:
        """Keep the first `length` positions of a slot at most."""
        slot.tokens.truncate(length)
        self._model.truncate(slot.index, length)

    def leave(self, slot: Slot) -> None:
        """The job in the slot is over; a slot whose session was released meanwhile is free now."""
        slot.busy = False
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

    def _claim(self, session: str) -> Slot:
        if not self._free:
            idle = [slot for slot in self._by_session.values() if not slot.busy]
            if not idle:
                raise TaskError.exhausted(f"all {self._model.num_slots} slots are at work", 1.0)
            self.release(min(idle, key=lambda slot: slot.touched).session)
        slot = Slot(heapq.heappop(self._free), session, touched=self._clock())
        self._by_session[session] = slot
        return slot

    def _vacate(self, slot: Slot) -> None:
        self._model.truncate(slot.index, 0)
        heapq.heappush(self._free, slot.index)


def check_ids(tokens: Sequence[int], field_name: str, vocab_size: int) -> None:
    """Raise TaskError(INVALID_ARGUMENT) naming the first token id outside the vocabulary."""
    for token in tokens:
        if token >= vocab_size:
            raise TaskError.invalid(field_name, f"has token id {token}; ids lie below {vocab_size}")
