"""The command `outrider call`: its options, and where it finds a service.

Knows what a person or a script may type. What is then done is imported when it is asked for.
"""

import os
import re
import signal
import sys
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console

from cluster.outcome import FAILED, REFUSED, Refused, require_seconds, say_error, with_option

MAX_CONCURRENCY = 1024
MAX_RETRIES = 100
_ADDRESS = re.compile(r"(\[[^\]]+\]|[^:/\s]+):\d{1,5}")

CALL_EPILOG = (
    "Exit codes: 0 every request was answered; 1 one failed (no service, deadline, abort, a fault); 2 none"
    " failed, but an option, the input or a request was refused; 130 ended by Ctrl-C (143 by SIGTERM)."
)


class Order(StrEnum):
    """In which order lines are written."""

    KEPT = "kept"
    FINISHED = "finished"


class _Failed(RuntimeError):
    """The sentence says what keeps the command from being done."""


def call_command(
    requests: Annotated[
        str | None,
        typer.Argument(
            metavar="[JSON|FILE|-]",
            help="A request or an array of them as JSON, or a file of requests; '-' or nothing reads standard"
            " input.",
        ),
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="host:port of a service; by default that of the deployment.")
    ] = None,
    deployment: Annotated[str, typer.Option(help="The deployment, as named by outrider up.")] = "default",
    concurrency: Annotated[int, typer.Option(help=f"Requests at once, {MAX_CONCURRENCY} at most.")] = 16,
    order: Annotated[
        Order | None,
        typer.Option(help="Write answers in the order of their requests (the default), or as they finish."),
    ] = None,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream", help="Write a line for each event as it happens: started, tokens, finished, usage."
        ),
    ] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Add each token's id, text and origin (accepted, bonus, ...).")
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds for each request that names no timeout_seconds of its own.")
    ] = 3600.0,
    retries: Annotated[
        int,
        typer.Option(
            help="Times that a request is sent again when the service is unavailable and says when to come,"
            " or goes on in mid-text when its stream broke. One that is full is asked until the timeout."
        ),
    ] = 5,
    abort: Annotated[
        str | None,
        typer.Option(
            metavar="REQUEST_ID",
            help="End a running request instead; its own caller gets what it had so far.",
        ),
    ] = None,
) -> None:
    """Send requests to a running service, many at once: JSON in, JSON lines out.

    outrider call '{"prompt": "Hi", "max_tokens": 20}'
    jq '{prompt: .question}' questions.json | outrider call --order finished

    A request is an object with a prompt (text, or a list of token ids) or
    messages (a list of {role, content}), and any of id, timeout_seconds,
    max_tokens, temperature, top_k, top_p, min_p, seed, n, num_draft_tokens,
    ignore_end_tokens, request_id (for --abort). A file or a pipe has one on
    each line, or objects and arrays laid out as jq does; a pipe that stays
    open is answered as it comes.

    Each request gets one line with its id (by default its place among the
    requests of the input, from 1): text, finish_reason, seed, usage, seconds;
    a list of choices where n is above 1; token_ids too if it came with token
    ids. Or an error with code and message, and in partial what had arrived.
    One that is refused costs the others nothing.
    """
    err = Console(stderr=True, highlight=False)
    try:
        if abort is not None:
            code = _abort(abort, requests, address, deployment)
        else:
            from cluster.calling import Manner, call, open_input

            _check_range("--concurrency", concurrency, 1, MAX_CONCURRENCY)
            _check_range("--retries", retries, 0, MAX_RETRIES)
            require_seconds("--timeout", timeout)
            if stream and order is Order.KEPT:
                raise Refused("--order is kept, but --stream writes events as they happen")
            manner = Manner(
                concurrency=concurrency,
                keep_order=not stream and order is not Order.FINISHED,
                stream=stream,
                with_tokens=tokens,
                timeout_seconds=timeout,
                max_retries=retries,
            )
            values = open_input(requests)
            code = call(_find(address, deployment), values, manner)
    except Refused as refused:
        code = say_error(err, str(refused), REFUSED)
    except _Failed as failed:
        code = say_error(err, str(failed), FAILED)
    except KeyboardInterrupt:  # before anything was sent
        code = 128 + signal.SIGINT
    except BrokenPipeError:  # whoever read the lines has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains at its exit
        code = FAILED
    except OSError as error:  # the disk is full, the input cannot be read on
        code = say_error(err, f"input or output failed: {error.strerror}", FAILED)
    raise typer.Exit(code)


def _abort(request_id: str, requests: str | None, address: str | None, deployment: str) -> int:
    if requests is not None:
        raise Refused("--abort ends a request and sends none; leave the requests out")
    if not request_id:
        raise Refused("--abort is empty; it must be a request_id")

    from cluster.calling import abort_request
    from protos.status import TaskError

    try:
        return abort_request(_find(address, deployment), request_id)
    except TaskError as error:
        raise _Failed(f"{error.code.name}: {error.message}") from None


def _check_range(option: str, value: int, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        raise Refused(f"{option} is {value}; it must lie in {lowest}..{highest}")


def _find(address: str | None, deployment: str) -> str:
    """The service's address: the one given, or the deployment's."""
    if address is not None:
        if not _ADDRESS.fullmatch(address):
            raise Refused(f"--address is {address!r}; it must be host:port")
        return address

    from cluster.deployment_state import BadName, DeploymentStateError, check_name, read_state

    try:
        check_name(deployment)
        state = read_state(deployment)
    except BadName as error:
        raise Refused(with_option(str(error), {"name": "--deployment"})) from None
    except DeploymentStateError as error:
        raise _Failed(str(error)) from None
    if state is None:
        raise _Failed(
            f"No deployment {deployment!r} is up. Start one with `outrider up`, or name a service with"
            " --address host:port."
        )
    return state.address
