"""A deployment that stays, on a real Ray: started, used, looked at, damaged, ended; nothing of it is left.

Guards against processes, ports and files left behind, starts that fail without words, a status that calls the
dead healthy, and ends that wait for the dead or the stopped. The models are tiny and random.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from cluster.deployment_state import DeploymentState, read_file, read_state
from cluster.deployment_status import examine
from cluster.processes import end_session, session_members
from cluster.up import PortTaken, require_free
from protos import inference_pb2_grpc
from protos.inference_pb2 import GenerateReply, GenerateRequest
from tests.tiny_models import save_tiny

OUTRIDER = [sys.executable, "-m", "cluster.command_line"]
pytestmark = pytest.mark.ray

NUM_TOKENS = 600  # of a text: it must not be over before somebody has looked


@dataclass(frozen=True)
class Models:
    target: str
    draft: str

    def options(self) -> list[str]:
        return ["--target", self.target, "--draft", self.draft]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    paths = [
        save_tiny(folder / name, seed=seed, max_position_embeddings=1024)
        for seed, name in enumerate(("target", "draft"))
    ]
    return Models(*map(str, paths))


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def _outrider(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*OUTRIDER, *arguments], capture_output=True, text=True, timeout=240)


@contextmanager
def _up(*options: str) -> Iterator[DeploymentState]:
    """A deployment, ended by force if a test has not ended it."""
    port = _free_port()
    done = _outrider("up", "--port", str(port), "--threads", "1", "--startup-timeout", "200", *options)
    try:
        assert done.returncode == 0, done.stderr
        state = read_state()
        assert state is not None
        assert state.address == f"127.0.0.1:{port}"
        assert state.address in done.stdout
        yield state
    finally:
        if (left := read_file("default")) is not None and left.processes():
            end_session(left.keeper_pid)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def _is_gone(pid: int) -> bool:
    """Ended; the dead that their parent has not collected yet count as ended."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _assert_nothing_is_left(state: DeploymentState, state_folder: Path) -> None:
    assert all(map(_is_gone, session_members(state.keeper_pid)))
    assert not state.folder.exists()
    assert list(state_folder.iterdir()) == []
    require_free(int(state.address.rpartition(":")[2]))


def _replies(address: str) -> Iterator[GenerateReply]:
    with grpc.insecure_channel(address) as channel:
        request = GenerateRequest(text="Hello", max_tokens=NUM_TOKENS, ignore_end_tokens=True)
        yield from inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=120)


def _status() -> tuple[int, dict[str, Any]]:
    done = _outrider("ps", "--json")
    [deployment] = json.loads(done.stdout)["deployments"]
    return done.returncode, deployment


def _end_of(replies: Iterator[GenerateReply]) -> str | None:
    events: list[str | None] = [reply.WhichOneof("event") for reply in replies]
    return events[-1]


def test_it_serves_spreads_sessions_shows_its_dead_and_leaves_nothing(
    models: Models, state_folder: Path
) -> None:
    with _up(*models.options(), "--targets", "2", "--drafters", "2", "--slots", "3") as state:
        assert [worker.name for worker in state.workers] == ["target-0", "target-1", "drafter-0", "drafter-1"]
        code, status = _status()
        assert (code, status["is_healthy"], status["num_sessions"]["running"]) == (0, True, 0)
        assert [actor["pid"] for actor in status["actors"]] == [
            state.coordinator_pid,
            *(worker.pid for worker in state.workers),
        ]
        assert "acceptance_rate" not in status  # nothing has been drafted
        assert state.control_token not in json.dumps(status)

        running = [_replies(state.address) for _ in range(2)]
        for replies in running:
            next(replies)
        report = examine(state)
        targets = [actor for actor in report.actors if actor.role == "target"]
        assert [(actor.num_sessions, actor.num_slots) for actor in targets] == [(1, 3), (1, 3)]
        assert [_end_of(replies) for replies in running] == ["usage", "usage"]

        wish = ("--max-tokens", "9", "--draft-tokens", "3", "--temperature", "1")
        done = _outrider("generate", "Hello", "--json", *wish)
        assert done.returncode == 0, done.stderr
        assert f"On the deployment 'default' at {state.address}" in done.stderr
        assert json.loads(done.stdout)["usage"]["num_draft_tokens"] > 0
        refused = _outrider("generate", "x" * 2000)
        assert (refused.returncode, "1 to 1023" in refused.stderr) == (2, True)
        again = _outrider("up", *models.options())
        assert (again.returncode, "is up already" in again.stderr) == (1, True)

        os.kill(state.workers[3].pid, signal.SIGKILL)
        _wait_until(lambda: _is_gone(state.workers[3].pid))
        code, status = _status()
        assert (code, status["is_healthy"]) == (1, False)
        assert [actor["name"] for actor in status["actors"] if not actor["is_healthy"]] == ["drafter-1"]
        assert "drafter-1: its process is gone" in status["problems"][0]
        assert status["totals"]["num_requests"] == 3
        assert 0 <= status["acceptance_rate"] <= 1
        _wait_until(lambda: _status()[0] == 0)  # the keeper has started it again
        reborn = next(actor for actor in _status()[1]["actors"] if actor["name"] == "drafter-1")
        assert reborn["address"] == state.workers[3].address
        assert reborn["pid"] not in (state.workers[3].pid, 0)

        running = [_replies(state.address)]
        next(running[0])  # a request is under way
        down = _outrider("down")
        assert down.returncode == 0, down.stderr
        assert "after what was at hand had finished" in down.stdout
        assert _end_of(running[0]) == "usage"  # served to its end
        _assert_nothing_is_left(state, state_folder)
    assert "No deployment is up" in _outrider("ps").stdout
    assert _outrider("down").returncode == 0


def test_a_stream_goes_on_when_its_target_was_started_again_and_a_coordinator_comes_back(
    models: Models, state_folder: Path
) -> None:
    with _up("--target", models.target, "--draft", "none") as state:
        replies = _replies(state.address)
        next(replies)
        os.kill(state.workers[0].pid, signal.SIGKILL)
        told = list(replies)
        assert told[-1].WhichOneof("event") == "usage"
        tokens = [token for reply in told if reply.HasField("tokens") for token in reply.tokens.tokens]
        assert len(tokens) == told[-1].usage.num_completion_tokens == NUM_TOKENS

        os.kill(state.coordinator_pid, signal.SIGKILL)
        _wait_until(lambda: _is_gone(state.coordinator_pid))
        _wait_until(lambda: _status()[0] == 0)
        coordinator = _status()[1]["actors"][0]
        assert coordinator["pid"] not in (state.coordinator_pid, 0)
        assert _end_of(_replies(state.address)) == "usage"
        assert _outrider("down").returncode == 0
        _assert_nothing_is_left(state, state_folder)


def test_without_a_keeper_and_with_a_stopped_coordinator_it_still_ends(
    models: Models, state_folder: Path
) -> None:
    with _up("--target", models.target, "--draft", "none") as state:
        os.kill(state.keeper_pid, signal.SIGKILL)
        _wait_until(lambda: not state.has_keeper)
        assert _end_of(_replies(state.address)) == "usage"  # the service goes on
        code, status = _status()
        assert (code, len(status["problems"])) == (1, 1)
        assert "keeper" in status["problems"][0]

        os.kill(state.coordinator_pid, signal.SIGSTOP)
        code, status = _status()
        coordinator = status["actors"][0]
        assert (code, coordinator["is_healthy"]) == (1, False)
        assert f"kill -CONT {state.coordinator_pid}" in coordinator["problem"]
        silent = _outrider("generate", "Hello")
        assert (silent.returncode, "outrider ps" in silent.stderr) == (1, True)
        down = _outrider("down")
        assert down.returncode == 0, down.stderr
        _assert_nothing_is_left(state, state_folder)


def test_a_start_that_fails_says_why_and_leaves_nothing(
    models: Models, state_folder: Path, tmp_path: Path
) -> None:
    broken = save_tiny(tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))  # one without weights
    up = _start("--target", str(broken), "--draft", "none")
    keeper = psutil.Process(up.pid).children()[0]
    folder = Path(keeper.cwd())
    _, errors = up.communicate(timeout=240)
    assert up.returncode == 1
    assert "Error: target-0 did not start:" in errors
    assert "lacks" in errors
    assert session_members(keeper.pid) == []
    assert not folder.exists()
    assert list(state_folder.iterdir()) == []


def _start(*options: str) -> subprocess.Popen[str]:
    """An `outrider up` that starts its Ray."""
    command = [*OUTRIDER, "up", "--port", str(_free_port()), *options]
    up = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert up.stderr is not None
    while "Starting Ray" not in up.stderr.readline():
        assert up.poll() is None
    return up


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_an_up_that_is_ended_while_it_starts_leaves_nothing(
    models: Models, state_folder: Path, number: signal.Signals, code: int
) -> None:
    up = _start(*models.options())
    assert up.stderr is not None
    [keeper] = psutil.Process(up.pid).children()
    folder = Path(keeper.cwd())
    _wait_until(lambda: len(session_members(keeper.pid)) > 2)
    busy = _outrider("down")
    assert (busy.returncode, "just starting or ending" in busy.stderr) == (1, True)
    up.send_signal(number)
    assert up.wait(timeout=30) == code
    up.stderr.close()
    _wait_until(lambda: all(map(_is_gone, session_members(keeper.pid))) and not folder.exists(), seconds=10)
    assert read_file("default") is None
    assert "No deployment" in _outrider("down").stdout
    assert list(state_folder.iterdir()) == []


def test_a_port_that_is_taken_is_named(models: Models) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(PortTaken, match=f"Port {port} of 127.0.0.1 is in use: .*--port"):
            require_free(port)
        done = _outrider("up", "--port", str(port), *models.options())
    assert (done.returncode, f"Port {port}" in done.stderr) == (1, True)
