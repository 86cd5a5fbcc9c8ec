"""The command `outrider timeline`: its options.

Knows what a person may type. What is then done is imported when it is asked for.
"""

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.interrupts import Interrupted

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.deployment_state import DeploymentState


def timeline_command(
    file: Annotated[Path, typer.Argument(help="The HTML file to write.")],
    deployment: Annotated[str, typer.Option(help="The deployment, as named by outrider up.")] = "default",
    seconds: Annotated[float, typer.Option(help="Seconds to watch, from now on.")] = 5.0,
) -> None:
    """Draw who was busy when: drafters, targets and the wire of a deployment at work.

    Watches for some seconds what the deployment is asked meanwhile, and writes
    one HTML file that needs nothing else. Changes nothing in the deployment.
    """
    from rich.console import Console

    from cluster.deployment_state import BadName, DeploymentStateError, check_name, read_state
    from cluster.outcome import FAILED, REFUSED, Refused, require_seconds, say_error

    err = Console(stderr=True, highlight=False)
    try:
        check_name(deployment)
        require_seconds("--seconds", seconds)
        state = read_state(deployment)
        if state is None:
            raise Refused(f"no deployment {deployment!r} is up; `outrider ps` shows those that are")
        code = _draw(state, file, seconds, err)
    except (BadName, Refused) as error:
        code = say_error(err, str(error), REFUSED)
    except DeploymentStateError as error:
        code = say_error(err, str(error), FAILED)
    except KeyboardInterrupt as error:
        err.print("Interrupted; nothing was written.")
        code = 128 + (error.signal_number if isinstance(error, Interrupted) else signal.SIGINT)
    raise typer.Exit(code)


def _draw(state: "DeploymentState", file: Path, seconds: float, err: "Console") -> int:
    """Record, write the page, say what it shows; returns the exit code."""
    from cluster.outcome import DONE, FAILED, say_error
    from cluster.recording import RecordingFailed, recorded
    from cluster.timeline_boxes import window
    from cluster.timeline_page import Phase, save

    try:
        spans = recorded(state.address, state.control_token, seconds)
    except RecordingFailed as error:
        return say_error(err, str(error), FAILED)
    seen = window(spans, seconds)
    if not seen.lanes:
        return say_error(err, f"Nothing was asked within {seconds:g} s, so there is nothing to draw.", FAILED)
    facts = [f"Target {state.target}, draft {state.draft or 'none'}, {state.rule} rule."]
    try:
        save(file, f"Outrider: who was busy when in {state.name}", [Phase(state.name, seen)], facts)
    except OSError as error:
        return say_error(err, f"{file} cannot be written: {error.strerror}", FAILED)
    shares = ", ".join(f"{lane.role} at {lane.address} busy {lane.busy_share:.0%}" for lane in seen.lanes)
    err.print(f"{seen.seconds:.1f} s of work, {seen.num_tokens} tokens: {shares}", soft_wrap=True)
    return DONE
