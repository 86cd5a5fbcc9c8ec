"""A private deployment on a real Ray: it generates, says what failed, drains, and leaves nothing behind.

Guards against processes and folders left over after Ctrl-C, listening beyond the loopback, and starts that
fail without words. The models are tiny and random.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest

from cluster.actors import WorkerSettings
from cluster.deployment import DeploymentFailed, private_deployment, starting_ray
from cluster.plan import Plan
from cluster.processes import end_session, session_members
from protos import inference_pb2_grpc
from protos.inference_pb2 import GenerateReply, GenerateRequest
from tests.tiny_models import save_tiny

OUTRIDER = [sys.executable, "-m", "cluster.command_line"]


@dataclass(frozen=True)
class Pair:
    target: Path
    draft: Path

    def command(self, *options: str) -> list[str]:
        models = ["--target", str(self.target), "--draft", str(self.draft)]
        return [*OUTRIDER, "generate", "Hello", *models, *options]

    def plan(self) -> Plan:
        return Plan(target=_settings(self.target), draft=_settings(self.draft), num_draft_tokens=3)


def _settings(folder: Path) -> WorkerSettings:
    return WorkerSettings(name=folder.name, folder=folder, num_slots=1, max_length=128, num_threads=1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("models")
    return Pair(save_tiny(folder / "target", seed=0), save_tiny(folder / "draft", seed=1))


def _wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def _child_of(pid: int) -> psutil.Process:
    """The process that owns Ray, which leads the session of all that is started."""
    [child] = psutil.Process(pid).children()
    return child


@pytest.mark.ray
def test_the_command_generates_and_leaves_nothing(pair: Pair) -> None:
    run = subprocess.Popen(
        pair.command(
            "--max-tokens", "40", "--draft-tokens", "3", "--seed", "3", "--temperature", "1", "--json"
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _wait_until(lambda: psutil.Process(run.pid).children())
    child = _child_of(run.pid)
    folder = Path(child.cwd())
    output, errors = run.communicate(timeout=120)
    assert run.returncode == 0, errors
    answer = json.loads(output)
    usage = answer["usage"]
    assert answer["seed"] == 3
    assert len(answer["tokens"]) == usage["num_completion_tokens"] > 0
    origins = [token["origin"] for token in answer["tokens"]]
    assert origins.count("accepted") == usage["num_accepted_tokens"]
    assert usage["num_draft_tokens"] > 0
    assert usage["num_q_bytes"] > 0
    assert all(line.startswith(("[", "Memory:")) for line in errors.splitlines()), errors  # no noise
    assert session_members(child.pid) == []
    assert not folder.exists()


@pytest.mark.ray
@pytest.mark.parametrize(
    ("sign", "seconds_after", "number", "repeats"),
    [
        ("Memory:", 0.1, signal.SIGINT, 3),  # Python starts
        ("Starting Ray", 0.0, signal.SIGTERM, 1),
        ("Starting Ray", 2.0, signal.SIGINT, 3),  # the middle of ray.init
        ("Loading", 1.0, signal.SIGINT, 1),
        ("Reading the prompt", 0.0, signal.SIGINT, 3),
    ],
)
def test_ctrl_c_leaves_nothing_at_any_moment(
    pair: Pair, sign: str, seconds_after: float, number: signal.Signals, repeats: int
) -> None:
    run = subprocess.Popen(
        pair.command("--max-tokens", "110"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert run.stderr is not None
    while sign not in run.stderr.readline():
        assert run.poll() is None
    time.sleep(seconds_after)
    children = psutil.Process(run.pid).children()  # none yet, or the one that owns Ray
    folders = []
    with contextlib.suppress(psutil.Error):
        folders = [Path(child.cwd()) for child in children]
    for _ in range(repeats):
        run.send_signal(number)
        time.sleep(0.05)
    errors = run.stderr.read()
    run.stderr.close()
    assert run.wait(timeout=30) in (128 + number, -number), errors
    assert "Traceback" not in errors
    assert [session_members(child.pid) for child in children] == [[] for _ in children]
    assert not any(folder.exists() for folder in folders if folder != Path.cwd())


@pytest.mark.ray
def test_a_killed_owner_leaves_nothing(pair: Pair) -> None:
    run = subprocess.Popen(pair.command(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert run.stderr is not None
    while "Starting Ray" not in run.stderr.readline():
        assert run.poll() is None
    child = _child_of(run.pid)
    folder = Path(child.cwd())
    _wait_until(lambda: len(session_members(child.pid)) > 2)
    run.kill()
    run.wait()
    run.stderr.close()
    _wait_until(lambda: not session_members(child.pid) and not folder.exists(), seconds=10)


@pytest.mark.ray
def test_a_model_that_its_worker_refuses_is_reported_in_its_own_words(pair: Pair, tmp_path: Path) -> None:
    broken = save_tiny(tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))  # one without weights
    plan = Plan(target=_settings(broken), draft=None, num_draft_tokens=0)
    with (
        pytest.raises(DeploymentFailed, match=r"target-0 did not start: .*lacks .* weights"),
        private_deployment(plan, print, startup_seconds=120),
    ):
        pass
    assert psutil.Process().children() == []


@pytest.mark.ray
def test_a_start_that_takes_too_long_is_ended(pair: Pair) -> None:
    steps: list[str] = []
    with (
        pytest.raises(DeploymentFailed, match=r"within 0\.5 s"),
        private_deployment(pair.plan(), steps.append, startup_seconds=0.5),
    ):
        pass
    assert psutil.Process().children() == []


@pytest.mark.ray
@pytest.mark.parametrize("seconds", [0.0, 2.0])  # Python starts; Ray does
def test_a_ray_that_gets_no_plan_is_ended(seconds: float) -> None:
    with starting_ray():
        time.sleep(seconds)
        child = _child_of(os.getpid())
        folder = Path(child.cwd())
    assert session_members(child.pid) == []
    assert not folder.exists()


@pytest.mark.ray
def test_only_its_owner_reaches_it_and_sigterm_drains_an_actor(pair: Pair) -> None:
    with private_deployment(pair.plan(), print, startup_seconds=120) as deployed:
        leader = _child_of(os.getpid()).pid
        members = [psutil.Process(pid) for pid in session_members(leader)]
        # The keeper, Ray's two with two that sleep in the place of Ray's agents, and the actors.
        assert len(members) == 1 + 4 + 3, [process.cmdline() for process in members]
        assert {process.nice() for process in members} == {psutil.Process().nice()}
        assert _listening_hosts(members) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        [ray_head] = [process for process in members if process.name() == "gcs_server"]
        assert _answer_without_token(ray_head) == grpc.StatusCode.UNAUTHENTICATED
        [coordinator] = [process for process in members if "Coordinato" in process.name()]
        assert not any("torch" in mapped.path for mapped in coordinator.memory_maps())
        replies = _generate(deployed.address)
        next(replies)  # the request runs
        coordinator.send_signal(signal.SIGTERM)
        events = [reply.WhichOneof("event") for reply in replies]
        assert events[-1] == "usage"  # served to its end
        _wait_until(lambda: not _is_alive(coordinator), seconds=15)
    assert session_members(leader) == []


def _generate(address: str) -> Iterator[GenerateReply]:
    with grpc.insecure_channel(address) as channel:
        request = GenerateRequest(text="Hello", max_tokens=100, ignore_end_tokens=True)
        yield from inference_pb2_grpc.InferenceStub(channel).Generate(request)


def _answer_without_token(ray_head: psutil.Process) -> object:
    [port] = {c.laddr.port for c in ray_head.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            "/ray.rpc.JobInfoGcsService/GetNextJobID"
        )
        try:
            return call(b"", timeout=10)
        except grpc.RpcError as error:
            return error.code()


def _listening_hosts(processes: list[psutil.Process]) -> set[str]:
    connections = [connection for process in processes for connection in process.net_connections("inet")]
    return {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}


def _is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


SERVING_TARGET = """
import signal, sys, threading
from pathlib import Path
from cluster.actors import TargetActor, WorkerSettings
actor = TargetActor()
settings = WorkerSettings(name="t", folder=Path(sys.argv[1]), num_slots=1, max_length=64, num_threads=1)
print(actor.start(settings), flush=True)
threading.Event().wait()
"""


def test_an_actors_process_exits_with_0_on_sigterm(pair: Pair) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVING_TARGET, str(pair.target)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("127.0.0.1:")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 0
    process.stdout.close()


def test_ending_a_session_ends_orphans_and_spares_one() -> None:
    # A leader whose child has left for a process group of its own and lost its parent.
    script = "import os, time\nif os.fork() == 0:\n os.setpgid(0, 0)\n os.fork()\ntime.sleep(60)"
    leader = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    _wait_until(lambda: len(session_members(leader.pid)) == 3)
    assert end_session(leader.pid, spare=leader.pid) == []
    assert leader.poll() is None
    assert end_session(leader.pid) == []
    assert leader.wait() == -signal.SIGKILL
    assert session_members(leader.pid) == []


def test_a_deployment_needs_no_main_thread(pair: Pair) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with private_deployment(pair.plan(), print, startup_seconds=0.2):
                pass
        except DeploymentFailed as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert len(failures) == 1
