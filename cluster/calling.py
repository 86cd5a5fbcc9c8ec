"""What `outrider call` does: requests in, lines out, signals and an exit code.

Knows the streams of a process and its signals. How JSON is read, requests are sent and lines look is said
elsewhere.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, BinaryIO

import grpc

from cluster.at_once import AtOnce, from_thread
from cluster.call_lines import Outcome, error_as_json, event_as_json, outcome_of, result_as_json
from cluster.call_requests import Call, Refusal, read_calls
from cluster.calls import OPTIONS, Answer, Caller, abort
from cluster.json_values import JsonValue, NotJson, read_values, values_of
from cluster.outcome import DONE, FAILED, REFUSED, Refused
from protos.inference_pb2 import GenerateReply

ABORT_SECONDS = 30.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Values = Iterator[JsonValue | NotJson]


@dataclass(frozen=True, slots=True)
class Manner:
    """How requests are to be sent and answers to be written."""

    concurrency: int
    keep_order: bool
    stream: bool  # events as they happen, in place of answers
    with_tokens: bool
    timeout_seconds: float
    max_retries: int


def open_input(given: str | None) -> Values:
    """The values of an argument: JSON itself, a file, or standard input for '-' and for none.

    Raises Refused when there is nothing to read.
    """
    if given is None or given == "-":
        if given is None and sys.stdin is not None and sys.stdin.isatty():
            raise Refused("input is missing; give JSON, a file, or a pipe on standard input")
        return _closing(_open(0, "standard input"))
    if given.lstrip().startswith(("{", "[")):
        return values_of(os.fsencode(given))
    return _closing(_open(given, f"input is {given!r}, which is not JSON, and as a file"))


def _closing(file: BinaryIO) -> Values:
    with file:
        yield from read_values(file)


def _open(file: str | int, what: str) -> BinaryIO:
    try:
        # Not sys.stdin: a thread that still reads it would keep the interpreter from ending.
        return open(file, "rb", closefd=file != 0)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise Refused(f"{what} cannot be read: {reason}") from None


def call(address: str, values: Values, manner: Manner) -> int:
    """Answer every request, and return the exit code: 128 and its number after a signal."""
    return asyncio.run(_Calling(address, values, manner).run())


def abort_request(address: str, request_id: str) -> int:
    """Print whether such a request was running and is ended; DONE if so."""

    async def ask() -> bool:
        async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
            return await abort(channel, request_id, ABORT_SECONDS)

    is_aborted = asyncio.run(ask())
    _write({"request_id": request_id, "aborted": is_aborted})
    return DONE if is_aborted else FAILED


class _Calling:
    """One run of the command."""

    def __init__(self, address: str, values: Values, manner: Manner) -> None:
        self._address = address
        self._values = values
        self._manner = manner
        self._outcomes: Counter[Outcome] = Counter()
        self._signal: int | None = None

    async def run(self) -> int:
        manner, begun = self._manner, time.monotonic()
        async with (
            grpc.aio.insecure_channel(self._address, options=OPTIONS) as channel,
            contextlib.aclosing(from_thread(read_calls(self._values))) as calls,
        ):
            self._caller = Caller(
                channel,
                timeout_seconds=manner.timeout_seconds,
                max_retries=manner.max_retries,
                show=self._show,
            )
            at_once = AtOnce(
                self._answer, self._hand_on, concurrency=manner.concurrency, keep_order=manner.keep_order
            )

            def stop(number: int) -> None:
                self._signal = number
                at_once.stop()

            with _first_signal(stop):
                await at_once.run(calls)
        if sys.stderr.isatty():
            counts = ", ".join(f"{self._outcomes[outcome]} {outcome.value}" for outcome in Outcome)
            print(f"{counts} in {time.monotonic() - begun:.1f} s", file=sys.stderr)
        return self._exit_code()

    async def _answer(self, entry: Call | Refusal) -> Answer | Refusal:
        return entry if isinstance(entry, Refusal) else await self._caller.answer(entry)

    def _show(self, call: Call, reply: GenerateReply) -> None:
        if self._manner.stream:
            _write(event_as_json(call, reply, with_tokens=self._manner.with_tokens))

    def _hand_on(self, result: Answer | Refusal) -> None:
        self._outcomes[outcome_of(result)] += 1
        if not self._manner.stream:
            _write(result_as_json(result, with_tokens=self._manner.with_tokens))
        elif isinstance(result, Refusal) or result.error is not None:
            _write({"event": "error"} | error_as_json(result))

    def _exit_code(self) -> int:
        if self._signal is not None:
            return 128 + self._signal
        if self._outcomes[Outcome.FAILED]:
            return FAILED
        return REFUSED if self._outcomes[Outcome.REFUSED] else DONE


@contextlib.contextmanager
def _first_signal(stop: Callable[[int], None]) -> Iterator[None]:
    """Within the block, let the first signal that ends programs call `stop` in the loop; the next one kills.

    The handlers are Python's own, not the loop's, as the loop may be held up in writing to a pipe. A signal
    that was ignored before (as under nohup) stays ignored.
    """
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    taken = [number for number in _SIGNALS if before[number] is not signal.SIG_IGN]

    def receive(number: int, _frame: FrameType | None) -> None:
        for other in taken:
            signal.signal(other, signal.SIG_DFL)
        loop.call_soon_threadsafe(stop, number)

    try:
        for number in taken:
            signal.signal(number, receive)
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])


def _write(line: dict[str, Any]) -> None:
    text = memoryview(json.dumps(line).encode() + b"\n")
    while text:  # under PYTHONUNBUFFERED a signal cuts a write short, and nobody else would write the rest
        text = text[sys.stdout.buffer.write(text) :]
    sys.stdout.flush()
