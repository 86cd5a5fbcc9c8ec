"""Whatever is sent is answered with a result or a refusal, and disturbs nobody: a short form of `fuzz_run`.

Guards against messages that end a server, a stream or somebody else's text, and against faults of the caller
that are reported as ours.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from google.rpc.error_details_pb2 import BadRequest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from protos import control_pb2, inference_pb2, worker_pb2
from protos.worker_pb2 import ReplyBatch, ScoreRequest, TaskBatch
from tests.fuzz_methods import METHODS, STREAMS
from tests.fuzzing import Fuzzer, fuzzed
from tests.test_service import details_of

NUM_TURNS = 12
NOT_A_MESSAGE = b"\xff\xff\xff"


@pytest_asyncio.fixture
async def fuzzer(tmp_path: Path) -> AsyncIterator[Fuzzer]:
    """One deployment for all examples of a test: what one leaves behind meets the next."""
    async with fuzzed(tmp_path) as running:
        yield running


def test_every_method_is_fuzzed() -> None:
    services = [
        service
        for module in (inference_pb2, control_pb2, worker_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
    ]
    methods = {f"{service.name}/{method.name}" for service in services for method in service.methods}
    assert methods == METHODS.keys() | set(STREAMS.values())


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),  # a seed that fails is as small as one can be
    suppress_health_check=(HealthCheck.function_scoped_fixture, HealthCheck.too_slow),
)
@given(seed=st.integers(0, 2**32 - 1))
@example(seed=1)
async def test_what_is_almost_right_is_answered_or_refused_and_disturbs_nobody(
    fuzzer: Fuzzer, seed: int
) -> None:
    await fuzzer.run(seed, 0, NUM_TURNS)
    assert not fuzzer.findings.failures


@pytest.mark.parametrize("name", METHODS)
async def test_a_request_that_does_not_parse_is_the_callers_fault(fuzzer: Fuzzer, name: str) -> None:
    """Guards against UNKNOWN, which gRPC says by itself."""
    call = fuzzer.opening(name)(NOT_A_MESSAGE)
    answer = call.read() if METHODS[name].is_stream else call
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    violation = BadRequest()
    assert details_of(caught.value).details[0].Unpack(violation)
    assert name in violation.field_violations[0].description


@pytest.mark.parametrize("name", STREAMS.values())
async def test_a_stream_ends_at_a_message_that_does_not_parse_and_answers_what_came_before(
    fuzzer: Fuzzer, name: str
) -> None:
    call = fuzzer.opening(name)()
    await call.write(TaskBatch(generation=7, echo=5).SerializeToString())
    await call.write(NOT_A_MESSAGE)
    assert ReplyBatch.FromString(await call.read()).echo == 5
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_refusal_of_a_long_word_fits_its_trailers(fuzzer: Fuzzer) -> None:
    """Guards against a status that never arrives because it quotes what it refuses."""
    request = inference_pb2.GenerateRequest(rule="\U000e0001" * 5000)
    request.token_ids.ids.append(1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await fuzzer.opening("Inference/Generate")(request.SerializeToString()).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_score_may_be_waited_for_longer_than_the_wire_can_say(fuzzer: Fuzzer) -> None:
    """Guards against a deadline in thousands of years, as any client can send it, that is a fault of ours."""
    request = METHODS["Target/Score"].requests[0]
    assert isinstance(request, ScoreRequest)
    assert (await fuzzer.target.score(request, 1e12)).rows
