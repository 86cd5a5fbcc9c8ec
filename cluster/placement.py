"""A Ray of its own and the actors of one deployment in it: started, placed, drained.

Knows Ray and a plan. Does not know who wants the deployment, nor how its processes are ended
(`cluster.local_ray`).
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cluster.actors import CoordinatorActor, DrafterActor, TargetActor
from cluster.deployment_state import WorkerAddress
from cluster.plan import Deployed, Plan
from cluster.revival import Placed, Revival

NAMESPACE = "outrider"  # where the actors' names are known
COORDINATOR = "coordinator"
Say = Callable[[str], None]
PATIENCE_SECONDS = 5.0  # for the answer of an actor that has had its grace


class ActorFailed(RuntimeError):
    """The sentence says which actor failed and why."""


class RayTooSlow(RuntimeError):
    """Ray gave itself up while its processes started, as it does after half a minute on a busy machine."""


class Placement:
    """Ray and the actors in it, as far as they have come."""

    def __init__(self) -> None:
        """Nothing runs yet."""
        self._actors: dict[str, Any] = {}
        self._ray_address = ""
        self._revival: Revival | None = None

    def start_ray(self, folder: Path) -> None:
        """Start a Ray that keeps its files in the new `folder`, and connect to it. Raises RayTooSlow, and
        leaves processes behind then.
        """
        import ray

        from cluster.ray_head import start_head

        try:
            self._ray_address = start_head(folder)
        except Exception as error:  # Ray has no class for it
            if "timed out during startup" in str(error):
                raise RayTooSlow from error
            raise
        ray.init(
            address=self._ray_address,
            namespace=NAMESPACE,
            _node_ip_address="127.0.0.1",
            log_to_driver=False,
            configure_logging=False,
        )

    def place(self, plan: Plan, say: Say) -> Deployed:
        """Start the actors, and return once all of them serve. Raises ActorFailed.

        No actor reserves a core: workers take turns in part, which reservations cannot say. An actor that
        dies is started again by `revive`, not by Ray, which would not tell it what to serve.
        """
        import ray

        starts = {name: partial(_start_worker, name, plan) for name, _, _ in plan.workers()}
        pending = {}
        for name, start in starts.items():
            self._actors[name], served = start()
            pending[served] = name
        coordinator = self._actors[COORDINATOR] = _create(COORDINATOR, CoordinatorActor)
        prepared = coordinator.prepare.remote(plan.target.folder)
        addresses: dict[str, str] = {}
        while pending:
            say(f"Loading {' and '.join(pending.values())}")
            [done], _ = ray.wait(list(pending))
            name = pending.pop(done)
            addresses[name] = _result(name, done)
        say("Starting the coordinator")
        _result(COORDINATOR, prepared)
        config = _coordinator_config(plan, addresses)
        address = _result(COORDINATOR, coordinator.start.remote(config))
        starts = {name: partial(start, _port(addresses[name])) for name, start in starts.items()}
        starts[COORDINATOR] = partial(
            _start_coordinator, plan.target.folder, config | {"port": _port(address)}
        )
        self._revival = Revival(
            [Placed(name, self._actors[name], start) for name, start in starts.items()],
            self._actors.__setitem__,
        )
        pids = {name: int(_result(name, actor.pid.remote())) for name, actor in self._actors.items()}
        return Deployed(
            address=address,
            control_token=plan.control_token,
            workers=tuple(
                WorkerAddress(
                    role=role, name=name, model=settings.name, address=addresses[name], pid=pids[name]
                )
                for name, role, settings in plan.workers()
            ),
            coordinator_pid=pids[COORDINATOR],
            ray_address=self._ray_address,
        )

    def revive(self) -> None:
        """See who has died since the last look, and start it again; waits for nobody."""
        if self._revival is not None:
            self._revival.look()

    def drain(self, grace_seconds: float) -> None:
        """Let every actor finish what is at hand, within the grace: the coordinator first, as it gives out
        the work, then all workers at once. One that does not answer, or is dead, is passed over.
        """
        import ray

        self._revival = None
        names = self._actors.keys()
        for these in (names & {COORDINATOR}, names - {COORDINATOR}):
            stopping = [self._actors[name].stop.remote(grace_seconds) for name in these]
            if stopping:
                ray.wait(stopping, num_returns=len(stopping), timeout=grace_seconds + PATIENCE_SECONDS)


def _create(name: str, kind: type) -> Any:
    import ray

    actor: Any = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)(kind)
    return actor.options(name=name, lifetime="detached").remote()


def _start_worker(name: str, plan: Plan, port: int = 0) -> tuple[Any, Any]:
    """The actor, and a reference to its address."""
    role, settings = next((role, settings) for other, role, settings in plan.workers() if other == name)
    actor: Any = _create(name, {"target": TargetActor, "draft": DrafterActor}[role])
    token = plan.control_token if role == "target" else None  # a drafter has nothing to show
    return actor, actor.start.remote(settings, token, port)


def _start_coordinator(tokenizer_folder: Path, config: Mapping[str, Any]) -> tuple[Any, Any]:
    """The same for the coordinator, once there are workers."""
    actor: Any = _create(COORDINATOR, CoordinatorActor)
    actor.prepare.remote(tokenizer_folder)
    return actor, actor.start.remote(config)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _result(name: str, reference: Any) -> str:
    """What an actor returned, as text. Raises ActorFailed in words that say which one failed."""
    import ray

    try:
        return str(ray.get(reference))
    except ray.exceptions.RayTaskError as error:
        raise ActorFailed(f"{name} did not start: {in_words(error.cause)}") from error
    except ray.exceptions.RayActorError as error:
        if error.actor_init_failed:
            raise ActorFailed(f"{name} did not start: {in_words(error)}") from error
        raise ActorFailed(
            f"{name} did not start: its process died; perhaps it was killed or memory ran out."
        ) from error


def in_words(error: BaseException) -> str:
    """What the error says, or what it is where it says nothing."""
    return str(error) or type(error).__name__


def _coordinator_config(plan: Plan, addresses: Mapping[str, str]) -> dict[str, Any]:
    """The fields of the coordinator's configuration, a class that is loaded where it is used."""
    of_role: dict[str, list[str]] = {"target": [], "draft": []}
    for name, role, _ in plan.workers():
        of_role[role].append(addresses[name])
    return {
        "port": plan.port,
        "targets": of_role["target"],
        "drafts": of_role["draft"],
        "control_token": plan.control_token,
        "num_draft_tokens": plan.num_draft_tokens,
        "rule": plan.rule,
    }
