"""The commands `outrider up`, `ps` and `down`: their options.

Knows what a person may type. What is then done (`cluster.up`, `cluster.ps`, `cluster.down`) is imported when
it is asked for.
"""

import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cluster.interrupts import Interrupted

if TYPE_CHECKING:
    from protos.limits import NumDraftTokens

DEFAULT_PORT = 7480
STARTUP_SECONDS = 300.0


def _go_offline(wanted: bool) -> bool:
    """In the environment, as every process that is started must know."""
    if wanted:
        os.environ["OUTRIDER_OFFLINE"] = "1"
    return wanted


Offline = Annotated[
    bool,
    typer.Option(
        "--offline",
        callback=_go_offline,
        help="Fetch nothing; models must be on this machine already. As OUTRIDER_OFFLINE=1.",
    ),
]


def read_draft_tokens(text: str | None) -> "NumDraftTokens | None":
    """What --draft-tokens says."""
    if text is None or text == "auto":
        return text  # type: ignore[return-value]
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(
            f"is {text!r}; give a whole number or auto", param_hint="--draft-tokens"
        ) from None


def up_command(
    target: Annotated[
        str,
        typer.Option(
            help="The model to write with: demo, a folder, a GGUF file, or a hub id (org/name@revision)."
        ),
    ] = "demo",
    draft: Annotated[
        str, typer.Option(help="The model that proposes tokens: as for --target, or none for plain decoding.")
    ] = "demo",
    targets: Annotated[int, typer.Option(help="Workers that hold the target.")] = 1,
    drafters: Annotated[
        int | None, typer.Option(help="Workers that hold the draft.", show_default="1")
    ] = None,
    draft_tokens: Annotated[
        str | None,
        typer.Option(
            help="Draft tokens a round (K) unless a request says otherwise: a number, 64 at most, or auto for"
            " as many as pay.",
            show_default="auto",
        ),
    ] = None,
    rule: Annotated[
        Literal["token", "block"],
        typer.Option(help="How targets judge a block of drafts; both keep the law."),
    ] = "token",
    slots: Annotated[
        int | None,
        typer.Option(
            help="Sessions that each target holds at once; further requests wait.",
            show_default="32, or as many as fit well into memory",
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a session, prompt included.", show_default="2048, or the target's context"
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            help="torch's threads in each worker; a model of few layers takes one.",
            show_default="the cores, shared among workers",
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the public service; all others are any free ones.")] = (
        DEFAULT_PORT
    ),
    name: Annotated[str, typer.Option(help="Tells several deployments apart.")] = "default",
    offline: Offline = False,
    startup_timeout: Annotated[
        float, typer.Option(help="Seconds within which the deployment must serve.")
    ] = STARTUP_SECONDS,
) -> None:
    """Start a deployment on this machine that stays.

    A Ray of its own with drafters, targets and a coordinator. The command
    returns when all of them serve, or says what failed and leaves nothing
    behind. `outrider generate` uses the deployment; `outrider ps` shows it,
    `outrider down` ends it.
    """

    def run() -> int:
        from cluster.staying_plan import StayingWish
        from cluster.up import start_deployment

        wish = StayingWish(
            target=target,
            draft=draft,
            num_targets=targets,
            num_drafters=drafters,
            num_draft_tokens=read_draft_tokens(draft_tokens),
            rule=rule,
            num_slots=slots,
            max_length=max_length,
            num_threads=threads,
            port=port,
        )
        return start_deployment(wish, name, startup_seconds=startup_timeout)

    _exit_with(run, "Interrupted; `outrider ps` shows whether it was up already.")


def ps_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Show the deployments that are up: actors, models, slots, sessions, acceptance, health.

    Exit code 1 when something is not healthy.
    """

    def run() -> int:
        from cluster.ps import show_deployments

        return show_deployments(in_json=as_json)

    _exit_with(run, "Interrupted.")


def down_command(
    name: Annotated[str, typer.Argument(help="The deployment to end.")] = "default",
    grace: Annotated[
        float, typer.Option(help="Seconds that running requests have to finish; 0 for none.")
    ] = 10.0,
) -> None:
    """End a deployment: no process, port or file of it is left.

    It takes no further requests, and those that run may finish within the grace.
    """

    def run() -> int:
        from cluster.down import end_deployment

        return end_deployment(name, grace_seconds=grace)

    _exit_with(run, "Interrupted; run `outrider down` again to end what is left.")


def _exit_with(run: Callable[[], int], at_interrupt: str) -> None:
    """Exit with what `run` returns, or as interrupted."""
    try:
        code = run()
    except KeyboardInterrupt as error:
        typer.echo(at_interrupt, err=True)
        number = error.signal_number if isinstance(error, Interrupted) else signal.SIGINT
        code = 128 + number
    raise typer.Exit(code)
