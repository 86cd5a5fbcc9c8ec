"""The file of a deployment tells who is up: a stale file does not, nor does a process id used again."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.deployment_state import (
    BadName,
    DeploymentState,
    DeploymentStateError,
    WorkerAddress,
    check_name,
    deployment_names,
    locked,
    read_file,
    read_state,
    remove_state,
    write_state,
)
from cluster.processes import started_at
from cluster.ps import show_deployments


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that leads a session and works in tmp_path."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], cwd=tmp_path, start_new_session=True
    )
    yield process
    process.kill()
    process.wait()


def _state(pid: int, folder: Path, *, started: float | None = None, name: str = "default") -> DeploymentState:
    worker = WorkerAddress(role="target", name="target-0", model="demo", address="127.0.0.1:2", pid=pid)
    return DeploymentState(
        name=name,
        address="127.0.0.1:1",
        control_token="secret",
        workers=(worker,),
        target="demo",
        draft=None,
        target_folder=Path("/models/demo"),
        num_draft_tokens=0,
        rule="token",
        folder=folder,
        ray_address="127.0.0.1:3",
        keeper_pid=pid,
        keeper_started=started or started_at(pid) or 0.0,
        coordinator_pid=pid,
        created_at=time.time(),
    )


def test_what_is_written_is_read_while_the_keeper_lives(
    keeper: subprocess.Popen[bytes], tmp_path: Path, state_folder: Path
) -> None:
    state = _state(keeper.pid, tmp_path)
    assert read_state() is None
    write_state(state)
    assert read_state() == state
    assert deployment_names() == ["default"]
    [file] = state_folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600  # it holds the control token
    assert "secret" not in repr(state)
    keeper.kill()
    keeper.wait()
    assert read_state() is None
    assert read_file("default") == state
    remove_state("default")
    assert list(state_folder.iterdir()) == []


def test_a_process_with_the_keepers_id_is_not_the_keeper(
    keeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    another = _state(keeper.pid, tmp_path / "elsewhere", started=time.time() - 1000)
    assert another.processes() == []
    write_state(another)
    assert read_state() is None


def test_a_session_without_its_keeper_is_known_by_where_it_works(tmp_path: Path) -> None:
    script = "import os, time\nif os.fork() == 0:\n time.sleep(60)\n"
    leader = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, start_new_session=True)
    leader.wait()
    state = _state(leader.pid, tmp_path, started=time.time())
    [orphan] = state.processes()
    assert not state.has_keeper
    assert _state(leader.pid, tmp_path / "elsewhere", started=time.time()).processes() == []
    psutil.Process(orphan).kill()


@pytest.mark.parametrize("content", ["", "{}", '{"name": 1', "[]"])
def test_an_unreadable_file_is_named(state_folder: Path, content: str) -> None:
    state_folder.mkdir()
    (state_folder / "default.json").write_text(content)
    with pytest.raises(DeploymentStateError, match=r"default\.json cannot be read .*remove the file"):
        read_state()


def test_one_command_at_a_time_starts_or_ends_a_deployment(state_folder: Path) -> None:
    with locked("default"):
        with pytest.raises(DeploymentStateError, match="starting or ending"), locked("default"):
            pass
        with locked("other"):  # has a lock of its own
            pass
    with locked("default"):
        pass
    assert list(state_folder.iterdir()) == []


def test_a_state_folder_that_is_none_is_named(state_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state_folder.write_text("")
    assert show_deployments(in_json=False) == 1
    assert f"{state_folder} cannot be read" in capsys.readouterr().err.replace("\n", "")


def test_what_fails_under_the_lock_is_raised(state_folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="ours"), locked("default"):
        raise FileNotFoundError("ours")
    assert list(state_folder.iterdir()) == []


def test_a_folder_known_by_another_path_is_the_same(keeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(psutil.Process(keeper.pid).cwd())
    state = _state(keeper.pid, link, started=1.0)  # so only its folder tells
    assert state.has_keeper


def test_one_damaged_file_hides_no_other_deployment(
    state_folder: Path, keeper: subprocess.Popen[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_state(_state(keeper.pid, tmp_path, name="sound"))
    (state_folder / "damaged.json").write_text("{")
    assert show_deployments(in_json=True) == 1
    shown = json.loads(capsys.readouterr().out)
    assert [deployment["name"] for deployment in shown["deployments"]] == ["sound"]
    assert "damaged.json cannot be read" in shown["damages"][0]


@pytest.mark.parametrize("name", ["", "../up", "a b", "-x", "x" * 33, ".hidden"])
def test_a_name_that_cannot_be_a_files_is_refused(name: str) -> None:
    with pytest.raises(BadName, match="1 to 32"):
        check_name(name)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_STATE", str(tmp_path / "file" / "state"))
    with pytest.raises(DeploymentStateError, match="OUTRIDER_STATE"), locked("default"):
        pass
