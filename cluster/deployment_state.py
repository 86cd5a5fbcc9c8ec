"""The deployments that stay: a small file for each says where it serves, what runs, and who may end it.

Knows these files and whether the processes they name live. Starts nothing, ends nothing, and asks no service.
"""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal

import platformdirs
from pydantic import Field, ValidationError

from cluster.processes import session_members, started_at, works_in
from protos.limits import AUTO, NumDraftTokens
from protos.settings import Settings

DEFAULT_NAME = "default"
FOLDER_PREFIX = "outrider-"  # of a deployment's own folder
_CLOCK_SECONDS = 2.0  # the system tells when a process began in ticks since a start that it knows to a second
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")


class DeploymentStateError(RuntimeError):
    """The sentence says what is wrong with a deployment's file, and what to do."""


class BadName(ValueError):
    """The sentence gives the name, and what a name must be."""


class WorkerAddress(Settings):
    """One worker of a deployment."""

    role: Literal["target", "draft"]
    name: str  # of its actor, such as "target-0"
    model: str  # as it was given
    address: str  # host:port
    pid: int


class DeploymentState(Settings):
    """What is known of a deployment once it serves."""

    name: str
    address: str  # host:port of the public service
    control_token: str = Field(repr=False)
    workers: tuple[WorkerAddress, ...]  # targets first
    target: str  # the models, as they were given
    draft: str | None
    target_folder: Path
    num_draft_tokens: NumDraftTokens  # K of rounds unless a request says otherwise
    rule: Literal["token", "block"]
    folder: Path  # Ray's files and the log
    ray_address: str  # host:port
    keeper_pid: int  # the process that ends all of it; leads the operating-system session of the others
    keeper_started: float  # seconds since 1970, to tell it from a later process with its id
    coordinator_pid: int
    created_at: float  # seconds since 1970

    @property
    def draft_tokens_in_words(self) -> str:
        """How many draft tokens a round has, unless a request says otherwise."""
        if self.num_draft_tokens == AUTO:
            return "as many draft tokens a round as pay"
        return f"{self.num_draft_tokens} draft tokens a round"

    @property
    def has_keeper(self) -> bool:
        """Whether the process that ends the others lives."""
        started = started_at(self.keeper_pid)
        return started is not None and (
            abs(started - self.keeper_started) < _CLOCK_SECONDS or works_in(self.folder, self.keeper_pid)
        )

    def processes(self) -> list[int]:
        """Ids of its processes, the keeper's included, and dead ones until they are collected.

        The kernel gives a session's number to no other while the session has members, so one member that is
        known for ours vouches for all. Process ids themselves are used again, after a restart of the machine
        for certain.
        """
        members = session_members(self.keeper_pid)
        ours = self.has_keeper or any(works_in(self.folder, pid) for pid in members)
        return members if ours else []


def check_name(name: str) -> None:
    """Raise BadName for a name that cannot be a file's everywhere."""
    if not _NAME.fullmatch(name):
        raise BadName(
            f"name is {name!r}; it must be 1 to 32 letters, digits, '-' or '_', and begin with one of the"
            " first two"
        )


def state_folder() -> Path:
    """Where the files are: OUTRIDER_STATE, or else the user's state directory."""
    override = os.environ.get("OUTRIDER_STATE")
    if override:
        return Path(override).expanduser()
    return platformdirs.user_state_path("outrider", appauthor=False)


def read_state(name: str = DEFAULT_NAME) -> DeploymentState | None:
    """The deployment of this name; None when none is up, hence also when its processes are gone.

    Raises DeploymentStateError for a file that cannot be read.
    """
    state = read_file(name)
    return state if state is not None and state.processes() else None


def read_file(name: str) -> DeploymentState | None:
    """What the file says, whether or not it is still so; None without one. Raises DeploymentStateError."""
    file = _file(name)
    try:
        return DeploymentState.model_validate_json(file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is damaged or of another version"
        raise DeploymentStateError(
            f"The state of the deployment {name!r} in {file} cannot be read ({reason}): end its processes, if"
            " there are any, and remove the file."
        ) from error


def deployment_names() -> list[str]:
    """Names of all deployments that have a file. Raises DeploymentStateError when it cannot be known."""
    folder = state_folder()
    try:
        files = list(folder.iterdir()) if folder.exists() else []
    except OSError as error:
        raise DeploymentStateError(f"The folder {folder} cannot be read ({error.strerror}).") from error
    return sorted(file.stem for file in files if file.suffix == ".json" and _NAME.fullmatch(file.stem))


def write_state(state: DeploymentState) -> None:
    """Write the file, whole or not at all, for this user's eyes only."""
    number, path = tempfile.mkstemp(dir=_made_folder(), prefix=".")  # 0600
    try:
        with os.fdopen(number, "w") as file:
            file.write(state.model_dump_json(indent=1) + "\n")
        os.replace(path, _file(state.name))
    except BaseException:  # Ctrl-C too leaves no half of a file
        os.unlink(path)
        raise


def remove_state(name: str) -> None:
    """Remove the deployment's file."""
    file = _file(name)
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise DeploymentStateError(f"The file {file} cannot be removed ({error.strerror}).") from error


def forget(state: DeploymentState) -> None:
    """Remove a deployment's folder and file, once its processes have ended."""
    if state.folder.name.startswith(FOLDER_PREFIX):
        shutil.rmtree(state.folder, ignore_errors=True)
    remove_state(state.name)


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Be the only one that starts or ends the deployment of this name, within the block.

    The system takes the lock back from a process that dies. Raises DeploymentStateError when another one has
    it.
    """
    path = _made_folder() / f"{name}.lock"
    with _own_lock(name, path):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _own_lock(name: str, path: Path) -> IO[str]:
    """The lock's file, open and locked, and still in its place: whoever had it before removes it."""
    while True:
        try:
            file = path.open("w")
        except OSError as error:
            raise DeploymentStateError(
                f"{path}, which keeps two commands apart, cannot be written ({error.strerror})."
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return file
        except BlockingIOError:
            file.close()
            raise DeploymentStateError(
                f"Another command is just starting or ending the deployment {name!r}: wait for it to end."
            ) from None
        file.close()


def _file(name: str) -> Path:
    return state_folder() / f"{name}.json"


def _made_folder() -> Path:
    folder = state_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise DeploymentStateError(
            f"The folder {folder}, which is to hold the deployment's state, cannot be made"
            f" ({error.strerror}): name another one in OUTRIDER_STATE."
        ) from error
    return folder
