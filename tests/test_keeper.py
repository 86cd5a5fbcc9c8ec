"""The keeper of a deployment: what its owner says, and what signals mean once it is kept. No Ray here.

Guards against a deployment that outlives a killed owner, and against a second signal that is not obeyed.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import local_ray
from cluster.local_ray import DRAINING_FILE, KEEP, RAY_ATTEMPTS, STOP, start_ray
from cluster.placement import Placement, RayTooSlow
from cluster.processes import end_session, session_members

# A keeper whose deployment is one sleeping process, and whose draining takes as long as it is told to.
KEEPER = """
import signal, subprocess, sys, threading, time
from pathlib import Path
from cluster.local_ray import _Keeper, _Owner

class Placement:
    def drain(self, grace_seconds):
        time.sleep(float(sys.argv[1]))
        Path("../drained").touch()

subprocess.Popen(["sleep", "100"])
keeper = _Keeper(_Owner(sys.stdin, sys.stdout), Placement(), Path.cwd())
signal.signal(signal.SIGTERM, keeper.on_sigterm)
print("begun", flush=True)
threading.Thread(target=keeper.obey, daemon=True).start()
threading.Thread(target=lambda: print(keeper.plans.get(), flush=True), daemon=True).start()
while True:
    time.sleep(0.05)
"""


class Keeper:
    """The process."""

    def __init__(self, folder: Path, drain_seconds: float) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.process = subprocess.Popen(
            [sys.executable, "-c", KEEPER, str(drain_seconds)],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._next_line() == "begun\n"

    @property
    def has_drained(self) -> bool:
        return (self.folder.parent / "drained").exists()

    def keep(self) -> None:
        self.tell(KEEP)
        assert self._next_line() == '{"kept": true}\n'

    def plan(self, plan: str) -> None:
        self.tell(plan)
        assert self._next_line() == plan + "\n"  # somebody has got it

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def leave(self) -> None:
        """What the owner's death looks like."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def assert_ends(self) -> None:
        """It, its family and its folder are gone soon."""
        assert self.process.wait(15) == 0
        assert session_members(self.process.pid) == []
        assert not self.folder.exists()

    def _next_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@contextlib.contextmanager
def _keeper(tmp_path: Path, drain_seconds: float = 0.0) -> Iterator[Keeper]:
    keeper = Keeper(tmp_path / "deployment", drain_seconds)
    try:
        yield keeper
    finally:
        end_session(keeper.process.pid)
        keeper.process.wait()
        for pipe in (keeper.process.stdin, keeper.process.stdout):
            assert pipe is not None
            pipe.close()


class SlowPlacement(Placement):
    """A Ray that starts at the given attempt."""

    def __init__(self, num_failures: int) -> None:
        self.folders: list[Path] = []
        self._num_failures = num_failures

    def start_ray(self, folder: Path) -> None:
        self.folders.append(folder)
        if len(self.folders) <= self._num_failures:
            raise RayTooSlow


@pytest.mark.parametrize("num_failures", [0, 1, RAY_ATTEMPTS - 1, RAY_ATTEMPTS])
def test_a_ray_that_is_too_slow_for_itself_is_started_anew(
    num_failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(local_ray, "end_session", lambda leader, *, spare: ended.append(spare))
    placement = SlowPlacement(num_failures)
    if num_failures < RAY_ATTEMPTS:
        start_ray(placement, tmp_path)
    else:
        with pytest.raises(RuntimeError, match="machine is too busy"):
            start_ray(placement, tmp_path)
    assert ended == [os.getpid()] * num_failures  # the processes of each failed start, never our own
    assert len(set(placement.folders)) == len(placement.folders) == min(num_failures + 1, RAY_ATTEMPTS)


def test_an_owner_that_is_gone_ends_it_without_draining(tmp_path: Path) -> None:
    with _keeper(tmp_path) as keeper:
        keeper.leave()
        keeper.assert_ends()
        assert not keeper.has_drained


def test_a_plan_is_handed_on_and_the_owner_is_obeyed_before_and_after(tmp_path: Path) -> None:
    with _keeper(tmp_path / "planned") as keeper:
        keeper.plan('{"num_draft_tokens": 3}')
        keeper.tell(STOP)
        keeper.assert_ends()
    with _keeper(tmp_path / "refused") as keeper:
        keeper.tell(STOP)
        keeper.assert_ends()


def test_told_to_stop_it_drains_and_ends(tmp_path: Path) -> None:
    with _keeper(tmp_path) as keeper:
        keeper.tell(STOP)
        keeper.assert_ends()
        assert keeper.has_drained


def test_kept_it_outlives_its_owner_until_sigterm_which_drains(tmp_path: Path) -> None:
    with _keeper(tmp_path, drain_seconds=0.3) as keeper:
        keeper.keep()
        keeper.leave()
        time.sleep(0.3)
        assert keeper.process.poll() is None
        keeper.process.send_signal(signal.SIGTERM)
        keeper.assert_ends()
        assert keeper.has_drained


def test_a_second_sigterm_ends_it_at_once(tmp_path: Path) -> None:
    with _keeper(tmp_path, drain_seconds=60.0) as keeper:
        keeper.keep()
        keeper.process.send_signal(signal.SIGTERM)
        while not (keeper.folder / DRAINING_FILE).exists():
            assert keeper.process.poll() is None
            time.sleep(0.01)
        keeper.process.send_signal(signal.SIGTERM)
        keeper.assert_ends()
        assert not keeper.has_drained
