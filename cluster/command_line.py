"""The command `outrider`: its options and exit codes.

Knows what a person may type. What is then done stands elsewhere and is imported when it is asked for, so that
help and a mistyped option are answered at once, and Ctrl-C is no error even while Python still loads.
"""

import signal
from importlib.metadata import version
from typing import Annotated

import typer

from cluster.bench_command import bench_command
from cluster.call_command import CALL_EPILOG, call_command
from cluster.check_law_command import CHECK_LAW_EPILOG, check_law_command
from cluster.deployment_commands import (
    STARTUP_SECONDS,
    Offline,
    down_command,
    ps_command,
    read_draft_tokens,
    up_command,
)
from cluster.interrupts import Interrupted
from cluster.timeline_command import timeline_command

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def main() -> None:
    """The console script."""
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"outrider {version('outrider')}")
        raise typer.Exit


EXIT_CODES = (
    "Exit codes: 0 done; 1 failed, also for a model that cannot be used; 2 an option or the input was"
    " refused; 130 ended by Ctrl-C."
)


@app.callback(epilog=EXIT_CODES)
def outrider(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    """Exact speculative decoding over a network."""


@app.command("generate", epilog=EXIT_CODES)
def generate_command(
    prompt: Annotated[str, typer.Argument(help="The text to continue or answer; '-' reads standard input.")],
    target: Annotated[
        str | None,
        typer.Option(
            help="The model to write with: demo, a folder, a GGUF file, or a hub id (org/name@revision).",
            show_default="the deployment's, or demo",
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="The model that proposes tokens: as for --target, or none for plain decoding.",
            show_default="the deployment's, or demo",
        ),
    ] = None,
    draft_tokens: Annotated[
        str | None,
        typer.Option(
            help="Draft tokens a round (K): a number, 64 at most, 0 for none, or auto for as many as pay.",
            show_default="the deployment's, or auto",
        ),
    ] = None,
    # Not the model's own law, 1.0: at that, a small chat model wanders off within two sentences.
    temperature: Annotated[
        float, typer.Option(help="0 is greedy, 1 the model's own law, 100 the limit.")
    ] = 0.7,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass; 1 keeps all.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens below this share of the likeliest; 0 keeps all.")
    ] = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(help="Repeats a run with the same options; a fresh one otherwise, and said."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Put the prompt as a question to the model's chat template, or continue it as it is."
            " By default: chat where there is a template.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text as it comes.")
    ] = False,
    deployment: Annotated[
        str | None,
        typer.Option(help="The deployment to use.", show_default="default, if it is up; else a private one"),
    ] = None,
    private: Annotated[
        bool,
        typer.Option(
            "--private", help="Use a private deployment, as --target and --draft do, even if one is up."
        ),
    ] = False,
    offline: Offline = False,
    startup_timeout: Annotated[
        float, typer.Option(help="Seconds within which a private deployment must serve.")
    ] = STARTUP_SECONDS,
) -> None:
    """Generate one text, on the deployment that is up or on a private one that ends with it.

    Without a deployment that is up (see `outrider up`), starts Ray, a drafter,
    a target and a coordinator on this machine and ends them with the text.
    Shows which tokens were drafted. The text goes to standard output,
    everything else to standard error.
    """
    try:
        from cluster.generate_command import Place, generate_text
        from cluster.private_run import Wish

        wish = Wish(
            prompt=prompt,
            num_draft_tokens=read_draft_tokens(draft_tokens),
            chat=chat,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            max_tokens=max_tokens,
        )
        place = Place(target, draft, deployment, private, startup_timeout)
        code = generate_text(wish, place, as_json=as_json)
    except KeyboardInterrupt as error:
        typer.echo("Interrupted; nothing runs that did not run before.", err=True)
        number = error.signal_number if isinstance(error, Interrupted) else signal.SIGINT
        raise typer.Exit(128 + number) from None
    raise typer.Exit(code)


app.command("up", epilog=EXIT_CODES)(up_command)
app.command("ps", epilog=EXIT_CODES)(ps_command)
app.command("down", epilog=EXIT_CODES)(down_command)
app.command("call", epilog=CALL_EPILOG)(call_command)
app.command("check-law", epilog=CHECK_LAW_EPILOG)(check_law_command)
app.command("bench", epilog=EXIT_CODES)(bench_command)
app.command("timeline", epilog=EXIT_CODES)(timeline_command)


if __name__ == "__main__":
    main()
