"""What `outrider up` does: find the models, deploy them, note where they are, and leave them running.

Knows the order of these steps. Each of them stands in a module of its own.
"""

import errno
import socket
import time
from pathlib import Path

from rich.console import Console

from cluster.deployment import DeploymentFailed, RayOfOurs, starting_ray
from cluster.deployment_state import (
    DEFAULT_NAME,
    BadName,
    DeploymentState,
    DeploymentStateError,
    check_name,
    forget,
    locked,
    read_file,
    remove_state,
    write_state,
)
from cluster.finding import find
from cluster.memory import DoesNotFit
from cluster.outcome import DONE, FAILED, REFUSED, Refused, require_seconds, say_error, with_option
from cluster.plan import Deployed
from cluster.processes import started_at
from cluster.progress import Steps
from cluster.staying_plan import StayingPlan, StayingWish, check_wish, prepare_staying
from workers.checkpoints import ModelRefused

HOST = "127.0.0.1"


class PortTaken(RuntimeError):
    """The sentence names the port and the option."""


def start_deployment(wish: StayingWish, name: str, *, startup_seconds: float) -> int:
    """Do it, say what happened, and return the exit code."""
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    try:
        check_name(name)
        check_wish(wish)
        require_seconds("startup_timeout", startup_seconds)
        with locked(name):
            _require_none(name)
            require_free(wish.port)
            with Steps(err) as steps:
                found = find(wish.target, wish.draft, steps.say)
                with starting_ray() as ray:
                    plan = prepare_staying(wish, found)
                    steps.note(plan.memory)
                    state = _deploy(ray, wish, plan, name, steps, startup_seconds)
    except (Refused, BadName) as error:
        return say_error(err, with_option(str(error), _OPTIONS), REFUSED)
    except (PortTaken, ModelRefused, DoesNotFit, DeploymentFailed, DeploymentStateError, OSError) as error:
        return say_error(err, str(error), FAILED)
    out.print(_summary(state, plan), markup=False, soft_wrap=True)
    return DONE


def _require_none(name: str) -> None:
    """Raise DeploymentStateError when one of this name is up; remove what one that has ended left behind."""
    state = read_file(name)
    if state is None:
        return
    if state.processes():
        raise DeploymentStateError(
            f"The deployment {name!r} is up already, at {state.address}: use it, end it with"
            f" `outrider down{_argument(name)}`, or give another --name and --port."
        )
    forget(state)


def require_free(port: int) -> None:
    """Raise PortTaken when the public service could not listen there, before minutes go into its workers."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the service does
        try:
            listener.bind((HOST, port))
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            raise PortTaken(f"Port {port} of {HOST} {reason}: give another one with --port.") from None


def _deploy(
    ray: RayOfOurs, wish: StayingWish, plan: StayingPlan, name: str, steps: Steps, startup_seconds: float
) -> DeploymentState:
    states = []

    def record(deployed: Deployed, folder: Path, keeper_pid: int) -> None:
        started = started_at(keeper_pid)
        if started is None:
            raise DeploymentFailed("The process that owns Ray ended as soon as all served.")
        state = DeploymentState(
            name=name,
            target=wish.target,
            draft=wish.draft if wish.drafts else None,
            target_folder=plan.plan.target.folder,
            num_draft_tokens=plan.plan.num_draft_tokens,
            rule=wish.rule,
            folder=folder,
            keeper_pid=keeper_pid,
            keeper_started=started,
            created_at=time.time(),
            **dict(deployed),
        )
        write_state(state)
        states.append(state)

    try:
        ray.keep(plan.plan, steps.say, record, startup_seconds=startup_seconds)
    except DeploymentFailed:  # nothing else is raised once the file is written, unless the deployment stays
        remove_state(name)
        raise
    return states[0]


def _summary(state: DeploymentState, plan: StayingPlan) -> str:
    settings, option = plan.plan.target, _argument(state.name, " --deployment")
    models = f"target {state.target}" + (
        f" ({plan.plan.num_targets} workers)" if plan.plan.num_targets > 1 else ""
    )
    if state.draft is not None:
        drafters = f" ({plan.plan.num_drafters} workers)" if plan.plan.num_drafters > 1 else ""
        models += f", draft {state.draft}{drafters}, {state.draft_tokens_in_words}"
    return "\n".join(
        [
            f"The deployment {state.name!r} serves at {state.address}: {models};"
            f" {settings.num_slots} sessions a target of up to {settings.max_length} positions each.",
            f"Write with it: outrider generate 'Why is the sky blue?'{option}",
            f"Check its law: outrider check-law{option}",
            "See how it is: outrider ps",
            f"End it:        outrider down{_argument(state.name)}",
        ]
    )


def _argument(name: str, option: str = "") -> str:
    return "" if name == DEFAULT_NAME else f"{option} {name}"


_OPTIONS = {
    "name": "--name",
    "num_targets": "--targets",
    "num_drafters": "--drafters",
    "num_draft_tokens": "--draft-tokens",
    "num_slots": "--slots",
    "max_length": "--max-length",
    "num_threads": "--threads",
    "port": "--port",
    "startup_timeout": "--startup-timeout",
}
