"""The command `outrider check-law`: its options, and where it finds what it asks.

Knows what a person may type and which deployment is meant. What is then done is imported when asked for.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.outcome import DONE, FAILED, REFUSED, Refused, require_seconds, say_error, with_option

if TYPE_CHECKING:
    from coordinator.text import Text as Tokenizer

INTERRUPTED = 130
# A short prompt, as every sample reads it, with one likely next token, as the first one is not verified.
PROMPT = "For example"
SAY_SECONDS = 5.0  # between two lines of the same step where there is no terminal

CHECK_LAW_EPILOG = (
    "Exit codes: 0 consistent; 1 not consistent, inconclusive, or the check failed; 2 an option was refused;"
    " 130 ended by Ctrl-C."
)


def check_law_command(
    deployment: Annotated[str, typer.Option(help="The deployment, as named by outrider up.")] = "default",
    prompt: Annotated[
        str, typer.Option(help="What to sample behind: short, as each sample reads it.")
    ] = PROMPT,
    samples: Annotated[int, typer.Option(help="Samples to compare, 16 at least.")] = 1408,
    tokens: Annotated[int, typer.Option(help="Tokens of each sample to compare, 2 to 64.")] = 3,
    temperature: Annotated[float, typer.Option(help="0 is greedy, 1 the model's own law.")] = 1.0,
    top_k: Annotated[
        int, typer.Option(help="Keep the k likeliest tokens, so that the others must not occur; 0 keeps all.")
    ] = 20,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass; 1 keeps all.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens below this share of the likeliest; 0 keeps all.")
    ] = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(help="Of the first request; repeats a check. A fresh one otherwise, and said."),
    ] = None,
    max_seconds: Annotated[
        float, typer.Option(help="Seconds after which no further sample is begun, a day at most.")
    ] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Prove the law on a running deployment: many short samples of its service against its target's exact p.

    Asks the target for its distributions behind a prompt, samples the same
    prompt through the public service, drafts and all, and tests whether the
    samples follow: no token of probability zero, the joint law of the first
    tokens, independence, and the acceptance of drafts. Needs the deployment's
    control token, so it works for who started the deployment.
    """
    given = {
        "num_samples": samples,
        "depth": tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": secrets.randbits(64) if seed is None else seed,
        "max_seconds": max_seconds,
    }
    try:
        raise typer.Exit(_check(deployment, prompt, given, as_json=as_json))
    except KeyboardInterrupt:
        typer.echo("Interrupted.", err=True)
        raise typer.Exit(INTERRUPTED) from None


_OPTIONS = {"num_samples": "--samples", "depth": "--tokens", "prompt": "--prompt", "name": "--deployment"}


def _check(name: str, prompt: str, given: dict[str, Any], *, as_json: bool) -> int:
    """Do it, say what was found, and return the exit code."""
    from pydantic import ValidationError
    from rich.console import Console

    from cluster.check_law import Endpoints, check_law
    from cluster.deployment_state import BadName, DeploymentStateError, check_name, read_state
    from cluster.law_report import Verdict
    from cluster.law_samples import CheckFailed, CheckSettings
    from cluster.law_table import law_as_json, law_tables
    from cluster.progress import Steps
    from coordinator.text import Text as Tokenizer
    from coordinator.text_error import TextError

    err = Console(stderr=True, highlight=False)
    try:
        check_name(name)
        require_seconds("--max-seconds", given["max_seconds"])
        settings = CheckSettings(**given)
        state = read_state(name)
        if state is None:
            return say_error(err, f"No deployment {name!r} is up. Start one with `outrider up`.", FAILED)
        tokenizer = Tokenizer.load(state.target_folder)
        ids = tokenizer.encode(prompt)
        if not ids:
            raise Refused("prompt is empty; give some text")
        with Steps(err) as steps:
            steps.note(f"Checking {state.target} behind {prompt!r} with --seed {settings.seed}")
            endpoints = Endpoints(
                service=state.address,
                targets=tuple(each.address for each in state.workers if each.role == "target"),
                control_token=state.control_token,
                has_token_rule=state.rule == "token",
            )
            say = steps.say if err.is_terminal else _paced(steps.say)
            report = asyncio.run(check_law(endpoints, ids, settings, say))
    except ValidationError as error:
        return say_error(err, _in_words(error.errors()[0]), REFUSED)
    except (Refused, BadName) as error:
        return say_error(err, with_option(str(error), _OPTIONS), REFUSED)
    except TextError as error:
        return say_error(err, str(error), REFUSED)
    except (CheckFailed, DeploymentStateError) as error:
        return say_error(err, str(error), FAILED)
    names = _namer(tokenizer)
    if as_json:
        print(json.dumps({"prompt": prompt, "seed": settings.seed, **law_as_json(report, names)}))
    else:
        Console(highlight=False).print(law_tables(report, names))
    return DONE if report.verdict is Verdict.CONSISTENT else FAILED


def _namer(tokenizer: "Tokenizer") -> Callable[[Sequence[int]], str]:
    """Text of token ids; a last one without text of its own, such as an end token, by its number."""

    def name(ids: Sequence[int]) -> str:
        stream = tokenizer.stream()
        pieces = [stream.push(token) for token in ids]
        pieces.append(stream.flush())
        return "".join(pieces) + ("" if not ids or any(pieces[-2:]) else f"[{ids[-1]}]")

    return name


def _paced(say: Callable[[str], None]) -> Callable[[str], None]:
    """Says each step at its begin and then no more often than every few seconds."""
    last_step, last_said = "", 0.0

    def paced(sentence: str) -> None:
        nonlocal last_step, last_said
        step, now = sentence.partition(":")[0], time.monotonic()
        if step != last_step or now - last_said >= SAY_SECONDS:
            last_step, last_said = step, now
            say(sentence)

    return paced


def _in_words(error: Any) -> str:
    """The first thing that is wrong with the settings, by the option that was typed."""
    field = str(error["loc"][0])
    option = _OPTIONS.get(field, "--" + field.replace("_", "-"))
    return f"{option} is {error['input']}; {error['msg'].replace('Input should', 'it must')}"
