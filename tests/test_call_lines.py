"""`outrider call`: what a script may write, and the lines that it gets.

Guards against numbers that lose digits, values that spoil their neighbours, ids that two requests share, and
input that takes many times its size in memory.
"""

import io
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.call_requests import Call, read_call
from cluster.json_values import JsonValue, NotJson, read_values
from protos.inference_pb2 import GenerateRequest
from protos.status import TaskError
from tests.call_service import Replies, call, lines_of, requests_of, serving, text_of


@pytest.fixture
def service() -> Iterator[Any]:
    """A Service with its `address`."""
    with serving() as servicer:
        yield servicer


# ---- what comes out


def test_an_answer_is_one_line_and_nothing_else(service: Any) -> None:
    result = call(service, '{"prompt": "Hi", "seed": 18446744073709551615}')
    assert (result.exit_code, result.stderr) == (0, "")
    [line] = lines_of(result)
    assert line.pop("seconds") > 0
    assert line.pop("usage")["num_prompt_tokens"] == 3
    assert line == {"id": 1, "text": "Hi", "finish_reason": "length", "seed": 2**64 - 1}


def test_ids_are_echoed_as_they_are_and_otherwise_tell_the_place(service: Any, tmp_path: Path) -> None:
    ids = ["a", 7, 0.5, False, "", 10**30, "é\ud800"]
    file = tmp_path / "requests.jsonl"
    file.write_text("".join(json.dumps({"id": i, "prompt": "x"}) + "\n" for i in ids) + '\n{"prompt": "x"}\n')
    assert [line["id"] for line in lines_of(call(service, file))] == [*ids, len(ids) + 1]


def test_no_two_requests_of_an_input_get_the_same_default_id(service: Any, tmp_path: Path) -> None:
    """Not those of two arrays, nor a broken one and its neighbour."""
    file = tmp_path / "requests.jsonl"
    lines = [requests_of("a", "b"), "", "[]", "broken", requests_of("d", "e"), '{"prompt": "f"}']
    file.write_text("\n".join(lines))
    written = lines_of(call(service, file))
    assert [line["id"] for line in written] == [1, 2, 3, 4, 5, 6]
    assert [line.get("text") for line in written] == ["a", "b", None, "d", "e", "f"]


def test_several_choices_come_in_a_list_each_with_its_end(service: Any) -> None:
    def behave(request: GenerateRequest) -> Replies:
        yield from text_of("later", choice=1)
        yield from text_of("first", choice=0)

    service.behave = behave
    [line] = lines_of(call(service, '{"prompt": "x", "n": 2}'))
    assert line["choices"] == [
        {"text": "first", "finish_reason": "length"},
        {"text": "later", "finish_reason": "length"},
    ]
    assert "text" not in line


def test_token_ids_come_back_to_those_who_sent_them_and_tokens_to_those_who_ask(service: Any) -> None:
    service.behave = lambda request: text_of("ab")
    assert lines_of(call(service, '{"prompt": [1, 2]}'))[0]["token_ids"] == [97, 98]
    [line] = lines_of(call(service, '{"prompt": "x"}', "--tokens"))
    assert line["tokens"][1] == {"id": 98, "text": "b", "origin": "accepted"}
    assert "token_ids" not in line


def test_streamed_events_are_lines_in_the_order_of_the_stream(service: Any) -> None:
    result = call(service, '{"id": "i", "prompt": "ab", "seed": 5}', "--stream", "--tokens")
    assert result.exit_code == 0
    lines = lines_of(result)
    assert [line["event"] for line in lines] == ["started", "tokens", "tokens", "finished", "usage"]
    assert {line["id"] for line in lines} == {"i"}
    assert (lines[0]["request_id"], lines[0]["seed"]) == ("r", 5)
    assert lines[2]["tokens"] == [{"id": 98, "text": "b", "origin": "accepted"}]
    assert lines[3]["finish_reason"] == "length"


def test_a_streamed_failure_is_an_event_too(service: Any) -> None:
    def behave(request: GenerateRequest) -> Replies:
        yield next(text_of("a"))
        raise TaskError.internal("a fault")

    service.behave = behave
    result = call(service, '{"prompt": "x"}', "--stream")
    assert result.exit_code == 1
    assert [line["event"] for line in lines_of(result)] == ["started", "tokens", "error"]
    assert lines_of(result)[-1]["error"] == {"code": "INTERNAL", "message": "a fault"}


# ---- what goes in


def sent(service: Any, request: dict[str, Any]) -> GenerateRequest:
    result = call(service, json.dumps(request))
    assert result.exit_code == 0, result.output
    return GenerateRequest.FromString(service.requests[-1].SerializeToString())


def test_fields_reach_the_service_exactly(service: Any) -> None:
    fields: dict[str, Any] = {
        "request_id": "é",
        "max_tokens": 9,
        "temperature": 0.1,
        "top_k": 2**32 - 1,
        "top_p": 1,
        "min_p": 0.125,
        "seed": 2**64 - 1,
        "n": 1,
        "num_draft_tokens": 0,
        "ignore_end_tokens": True,
        "stop": ["a", "b"],
        "logit_bias": {"50": -1.5},
    }
    request = sent(service, {"prompt": "Hi", "repetition_penalty": None, **fields})
    expected = GenerateRequest(text="Hi", **{**fields, "logit_bias": {50: -1.5}})
    assert request == expected
    assert request.HasField("num_draft_tokens")
    assert not request.HasField("repetition_penalty")


@pytest.mark.parametrize(
    ("given", "kind", "value"),
    [
        ({"prompt": "Hi"}, "text", "Hi"),
        ({"text": "Hi"}, "text", "Hi"),
        ({"prompt": [3, 4]}, "token_ids", [3, 4]),
        ({"token_ids": [3, 4]}, "token_ids", [3, 4]),
        ({"token_ids": {"ids": [3, 4.0]}}, "token_ids", [3, 4]),
        ({"prompt": []}, "token_ids", []),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "chat", [("user", "Hi")]),
        ({"chat": {"messages": [{"role": "user", "content": "Hi"}]}}, "chat", [("user", "Hi")]),
    ],
)
def test_a_prompt_is_text_token_ids_or_messages(given: dict[str, Any], kind: str, value: Any) -> None:
    read = read_call(given, 1)
    assert isinstance(read, Call)
    request = read.request
    assert request.WhichOneof("prompt") == kind
    said: Any = request.text
    if kind == "token_ids":
        said = list(request.token_ids.ids)
    elif kind == "chat":
        said = [(message.role, message.content) for message in request.chat.messages]
    assert said == value


@pytest.mark.parametrize(
    ("line", "field", "words"),
    [
        ('{"prompt": "x", "max_token": 3}', "max_token", "did you mean max_tokens?"),
        ('{"promt": "x"}', "promt", "did you mean prompt?"),
        ('{"prompt": "x", "maxTokens": 3}', "maxTokens", "did you mean max_tokens?"),
        ('{"max_tokens": 3}', "prompt", "is missing"),
        ('{"prompt": "x", "messages": []}', "messages", "beside prompt"),
        ('{"prompt": 3}', "prompt", "is 3; it must be a string or a list of token ids"),
        ('{"prompt": [1, "x"]}', "prompt[1]", 'is "x"; it must be a whole number'),
        ('{"prompt": [1, 4294967296]}', "prompt[1]", "is 4294967296; it must lie in 0..4294967295"),
        ('{"prompt": "\\ud800"}', "prompt", "half a surrogate pair at character 1"),
        ('{"messages": {}}', "messages", "must be a list"),
        ('{"messages": ["Hi"]}', "messages[0]", "must be an object"),
        ('{"messages": [{"rol": "user"}]}', "messages[0].rol", "did you mean role?"),
        ('{"messages": [{"role": 5}]}', "messages[0].role", "is 5; it must be a string"),
        ('{"prompt": "x", "max_tokens": "9"}', "max_tokens", 'is "9"; it must be a whole number'),
        ('{"prompt": "x", "max_tokens": 1.5}', "max_tokens", "is 1.5; it must be a whole number"),
        ('{"prompt": "x", "seed": 1e19}', "seed", "it must be a whole number"),
        ('{"prompt": "x", "max_tokens": true}', "max_tokens", "is true; it must be a whole number"),
        ('{"prompt": "x", "max_tokens": -1}', "max_tokens", "is -1; it must lie in 0..4294967295"),
        ('{"prompt": "x", "seed": 18446744073709551616}', "seed", f"it must lie in 0..{2**64 - 1}"),
        ('{"prompt": "x", "temperature": "hot"}', "temperature", 'is "hot"; it must be a number'),
        ('{"prompt": "x", "ignore_end_tokens": 1}', "ignore_end_tokens", "is 1; it must be true or false"),
        ('{"prompt": "x", "logit_bias": {"a": 1}}', "logit_bias's name", "a whole number in quotes"),
        ('{"prompt": "x", "timeout_seconds": 0}', "timeout_seconds", "is 0; it must lie above 0"),
        ('{"prompt": "x", "timeout_seconds": 86401}', "timeout_seconds", "and at most 86400 s"),
        ('{"prompt": "x", "id": [1]}', "id", "is [1]; it must be a string, a number, true or false"),
        ("7", None, "a request is 7; it must be an object"),
        ('{"prompt": "x"', None, "line 2 is not JSON: Expecting ',' delimiter at column 15"),
        ('{"prompt": "x', None, "line 2 is not JSON: Unterminated string"),
        ("prompt: x", None, "line 2 is not JSON"),
        ('{"prompt": "x"} {"prompt": "y"}', None, "line 2 is not JSON: Extra data at column 17"),
        ('{"prompt": "x", "temperature": NaN}', None, "NaN is no number"),
        ('{"prompt": "x", "temperature": -Infinity}', None, "-Infinity is no number"),
        ('{"prompt": "x", "temperature": 1e999}', None, "1e999 is too large"),
        ('{"prompt": "x", "seed": 1, "seed": 2}', None, "'seed' stands twice"),
        ("[" * 100_000 + "]" * 100_000, None, "line 2 is nested too deeply"),
        ('{"prompt": "x", "seed": ' + "9" * 6000 + "}", None, "... has 6000 digits; the limit is 1000"),
        (b'{"prompt": "\xff"}', None, "line 2 is not UTF-8 at byte 13"),
    ],
)
def test_a_line_that_cannot_be_is_refused_in_words_and_the_others_go_on(
    service: Any, tmp_path: Path, line: str | bytes, field: str | None, words: str
) -> None:
    data = line if isinstance(line, bytes) else line.encode()
    file = tmp_path / "requests.jsonl"
    file.write_bytes(b'{"prompt": "before"}\n' + data + b'\n{"prompt": "behind"}')
    result = call(service, file)
    before, refused, behind = lines_of(result)
    assert (before["text"], behind["text"], result.exit_code) == ("before", "behind", 2)
    assert refused.keys() == {"id", "error"}
    assert (refused["id"], refused["error"]["code"]) == (2, "INVALID_ARGUMENT")
    assert refused["error"].get("field") == field
    assert words in refused["error"]["message"]


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        ('{\n  "prompt": "a"\n}\n{\n  "prompt": "b"\n}\n', ["a", "b"]),  # as jq prints
        ('[\n  {"prompt": "a}"},\n\n  {"prompt": "{b"}\n]', ["a}", "{b"]),
        ('[{"prompt": "a"},\r\n {"prompt": "b"}]\r\n{"prompt": "c"}', ["a", "b", "c"]),
        ('{"prompt": "a",\n "max_tokens": 5}', ["a"]),
        ('\ufeff{"prompt": "a"}', ["a"]),
        ('[]\n{"prompt": "a"}', ["a"]),
        ("", []),
        ("\n \n", []),
    ],
)
def test_values_may_stand_on_several_lines(
    service: Any, tmp_path: Path, text: str, prompts: list[str]
) -> None:
    file = tmp_path / "requests.json"
    file.write_text(text)
    result = call(service, file)
    assert ([line["text"] for line in lines_of(result)], result.exit_code) == (prompts, 0)


def test_a_value_that_breaks_off_spoils_only_itself(service: Any, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt": "a",\n{"prompt": "b"}\n[\n')
    result = call(service, file)
    broken, whole, end = lines_of(result)
    assert (broken["id"], whole["text"], end["id"], result.exit_code) == (1, "b", 3, 2)


@pytest.mark.parametrize("piece", ["x", "\\n", '\\"', "x\\n"])
def test_a_long_line_takes_a_few_times_its_size_in_memory(piece: str) -> None:
    """Whatever it is made of; a search that may go back to each character would take 120 times its size."""
    line = json.dumps({"prompt": "?"}).replace("?", piece * 200_000).encode()
    tracemalloc.start()
    try:
        [value] = read_values(io.BytesIO(line + b"\n"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(value, JsonValue)
    assert peak < 20 * len(line)


def test_a_long_string_that_breaks_off_is_searched_once() -> None:
    """Once from each of its quotes would take hours."""
    [broken] = read_values(io.BytesIO(b'{"prompt": "' + b'\\"' * 1_000_000))
    assert broken == NotJson("line 1 is not JSON: Unterminated string starting at column 12")


def test_an_argument_is_one_value_however_it_is_laid_out(service: Any) -> None:
    result = call(service, ' {"prompt"\n:"a"\n}')
    assert ([line["text"] for line in lines_of(result)], result.exit_code) == (["a"], 0)


def test_what_the_service_refuses_is_said_in_the_words_of_the_caller(service: Any) -> None:
    def behave(request: GenerateRequest) -> Replies:
        if request.text == "long":
            raise TaskError.invalid("text", "has 9 tokens; 1 to 8 leave room for an answer")
        yield from text_of("x")

    service.behave = behave
    result = call(service, requests_of("long", "x"))
    [refused, answered] = lines_of(result)
    assert refused == {
        "id": 1,
        "error": {
            "code": "INVALID_ARGUMENT",
            "message": "prompt has 9 tokens; 1 to 8 leave room for an answer",
            "field": "prompt",
        },
    }
    assert (answered["text"], result.exit_code) == ("x", 2)
