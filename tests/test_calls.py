"""`outrider call`: every request ends in one line, in order, whatever becomes of the others.

Guards against requests that are lost, reordered or sent twice, input that is read faster than it is answered,
numbers that lose digits, and slots that stay taken when a call is interrupted.
"""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status
from typer.testing import CliRunner, Result

from cluster.at_once import WINDOW, AtOnce, from_thread
from cluster.call_requests import Call, read_call
from cluster.calls import OPTIONS, Answer, Caller, abort
from cluster.command_line import app
from protos import inference_pb2_grpc
from protos.inference_pb2 import (
    FINISH_REASON_ABORT,
    FINISH_REASON_LENGTH,
    ORIGIN_ACCEPTED,
    AbortReply,
    AbortRequest,
    Finished,
    GenerateReply,
    GenerateRequest,
    Started,
    Token,
    Tokens,
    Usage,
)
from protos.status import TaskError
from tests.pipelines import Pipeline, pipeline
from tests.test_service import all_is_free, draft_model, target_model
from tests.test_worker_client import eventually

SOON = 20.0

Replies = Iterator[GenerateReply]


# ---- a service that does what a test wants


def text_of(text: str, *, choice: int = 0, reason: Any = FINISH_REASON_LENGTH) -> Replies:
    """A choice that says a letter a token."""
    for letter in text:
        token = Token(id=ord(letter), text=letter, origin=ORIGIN_ACCEPTED)
        yield GenerateReply(tokens=Tokens(choice=choice, tokens=[token]))
    yield GenerateReply(finished=Finished(choice=choice, reason=reason))


class Service(inference_pb2_grpc.InferenceServicer):
    """Repeats prompts, or does as `behave` says."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.behave: Callable[[GenerateRequest], Replies] = lambda request: text_of(request.text)
        self.lock = threading.Lock()
        self.num_running = self.most_running = 0

    def Generate(self, request: GenerateRequest, context: grpc.ServicerContext) -> Replies:
        with self.lock:
            self.requests.append(request)
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        try:
            yield GenerateReply(started=Started(request_id="r", seed=request.seed, num_prompt_tokens=3))
            yield from self.behave(request)
            yield GenerateReply(usage=Usage(num_prompt_tokens=3))
        except TaskError as error:
            context.abort_with_status(rpc_status.to_status(error.to_status()))
        finally:
            with self.lock:
                self.num_running -= 1

    def Abort(self, request: AbortRequest, context: grpc.ServicerContext) -> AbortReply:
        return AbortReply(aborted=request.request_id == "running")


@pytest.fixture
def service() -> Iterator[Any]:
    """A Service with its `address`."""
    servicer: Any = Service()
    server = grpc.server(ThreadPoolExecutor(max_workers=16))
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer
    server.stop(None).wait()


def call(service: Any, *arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["call", "--address", service.address, *map(str, arguments)])


def lines_of(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def requests_of(*prompts: str, **fields: Any) -> str:
    return json.dumps([{"prompt": prompt, **fields} for prompt in prompts])


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
    assert [line["id"] for line in lines_of(call(service, file))] == [*ids, len(ids) + 2]
    assert [line["id"] for line in lines_of(call(service, requests_of("x", "y")))] == [1, 2]


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


# ---- order and bounds


@pytest.mark.parametrize(("order", "expected"), [("kept", [1, 2, 3, 4, 5]), ("finished", [2, 3, 4, 5, 1])])
def test_answers_come_in_order_or_as_they_finish(service: Any, order: str, expected: list[int]) -> None:
    """The first request waits for the others, which go one by one."""
    others_are_done = threading.Event()
    turns = {str(i): threading.Event() for i in range(2, 7)}
    turns["2"].set()

    def behave(request: GenerateRequest) -> Replies:
        if request.text == "1":
            assert others_are_done.wait(SOON)
        else:
            assert turns[request.text].wait(SOON)
        yield from text_of(request.text)
        if request.text == "5":
            threading.Timer(0.2, others_are_done.set).start()
        elif request.text != "1":  # so much later that it arrives later
            threading.Timer(0.1, turns[str(int(request.text) + 1)].set).start()

    service.behave = behave
    result = call(service, requests_of("1", "2", "3", "4", "5"), "--order", order)
    assert [line["id"] for line in lines_of(result)] == expected
    assert all(line["text"] == str(line["id"]) for line in lines_of(result))


def test_as_many_run_at_once_as_the_option_says_and_no_more(service: Any) -> None:
    three_run = threading.Barrier(3)

    def behave(request: GenerateRequest) -> Replies:
        three_run.wait(SOON)
        yield from text_of("x")

    service.behave = behave
    result = call(service, requests_of(*"abcdefghijklmno"), "--concurrency", "3")
    assert (result.exit_code, len(lines_of(result)), service.most_running) == (0, 15, 3)


@pytest.mark.parametrize("keep_order", [True, False])
async def test_input_is_read_no_further_than_a_window_ahead(keep_order: bool) -> None:
    """An endless input, of whose requests the first hangs, or, without order, all do."""
    num_read = 0
    is_over = asyncio.Event()
    written: list[int] = []

    async def questions() -> AsyncIterator[int]:
        nonlocal num_read
        while True:
            num_read += 1
            yield num_read

    async def answer(question: int) -> int:
        if question == 1 or not keep_order:
            with contextlib.suppress(asyncio.CancelledError):
                await is_over.wait()
        return question

    at_once = AtOnce(answer, written.append, concurrency=3, keep_order=keep_order)
    running = asyncio.create_task(at_once.run(questions()))
    bound = 3 * WINDOW if keep_order else 3
    await eventually(lambda: num_read == bound)
    await asyncio.sleep(0.05)
    assert (num_read, written) == (bound, [])
    at_once.stop()
    await running
    assert sorted(written) == list(range(1, bound + 1))
    assert written == sorted(written) or not keep_order


async def test_what_reading_raises_comes_behind_the_answers_to_what_was_read() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    async def answer(question: int) -> int:
        await asyncio.sleep(0.05)
        return question

    written: list[int] = []
    with pytest.raises(OSError, match="the disk is gone"):
        await AtOnce(answer, written.append, concurrency=2, keep_order=True).run(from_thread(items()))
    assert written == [1]


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


# ---- retries, deadlines, ends


def failing(
    error: TaskError, *, times: int = 10**9, behind: str = ""
) -> Callable[[GenerateRequest], Replies]:
    """So many attempts fail, each behind a few tokens; the next one is answered."""
    num_left = times

    def behave(request: GenerateRequest) -> Replies:
        nonlocal num_left
        if num_left:
            num_left -= 1
            yield from list(text_of(behind))[:-1]
            raise error
        yield from text_of("answer")

    return behave


@pytest.mark.parametrize(
    "error", [TaskError.exhausted("full", 0.01), TaskError.unavailable("restarting", 0.01)]
)
def test_a_busy_service_is_asked_again_when_it_says(service: Any, error: TaskError) -> None:
    service.behave = failing(error, times=2)
    result = call(service, '{"prompt": "x"}')
    assert ([line["text"] for line in lines_of(result)], result.exit_code) == (["answer"], 0)
    assert len(service.requests) == 3


def test_retries_have_an_end(service: Any) -> None:
    service.behave = failing(TaskError.exhausted("full", 0.01))
    result = call(service, '{"prompt": "x"}', "--retries", "2")
    [line] = lines_of(result)
    assert line["error"] == {"code": "RESOURCE_EXHAUSTED", "message": "full", "retry_seconds": 0.01}
    assert (result.exit_code, len(service.requests)) == (1, 3)


@pytest.mark.parametrize(
    ("error", "behind"),
    [
        (TaskError.unavailable("lost the target", 0.01), "ab"),  # something was shown
        (TaskError(grpc.StatusCode.UNAVAILABLE, "no word of coming again"), ""),
        (TaskError.internal("a fault"), ""),
        (TaskError.exhausted("come in a minute", 60.0), ""),
        (TaskError.exhausted("come when your time is over", 25.0), ""),
    ],
)
def test_what_must_not_or_need_not_be_sent_again_is_reported_at_once(
    service: Any, error: TaskError, behind: str
) -> None:
    service.behave = failing(error, times=1, behind=behind)
    timeout = "20" if "your time" in error.message else "7200"
    result = call(service, '{"prompt": "x"}', "--timeout", timeout)
    [line] = lines_of(result)
    assert (line["error"]["code"], line["error"]["message"]) == (error.code.name, error.message)
    assert line["partial"] == {"text": behind, "num_tokens": len(behind)}
    assert (result.exit_code, len(service.requests)) == (1, 1)


def test_a_deadline_is_each_request_s_own_and_keeps_what_had_arrived(service: Any) -> None:
    is_over = threading.Event()

    def behave(request: GenerateRequest) -> Replies:
        yield from list(text_of("par"))[:-1]
        if request.text == "slow":
            is_over.wait(SOON)
        yield from text_of("t")

    service.behave = behave
    result = call(service, '[{"prompt": "slow", "timeout_seconds": 0.5}, {"prompt": "fast"}]')
    is_over.set()
    late, answered = lines_of(result)
    assert late["error"] == {
        "code": "DEADLINE_EXCEEDED",
        "message": "the request was not complete within 0.5 seconds",
    }
    assert late["partial"] == {"text": "par", "num_tokens": 3}
    assert (answered["text"], result.exit_code) == ("part", 1)


def test_a_request_that_somebody_aborts_has_what_it_had_and_counts_as_failed(service: Any) -> None:
    service.behave = lambda request: text_of("had", reason=FINISH_REASON_ABORT)
    result = call(service, '{"prompt": "x"}')
    [line] = lines_of(result)
    assert (line["text"], line["finish_reason"], result.exit_code) == ("had", "abort", 1)


def test_a_stream_that_ends_too_early_is_no_answer(service: Any) -> None:
    service.behave = lambda request: iter(list(text_of("ab"))[:-1])
    result = call(service, '{"prompt": "x"}')
    [line] = lines_of(result)
    assert (line["error"]["code"], line["partial"]["text"], result.exit_code) == ("INTERNAL", "ab", 1)


def test_a_failure_weighs_more_than_a_refusal(service: Any) -> None:
    service.behave = failing(TaskError.internal("a fault"))
    assert call(service, '[{"prompt": "x"}, {"promt": "x"}]').exit_code == 1
    assert call(service, '[{"promt": "x"}]').exit_code == 2


def test_no_service_is_one_error_a_request() -> None:
    result = call(SimpleNamespace(address="127.0.0.1:1"), requests_of("a", "b"))
    assert [line["error"]["code"] for line in lines_of(result)] == ["UNAVAILABLE"] * 2
    assert result.exit_code == 1


@pytest.mark.parametrize(("name", "is_running"), [("running", True), ("unknown", False)])
def test_abort_says_whether_such_a_request_was_running(service: Any, name: str, is_running: bool) -> None:
    result = call(service, "--abort", name)
    assert lines_of(result) == [{"request_id": name, "aborted": is_running}]
    assert result.exit_code == (0 if is_running else 1)


# ---- the command


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--concurrency", "0"], "--concurrency is 0; it must lie in 1..1024"),
        (["--retries", "-1"], "--retries is -1; it must lie in 0..100"),
        (["--timeout", "nan"], "--timeout is nan; it must lie above 0"),
        (["--timeout", "0"], "--timeout is 0; it must lie above 0"),
        (["--stream", "--order", "kept"], "--order is kept"),
        (["--address", "localhost"], "--address is 'localhost'; it must be host:port"),
        (["--abort", "r"], "--abort ends a request and sends none"),
    ],
)
def test_an_option_that_cannot_be_is_refused(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["call", '{"prompt": "x"}', *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr


def test_an_input_that_is_neither_json_nor_a_file_is_refused(tmp_path: Path) -> None:
    for given in ("Hi there", str(tmp_path)):
        result = CliRunner().invoke(app, ["call", given, "--address", "127.0.0.1:1"])
        assert (result.exit_code, result.stdout) == (2, "")
        assert repr(given) in result.stderr


def test_without_a_deployment_the_error_says_how_to_start_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_STATE", str(tmp_path))
    result = CliRunner().invoke(app, ["call", '{"prompt": "x"}', "--deployment", "mine"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "'mine'" in result.stderr
    assert "outrider up" in result.stderr


def test_the_deployment_that_is_up_is_called(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []

    def read_state(name: str) -> Any:
        names.append(name)
        return SimpleNamespace(address=service.address)

    monkeypatch.setattr("cluster.deployment_state.read_state", read_state)
    result = CliRunner().invoke(app, ["call", '{"prompt": "x"}'])
    assert (result.exit_code, names) == (0, ["default"])


def test_the_command_loads_neither_ray_nor_torch() -> None:
    code = (
        "import sys, cluster.calling, cluster.deployment_state, cluster.command_line;"
        "print(sorted({'ray', 'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# ---- the process: pipes and signals


@contextlib.asynccontextmanager
async def process(address: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command with pipes."""
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cluster.command_line", "call", "--address", address, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()


def write(running: asyncio.subprocess.Process, *requests: dict[str, Any]) -> None:
    """Without waiting for the command to read it."""
    assert running.stdin is not None
    running.stdin.write(b"".join(json.dumps(request).encode() + b"\n" for request in requests))


async def read(running: asyncio.subprocess.Process) -> dict[str, Any]:
    assert running.stdout is not None
    return dict(json.loads(await asyncio.wait_for(running.stdout.readline(), SOON)))


async def test_a_pipe_that_stays_open_is_answered_as_it_comes() -> None:
    async with pipeline(target_model(), draft_model()) as service, process(service.address) as running:
        for i in range(3):
            write(running, {"id": i, "prompt": [i], "max_tokens": 2, "temperature": 0})
            assert (await read(running))["id"] == i
        assert running.stdin is not None
        running.stdin.close()
        assert await asyncio.wait_for(running.wait(), SOON) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_a_signal_ends_what_runs_keeps_what_it_had_and_frees_its_slots(number: int, code: int) -> None:
    """The input stays open: nobody waits for it."""
    async with (
        pipeline(target_model(0.005), draft_model()) as service,
        process(service.address, "--concurrency", "2") as running,
    ):
        long: dict[str, Any] = {"prompt": [1], "max_tokens": 4000}
        write(running, long, long, long)  # the third one has to wait
        await eventually(lambda: service.target.num_slots_used == 2, SOON)
        await asyncio.sleep(0.2)
        running.send_signal(number)
        for i in (1, 2):
            line = await read(running)
            assert (line["id"], line["error"]["code"]) == (i, "CANCELLED")
            assert line["partial"]["num_tokens"] == len(line["partial"]["token_ids"]) > 0
        assert await asyncio.wait_for(running.wait(), SOON) == code
        out, err = await running.communicate()
        assert (out, err) == (b"", b"")
        await all_is_free(service)


async def test_the_second_signal_ends_at_once() -> None:
    """Nobody reads the output, so that the command hangs in writing it."""
    async with process("127.0.0.1:1") as running:
        write(running, {"id": 0}, *({"id": "x" * 50_000} for _ in range(20)))
        await read(running)
        await asyncio.sleep(0.5)
        running.send_signal(signal.SIGINT)
        await asyncio.sleep(0.5)
        assert running.returncode is None
        running.send_signal(signal.SIGINT)
        await asyncio.wait_for(running.communicate(), SOON)
        assert running.returncode == -signal.SIGINT


async def test_a_reader_that_goes_ends_the_command_without_a_word() -> None:
    async with process("127.0.0.1:1") as running:
        assert running.stdout is not None
        write(running, {"nothing": 1})
        await read(running)
        running.stdout._transport.close()  # type: ignore[attr-defined]
        write(running, *({"nothing": i} for i in range(10)))
        assert await asyncio.wait_for(running.wait(), SOON) == 1
        assert running.stderr is not None
        assert await running.stderr.read() == b""


# ---- slots


@contextlib.asynccontextmanager
async def caller(service: Pipeline, timeout_seconds: float = SOON) -> AsyncIterator[tuple[Caller, Any]]:
    """With its channel."""
    async with grpc.aio.insecure_channel(service.address, options=OPTIONS) as channel:
        yield Caller(channel, timeout_seconds=timeout_seconds, max_retries=5), channel


def long_call(**fields: Any) -> Call:
    read = read_call({"prompt": [1], "max_tokens": 4000, "n": 3, "temperature": 0, **fields}, 1)
    assert isinstance(read, Call)
    return read


@pytest.mark.parametrize("how", ["cancel", "deadline", "abort"])
async def test_a_call_that_does_not_reach_its_end_frees_its_slots(how: str) -> None:
    async with pipeline(target_model(0.005), draft_model()) as service, caller(service) as (client, channel):
        fields = {"timeout_seconds": 0.5} if how == "deadline" else {"request_id": "r"}
        running = asyncio.create_task(client.answer(long_call(**fields)))
        await eventually(lambda: service.target.num_slots_used == 3)
        if how == "cancel":
            running.cancel()
        elif how == "abort":
            await asyncio.sleep(0.1)
            assert await abort(channel, "r", SOON)
            assert not await abort(channel, "unknown", SOON)
        answer: Answer = await asyncio.wait_for(running, SOON)
        await all_is_free(service)
    if how == "abort":
        assert (answer.error, answer.is_aborted) == (None, True)
    else:
        assert answer.error is not None
        assert answer.error.code.name == {"cancel": "CANCELLED", "deadline": "DEADLINE_EXCEEDED"}[how]
    assert len(answer.choices) == 3


async def test_a_full_service_is_waited_for_and_everybody_is_answered() -> None:
    """8 calls for 1 slot and 1 place in the queue; the pauses grow, so that the retries do."""
    async with (
        pipeline(target_model(num_slots=1), draft_model(), max_waiting_sessions=1) as service,
        caller(service) as (client, _),
    ):
        calls = [long_call(max_tokens=3, n=1) for _ in range(5)]
        answers = await asyncio.gather(*map(client.answer, calls))
        assert [answer.error for answer in answers] == [None] * 5
        assert len({tuple(token.id for token in answer.choices[0].tokens) for answer in answers}) == 1
        await all_is_free(service)
