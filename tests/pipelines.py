"""A whole pipeline in one event loop for tests: real gRPC servers, real coordinator, any models."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
from pydantic import SecretStr

from coordinator.server import CoordinatorConfig, CoordinatorServer
from protos import inference_pb2_grpc
from protos.inference_pb2 import Finished, GenerateRequest, Started, Token, TokenIds, Usage
from workers.language_model import LanguageModel
from workers.server import ModelIdentity, WorkerConfig, WorkerServer


@dataclass
class Pipeline:
    """Running servers and a client of the public service."""

    stub: Any
    target: WorkerServer
    draft: WorkerServer | None
    coordinator: CoordinatorServer
    address: str
    target_address: str


@dataclass
class Generated:
    """All that one Generate call said."""

    started: Started
    choices: list[list[Token]]
    finished: dict[int, Finished]
    usage: Usage

    def ids(self, choice: int = 0) -> tuple[int, ...]:
        """A choice's token ids."""
        return tuple(token.id for token in self.choices[choice])

    def text(self, choice: int = 0) -> str:
        """A choice's text."""
        return "".join(token.text for token in self.choices[choice]) + self.finished[choice].text


@contextlib.asynccontextmanager
async def pipeline(
    target: LanguageModel,
    draft: LanguageModel | None,
    *,
    end_token_ids: tuple[int, ...] = (),
    worker: WorkerConfig | None = None,
    control_token: str | None = None,
    **coordinator: Any,
) -> AsyncIterator[Pipeline]:
    """Serve the models; keyword arguments go into the CoordinatorConfig.

    Where `worker` says nothing else, sessions share every prefix, however short: the proofs hold with that.
    """
    secret = None if control_token is None else SecretStr(control_token)
    # A moment in which the machine is busy with other tests is no fault of the drafter.
    settings = {"control_token": secret, "num_draft_tokens": 3, "draft_timeout_seconds": 10.0, **coordinator}
    worker = worker or WorkerConfig(control_token=secret, min_shared_tokens=1)
    async with contextlib.AsyncExitStack() as stack:
        target_server = WorkerServer("target", target, ModelIdentity("t", "", end_token_ids, "table"), worker)
        addresses = {"targets": [await target_server.start()]}
        stack.push_async_callback(target_server.stop, 0.1)
        draft_server = None
        if draft is not None:
            draft_server = WorkerServer("draft", draft, ModelIdentity("d", "", (), "table"), worker)
            addresses["drafts"] = [await draft_server.start()]
            stack.push_async_callback(draft_server.stop, 0.1)
        server = CoordinatorServer(CoordinatorConfig(**{**addresses, **settings}))
        address = await server.start()
        stack.push_async_callback(server.stop, 0.1)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        yield Pipeline(
            inference_pb2_grpc.InferenceStub(channel),
            target_server,
            draft_server,
            server,
            address,
            addresses["targets"][0],
        )


async def generate(
    stub: Any, prompt: list[int] | None = None, *, timeout_seconds: float = 120.0, **fields: Any
) -> Generated:
    """One call, to its end. `prompt` are token ids; other fields go into the GenerateRequest."""
    if prompt is not None:
        fields["token_ids"] = TokenIds(ids=prompt)
    started, usage = Started(), Usage()
    choices: list[list[Token]] = [[] for _ in range(fields.get("n", 1))]
    finished: dict[int, Finished] = {}
    async for reply in stub.Generate(GenerateRequest(**fields), timeout=timeout_seconds):
        event = reply.WhichOneof("event")
        if event == "started":
            started = reply.started
        elif event == "tokens":
            choices[reply.tokens.choice].extend(reply.tokens.tokens)
        elif event == "finished":
            finished[reply.finished.choice] = reply.finished
        else:
            usage = reply.usage
    return Generated(started, choices, finished, usage)
