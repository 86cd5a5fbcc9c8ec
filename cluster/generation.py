"""One request to the public API, and what came of it.

Knows the public messages and the clock on this side of the wire. Prints nothing.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos import inference_pb2_grpc
from protos.inference_pb2 import (
    Finished,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Origin,
    RoundTimes,
    Token,
    Usage,
)

_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.enable_http_proxy", 0),
]

# Every wait has an end. Beyond these no model that is worth waiting for is still at work.
_PROMPT_SECONDS = 600.0
_SECONDS_A_TOKEN = 60.0

Show = Callable[[list[Token]], None]


class GenerationFailed(RuntimeError):
    """The service ended the request; `refused` when the request itself was at fault."""

    def __init__(self, message: str, *, refused: bool) -> None:
        """`message` is a sentence."""
        super().__init__(message)
        self.refused = refused


@dataclass(slots=True)
class Generation:
    """What one request with one choice returned, and how long that took."""

    tokens: list[Token] = field(default_factory=list)
    tail: str = ""  # text behind the last token: what an incomplete character left
    finish_reason: str = ""
    seed: int = 0
    usage: Usage = field(default_factory=Usage)
    first_token_seconds: float | None = None  # from sending the request to the first token's arrival
    seconds: float | None = None  # and to the last one's; None without tokens

    def take(self, reply: GenerateReply, seconds: float) -> None:
        """Add what one reply says; it came so many seconds after the request was sent."""
        match reply.WhichOneof("event"):
            case "started":
                self.seed = reply.started.seed
            case "tokens":
                self.seconds = seconds
                if self.first_token_seconds is None:
                    self.first_token_seconds = seconds
                self.tokens += reply.tokens.tokens
            case "finished":
                self.finish_reason = reason_name(reply.finished)
                self.tail = reply.finished.text
            case "usage":
                self.usage = reply.usage

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(token.text for token in self.tokens) + self.tail

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens over the time from the request to the last of them, the prompt's pass included."""
        return len(self.tokens) / self.seconds if self.seconds else None

    def as_json(self) -> dict[str, Any]:
        """Everything by name; what does not exist (a rate of nothing) is left out."""
        known: dict[str, Any] = {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "seconds": self.seconds,
            "first_token_seconds": self.first_token_seconds,
            "tokens_per_second": self.tokens_per_second,
            "usage": usage_as_json(self.usage),
            "tokens": tokens_as_json(self.tokens),
        }
        return {name: value for name, value in known.items() if value is not None}


def origin_name(token: Token) -> str:
    """accepted, recovered, bonus or plain."""
    return Origin.Name(token.origin).removeprefix("ORIGIN_").lower()


def reason_name(finished: Finished) -> str:
    """stop, length or abort."""
    return FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower()


def tokens_as_json(tokens: Iterable[Token]) -> list[dict[str, Any]]:
    """Each with its id, text and origin."""
    return [{"id": token.id, "text": token.text, "origin": origin_name(token)} for token in tokens]


def usage_as_json(message: Usage | RoundTimes) -> dict[str, Any]:
    """The message's fields by name, in its order; what is absent (a rate of nothing) is left out."""
    known: dict[str, Any] = {}
    for kind in message.DESCRIPTOR.fields:
        value = getattr(message, kind.name)
        if kind.message_type is not None:
            known[kind.name] = usage_as_json(value)
        elif kind.is_repeated:
            known[kind.name] = list(value)
        elif not kind.has_presence or message.HasField(kind.name):
            known[kind.name] = value
    return known


def generate(address: str, request: GenerateRequest, show: Show) -> Generation:
    """Run a request with one choice; `show` gets its tokens as they arrive. Raises GenerationFailed."""
    with grpc.insecure_channel(address, options=_OPTIONS) as channel:
        try:
            stub = inference_pb2_grpc.InferenceStub(channel)
            timeout = _PROMPT_SECONDS + _SECONDS_A_TOKEN * request.max_tokens
            return collect(stub.Generate(request, timeout=timeout), show, time.monotonic)
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            refused = code == grpc.StatusCode.INVALID_ARGUMENT
            raise GenerationFailed(f"{code.name}: {details}", refused=refused) from error


def collect(replies: Iterable[GenerateReply], show: Show, clock: Callable[[], float]) -> Generation:
    """Gather the replies of a request that has just been sent: its seconds count from here."""
    generation = Generation()
    begun = clock()
    for reply in replies:
        generation.take(reply, clock() - begun)
        if reply.HasField("tokens"):
            show(list(reply.tokens.tokens))
    return generation
