"""A service of the public API that does what a test wants, and `outrider call` run against it."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from grpc_status import rpc_status
from typer.testing import CliRunner, Result

from cluster.command_line import app
from protos import inference_pb2_grpc
from protos.inference_pb2 import (
    FINISH_REASON_LENGTH,
    ORIGIN_ACCEPTED,
    AbortReply,
    AbortRequest,
    Finished,
    GenerateReply,
    GenerateRequest,
    Started,
    Token,
    Tokens,
    Usage,
)
from protos.status import TaskError

Replies = Iterator[GenerateReply]


def text_of(text: str, *, choice: int = 0, reason: Any = FINISH_REASON_LENGTH) -> Replies:
    """A choice that says a letter a token."""
    for letter in text:
        token = Token(id=ord(letter), text=letter, origin=ORIGIN_ACCEPTED)
        yield GenerateReply(tokens=Tokens(choice=choice, tokens=[token]))
    yield GenerateReply(finished=Finished(choice=choice, reason=reason))


class Service(inference_pb2_grpc.InferenceServicer):
    """Repeats prompts, or does as `behave` says."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.behave: Callable[[GenerateRequest], Replies] = lambda request: text_of(request.text)
        self.lock = threading.Lock()
        self.num_running = self.most_running = 0

    def Generate(self, request: GenerateRequest, context: grpc.ServicerContext) -> Replies:
        with self.lock:
            self.requests.append(request)
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        try:
            yield GenerateReply(started=Started(request_id="r", seed=request.seed, num_prompt_tokens=3))
            yield from self.behave(request)
            yield GenerateReply(usage=Usage(num_prompt_tokens=3))
        except TaskError as error:
            context.abort_with_status(rpc_status.to_status(error.to_status()))
        finally:
            with self.lock:
                self.num_running -= 1

    def Abort(self, request: AbortRequest, context: grpc.ServicerContext) -> AbortReply:
        return AbortReply(aborted=request.request_id == "running")


@contextlib.contextmanager
def serving() -> Iterator[Any]:
    """A Service with its `address`."""
    servicer: Any = Service()
    server = grpc.server(ThreadPoolExecutor(max_workers=16))
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield servicer
    finally:
        server.stop(None).wait()


def call(service: Any, *arguments: str | Path) -> Result:
    """The command with these arguments, in this process."""
    return CliRunner().invoke(app, ["call", "--address", service.address, *map(str, arguments)])


def lines_of(result: Result) -> list[dict[str, Any]]:
    """What it wrote."""
    return [json.loads(line) for line in result.stdout.splitlines()]


def requests_of(*prompts: str, **fields: Any) -> str:
    """An array of requests, alike but for their prompts."""
    return json.dumps([{"prompt": prompt, **fields} for prompt in prompts])
