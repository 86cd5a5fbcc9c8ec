"""What `outrider down` does: let a deployment finish what is at hand, then end every process of it.

Knows its file, its processes and its keeper (`cluster.local_ray`). Asks neither Ray nor the coordinator,
either of which may be dead or stopped.
"""

import contextlib
import os
import signal
import time

from rich.console import Console

from cluster.deployment_state import (
    BadName,
    DeploymentState,
    DeploymentStateError,
    check_name,
    forget,
    locked,
    read_file,
)
from cluster.local_ray import DRAINING_FILE
from cluster.outcome import DONE, FAILED, REFUSED, Refused, require_seconds, say_error
from cluster.processes import end_session

_LOOKING_SECONDS = 0.1


def end_deployment(name: str, *, grace_seconds: float) -> int:
    """Do it, say what happened, and return the exit code."""
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    try:
        check_name(name)
        require_seconds("--grace", grace_seconds, lowest=0.0)
        with locked(name):
            state = read_file(name)
            sentence = (
                f"No deployment {name!r} is up: nothing to end."
                if state is None
                else _end(state, grace_seconds)
            )
    except (Refused, BadName) as error:
        return say_error(err, str(error), REFUSED)
    except (DeploymentStateError, StillRunning) as error:
        return say_error(err, str(error), FAILED)
    out.print(sentence, markup=False, soft_wrap=True)
    return DONE


class StillRunning(RuntimeError):
    """The sentence names the processes that cannot be ended."""


def _end(state: DeploymentState, grace_seconds: float) -> str:
    """End all of it and say so. Raises StillRunning."""
    begun = time.monotonic()
    num_processes = len(state.processes())
    if num_processes == 0:
        forget(state)
        return f"The deployment {state.name!r} had ended already; what it left behind is removed."
    has_drained = grace_seconds > 0 and _drain(state, grace_seconds)
    if state.processes():
        survivors = end_session(state.keeper_pid)
        if survivors:
            raise StillRunning(f"Processes {survivors} of the deployment {state.name!r} cannot be ended.")
    forget(state)
    if has_drained:
        how = "after what was at hand had finished"
    else:
        how = f"whatever was at hand after {grace_seconds:g} s" if grace_seconds else "at once"
    return (
        f"Ended the deployment {state.name!r} at {state.address}: {num_processes} processes,"
        f" {how}, in {time.monotonic() - begun:.1f} s."
    )


def _drain(state: DeploymentState, grace_seconds: float) -> bool:
    """Have the keeper drain and end everything; whether it has within the grace."""
    if not state.has_keeper:
        return False
    if not (state.folder / DRAINING_FILE).exists():  # to one that drains, a second signal means: no longer
        with contextlib.suppress(ProcessLookupError):
            os.kill(state.keeper_pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while state.has_keeper:
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOKING_SECONDS)
    return True
