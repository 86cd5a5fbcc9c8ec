"""`outrider call`: every request ends in one line, in order, whatever becomes of the others.

Guards against requests that are lost, reordered or sent twice, input that is read faster than it is answered,
and slots that stay taken when a call is interrupted.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from cluster import calls
from cluster.at_once import WINDOW, AtOnce, from_thread
from cluster.call_requests import Call, read_call
from cluster.calls import OPTIONS, Answer, Caller, abort, retry_pause
from protos.inference_pb2 import FINISH_REASON_ABORT, GenerateReply, GenerateRequest
from protos.status import TaskError
from tests.call_service import Replies, call, lines_of, requests_of, serving, text_of
from tests.pipelines import Pipeline, pipeline
from tests.test_service import all_is_free, draft_model, target_model
from tests.test_worker_client import eventually

SOON = 20.0


@pytest.fixture
def service() -> Iterator[Any]:
    """A Service with its `address`."""
    with serving() as servicer:
        yield servicer


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
    service.behave = failing(TaskError.unavailable("restarting", 0.01))
    result = call(service, '{"prompt": "x"}', "--retries", "2")
    [line] = lines_of(result)
    assert line["error"] == {"code": "UNAVAILABLE", "message": "restarting", "retry_seconds": 0.01}
    assert (result.exit_code, len(service.requests)) == (1, 3)


def test_a_full_service_is_asked_however_often_until_the_deadline(service: Any) -> None:
    service.behave = failing(TaskError.exhausted("full", 0.01), times=5)
    result = call(service, '{"prompt": "x"}', "--retries", "0")
    assert ([line["text"] for line in lines_of(result)], len(service.requests)) == (["answer"], 6)
    service.behave = failing(TaskError.exhausted("full", 0.01))
    result = call(service, '{"prompt": "x", "timeout_seconds": 0.5}')
    [line] = lines_of(result)
    assert line["error"]["code"] in ("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")  # between attempts, or in one
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("num_retries", "left_seconds", "longest"),
    [(0, 3600.0, 2.0), (3, 3600.0, 9.0), (10**6, 3600.0, 31.0), (10, 5.0, 3.0)],
)
def test_pauses_are_no_shorter_than_the_service_asks_and_all_different(
    num_retries: int, left_seconds: float, longest: float
) -> None:
    """They grow, and leave time for an attempt."""
    error = TaskError.exhausted("full", 1.0)
    pauses = {retry_pause(error, num_retries, left_seconds) or 0.0 for _ in range(200)}
    assert len(pauses) > 190
    assert 1.0 <= min(pauses) < 1.0 + 0.2 * (longest - 1.0)
    assert longest - 0.2 * (longest - 1.0) < max(pauses) <= longest
    assert retry_pause(error, num_retries, 1.0) is None


def test_a_service_that_names_no_time_is_not_asked_without_a_pause() -> None:
    pauses = [retry_pause(TaskError.exhausted("full", 0.0), i, 60.0) for i in range(20)]
    assert all(pause is not None and pause >= 0.01 for pause in pauses)


@pytest.mark.parametrize(
    ("error", "behind"),
    [
        (TaskError(grpc.StatusCode.UNAVAILABLE, "no word of coming again"), ""),
        (TaskError.internal("a fault"), ""),
        (TaskError.exhausted("come when your time is over", 25.0), ""),
        (TaskError.unavailable("come when your time is over", 25.0), ""),
    ],
)
def test_what_must_not_or_need_not_be_sent_again_is_reported_at_once(
    service: Any, error: TaskError, behind: str
) -> None:
    service.behave = failing(error, times=1, behind=behind)
    result = call(service, '{"prompt": "x"}', "--timeout", "20")
    [line] = lines_of(result)
    assert (line["error"]["code"], line["error"]["message"]) == (error.code.name, error.message)
    assert line["partial"] == {"text": behind, "num_tokens": len(behind)}
    assert (result.exit_code, len(service.requests)) == (1, 1)


def broken_at(cuts: Sequence[int], text: str, error: TaskError) -> Callable[[GenerateRequest], Replies]:
    """A service that resumes, and breaks off each stream before the letters of these places."""
    left = list(cuts)

    def behave(request: GenerateRequest) -> Replies:
        start = sum(request.resume_from)
        if not left:
            yield from text_of(text[start:])
            return
        yield from list(text_of(text[start : left.pop(0)]))[:-1]
        raise error

    return behave


@pytest.mark.parametrize(
    "error",
    [
        TaskError.unavailable("lost the target", 0.01),
        TaskError(grpc.StatusCode.UNAVAILABLE, "the connection broke"),
    ],
)
def test_a_stream_that_breaks_is_resumed_behind_what_has_arrived(
    service: Any, error: TaskError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "RESUME_PAUSE_SECONDS", 0.01)
    service.behave = broken_at([2, 5], "outrider", error)
    result = call(service, '{"prompt": "x", "seed": 3}')
    [line] = lines_of(result)
    assert (line["text"], result.exit_code) == ("outrider", 0)
    assert [list(request.resume_from) for request in service.requests] == [[], [2], [5]]
    assert [request.request_id for request in service.requests] == ["", "r", "r"]
    assert {(request.text, request.seed) for request in service.requests} == {("x", 3)}


def test_a_resumed_stream_is_shown_as_one(service: Any) -> None:
    service.behave = broken_at([3], "outrider", TaskError.unavailable("lost the target", 0.01))
    result = call(service, '{"prompt": "x"}', "--stream")
    events = [line["event"] for line in lines_of(result)]
    assert events == ["started", *["tokens"] * 8, "finished", "usage"]


def test_resuming_has_an_end(service: Any) -> None:
    error = TaskError.unavailable("lost the target", 0.01)
    service.behave = broken_at([1, 2, 3, 4, 5], "outrider", error)
    result = call(service, '{"prompt": "x"}', "--retries", "2")
    [line] = lines_of(result)
    assert line["error"]["message"] == "lost the target"
    assert (line["partial"]["text"], result.exit_code, len(service.requests)) == ("out", 1, 3)


def test_a_service_that_no_longer_knows_the_request_is_not_what_failed(service: Any) -> None:
    def behave(request: GenerateRequest) -> Replies:
        if request.resume_from:
            raise TaskError.unknown("request_id", request.request_id)
        yield from list(text_of("ab"))[:-1]
        raise TaskError.unavailable("lost the target", 0.01)

    service.behave = behave
    result = call(service, '{"prompt": "x"}')
    [line] = lines_of(result)
    assert (line["error"]["code"], line["partial"]["text"]) == ("UNAVAILABLE", "ab")
    assert len(service.requests) == 2


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


@pytest.mark.parametrize("reply", [next(text_of("a", choice=2)), next(text_of("", choice=2))])
def test_a_reply_for_a_choice_that_was_not_asked_for_fails_its_request_alone(
    service: Any, reply: GenerateReply
) -> None:
    def behave(request: GenerateRequest) -> Replies:
        if request.text == "bad":
            yield reply
        for choice in (0, 1):
            yield from text_of("x", choice=choice)

    service.behave = behave
    result = call(service, requests_of("bad", "good", n=2))
    failed, answered = lines_of(result)
    assert failed["error"] == {
        "code": "INTERNAL",
        "message": "choice of the service's reply is 2; it must lie in 0..1",
    }
    assert [choice["text"] for choice in answered["choices"]] == ["x", "x"]
    assert result.exit_code == 1


def test_no_place_is_made_for_choices_before_the_service_agrees_to_them() -> None:
    """The field holds four thousand million."""
    answer = Answer(Call("i", GenerateRequest(n=2**32 - 1)))
    assert (len(answer.choices), answer.is_complete, answer.has_output) == (1, False, False)


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
    """5 calls for 1 slot and 1 place in the queue."""
    async with (
        pipeline(target_model(num_slots=1), draft_model(), max_waiting_sessions=1) as service,
        caller(service) as (client, _),
    ):
        calls = [long_call(max_tokens=3, n=1) for _ in range(5)]
        answers = await asyncio.gather(*map(client.answer, calls))
        assert [answer.error for answer in answers] == [None] * 5
        assert len({tuple(token.id for token in answer.choices[0].tokens) for answer in answers}) == 1
        await all_is_free(service)
