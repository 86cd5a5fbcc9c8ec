"""From a GenerateRequest to an order that can be carried out, or an error that names the field.

Knows the public message and the deployment's limits. What is not supported is refused by name; nothing that a
caller asked for is dropped in silence.
"""

import hashlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from coordinator.draft_length import LONGEST
from coordinator.text import Text
from coordinator.text_error import TextError
from protos.inference_pb2 import GenerateRequest
from protos.status import TaskError
from protos.worker_pb2 import RULE_BLOCK, RULE_TOKEN, Rule, Sampling

UNSUPPORTED = (
    "stop",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
)

MAX_REQUEST_ID_CHARACTERS = 128
RULES = {"token": RULE_TOKEN, "block": RULE_BLOCK}
MAX_QUOTED_CHARACTERS = 250  # errors travel in trailers, of which gRPC takes 8 KiB


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may ask for."""

    vocab_size: int
    max_length: int  # prompt and completion together
    max_choices: int
    max_num_draft_tokens: int
    default_max_tokens: int
    num_draft_tokens: int  # K unless a request says otherwise
    auto_draft_tokens: bool  # whether that is the most, and K chosen round by round
    rule: str  # one of RULES


@dataclass(frozen=True, slots=True)
class Order:
    """A request with every default filled in and every field checked."""

    request_id: str
    body_digest: bytes  # of the message that it was read from
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    seed: int
    num_choices: int
    num_draft_tokens: int
    auto_draft_tokens: bool  # whether that is the most, and K chosen round by round
    rule: "Rule"
    ignore_end_tokens: bool


def read_request(request: GenerateRequest, text: Text | None, limits: Limits) -> Order:
    """Raises TaskError(INVALID_ARGUMENT) for the first field that cannot be."""
    _refuse_unknown_fields(request)
    for name in UNSUPPORTED:
        if name in {field.name for field, _ in request.ListFields()}:
            raise TaskError.invalid(name, "is not supported here; leave it out")
    if len(request.request_id) > MAX_REQUEST_ID_CHARACTERS:
        raise TaskError.invalid(
            "request_id",
            f"has {len(request.request_id)} characters; the limit is {MAX_REQUEST_ID_CHARACTERS}",
        )
    prompt = _read_prompt(request, text, limits)
    max_tokens = _integer(request, "max_tokens", limits.default_max_tokens, 1, limits.max_length)
    is_deployments = limits.auto_draft_tokens and not request.HasField("num_draft_tokens")
    is_auto = request.auto_draft_tokens or is_deployments
    most = min(LONGEST, limits.max_num_draft_tokens) if is_auto else limits.num_draft_tokens
    return Order(
        request_id=request.request_id or secrets.token_hex(8),
        body_digest=_body_digest(request),
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=Sampling(
            temperature=_number(request, "temperature", 1.0, 0.0, 100.0),
            top_k=_integer(request, "top_k", 0, 0, 2**31 - 1),
            top_p=_number(request, "top_p", 1.0, math.ulp(0.0), 1.0),
            min_p=_number(request, "min_p", 0.0, 0.0, 1.0),
        ),
        seed=request.seed if request.HasField("seed") else secrets.randbits(64),
        num_choices=_integer(request, "n", 1, 1, limits.max_choices),
        num_draft_tokens=_integer(request, "num_draft_tokens", most, 0, limits.max_num_draft_tokens),
        auto_draft_tokens=is_auto,
        rule=_rule(request.rule or limits.rule),
        ignore_end_tokens=request.ignore_end_tokens,
    )


def check_resumption(request: GenerateRequest, order: Order, num_tokens: Sequence[int]) -> None:
    """Raise TaskError(INVALID_ARGUMENT) unless the order's stream can go on from where the request says.

    `num_tokens` are committed by choice.
    """
    if _body_digest(request) != order.body_digest:
        raise TaskError.invalid(
            "request_id",
            f"is {order.request_id!r}, a request with another body; but for resume_from it must be the same",
        )
    start = request.resume_from
    if len(start) != len(num_tokens):
        raise TaskError.invalid(
            "resume_from", f"has {len(start)} entries; the request has {len(num_tokens)} choices"
        )
    for choice, (wanted, committed) in enumerate(zip(start, num_tokens, strict=True)):
        if wanted > committed:
            raise TaskError.invalid(
                "resume_from", f"is {wanted} for choice {choice}, of which {committed} tokens are committed"
            )


def _body_digest(request: GenerateRequest) -> bytes:
    """Names what is asked for, whatever the request is called and wherever its stream begins."""
    body = GenerateRequest()
    body.CopyFrom(request)
    body.ClearField("request_id")
    body.ClearField("resume_from")
    return hashlib.blake2b(body.SerializeToString(deterministic=True), digest_size=16).digest()


def _read_prompt(request: GenerateRequest, text: Text | None, limits: Limits) -> list[int]:
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise TaskError.invalid("prompt", "is missing; give text, token_ids or chat")
    if kind == "token_ids":
        prompt = list(request.token_ids.ids)
    elif text is None:
        raise TaskError.invalid(kind, "needs a tokenizer, which this deployment lacks; give token_ids")
    else:
        try:
            if kind == "text":
                prompt = text.encode(request.text)
            else:
                prompt = text.encode_chat([(m.role, m.content) for m in request.chat.messages])
        except TextError as error:
            field, _, problem = str(error).partition(": ")
            if len(problem) > MAX_QUOTED_CHARACTERS:
                problem = (
                    f"{problem[: MAX_QUOTED_CHARACTERS // 2]} ... {problem[-MAX_QUOTED_CHARACTERS // 2 :]}"
                )
            raise TaskError.invalid(field, problem) from None
    if not 1 <= len(prompt) < limits.max_length:
        raise TaskError.invalid(
            kind, f"has {len(prompt)} tokens; 1 to {limits.max_length - 1} leave room for an answer"
        )
    for token in prompt:  # a tokenizer, too, may know more ids than the model
        if token >= limits.vocab_size:
            field = "token_ids.ids" if kind == "token_ids" else kind
            raise TaskError.invalid(field, f"has token id {token}; ids lie below {limits.vocab_size}")
    return prompt


def _rule(name: str) -> "Rule":
    if name not in RULES:
        quoted = repr(name)[:MAX_QUOTED_CHARACTERS]
        raise TaskError.invalid("rule", f"is {quoted}; it must be one of {', '.join(RULES)}")
    return RULES[name]


def _integer(request: GenerateRequest, field: str, default: int, lowest: int, highest: int) -> int:
    value = getattr(request, field) if request.HasField(field) else default
    if not lowest <= value <= highest:
        raise TaskError.invalid(field, f"is {value}; it must lie in {lowest}..{highest}")
    return int(value)


def _number(request: GenerateRequest, field: str, default: float, lowest: float, highest: float) -> float:
    value = getattr(request, field) if request.HasField(field) else default
    if not lowest <= value <= highest:  # NaN lies nowhere
        edge = "above 0 and at most" if lowest == math.ulp(0.0) else f"from {lowest:g} to"
        raise TaskError.invalid(field, f"is {value}; it must lie {edge} {highest:g}")
    return float(value)


def _refuse_unknown_fields(message: Message) -> None:
    """Fields of a newer or another API: the wire knows their numbers only."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        number = unknown[0].field_number
        raise TaskError.invalid(
            f"field {number} of {message.DESCRIPTOR.name}", "is not known to this server; leave it out"
        )
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else [value]:
            _refuse_unknown_fields(part)
