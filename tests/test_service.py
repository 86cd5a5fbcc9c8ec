"""The public service over real gRPC, with models whose law is written down.

Guards against slots that stay taken when a client goes in whatever way, texts that depend on their
neighbours, seeds that are ignored, limits that are overrun, and usage that does not add up.
"""

import asyncio
import contextlib
import random
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models

from protos import inference_pb2_grpc
from protos.inference_pb2 import (
    FINISH_REASON_ABORT,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    ORIGIN_ACCEPTED,
    ORIGIN_PLAIN,
    AbortRequest,
    Chat,
    ChatMessage,
    GenerateRequest,
    GetModelInfoRequest,
    TokenIds,
)
from tests.pipelines import Generated, Pipeline, generate, pipeline
from tests.test_worker_client import SOON, eventually
from workers.server import WorkerConfig
from workers.table_model import NextLogits, TableModel

V = 12  # vocabulary
A_MOMENT = 1.0  # within which what nobody wants any more is freed


# ---- models with a known law


def law(seed: int) -> NextLogits:
    """Next-token logits that depend on the whole prefix: a cache that is cut wrongly says something else."""

    def next_logits(prefix: tuple[int, ...]) -> NDArray[np.floating]:
        return 2.0 * np.random.default_rng([seed, zlib.crc32(bytes(prefix)), len(prefix)]).normal(size=V)

    return next_logits


def near(next_logits: NextLogits, seed: int = 99, distance: float = 0.5) -> NextLogits:
    """A drafter's law that often agrees."""
    noise = law(seed)
    return lambda prefix: np.asarray(next_logits(prefix) + distance * noise(prefix))


TARGET = law(1)
DRAFT = near(TARGET)


def greedy(
    prompt: Sequence[int], num_tokens: int, end: Sequence[int] = (), next_logits: NextLogits = TARGET
) -> tuple[int, ...]:
    """What plain decoding says, computed here."""
    said: list[int] = []
    while len(said) < num_tokens and not (said and said[-1] in end):
        said.append(int(np.float32(next_logits((*prompt, *said))).argmax()))
    return tuple(said)


def target_model(latency: float = 0.0, **fields: Any) -> TableModel:
    return TableModel(TARGET, V, latency_seconds=(lambda _: latency) if latency else None, **fields)


def draft_model(next_logits: NextLogits = DRAFT, **fields: Any) -> TableModel:
    return TableModel(next_logits, V, **fields)


# ---- calls


def ids_of(prompt: Sequence[int], **fields: Any) -> GenerateRequest:
    return GenerateRequest(token_ids=TokenIds(ids=prompt), **fields)


async def error_of(call: Any) -> grpc.aio.AioRpcError:
    """How a call failed, read to its end."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


def details_of(error: grpc.aio.AioRpcError) -> Status:
    status = rpc_status.from_call(error)
    assert isinstance(status, Status)
    return status


async def read_tokens(call: Any, num_tokens: int) -> list[int]:
    """The first tokens of a call, which goes on."""
    said: list[int] = []
    while len(said) < num_tokens:
        said += [token.id for token in (await call.read()).tokens.tokens]
    return said


async def all_is_free(service: Pipeline, within: float = A_MOMENT) -> None:
    """No slot on either worker, nothing running or waiting."""
    workers = [worker for worker in (service.target, service.draft) if worker is not None]
    await eventually(lambda: all(worker.num_slots_used == 0 for worker in workers), within)
    info = await service.stub.GetModelInfo(GetModelInfoRequest())
    assert (info.num_running_sessions, info.num_waiting_sessions) == (0, 0)


@contextlib.asynccontextmanager
async def second_client(service: Pipeline) -> AsyncIterator[Any]:
    """With a connection of its own."""
    async with grpc.aio.insecure_channel(service.address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


# ---- what a stream says


async def test_a_stream_begins_with_started_ends_with_usage_and_says_nothing_behind_a_choice_s_end() -> None:
    async with pipeline(target_model(), draft_model()) as service:
        events = [
            reply
            async for reply in service.stub.Generate(
                ids_of([1, 2], n=3, max_tokens=9, request_id="mine", seed=5), timeout=SOON
            )
        ]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "started"
    assert kinds[-1] == "usage"
    assert kinds.count("started") == kinds.count("usage") == 1
    started = events[0].started
    assert (started.request_id, started.seed, started.num_prompt_tokens) == ("mine", 5, 2)
    for choice in range(3):
        mine = [
            event.WhichOneof("event")
            for event in events
            if (event.HasField("tokens") and event.tokens.choice == choice)
            or (event.HasField("finished") and event.finished.choice == choice)
        ]
        assert mine == ["tokens"] * (len(mine) - 1) + ["finished"]


async def test_usage_adds_up_with_what_was_streamed() -> None:
    async with pipeline(target_model(), draft_model(), num_draft_tokens=4) as service:
        result = await generate(service.stub, [1, 2, 3], n=4, max_tokens=40, seed=3)
    usage = result.usage
    accepted = sum(token.origin == ORIGIN_ACCEPTED for choice in result.choices for token in choice)
    assert usage.num_prompt_tokens == 3
    assert usage.num_completion_tokens == sum(len(choice) for choice in result.choices) == 160
    assert usage.num_accepted_tokens == sum(usage.num_accepted_tokens_per_pos) == accepted > 0
    assert usage.num_rounds + accepted == 160, "each round adds one token beside the accepted ones"
    assert usage.num_drafts <= usage.num_rounds
    assert usage.num_accepted_tokens <= usage.num_draft_tokens <= 4 * usage.num_drafts
    assert usage.acceptance_rate == usage.num_accepted_tokens / usage.num_draft_tokens
    assert usage.mean_acceptance_length == 1 + usage.num_accepted_tokens / usage.num_drafts
    assert len(usage.num_accepted_tokens_per_pos) == 4
    assert usage.num_q_bytes > 0
    assert usage.num_fallbacks == 0


async def test_with_a_drafter_that_is_the_target_everything_is_kept() -> None:
    async with pipeline(target_model(), draft_model(TARGET), encoding="full", num_draft_tokens=3) as service:
        usage = (await generate(service.stub, [4], max_tokens=60, temperature=0.0)).usage
    assert usage.num_drafts > 10
    assert usage.acceptance_rate == 1.0
    assert usage.num_rounds < 30


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("encoding", ["sparse", "full", "one_hot"])
async def test_greedy_text_is_the_target_s_whatever_the_drafter(rule: str, encoding: str) -> None:
    for drafts in (TARGET, DRAFT, law(7)):
        async with pipeline(target_model(), draft_model(drafts), rule=rule, encoding=encoding) as service:
            result = await generate(service.stub, [3, 1], max_tokens=30, temperature=0.0, num_draft_tokens=5)
            assert result.ids() == greedy([3, 1], 30)
            assert result.usage.num_drafts > 0
            await all_is_free(service)


async def test_texts_reach_the_client_with_their_tokens(tmp_path: Path) -> None:
    wordy(tmp_path, [chr(ord("a") + i) for i in range(V)])
    async with pipeline(target_model(), draft_model(), tokenizer_folder=tmp_path) as service:
        result = await generate(service.stub, text="bc", max_tokens=20, temperature=0.0)
    expected = greedy([1, 2], 20)
    assert result.started.num_prompt_tokens == 2
    assert result.ids() == expected
    assert result.text() == "".join(chr(ord("a") + token) for token in expected)


def wordy(folder: Path, words: list[str]) -> None:
    """A tokenizer with one word an id."""
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


# ---- samples and seeds


async def test_samples_of_one_prompt_differ_and_the_first_is_the_single_one_s_text() -> None:
    async with pipeline(target_model(), draft_model()) as service:
        many = await generate(service.stub, [2], n=8, max_tokens=20, seed=11, num_draft_tokens=0)
        one = await generate(service.stub, [2], max_tokens=20, seed=11, num_draft_tokens=0)
        drafted = await generate(service.stub, [2], n=8, max_tokens=20, seed=11, num_draft_tokens=4)
    assert len({many.ids(choice) for choice in range(8)}) == 8
    assert len({drafted.ids(choice) for choice in range(8)}) == 8
    assert many.ids(0) == one.ids()


async def test_a_seed_gives_the_same_text_alone_and_among_neighbours() -> None:
    async with pipeline(target_model(), draft_model()) as service:
        wanted: dict[str, Any] = {"max_tokens": 30, "seed": 2**64 - 1, "num_draft_tokens": 0, "top_p": 0.9}
        alone = await generate(service.stub, [2, 7], **wanted)
        among, *_ = await asyncio.gather(
            generate(service.stub, [2, 7], **wanted),
            *(generate(service.stub, [i], max_tokens=10 + 5 * i, num_draft_tokens=i) for i in range(6)),
        )
        other = await generate(service.stub, [2, 7], **{**wanted, "seed": 0})
    assert among.ids() == alone.ids()
    assert other.ids() != alone.ids()
    assert alone.started.seed == 2**64 - 1
    assert other.started.seed == 0


async def test_requests_without_a_seed_differ_and_the_seed_they_return_repeats_them() -> None:
    async with pipeline(target_model(), None) as service:
        results = await asyncio.gather(
            *(generate(service.stub, [5], max_tokens=15, num_draft_tokens=0) for _ in range(6))
        )
        assert len({result.started.seed for result in results}) == 6
        assert len({result.ids() for result in results}) == 6
        seed = results[0].started.seed
        again = await generate(service.stub, [5], max_tokens=15, seed=seed, num_draft_tokens=0)
    assert again.ids() == results[0].ids()


# ---- how many tokens ahead


async def test_with_k_0_no_drafter_is_asked_and_the_text_is_plain_decoding_s() -> None:
    num_drafted = 0

    def counting(prefix: tuple[int, ...]) -> NDArray[np.floating]:
        nonlocal num_drafted
        num_drafted += 1
        return DRAFT(prefix)

    slots = []
    unasked = WorkerConfig(calibration_seconds=0.0)
    async with pipeline(target_model(0.001), draft_model(counting), worker=unasked) as service:
        assert service.draft is not None
        running = asyncio.create_task(
            generate(service.stub, [1, 2], max_tokens=25, temperature=0.0, num_draft_tokens=0)
        )
        while not running.done():
            slots.append(service.draft.num_slots_used)
            await asyncio.sleep(0.002)
        result = await running
    assert result.ids() == greedy([1, 2], 25)
    assert num_drafted == 0
    assert max(slots) == 0
    usage = result.usage
    assert (usage.num_rounds, usage.num_drafts, usage.num_draft_tokens, usage.num_q_bytes) == (25, 0, 0, 0)
    assert not usage.HasField("acceptance_rate")
    assert not usage.HasField("mean_acceptance_length")
    assert list(usage.num_accepted_tokens_per_pos) == []
    assert {token.origin for token in result.choices[0]} == {ORIGIN_PLAIN}


async def test_a_deployment_without_a_drafter_decodes_plainly() -> None:
    async with pipeline(target_model(), None) as service:
        result = await generate(service.stub, [1, 2], max_tokens=25, temperature=0.0)
        info = await service.stub.GetModelInfo(GetModelInfoRequest())
        await all_is_free(service)
    assert result.ids() == greedy([1, 2], 25)
    assert (result.usage.num_drafts, result.usage.num_fallbacks) == (0, 0)
    assert (info.draft_model, info.num_draft_tokens) == ("", 0)


@pytest.mark.parametrize(("asked", "expected"), [(None, 3), (1, 1), (6, 6)])
async def test_k_is_the_request_s_or_the_deployment_s(asked: int | None, expected: int) -> None:
    fields = {} if asked is None else {"num_draft_tokens": asked}
    async with pipeline(target_model(), draft_model(TARGET)) as service:
        usage = (await generate(service.stub, [1], max_tokens=60, temperature=0.0, **fields)).usage
    assert len(usage.num_accepted_tokens_per_pos) == expected


async def test_a_default_k_above_the_limit_is_lowered_to_it() -> None:
    """Guards against refusing every request for a field that it does not set."""
    async with pipeline(target_model(), draft_model(TARGET), max_num_draft_tokens=2) as service:
        usage = (await generate(service.stub, [1], max_tokens=30, temperature=0.0)).usage
        info = await service.stub.GetModelInfo(GetModelInfoRequest())
    assert len(usage.num_accepted_tokens_per_pos) == 2
    assert (info.num_draft_tokens, info.max_num_draft_tokens) == (2, 2)


async def test_a_drafter_with_a_shorter_context_helps_as_far_as_it_reaches() -> None:
    async with pipeline(target_model(max_length=60), draft_model(TARGET, max_length=20)) as service:
        result = await generate(service.stub, [1, 2], max_tokens=50, temperature=0.0)
        late = await generate(service.stub, list(range(10)) * 3, max_tokens=10, temperature=0.0)
    assert result.ids() == greedy([1, 2], 50)
    assert 0 < result.usage.num_accepted_tokens <= 20
    assert result.usage.num_fallbacks == 0, "it did not fail, it was not asked"
    assert late.ids() == greedy(list(range(10)) * 3, 10)
    assert (late.usage.num_drafts, late.usage.num_fallbacks) == (0, 0)


# ---- where a text ends


async def test_texts_end_where_plain_decoding_ends_them_at_an_end_token_or_at_max_tokens() -> None:
    end = (4, 9)
    reasons = set()
    async with pipeline(
        target_model(), draft_model(near(TARGET, distance=0.2)), end_token_ids=end, num_draft_tokens=6
    ) as service:
        for prompt in range(12):
            result = await generate(service.stub, [prompt], max_tokens=12, temperature=0.0)
            expected = greedy([prompt], 12, end)
            assert result.ids() == expected
            stopped = expected[-1] in end
            assert result.finished[0].reason == (FINISH_REASON_STOP if stopped else FINISH_REASON_LENGTH)
            assert result.usage.num_completion_tokens == len(expected)
            reasons.add((stopped, len(expected) == 12))
        await all_is_free(service)
    assert {(True, False), (False, True)} <= reasons


async def test_ignoring_end_tokens_the_text_goes_on_to_max_tokens() -> None:
    async with pipeline(target_model(), draft_model(TARGET), end_token_ids=(4, 9)) as service:
        result = await generate(service.stub, [1], max_tokens=40, temperature=0.0, ignore_end_tokens=True)
    assert result.ids() == greedy([1], 40)
    assert {4, 9} & set(result.ids())
    assert result.finished[0].reason == FINISH_REASON_LENGTH


@pytest.mark.parametrize("length", [15, 14, 9])
async def test_the_context_s_end_is_reached_exactly(length: int) -> None:
    """Guards against looking ahead past the last position."""
    prompt = [i % V for i in range(length)]
    async with pipeline(target_model(max_length=16), draft_model(max_length=16)) as service:
        result = await generate(service.stub, prompt, max_tokens=16, temperature=0.0, num_draft_tokens=8)
    assert result.ids() == greedy(prompt, 16 - length)
    assert result.finished[0].reason == FINISH_REASON_LENGTH
    assert result.usage.num_fallbacks == 0


# ---- Abort


async def test_aborting_a_running_request_ends_its_stream_in_order_and_frees_its_slots() -> None:
    async with pipeline(target_model(0.005), draft_model()) as service:
        running = asyncio.create_task(
            generate(service.stub, [1], n=3, max_tokens=4000, request_id="r", temperature=0.0)
        )
        await eventually(lambda: service.target.num_slots_used == 3)
        await asyncio.sleep(0.1)
        assert (await service.stub.Abort(AbortRequest(request_id="r"))).aborted
        result = await asyncio.wait_for(running, A_MOMENT)
        await all_is_free(service)
    assert [result.finished[choice].reason for choice in range(3)] == [FINISH_REASON_ABORT] * 3
    for choice in range(3):
        assert result.ids(choice) == greedy([1], len(result.ids(choice)))
    assert result.usage.num_completion_tokens == sum(len(choice) for choice in result.choices) > 0


async def test_aborting_a_waiting_request_leaves_the_running_ones_alone() -> None:
    async with pipeline(target_model(0.005, num_slots=1), draft_model()) as service:
        running = asyncio.create_task(generate(service.stub, [1], max_tokens=30, temperature=0.0))
        await eventually(lambda: service.target.num_slots_used == 1)
        waiting = asyncio.create_task(generate(service.stub, [2], request_id="w"))
        await eventually_waiting(service, 1)
        assert (await service.stub.Abort(AbortRequest(request_id="w"))).aborted
        result = await asyncio.wait_for(waiting, A_MOMENT)
        assert result.finished[0].reason == FINISH_REASON_ABORT
        assert (result.ids(), result.usage.num_rounds) == ((), 0)
        await eventually_waiting(service, 0)
        assert (await running).ids() == greedy([1], 30)
        await all_is_free(service)


async def eventually_waiting(service: Pipeline, expected: int) -> None:
    for _ in range(200):
        info = await service.stub.GetModelInfo(GetModelInfoRequest())
        if info.num_waiting_sessions == expected:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"{expected} sessions never waited")


async def test_aborting_what_is_unknown_or_over_says_so() -> None:
    async with pipeline(target_model(), None) as service:
        await generate(service.stub, [1], max_tokens=2, request_id="over")
        for name in ("over", "never", ""):
            assert not (await service.stub.Abort(AbortRequest(request_id=name))).aborted


async def test_aborting_keeps_choices_that_were_finished() -> None:
    """n = 8 on two slots: some choices are over, some run, some wait."""
    async with pipeline(target_model(0.003, num_slots=2), draft_model()) as service:
        running = asyncio.create_task(
            generate(service.stub, [1], n=8, max_tokens=20, request_id="r", temperature=0.0)
        )
        await asyncio.sleep(0.1)
        await service.stub.Abort(AbortRequest(request_id="r"))
        result = await asyncio.wait_for(running, A_MOMENT)
        await all_is_free(service)
    assert sorted(result.finished) == list(range(8))
    for choice, finished in result.finished.items():
        text = result.ids(choice)
        assert text == greedy([1], len(text))
        assert (finished.reason == FINISH_REASON_LENGTH) == (len(text) == 20)


# ---- clients that go


async def test_a_client_that_cancels_frees_its_slots_on_both_workers() -> None:
    async with pipeline(target_model(0.005), draft_model()) as service:
        assert service.draft is not None
        call = service.stub.Generate(ids_of([1], n=4, max_tokens=4000))
        await read_tokens(call, 40)
        assert (service.target.num_slots_used, service.draft.num_slots_used) == (4, 4)
        call.cancel()
        await all_is_free(service)


async def test_a_client_that_cancels_during_the_prefill_does_not_wait_for_its_end() -> None:
    """The prompt takes 100 passes of 30 ms on either worker."""
    slow: dict[str, Any] = {"latency_seconds": lambda _: 0.03}
    async with pipeline(
        target_model(0.03), draft_model(**slow), worker=WorkerConfig(max_pass_tokens=32)
    ) as service:
        call = service.stub.Generate(ids_of([1] * 3200, max_tokens=5))
        await call.read()
        draft = service.draft
        assert draft is not None
        await eventually(lambda: service.target.num_slots_used == draft.num_slots_used == 1)
        call.cancel()
        await all_is_free(service, within=0.5)


async def test_a_client_that_cancels_while_it_waits_leaves_its_place() -> None:
    async with pipeline(target_model(0.005, num_slots=1), None, max_waiting_sessions=1) as service:
        running = asyncio.create_task(generate(service.stub, [1], max_tokens=60, temperature=0.0))
        await eventually(lambda: service.target.num_slots_used == 1)
        waiting = service.stub.Generate(ids_of([2]))
        await waiting.read()
        await eventually_waiting(service, 1)
        waiting.cancel()
        await eventually_waiting(service, 0)
        assert (await generate(service.stub, [3], max_tokens=5, temperature=0.0)).ids() == greedy([3], 5)
        assert (await running).ids() == greedy([1], 60)
        await all_is_free(service)


async def test_a_client_whose_deadline_passes_frees_its_slots() -> None:
    async with pipeline(target_model(0.005), draft_model()) as service:
        error = await error_of(service.stub.Generate(ids_of([1], n=3, max_tokens=4000), timeout=0.2))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await all_is_free(service)


async def test_a_client_whose_connection_breaks_frees_its_slots() -> None:
    async with pipeline(target_model(0.005), draft_model()) as service:
        async with second_client(service) as stub:
            call = stub.Generate(ids_of([1], n=3, max_tokens=4000))
            await read_tokens(call, 10)
        await all_is_free(service)


@pytest.mark.parametrize("how", ["cancel", "abort"])
async def test_a_client_that_stopped_reading_can_still_be_ended(how: str, tmp_path: Path) -> None:
    """The server's write is blocked by then; waiting for it would keep the slot for the whole text."""
    wordy(tmp_path, [chr(ord("a") + i) * 10_000 for i in range(V)])
    small_window = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with (
        pipeline(target_model(0.002), draft_model(), tokenizer_folder=tmp_path) as service,
        grpc.aio.insecure_channel(service.address, options=small_window) as channel,
    ):
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            ids_of([1], max_tokens=4000, request_id="r"), timeout=30
        )
        await call.read()
        await asyncio.sleep(0.3)  # some 30 tokens of 10 kB are more than the window holds
        assert service.target.num_slots_used == 1
        if how == "cancel":
            call.cancel()
        else:
            assert (await service.stub.Abort(AbortRequest(request_id="r"))).aborted
        await eventually(lambda: service.target.num_slots_used == 0, A_MOMENT)
        call.cancel()
        await all_is_free(service)


# ---- admission


async def test_a_full_queue_refuses_at_once_and_those_that_wait_run_later() -> None:
    async with pipeline(target_model(0.004, num_slots=2), draft_model(), max_waiting_sessions=3) as service:
        taken = [
            asyncio.create_task(generate(service.stub, [i], max_tokens=40, temperature=0.0)) for i in range(2)
        ]
        await eventually(lambda: service.target.num_slots_used == 2)
        waiting = [
            asyncio.create_task(generate(service.stub, [i], max_tokens=10, temperature=0.0))
            for i in range(2, 5)
        ]
        await eventually_waiting(service, 3)
        started = time.monotonic()
        error = await error_of(service.stub.Generate(ids_of([6]), timeout=SOON))
        assert time.monotonic() - started < 0.3
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        (detail,) = details_of(error).details
        retry = RetryInfo()
        assert detail.Unpack(retry)
        assert retry.retry_delay.ToSeconds() >= 1
        assert not any(task.done() for task in (*taken, *waiting))
        for prompt, task in enumerate((*taken, *waiting)):
            assert (await task).ids() == greedy([prompt], 40 if prompt < 2 else 10)
        await all_is_free(service)
        assert (await generate(service.stub, [6], max_tokens=3, temperature=0.0)).ids() == greedy([6], 3)


async def test_a_request_whose_choices_do_not_all_fit_takes_no_place() -> None:
    async with pipeline(target_model(num_slots=2), None, max_waiting_sessions=2) as service:
        error = await error_of(service.stub.Generate(ids_of([1], n=5), timeout=SOON))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len((await generate(service.stub, [1], n=4, max_tokens=3)).finished) == 4
        await all_is_free(service)


async def test_no_more_sessions_run_than_the_target_has_slots() -> None:
    async with pipeline(target_model(0.002, num_slots=3), draft_model()) as service:
        running = asyncio.create_task(generate(service.stub, [1], n=9, max_tokens=15, temperature=0.0))
        most = 0
        while not running.done():
            info = await service.stub.GetModelInfo(GetModelInfoRequest())
            assert info.num_running_sessions <= 3
            assert info.num_running_sessions + info.num_waiting_sessions <= 9
            most = max(most, info.num_running_sessions)
        assert most == 3
        assert {(await running).ids(choice) for choice in range(9)} == {greedy([1], 15)}


# ---- names, errors, health, reflection


async def test_a_request_id_in_use_is_refused_and_free_again_afterwards() -> None:
    async with pipeline(target_model(0.005), None) as service:
        first = service.stub.Generate(ids_of([1], request_id="same", max_tokens=4000))
        await read_tokens(first, 3)
        error = await error_of(service.stub.Generate(ids_of([2], request_id="same"), timeout=SOON))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert violations(error)[0][0] == "request_id"
        assert "same" in violations(error)[0][1]
        await read_tokens(first, 3)  # the first one goes on
        first.cancel()
        await all_is_free(service)
        assert len((await generate(service.stub, [2], request_id="same", max_tokens=4)).ids()) == 4


async def test_of_two_requests_of_one_id_in_the_same_moment_one_runs() -> None:
    async with pipeline(target_model(0.002), None) as service:
        results = await asyncio.gather(
            *(generate(service.stub, [1], request_id="same", max_tokens=20) for _ in range(5)),
            return_exceptions=True,
        )
        assert sum(isinstance(result, Generated) for result in results) == 1
        await all_is_free(service)


def violations(error: grpc.aio.AioRpcError) -> list[tuple[str, str]]:
    (detail,) = details_of(error).details
    bad = BadRequest()
    assert detail.Unpack(bad)
    return [(violation.field, violation.description) for violation in bad.field_violations]


async def test_a_bad_field_is_named_in_the_error_s_details_and_costs_nothing() -> None:
    async with pipeline(target_model(), draft_model()) as service:
        for fields, name in (
            ({"top_p": 0.0}, "top_p"),
            ({"stop": ["x"]}, "stop"),
            ({"n": 65}, "n"),
            ({"max_tokens": 4097}, "max_tokens"),
        ):
            request = GenerateRequest(token_ids=TokenIds(ids=[1]), **fields)
            error = await error_of(service.stub.Generate(request, timeout=SOON))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            ((field, words),) = violations(error)
            assert field == name
            assert error.details() == f"{field} {words}"
        await all_is_free(service)


async def test_errors_about_long_values_arrive_whole(tmp_path: Path) -> None:
    """They travel in trailers; where these grow too large, gRPC says RESOURCE_EXHAUSTED instead."""
    wordy(tmp_path, list("abcdefghijkl"))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    requests = {
        "request_id": ids_of([1], request_id="x" * 100_000),
        "messages[0].role": GenerateRequest(chat=Chat(messages=[ChatMessage(role="\U0001f44b " * 50_000)])),
    }
    async with pipeline(target_model(), None, tokenizer_folder=tmp_path) as service:
        for name, request in requests.items():
            error = await error_of(service.stub.Generate(request, timeout=SOON))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert violations(error)[0][0] == name


async def test_health_answers_for_the_server_and_its_service() -> None:
    async with (
        pipeline(target_model(), None) as service,
        grpc.aio.insecure_channel(service.address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "outrider.v1.Inference"):
            reply = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(health_pb2.HealthCheckRequest(service="other"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_what_is_served() -> None:
    async with (
        pipeline(target_model(), None) as service,
        grpc.aio.insecure_channel(service.address) as channel,
    ):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]))
        reply = await call.read()
        call.cancel()
    served = {entry.name for entry in reply.list_services_response.service}
    assert {"outrider.v1.Inference", "grpc.health.v1.Health"} <= served


async def test_the_model_s_limits_can_be_asked() -> None:
    async with pipeline(
        target_model(num_slots=5, max_length=77), draft_model(), end_token_ids=(4, 9), max_choices=6
    ) as service:
        info = await service.stub.GetModelInfo(GetModelInfoRequest())
    assert (info.target_model, info.draft_model, info.vocab_size, info.max_length) == ("t", "d", V, 77)
    assert (info.num_draft_tokens, info.max_num_draft_tokens, info.max_choices) == (3, 64, 6)
    assert list(info.end_token_ids) == [4, 9]
    assert (info.max_running_sessions, info.num_running_sessions, info.num_waiting_sessions) == (5, 0, 0)


# ---- stopping


async def test_stopping_lets_running_requests_finish_within_the_grace() -> None:
    async with pipeline(target_model(0.005), draft_model()) as service:
        running = asyncio.create_task(generate(service.stub, [1], max_tokens=40, temperature=0.0))
        await eventually(lambda: service.target.num_slots_used == 1)
        await service.coordinator.stop(SOON)
        assert (await running).ids() == greedy([1], 40)


async def test_what_outlasts_the_grace_ends_with_unavailable() -> None:
    async with pipeline(target_model(0.005), draft_model()) as service:
        call = service.stub.Generate(ids_of([1], max_tokens=4000))
        await read_tokens(call, 3)
        await service.coordinator.stop(0.1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_tokens(call, 4000)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


# ---- a crowd


async def test_a_coordinator_that_stops_frees_the_slots_of_what_it_was_generating() -> None:
    """The workers live on, and their leases are long."""
    async with pipeline(target_model(0.01, num_slots=4), draft_model(num_slots=4)) as service:
        calls = [
            asyncio.create_task(generate(service.stub, [i, 1], max_tokens=2000, ignore_end_tokens=True))
            for i in range(3)
        ]
        await eventually(lambda: service.target.num_slots_used == 3)
        await service.coordinator.stop(0.05)
        await asyncio.gather(*calls, return_exceptions=True)
        assert service.draft is not None
        drafts = service.draft
        await eventually(lambda: (service.target.num_slots_used, drafts.num_slots_used) == (0, 0))


async def test_in_a_crowd_that_joins_leaves_and_aborts_every_greedy_text_is_its_solo_one() -> None:
    """Guards against rows joined to the wrong request, and against slots that leak."""
    generator = random.Random(5)

    async def visit(stub: Any, number: int, leave: str, after: int) -> None:
        await asyncio.sleep(generator.random() * 0.5)
        prompt = [generator.randrange(V) for _ in range(generator.randint(1, 60))]
        num_tokens = generator.randint(1, 60)
        request = ids_of(
            prompt,
            max_tokens=num_tokens,
            temperature=0.0,
            request_id=str(number),
            num_draft_tokens=generator.randint(0, 6),
        )
        call = stub.Generate(request, timeout=30)
        said: list[int] = []
        async for reply in call:
            said += [token.id for token in reply.tokens.tokens]
            if len(said) >= after and leave == "cancel":
                call.cancel()
                break
            if len(said) >= after and leave == "abort":
                await stub.Abort(AbortRequest(request_id=str(number)))
                leave = ""
        expected = greedy(prompt, num_tokens)
        assert tuple(said) == expected[: len(said)]
        assert len(said) == num_tokens or after < num_tokens

    async with pipeline(
        target_model(num_slots=6),
        draft_model(num_slots=4),
        worker=WorkerConfig(max_pass_tokens=48),
        num_draft_tokens=4,
    ) as service:
        await asyncio.gather(
            *(
                visit(
                    service.stub, i, generator.choice(["", "", "cancel", "abort"]), generator.randint(1, 40)
                )
                for i in range(40)
            )
        )
        await all_is_free(service)
        await eventually(lambda: service.coordinator._service.num_running == 0)
        for i in range(40):
            assert not (await service.stub.Abort(AbortRequest(request_id=str(i)))).aborted
