"""A deployment from its owner's side: start it, follow it until it serves, then leave nothing of it behind,
or let it stay.

Knows one child process (`cluster.local_ray`), its two pipes and its folder; no Ray. The child leads a
session of its own, so Ctrl-C reaches the owner alone, and every process to be ended is a member of that
session.
"""

import contextlib
import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cluster.deployment_state import FOLDER_PREFIX
from cluster.interrupts import Interrupts, interrupts
from cluster.local_ray import KEEP, STOP
from cluster.plan import Deployed, Plan
from cluster.processes import end_session

STOP_SECONDS = 15.0
KEEP_SECONDS = 5.0
END_SECONDS = 5.0  # for the child to end everything; then that is done for it
_MAX_FOLDER_LENGTH = 40  # the path of a Unix socket has 107 bytes at most; ours and Ray's parts take 66

Progress = Callable[[str], None]
Record = Callable[[Deployed, Path, int], None]


class DeploymentFailed(RuntimeError):
    """The sentence says what failed."""


@contextlib.contextmanager
def private_deployment(plan: Plan, progress: Progress, *, startup_seconds: float) -> Iterator[Deployed]:
    """Run the plan on a Ray of its own and yield what serves: see `RayOfOurs.serving`."""
    with starting_ray() as ray, ray.serving(plan, progress, startup_seconds=startup_seconds) as deployed:
        yield deployed


@contextlib.contextmanager
def starting_ray() -> Iterator["RayOfOurs"]:
    """A Ray that starts while the block finds out what is to run on it.

    Within the block SIGINT, SIGTERM and SIGHUP raise Interrupted, once. However the block ends, and if this
    process is killed, no process and no file of the deployment is left, unless `RayOfOurs.keep` returned.
    """
    with interrupts() as signals, _child(signals) as child:
        yield RayOfOurs(child, signals)


class RayOfOurs:
    """A Ray that has been told to start, and runs one plan."""

    def __init__(self, child: "_Child", signals: Interrupts) -> None:
        """`child` has been started; `signals` are those of the block around both."""
        self._child = child
        self._signals = signals

    @contextlib.contextmanager
    def serving(self, plan: Plan, progress: Progress, *, startup_seconds: float) -> Iterator[Deployed]:
        """Run the plan and yield what serves, until the block ends.

        Raises DeploymentFailed when it does not serve within `startup_seconds`.
        """
        yield self._child.run(plan, progress, startup_seconds)
        self._child.stop()

    def keep(self, plan: Plan, progress: Progress, record: Record, *, startup_seconds: float) -> Deployed:
        """Run the plan and leave it running.

        `record` is told what serves, the deployment's folder, and the process that ends the deployment at
        SIGTERM; when it returns, the deployment stays. Raises DeploymentFailed as `serving` does.
        """
        deployed = self._child.run(plan, progress, startup_seconds)
        self._signals.hold()  # a Ctrl-C now comes too late
        record(deployed, self._child.folder, self._child.pid)
        self._child.keep()
        return deployed


@contextlib.contextmanager
def _child(signals: Interrupts) -> Iterator["_Child"]:
    """A child that has ended when the block has, unless it was kept."""
    child = _Child(_folder())
    try:
        try:
            with signals.held():
                child.start()
            yield child
        finally:
            signals.hold()
            child.end()
    finally:  # a signal may have struck just before `hold`; it was the last one to raise anything
        child.end()


class _Child:
    """The process that owns Ray."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_kept = False
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Its process id, which is the session's."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Make the folder and the process."""
        self.folder.mkdir(mode=0o700)
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                # -P: a file in the current folder must not stand in for a module.
                [sys.executable, "-P", "-m", "cluster.local_ray"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.folder,
                env=_environment(),
                start_new_session=True,
            )

    def run(self, plan: Plan, progress: Progress, seconds: float) -> Deployed:
        """Send the plan and follow the reports until the deployment serves."""
        deadline = time.monotonic() + seconds
        stage = "Starting Python"
        with contextlib.suppress(BrokenPipeError):  # its end shows below
            self._send(plan.model_dump_json())
        for line in self._lines(deadline):
            report = json.loads(line)
            if "failed" in report:
                raise DeploymentFailed(report["failed"])
            if "ready" in report:
                return Deployed.model_validate(report["ready"])
            stage = report["stage"]
            progress(stage)
        if time.monotonic() >= deadline:
            raise DeploymentFailed(
                f"The deployment did not serve within {seconds:g} s (--startup-timeout); last step: {stage}."
            )
        raise DeploymentFailed(f"The process that owns Ray ended in the step '{stage}': {self._last_words()}")

    def stop(self) -> None:
        """Let the actors drain and the child end everything."""
        with contextlib.suppress(BrokenPipeError):
            self._send(STOP)
        for _ in self._lines(time.monotonic() + STOP_SECONDS):
            pass

    def keep(self) -> None:
        """Let it live on its own, with all that it has started."""
        with contextlib.suppress(BrokenPipeError):  # its end shows below
            self._send(KEEP)
        if not any(json.loads(line).get("kept") for line in self._lines(time.monotonic() + KEEP_SECONDS)):
            raise DeploymentFailed(
                f"The process that owns Ray ended as soon as all served: {self._last_words()}"
            )
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._is_kept = True

    def end(self) -> None:
        """End what is left, at once, and remove the folder, unless it is kept. May be called again."""
        if self._is_kept:
            return
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with contextlib.suppress(BrokenPipeError):  # a plan that was never read
                self._process.stdin.close()  # tells the child to end all of it, and to collect the dead
            for _ in self._lines(time.monotonic() + END_SECONDS):
                pass
            survivors = end_session(self._process.pid)
            self._process.stdout.close()
            if survivors:
                raise DeploymentFailed(f"Processes {survivors} of the deployment cannot be ended.")
            self._process.wait()
            self._process = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def _send(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def _lines(self, deadline: float) -> Iterator[bytes]:
        """What the child reports, until it ends or the deadline comes."""
        assert self._process is not None
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        begun = b""
        while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            data = os.read(pipe, 1 << 16)
            if not data:
                return
            *lines, begun = (begun + data).split(b"\n")
            yield from lines

    def _last_words(self) -> str:
        with contextlib.suppress(FileNotFoundError):  # a keeper that was told to end removes its folder
            words = (self.folder / "log").read_text(errors="replace").strip().splitlines()
            if words:
                return words[-1]
        return "it left no message."


def _folder() -> Path:
    """A new name where Ray keeps its sockets and logs; short, since a socket's path must be."""
    name = f"{FOLDER_PREFIX}{secrets.token_hex(4)}"
    folder = Path(tempfile.gettempdir()).resolve() / name  # as the system names a process's current folder
    return folder if len(os.fsencode(folder)) <= _MAX_FOLDER_LENGTH else Path("/tmp").resolve() / name


def _environment() -> dict[str, str]:
    """The child's: ours without anything that would lead its Ray to another cluster, and with a token.

    Whoever reaches a Ray can run code in it, and other users of this machine reach its loopback. The token
    stands in the environment, which only this user can read, and nowhere in a file.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return inherited | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray replaces the loopback's address by one that other machines reach, and binds all interfaces,
        # unless this says that it is to be a cluster of one. Despite its name it works on Linux too.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "HF_HUB_OFFLINE": "1",  # the folders are complete
        "no_grpc_proxy": "127.0.0.1",
    }
