"""The process that owns a private Ray: starts it, places the actors, reports, and ends all of it.

Knows Ray. Runs as `python -m cluster.local_ray` in an operating-system session of its own, which Ray's
processes inherit. Its plan comes as the first line of standard input, reports go to standard output as JSON
lines, and it lives until standard input says stop or ends, which happens however its owner
(`cluster.deployment`) ends. So the owner needs no Ray, Ctrl-C does not reach Ray, and not even the owner's
SIGKILL leaves anything behind.
"""

import ctypes
import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

from pydantic import Field

from cluster.actors import CoordinatorActor, DrafterActor, TargetActor, WorkerSettings
from cluster.processes import end_session
from protos.settings import Settings

STOP = "stop"
OBJECT_STORE_BYTES = 100_000_000  # nothing of size travels through it
DRAIN_SECONDS = 5.0


class Plan(Settings):
    """What runs in a private deployment."""

    target: WorkerSettings
    draft: WorkerSettings | None  # None: plain decoding
    num_draft_tokens: int = Field(ge=0)  # K of rounds unless a request says otherwise


class _Owner:
    """The two pipes to the process that wants all this."""

    def __init__(self, commands: TextIO, reports: TextIO) -> None:
        self._commands = commands
        self._reports = reports

    def say(self, **report: Any) -> None:
        print(json.dumps(report), file=self._reports, flush=True)

    def next_command(self) -> str:
        """'' once the owner is gone."""
        return self._commands.readline().strip()


def main() -> None:
    """Run the plan on standard input until told to stop."""
    reports = os.fdopen(os.dup(1), "w")  # not inherited by Ray's processes
    os.dup2(2, 1)  # whatever else is printed goes to the log
    _adopt_orphans()
    owner = _Owner(sys.stdin, reports)
    plan = Plan.model_validate_json(sys.stdin.readline())
    folder = Path.cwd()
    running = _Running()
    threading.Thread(target=_obey, args=(owner, running, folder), daemon=True).start()
    try:
        owner.say(stage="Starting a private Ray")
        running.start_ray(folder)
        owner.say(ready=running.place(plan, owner))
    except Exception as error:
        owner.say(failed=_in_words(error))
    threading.Event().wait()  # `_obey` ends the process


def _adopt_orphans() -> None:
    """Become the parent of Ray's processes whose own parent is gone, so as to collect them when they end.

    The first process of a container often does not, and every run would leave some dead ones in its table.
    """
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def _obey(owner: _Owner, running: "_Running", folder: Path) -> None:
    """Drain when told to stop; end everything then, or when the owner is gone."""
    told = owner.next_command() == STOP
    try:
        if told:
            running.drain()
    finally:
        end_session(os.getsid(0), spare=os.getpid())
        if not told:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


class _Running:
    """Ray and the actors in it, as far as they have come."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}

    def start_ray(self, folder: Path) -> None:
        """Start a Ray that listens on the loopback only and keeps its files in `folder`."""
        import ray

        ray.init(
            address="local",
            _node_ip_address="127.0.0.1",
            _temp_dir=str(folder / "ray"),  # one below: Ray opens it to all users
            num_cpus=3,  # so that Ray has three processes ready; the actors reserve none, see `place`
            num_gpus=0,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
        )

    def place(self, plan: Plan, owner: _Owner) -> str:
        """Start the actors and return the coordinator's address once all of them serve.

        No actor reserves a core. In a private run a draft and its verification take turns, so both workers
        may use all the cores, which reservations cannot say. An actor that dies stays dead: the run ends
        with it.
        """
        import ray

        options = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)
        workers = {"target": (TargetActor, plan.target), "draft": (DrafterActor, plan.draft)}
        pending = {}
        for role, (kind, settings) in workers.items():
            if settings is not None:
                self._actors[role] = options(kind).remote()
                pending[self._actors[role].start.remote(settings)] = role
        self._actors["coordinator"] = options(CoordinatorActor).remote()

        addresses: dict[str, str] = {}
        while pending:
            owner.say(stage=f"Loading {' and '.join(pending.values())}")
            [done], _ = ray.wait(list(pending))
            role = pending.pop(done)
            addresses[role] = _result(role, done)
        owner.say(stage="Starting the coordinator")
        config = _coordinator_config(plan, addresses)
        return _result("coordinator", self._actors["coordinator"].start.remote(config))

    def drain(self) -> None:
        """Let every actor finish what is at hand, the coordinator first, as it gives out the work."""
        import ray

        for _, actor in reversed(self._actors.items()):
            ray.get(actor.stop.remote(DRAIN_SECONDS), timeout=DRAIN_SECONDS + 5)


class _ActorFailed(RuntimeError):
    """The sentence says which actor failed and why."""


def _result(role: str, reference: Any) -> str:
    """What an actor returned. Raises _ActorFailed in words that say which one failed."""
    import ray

    try:
        return str(ray.get(reference))
    except ray.exceptions.RayTaskError as error:
        raise _ActorFailed(f"The {role} did not start: {_in_words(error.cause)}") from error
    except ray.exceptions.RayActorError as error:
        if error.actor_init_failed:
            raise _ActorFailed(f"The {role} did not start: {_in_words(error)}") from error
        raise _ActorFailed(
            f"The {role}'s process died while it started; perhaps it was killed or memory ran out."
        ) from error


def _in_words(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _coordinator_config(plan: Plan, addresses: dict[str, str]) -> Any:
    from coordinator.server import CoordinatorConfig

    return CoordinatorConfig(
        host="127.0.0.1",
        port=0,
        targets=(addresses["target"],),
        drafts=(addresses["draft"],) if "draft" in addresses else (),
        tokenizer_folder=plan.target.folder,
        num_draft_tokens=plan.num_draft_tokens,
    )


if __name__ == "__main__":
    main()
