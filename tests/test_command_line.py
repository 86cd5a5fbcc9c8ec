"""The command refuses before it starts anything, and prints what the service sent. No Ray here."""

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import psutil
import pytest
from typer.testing import CliRunner, Result

from cluster import generate_command
from cluster.command_line import app
from cluster.deployment import DeploymentFailed
from cluster.deployment_state import DeploymentState, read_state, write_state
from cluster.interrupts import Interrupted
from cluster.plan import Deployed, Plan
from protos import inference_pb2_grpc
from protos.inference_pb2 import (
    FINISH_REASON_LENGTH,
    ORIGIN_ACCEPTED,
    ORIGIN_RECOVERED,
    Finished,
    GenerateReply,
    GenerateRequest,
    GetModelInfoRequest,
    ModelInfo,
    Started,
    Token,
    Tokens,
    Usage,
)
from tests.tiny_models import save_tiny

TOKENS = [
    Token(id=7, text="Hello", origin=ORIGIN_ACCEPTED),
    Token(id=8, text=" [you]", origin=ORIGIN_RECOVERED),
]
USAGE = Usage(
    num_completion_tokens=2,
    num_rounds=1,
    num_drafts=1,
    num_draft_tokens=3,
    num_accepted_tokens=1,
    num_accepted_tokens_per_pos=[1, 0, 0],
    acceptance_rate=1 / 3,
    mean_acceptance_length=2.0,
    num_q_bytes=600,
)


INFO = ModelInfo(target_model="t", max_length=128)


class _Service(inference_pb2_grpc.InferenceServicer):
    """Answers every request with TOKENS, or refuses it."""

    refusal: str | None = None
    address = ""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []

    def Generate(self, request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateReply]:
        self.requests.append(request)
        if self.refusal is not None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.refusal)
        yield GenerateReply(started=Started(seed=request.seed if request.HasField("seed") else 99))
        yield GenerateReply(tokens=Tokens(tokens=TOKENS[:1]))
        yield GenerateReply(tokens=Tokens(tokens=TOKENS[1:]))
        yield GenerateReply(finished=Finished(reason=FINISH_REASON_LENGTH, text="�"))
        yield GenerateReply(usage=USAGE)

    def GetModelInfo(self, request: GetModelInfoRequest, context: grpc.ServicerContext) -> ModelInfo:
        return INFO


def _ray(serving: Callable[..., Any]) -> Callable[[], contextlib.nullcontext[Any]]:
    """What stands in for a Ray that starts: `serving` is told the plan."""
    return lambda: contextlib.nullcontext(SimpleNamespace(serving=serving))


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """What begins to run is refused before it serves, or served by a stand-in."""
    monkeypatch.setattr(generate_command, "starting_ray", _ray(lambda *_, **__: pytest.fail("it runs")))


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Service]:
    """A service in this process, in the place of a private deployment."""
    servicer = _Service()
    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()

    @contextlib.contextmanager
    def deployed(plan: Plan, say: Any, *, startup_seconds: float) -> Iterator[Deployed]:
        address = f"127.0.0.1:{port}"
        yield Deployed(address=address, control_token="", workers=(), coordinator_pid=0, ray_address="")

    monkeypatch.setattr(generate_command, "starting_ray", _ray(deployed))
    servicer.address = f"127.0.0.1:{port}"
    yield servicer
    server.stop(None).wait()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("target"))


def _generate(*arguments: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["generate", *map(str, arguments)], input=stdin)


@pytest.mark.parametrize(
    ("option", "value", "limit"),
    [
        ("--temperature", "-1", "0 to 100"),
        ("--temperature", "nan", "0 to 100"),
        ("--top-p", "0", "above 0 and at most 1"),
        ("--top-p", "1.5", "above 0 and at most 1"),
        ("--min-p", "2", "0 to 1"),
        ("--top-k", "-1", "0..2147483647"),
        ("--top-k", "99999999999", "0..2147483647"),
        ("--max-tokens", "0", "1..2147483647"),
        ("--draft-tokens", "65", "0..64"),
        ("--startup-timeout", "0", "0.001..86400 s"),
        ("--seed", "-1", f"0..{2**64 - 1}"),
        ("--seed", str(2**64), f"0..{2**64 - 1}"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name_value_and_limit(
    option: str, value: str, limit: str
) -> None:
    result = _generate("prompt", option, value, "--target", "/nowhere")
    assert result.exit_code == 2
    assert f"{option} is {value}" in result.stderr or f"{option} is {float(value)}" in result.stderr
    assert limit in result.stderr


def test_an_unknown_option_is_refused() -> None:
    assert _generate("prompt", "--tempreature", "1").exit_code == 2
    assert _generate("prompt", "--draft-tokens", "some").exit_code == 2


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_refused(prompt: str) -> None:
    result = _generate(prompt, "--target", "/nowhere")
    assert (result.exit_code, "prompt is empty" in result.stderr) == (2, True)


def test_a_prompt_that_leaves_no_room_is_refused_before_anything_starts(target: Path) -> None:
    result = _generate("x" * 200, "--target", target, "--draft", "none")
    assert result.exit_code == 2
    assert "127" in result.stderr


def test_a_model_that_is_not_there_is_named(target: Path) -> None:
    result = _generate("prompt", "--target", "/nowhere")
    assert (result.exit_code, "/nowhere" in result.stderr) == (1, True)
    result = _generate("prompt", "--target", target, "--draft", "/nowhere")
    assert (result.exit_code, "/nowhere" in result.stderr) == (1, True)


def test_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    for file in ("tokenizer_config.json", "chat_template.jinja"):
        (folder / file).unlink(missing_ok=True)
    result = _generate("prompt", "--target", folder, "--draft", "none", "--chat")
    assert (result.exit_code, "--no-chat" in result.stderr) == (2, True)


def test_a_run_that_would_not_fit_into_memory_is_refused(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.finding.available_memory", lambda: 10**8)
    result = _generate("prompt", "--target", target, "--draft", "none")
    assert (result.exit_code, "0.1 GB are available" in result.stderr) == (1, True)


def test_the_text_goes_to_standard_output_and_the_rest_to_standard_error(
    service: _Service, target: Path
) -> None:
    result = _generate("prompt", "--target", target, "--draft", target, "--seed", "5")
    assert result.exit_code == 0, result.output
    assert result.stdout == "Hello [you]�\n"
    assert "Memory: about" in result.stderr
    assert "1 of 3 draft tokens accepted (33.3%)" in result.stderr
    assert "seed 5" in result.stderr


def test_json_has_tokens_with_origins_usage_seed_and_times(service: _Service, target: Path) -> None:
    result = _generate("prompt", "--target", target, "--draft", target, "--json")
    answer = json.loads(result.stdout)
    assert answer["text"] == "Hello [you]�"
    assert answer["tokens"][1] == {"id": 8, "text": " [you]", "origin": "recovered"}
    assert answer["seed"] == 99
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["num_accepted_tokens_per_pos"] == [1, 0, 0]
    assert answer["usage"]["acceptance_rate"] == pytest.approx(1 / 3)
    assert 0 < answer["first_token_seconds"] <= answer["seconds"]
    assert answer["tokens_per_second"] == pytest.approx(2 / answer["seconds"])


def test_every_option_reaches_the_service(service: _Service, target: Path) -> None:
    options = {
        "temperature": 0.25,
        "top_k": 11,
        "top_p": 0.5,
        "min_p": 0.125,
        "seed": 2**64 - 1,
        "max_tokens": 9,
    }
    arguments = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    result = _generate(
        "-", "--target", target, "--draft", target, "--draft-tokens", "2", *map(str, arguments), stdin="Hi\n"
    )
    assert result.exit_code == 0, result.output
    [request] = service.requests
    assert {name: getattr(request, name) for name in options} == options
    assert request.num_draft_tokens == 2
    assert request.chat.messages[0].content == "Hi"  # the model has a template


def test_no_chat_sends_the_prompt_as_it_is(service: _Service, target: Path) -> None:
    assert _generate("Hi", "--target", target, "--draft", "none", "--no-chat").exit_code == 0
    [request] = service.requests
    assert (request.text, request.num_draft_tokens) == ("Hi", 0)


def test_a_refusal_by_the_service_is_a_refusal_here(service: _Service, target: Path) -> None:
    service.refusal = "top_k is 5; it must not be"
    result = _generate("prompt", "--target", target, "--draft", "none")
    assert (result.exit_code, "top_k is 5" in result.stderr) == (2, True)


@pytest.fixture
def up(
    service: _Service, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[_Service]:
    """A deployment that is up: the service, and a process that keeps nothing."""
    monkeypatch.setenv("OUTRIDER_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(generate_command, "starting_ray", None)  # nobody may start one
    keeper = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(300)"], cwd=tmp_path, start_new_session=True
    )
    state = DeploymentState(
        name="default",
        address=service.address,
        control_token="secret",
        workers=(),
        target="their-target",
        draft="their-draft",
        target_folder=target,
        num_draft_tokens=5,
        rule="token",
        folder=tmp_path,
        ray_address="127.0.0.1:1",
        keeper_pid=keeper.pid,
        keeper_started=psutil.Process(keeper.pid).create_time(),
        coordinator_pid=keeper.pid,
        created_at=0.0,
    )
    write_state(state)
    yield service
    keeper.kill()
    keeper.wait()


def test_a_deployment_that_is_up_is_used_and_named(up: _Service) -> None:
    result = _generate("Hi", "--seed", "5")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "Hello [you]�\n"
    assert f"On the deployment 'default' at {up.address}" in result.stderr
    assert "target their-target, draft their-draft, 5 draft tokens a round" in result.stderr
    [request] = up.requests
    assert request.chat.messages[0].content == "Hi"  # its target has a template
    assert not request.HasField("num_draft_tokens")  # the deployment's own
    assert _generate("Hi", "--deployment", "default", "--draft-tokens", "2").exit_code == 0
    assert up.requests[-1].num_draft_tokens == 2


def test_private_or_a_model_ask_for_a_private_deployment(
    up: _Service, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Plan] = []

    def fail(plan: Plan, *_: Any, **__: Any) -> None:
        plans.append(plan)
        raise DeploymentFailed("Not today.")

    monkeypatch.setattr(generate_command, "starting_ray", _ray(fail))
    assert "Not today." in _generate("Hi", "--target", target, "--draft", "none").stderr
    assert "Not today." in _generate("Hi", "--target", target, "--draft", target, "--private").stderr
    assert [plan.num_draft_tokens for plan in plans] == [0, "auto"]
    result = _generate("Hi", "--target", target, "--deployment", "default")
    assert (result.exit_code, "--deployment is default" in result.stderr) == (2, True)


def test_a_deployment_that_is_not_up_or_does_not_answer_is_said(up: _Service, tmp_path: Path) -> None:
    result = _generate("Hi", "--deployment", "other")
    assert (result.exit_code, "outrider up --name other" in result.stderr) == (1, True)
    result = _generate("Hi", "--deployment", "../other")
    assert (result.exit_code, "--deployment is '../other'" in result.stderr) == (2, True)
    state = read_state()
    assert state is not None
    write_state(state.model_copy(update={"address": "127.0.0.1:1"}))
    result = _generate("Hi")
    assert (result.exit_code, "outrider ps" in result.stderr) == (1, True)


def test_offline_reaches_whatever_fetches(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    for command in (["generate", "Hi"], ["up", "--port", port]):
        monkeypatch.setenv("OUTRIDER_OFFLINE", "0")  # the option changes it; put back afterwards
        result = CliRunner().invoke(app, [*command, "--offline", "--target", "nobody/has-this"])
        assert (result.exit_code, "nothing may be fetched offline" in result.stderr) == (1, True)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DeploymentFailed("The target did not start: no."), 1),
        (Interrupted(2), 130),
        (KeyboardInterrupt(), 130),
    ],
)
def test_what_ends_a_deployment_decides_the_exit_code(
    error: BaseException, code: int, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(generate_command, "starting_ray", _ray(fail))
    result = _generate("prompt", "--target", target, "--draft", "none")
    assert result.exit_code == code
    assert "Traceback" not in result.stderr


def test_the_version_is_said() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout.split()[0]) == (0, "outrider")


def test_the_command_loads_neither_ray_nor_torch() -> None:
    code = (
        "import sys, cluster.generate_command, cluster.command_line;"
        "print(sorted({'ray', 'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
