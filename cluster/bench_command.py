"""The command `outrider bench`: its options.

Knows what a person may type. What is then done (`cluster.bench_run`) is imported when it is asked for.
"""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from cluster.deployment_commands import Offline
from cluster.interrupts import Interrupted

if TYPE_CHECKING:
    from cluster.bench import Rule
    from protos.limits import NumDraftTokens

_Number = TypeVar("_Number")


def bench_command(
    target: Annotated[
        str, typer.Option(help="The model to write with: demo, a folder, or a hub id (org/name@revision).")
    ] = "demo",
    draft: Annotated[str, typer.Option(help="The model that proposes tokens: as for --target.")] = "demo",
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Questions in Spec-Bench's format, a JSON object a line with category and turns; "
            "the project's own 13 otherwise.",
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            help="Questions to ask: the first of each category, then the second, and so on; by default two "
            "of each: 26 of Spec-Bench's.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of each text; end tokens are ignored.")] = 96,
    draft_tokens: Annotated[
        str,
        typer.Option(
            help="Draft tokens a round (K) to try, numbers or auto, with commas; 0 is tried in any case."
        ),
    ] = "0,1,2,3,auto",
    rules: Annotated[
        str,
        typer.Option(
            help="How drafts are judged: token, block, or both with a comma, for each number of draft "
            "tokens; auto goes by the first."
        ),
    ] = "token",
    requests: Annotated[
        str,
        typer.Option(
            help="Requests at once to try, numbers with commas. For each above 1 all engines take turns in "
            "blocks of as many texts.",
        ),
    ] = "1",
    waves: Annotated[
        int,
        typer.Option(
            help="Texts of a block, as multiples of the requests at once: more of them weigh its end less."
        ),
    ] = 1,
    blocks: Annotated[
        int | None,
        typer.Option(
            help="Blocks for each number of requests above 1; by default as many as ask every prompt, 8 at "
            "least. Below 6 there are no intervals.",
        ),
    ] = None,
    batched: Annotated[
        str,
        typer.Option(
            help="Requests at once at which transformers takes part, with one generate of as many prompts; "
            "numbers with commas, 0 for none.",
        ),
    ] = "16",
    temperatures: Annotated[str, typer.Option(help="Temperatures to try, with commas.")] = "1,0",
    threads: Annotated[
        int | None, typer.Option(help="torch's threads, for every engine; by default all cores.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Times that each prompt is run, at least.")] = 1,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write everything there as JSON; '-' prints it in place of the table."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw a picture: a file that ends in .svg or .png.")
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            help="Draw who was busy when, with each K, in the run that was asked most: an HTML file."
        ),
    ] = None,
    offline: Offline = False,
    startup_timeout: Annotated[
        float, typer.Option(help="Seconds within which a deployment must serve, and transformers.")
    ] = 300.0,
) -> None:
    """Measure decoding with and without drafts against transformers' generate, in one run on this machine.

    transformers plain, transformers with the draft as assistant_model, and
    Outrider with each K answer the same prompts with the same weights in
    float32, one at a time, or as many at once as --requests says. Takes about
    25 minutes on two cores with the project's own prompts, more with more; it
    says how long beforehand. Ctrl-C ends it with what was measured so far.
    """
    try:
        from cluster.bench_plan import BenchWish
        from cluster.bench_run import Outlets, run_bench
        from cluster.machine import usable_cores
        from cluster.prompt_file import OWN_QUESTIONS

        wish = BenchWish(
            target=target,
            draft=draft,
            prompts=prompts or OWN_QUESTIONS,
            num_prompts=num_prompts,
            num_tokens=tokens,
            draft_lengths=_numbers("--draft-tokens", draft_tokens, _draft_length),
            temperatures=_numbers("--temperatures", temperatures, float),
            num_threads=usable_cores() if threads is None else threads,
            num_repeats=repeats,
            num_requests=_numbers("--requests", requests, int),
            num_waves=waves,
            num_blocks=blocks,
            rules=_numbers("--rules", rules, _rule),
            batched=_numbers("--batched", batched, int),
        )
        code = run_bench(wish, Outlets(json_file, picture, timeline), startup_seconds=startup_timeout)
    except KeyboardInterrupt as error:
        typer.echo("Interrupted; nothing was left running.", err=True)
        number = error.signal_number if isinstance(error, Interrupted) else signal.SIGINT
        raise typer.Exit(128 + number) from None
    raise typer.Exit(code)


def _draft_length(word: str) -> "NumDraftTokens":
    return "auto" if word.strip() == "auto" else int(word)


def _rule(word: str) -> "Rule":
    match word.strip():
        case "token":
            return "token"
        case "block":
            return "block"
    raise ValueError


def _numbers(option: str, text: str, kind: Callable[[str], _Number]) -> tuple[_Number, ...]:
    """The numbers between the commas, each once."""
    try:
        return tuple(dict.fromkeys(kind(word) for word in text.split(",")))
    except ValueError:
        raise typer.BadParameter(
            f"is {text!r}; give numbers with commas between them", param_hint=option
        ) from None
