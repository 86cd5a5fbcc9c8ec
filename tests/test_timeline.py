"""Spans of tasks reach whoever shows the control token, and nobody else; a slow reader loses the oldest."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from cluster.recording import RecordingFailed, recording
from coordinator import timeline
from coordinator.timeline import Timeline
from protos import control_pb2_grpc
from protos.authorization import metadata
from protos.control_pb2 import Span, Spans, WatchRequest
from protos.worker_pb2 import (
    DraftResult,
    DraftTask,
    Proposal,
    SessionState,
    TaskReply,
    VerifyResult,
    VerifyTask,
    WorkTimes,
)
from tests.laws import random_table
from tests.pipelines import Pipeline, generate, pipeline
from workers.table_model import TableModel

V, TOKEN = 6, "secret"
TIMES = WorkTimes(queue_ns=1, pass_ns=2, total_ns=3, first_pass=4)


@pytest.fixture
async def served() -> AsyncIterator[Pipeline]:
    target, draft = TableModel(random_table(V, 1), V), TableModel(random_table(V, 2), V)
    async with pipeline(target, draft, control_token=TOKEN, num_draft_tokens=2) as running:
        yield running


def _task(round: int = 1) -> DraftTask:
    state = SessionState(session="c/1", round=round, tokens=b"\0" * 12)
    return DraftTask(state=state, num_draft_tokens=3)


def _reply() -> TaskReply:
    return TaskReply(draft=DraftResult(proposal=Proposal(tokens=b"\0" * 8), times=TIMES))


async def _next(messages: AsyncIterator[Spans]) -> Spans:
    async with asyncio.timeout(10):
        return await anext(messages)


async def test_a_span_says_what_was_asked_and_what_came_of_it() -> None:
    recorder = Timeline()
    messages = recorder.watch()
    assert await _next(messages) == Spans()
    recorder.record("draft", "h:1", _task(5), 100, _reply())
    verify = VerifyTask(state=SessionState(session="c/2", round=6), proposal=Proposal(tokens=b"\0" * 16))
    recorder.record("target", "h:2", verify, 200, TaskReply(verify=VerifyResult(num_accepted=3, times=TIMES)))
    recorder.record("target", "h:2", verify, 300, TaskReply(verify=VerifyResult(num_accepted=3)))
    drafted, judged, repeated = (await _next(messages)).spans
    assert drafted.answered_ns > judged.asked_ns
    for span in (drafted, judged, repeated):
        span.ClearField("answered_ns")
    assert drafted == Span(
        role="draft",
        address="h:1",
        session="c/1",
        round=5,
        num_draft_tokens=3,
        num_sent_tokens=3,
        asked_ns=100,
        times=TIMES,
        num_tokens=2,
    )
    assert judged == Span(
        role="target",
        address="h:2",
        session="c/2",
        round=6,
        num_draft_tokens=4,
        asked_ns=200,
        times=TIMES,
        num_tokens=4,
    )
    assert not repeated.HasField("times")  # the worker had answered before
    await messages.aclose()


async def test_it_is_watched_while_somebody_does_and_each_gets_all() -> None:
    recorder = Timeline()
    assert not recorder.is_watched
    one, other = recorder.watch(), recorder.watch()
    await _next(one)
    await _next(other)
    recorder.record("draft", "h:1", _task(), 1, _reply())
    await one.aclose()
    assert recorder.is_watched
    assert len((await _next(other)).spans) == 1
    await other.aclose()
    assert not recorder.is_watched


async def test_whoever_does_not_read_loses_the_oldest_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MAX_UNREAD", 5)
    monkeypatch.setattr(timeline, "MAX_SPANS", 3)
    recorder = Timeline()
    messages = recorder.watch()
    await _next(messages)
    for round in range(12):
        recorder.record("draft", "h:1", _task(round), 1, _reply())
    first, second = await _next(messages), await _next(messages)
    assert (first.num_lost, [span.round for span in first.spans]) == (7, [7, 8, 9])
    assert (second.num_lost, [span.round for span in second.spans]) == (0, [10, 11])
    await messages.aclose()


async def test_a_recording_has_every_task_of_its_time(served: Pipeline) -> None:
    await generate(served.stub, [1], max_tokens=5)
    watch = recording(served.address, TOKEN)
    recorder = await asyncio.to_thread(watch.__enter__)
    answers = [await generate(served.stub, [1, 2], max_tokens=20, n=n) for n in (1, 2)]
    spans = await asyncio.to_thread(recorder.take)
    assert await asyncio.to_thread(recorder.take) == []
    await asyncio.to_thread(watch.__exit__, None, None, None)
    judged = [span for span in spans if span.role == "target"]
    assert len(judged) == sum(answer.usage.num_rounds for answer in answers)
    assert sum(s.num_draft_tokens for s in judged) == sum(a.usage.num_draft_tokens for a in answers)
    assert len({span.session for span in judged}) == 3
    drafted = [span for span in spans if span.role == "draft" and span.num_draft_tokens]
    assert sum(s.num_tokens for s in drafted) == sum(a.usage.num_draft_tokens for a in answers)
    assert [s.num_sent_tokens for s in judged if s.round == 1] == [2, 2, 2]
    for span in spans:
        assert (span.address == served.target_address) == (span.role == "target")
        assert 0 < span.times.total_ns <= span.answered_ns - span.asked_ns


async def test_a_recording_that_the_coordinator_ends_says_so(served: Pipeline) -> None:
    watch = recording(served.address, TOKEN)
    recorder = await asyncio.to_thread(watch.__enter__)
    await served.coordinator.stop(0.0)
    with pytest.raises(RecordingFailed, match="tells no more of its tasks"):
        await asyncio.to_thread(recorder.take)
    await asyncio.to_thread(watch.__exit__, None, None, None)


async def test_whoever_watches_does_not_hold_up_the_end(served: Pipeline) -> None:
    async with grpc.aio.insecure_channel(served.address) as channel:
        call = control_pb2_grpc.ControlStub(channel).Watch(WatchRequest(), metadata=metadata(TOKEN))
        assert await call.read() == Spans()
        async with asyncio.timeout(60):
            await served.coordinator.stop(600.0)
        while (spans := await call.read()) is not grpc.aio.EOF:
            assert spans == Spans()
        assert await call.code() is grpc.StatusCode.OK


async def test_a_recording_that_is_not_allowed_says_so(served: Pipeline) -> None:
    with pytest.raises(RecordingFailed, match="UNAUTHENTICATED"):
        await asyncio.to_thread(recording(served.address, "other").__enter__)


@pytest.mark.parametrize("shown", ["other", ""])
async def test_nobody_else_may_watch(served: Pipeline, shown: str) -> None:
    async with grpc.aio.insecure_channel(served.address) as channel:
        call = control_pb2_grpc.ControlStub(channel).Watch(WatchRequest(), metadata=metadata(shown))
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call.read()
    assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
