"""What came of a call as JSON: a line for each request, or a line for each event.

Knows the shape of these lines, which scripts rely on, and how an outcome counts. Writes nothing.
"""

from enum import Enum
from typing import Any

import grpc

from cluster.call_requests import Call, Refusal, Scalar
from cluster.calls import Answer, field_of, retry_seconds_of
from cluster.generation import Generation, reason_name, tokens_as_json, usage_as_json
from protos.inference_pb2 import GenerateReply


class Outcome(Enum):
    """How a request ended; the names are those of the summary."""

    ANSWERED = "answered"
    FAILED = "failed"
    REFUSED = "refused"


def outcome_of(result: Answer | Refusal) -> Outcome:
    """A request that somebody aborted has failed: its text is not what was asked for."""
    if isinstance(result, Refusal):
        return Outcome.REFUSED
    if result.error is None:
        return Outcome.FAILED if result.is_aborted else Outcome.ANSWERED
    is_refused = result.error.code is grpc.StatusCode.INVALID_ARGUMENT
    return Outcome.REFUSED if is_refused else Outcome.FAILED


def result_as_json(result: Answer | Refusal, *, with_tokens: bool) -> dict[str, Any]:
    """The line of a request: its answer, or its error with what had arrived before it failed."""
    if isinstance(result, Refusal) or result.error is not None:
        line = error_as_json(result)
        if isinstance(result, Answer) and outcome_of(result) is Outcome.FAILED:
            line |= {"partial": _texts_as_json(result, with_tokens), "seconds": round(result.seconds, 6)}
        return line
    return {
        "id": result.call.id,
        **_texts_as_json(result, with_tokens),
        "seed": result.choices[0].seed,
        "usage": usage_as_json(result.choices[0].usage),
        "seconds": round(result.seconds, 6),
    }


def error_as_json(result: Answer | Refusal) -> dict[str, Any]:
    """The line of an error alone; `result` must have one."""
    if isinstance(result, Refusal):
        return _error_line(result.id, grpc.StatusCode.INVALID_ARGUMENT, result.problem, field=result.field)
    error, call = result.error, result.call
    assert error is not None, "an answer without an error has no such line"
    field, message = field_of(error), error.message
    if field is not None and field in call.written:  # say it in the words of the caller
        message = call.written[field] + message.removeprefix(field) if message.startswith(field) else message
        field = call.written[field]
    return _error_line(call.id, error.code, message, field=field, retry_seconds=retry_seconds_of(error))


def event_as_json(call: Call, reply: GenerateReply, *, with_tokens: bool) -> dict[str, Any]:
    """The line of one event of a request's stream."""
    event = reply.WhichOneof("event")
    line: dict[str, Any] = {"id": call.id, "event": event}
    match event:
        case "started":
            line["request_id"] = reply.started.request_id
            line["seed"] = reply.started.seed
            line["num_prompt_tokens"] = reply.started.num_prompt_tokens
        case "tokens":
            line["choice"] = reply.tokens.choice
            line |= _text_as_json(call, Generation(tokens=list(reply.tokens.tokens)), with_tokens)
        case "finished":
            line["choice"] = reply.finished.choice
            line["finish_reason"] = reason_name(reply.finished)
            line["text"] = reply.finished.text
        case "usage":
            line["usage"] = usage_as_json(reply.usage)
    return line


def _error_line(
    call_id: Scalar,
    code: grpc.StatusCode,
    message: str,
    *,
    field: str | None = None,
    retry_seconds: float | None = None,
) -> dict[str, Any]:
    error = {"code": code.name, "message": message, "field": field, "retry_seconds": retry_seconds}
    return {"id": call_id, "error": {name: value for name, value in error.items() if value is not None}}


def _texts_as_json(answer: Answer, with_tokens: bool) -> dict[str, Any]:
    """The one text's fields, or a list of them in the order of the choices."""
    texts = [_text_as_json(answer.call, choice, with_tokens) for choice in answer.choices]
    return {"choices": texts} if answer.call.request.n > 1 else texts[0]


def _text_as_json(call: Call, text: Generation, with_tokens: bool) -> dict[str, Any]:
    """Token ids go to those who sent token ids, and to those who want to see the tokens."""
    fields: dict[str, Any] = {"text": text.text}
    if text.finish_reason:
        fields["finish_reason"] = text.finish_reason
    else:
        fields["num_tokens"] = len(text.tokens)
    if call.request.HasField("token_ids"):
        fields["token_ids"] = [token.id for token in text.tokens]
    if with_tokens:
        fields["tokens"] = tokens_as_json(text.tokens)
    return fields
