"""What clients were told, and whether that is what is promised: each token once, in order, and the law.

Knows the public stream and the laws of `fault_models`; not what was done to the service meanwhile.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import grpc

from protos.inference_pb2 import (
    FINISH_REASON_ABORT,
    FINISH_REASON_LENGTH,
    GenerateReply,
    GenerateRequest,
    Tokens,
    Usage,
)
from tests.fault_models import V, target_law
from tests.laws import Law, chi_square, plain_law
from workers.sampling import SamplingSettings

Kind = Literal["greedy", "seeded", "sample"]

SAMPLE_PROMPT = (1, 2)
SAMPLE_TOKENS = 4
HAS_INDEX = "first_index" in Tokens.DESCRIPTOR.fields_by_name


@dataclass(slots=True, eq=False)
class Record:
    """One call: what was asked, what came, how it ended."""

    kind: Kind
    request: GenerateRequest
    texts: list[list[int]] = field(init=False)  # by choice
    events: list[str] = field(default_factory=list)
    reasons: dict[int, int] = field(default_factory=dict)  # by choice
    usage: Usage | None = None
    status: grpc.StatusCode | None = None  # None while it runs, and when it ended well
    has_left: bool = False  # the client has hung up
    was_aborted: bool = False  # Abort was called
    is_over: bool = False
    longest_pause_seconds: float = 0.0
    problems: list[str] = field(default_factory=list)  # seen while it ran

    def __post_init__(self) -> None:
        self.texts = [[] for _ in range(self.request.n or 1)]

    @property
    def is_complete(self) -> bool:
        """Whether it ended well, with all of its tokens."""
        return self.usage is not None and set(self.reasons.values()) == {FINISH_REASON_LENGTH}

    async def follow(self, call: Any) -> None:
        """Read the call to its end; a call that goes on behind what has come may follow on one that broke."""
        self.has_left, self.is_over, self.status = False, False, None
        last = time.monotonic()
        try:
            async for reply in call:
                now = time.monotonic()
                self.longest_pause_seconds = max(self.longest_pause_seconds, now - last)
                last = now
                self._take(reply)
        except grpc.aio.AioRpcError as error:
            self.status = error.code()
        finally:
            self.is_over = True

    def _take(self, reply: GenerateReply) -> None:
        event = reply.WhichOneof("event")
        self.events.append(str(event))
        if event == "tokens":
            choice = reply.tokens.choice
            text = self.texts[choice]
            index = getattr(reply.tokens, "first_index", len(text))
            if index != len(text):
                self.problems.append(f"token {index} comes where {len(text)} was due")
            if choice in self.reasons:
                self.problems.append(f"choice {choice} goes on behind its end")
            text += [token.id for token in reply.tokens.tokens]
        elif event == "finished":
            self.reasons[reply.finished.choice] = reply.finished.reason
        elif event == "usage":
            self.usage = reply.usage


def violations(record: Record, reference: Sequence[int] | None = None) -> list[str]:
    """Promises that a call that is over has broken, in words.

    `reference` is the text of an undisturbed call, where that must be the same.
    """
    found = list(record.problems)
    request = record.request
    allowed = {None, grpc.StatusCode.UNAVAILABLE}
    if record.has_left:
        allowed.add(grpc.StatusCode.CANCELLED)
    if record.status not in allowed:
        found.append(f"it ends with {record.status}")
    if record.events and record.events[0] != "started":
        found.append(f"it begins with {record.events[0]}")
    went_on = record.status is None and not record.has_left
    if went_on and (record.usage is None or record.events[-1] != "usage"):
        found.append(f"it ends without its usage, behind {record.events[-2:]}")
    reasons = {FINISH_REASON_LENGTH} | ({FINISH_REASON_ABORT} if record.was_aborted else set())
    for choice, reason in record.reasons.items():
        if reason not in reasons:
            found.append(f"choice {choice} ends for reason {reason}")
        if reason == FINISH_REASON_LENGTH and len(record.texts[choice]) != request.max_tokens:
            found.append(f"choice {choice} has {len(record.texts[choice])} of {request.max_tokens} tokens")
    if any(len(text) > request.max_tokens for text in record.texts):
        found.append("a text is longer than was asked for")
    found += _usage_violations(record)
    if reference is not None and record.texts[0] != list(reference[: len(record.texts[0])]):
        found.append(f"the text is {record.texts[0]}, undisturbed it is {list(reference)}")
    return found


def _usage_violations(record: Record) -> list[str]:
    usage, num_tokens = record.usage, sum(map(len, record.texts))
    if usage is None:
        return []
    found = []
    if usage.num_completion_tokens != num_tokens:
        found.append(f"the usage counts {usage.num_completion_tokens} tokens; {num_tokens} came")
    if not usage.num_accepted_tokens <= usage.num_judged_tokens <= usage.num_draft_tokens:
        found.append(f"more was accepted than judged, or judged than drafted: {usage}")
    return found


def sample_law() -> Law:
    """The law of a sample's tokens, by enumeration."""
    return plain_law(target_law, SAMPLE_PROMPT, V, SAMPLE_TOKENS, SamplingSettings())


def samples_of(records: Sequence[Record]) -> list[tuple[int, ...]]:
    """The texts of the samples that are complete; that one is not must not hang on its tokens."""
    return [
        tuple(text)
        for record in records
        if record.kind == "sample" and record.is_complete
        for text in record.texts
    ]


def law_p_value(samples: Sequence[tuple[int, ...]], law: Law) -> float:
    """Of a chi-square test; 0 where a sequence of probability 0 was drawn."""
    counts = Counter(samples)
    if any(law.get(sequence, 0.0) == 0.0 for sequence in counts):
        return 0.0
    return chi_square(counts, law)
