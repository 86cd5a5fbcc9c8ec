"""From a JSON value to a request for the public API, or a refusal that names the field.

Knows what a script may write: the fields of GenerateRequest by their names, and a few friendlier ones. Values
that only the service can judge (a limit of the model, say) are the service's to refuse.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.json_fields import FieldRefused, number_at, put, quoted, refuse_name, refuse_value
from cluster.json_values import JsonValue, NotJson
from cluster.outcome import MAX_SECONDS
from protos.inference_pb2 import GenerateRequest

Scalar = str | int | float | bool

_PROMPTS = ("prompt", "messages", "text", "token_ids", "chat")
_OWN = ("id", "timeout_seconds", "prompt", "messages")
_OF_THE_SERVICE = tuple(GenerateRequest.DESCRIPTOR.fields_by_name)


@dataclass(frozen=True, slots=True)
class Call:
    """A request that can be sent."""

    id: Scalar  # the caller's, repeated in what comes of it
    request: GenerateRequest
    timeout_seconds: float | None = None  # None: the command's
    written: Mapping[str, str] = field(
        default_factory=dict
    )  # names that errors use, and the caller's for them


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that cannot be sent, and why, in a sentence."""

    id: Scalar
    problem: str
    field: str | None = None


def read_calls(values: Iterable[JsonValue | NotJson]) -> Iterator[Call | Refusal]:
    """One for each object, and for each object of an array.

    The id is the object's `id`, or else its place among all that this yields, from 1.
    """
    places = itertools.count(1)
    for read in values:
        if isinstance(read, NotJson):
            yield Refusal(next(places), read.problem)
        elif isinstance(read.value, list):
            for value in read.value:
                yield read_call(value, next(places))
        else:
            yield read_call(read.value, next(places))


def read_call(value: object, place: int) -> Call | Refusal:
    """`place` is the id of an object without one. Null fields are absent."""
    if not isinstance(value, dict):
        return Refusal(place, f'a request is {quoted(value)}; it must be an object like {{"prompt": "Hi"}}')
    given: dict[str, Any] = {name: item for name, item in value.items() if item is not None}
    call_id = given.pop("id", place)
    if isinstance(call_id, dict | list):
        problem = f"id is {quoted(call_id)}; it must be a string, a number, true or false"
        return Refusal(place, problem, "id")
    try:
        timeout_seconds = _timeout(given.pop("timeout_seconds", None))
        request = GenerateRequest()
        written = _put_prompt(request, given)
        for name, item in given.items():
            if name not in _OF_THE_SERVICE:
                refuse_name(name, (*_OWN, *_OF_THE_SERVICE))
            put(request, name, item, name)
    except FieldRefused as refused:
        return Refusal(call_id, str(refused), refused.field)
    return Call(call_id, request, timeout_seconds, written)


def _put_prompt(request: GenerateRequest, given: dict[str, Any]) -> dict[str, str]:
    """Move the prompt into the request; returns what errors may call it, each with what the caller does."""
    forms = [name for name in _PROMPTS if name in given]
    if len(forms) > 1:
        raise FieldRefused(forms[1], f"stands beside {forms[0]}; give one of them")
    if not forms:
        if unknown := next((name for name in given if name not in _OF_THE_SERVICE), None):
            refuse_name(unknown, (*_OWN, *_OF_THE_SERVICE))  # it may have been meant for the prompt
        raise FieldRefused("prompt", "is missing; give prompt (a string, or a list of token ids) or messages")
    name, value = forms[0], given.pop(forms[0])
    if name == "prompt" and not isinstance(value, str | list):
        refuse_value(name, value, "a string or a list of token ids")
    if name in ("prompt", "token_ids") and isinstance(value, list):
        put(request.token_ids, "ids", value, name)
    elif name == "prompt":
        put(request, "text", value, name)
    elif name == "messages":
        put(request.chat, "messages", value, name)
    else:
        put(request, name, value, name)
    return dict.fromkeys(("text", "token_ids", "token_ids.ids", "chat", "messages"), name)


def _timeout(value: object) -> float | None:
    if value is None:
        return None
    seconds = number_at("timeout_seconds", value)
    if not 0 < seconds <= MAX_SECONDS:
        limit = f"it must lie above 0 and at most {MAX_SECONDS:g} s"
        raise FieldRefused("timeout_seconds", f"is {quoted(value)}; {limit}")
    return seconds
