"""The coordinator as a process: connects to its workers, checks that they fit, serves the public API.

Knows configuration and life cycle; requests are the service's business.
"""

import contextlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from pydantic import Field, SecretStr

from coordinator.admission import Admission
from coordinator.choices import Choices
from coordinator.control import ControlService, Fleet
from coordinator.draft_length import LONGEST
from coordinator.draft_policy import DraftPolicy
from coordinator.drafting import Drafter, DraftSettings
from coordinator.kept_requests import KeepSettings
from coordinator.requests import Limits
from coordinator.service import InferenceService
from coordinator.spreading import Spread
from coordinator.text import Text
from coordinator.timeline import Timeline
from coordinator.verifying import Verifier, VerifySettings
from coordinator.worker_client import WorkerClient
from protos import control_pb2_grpc, inference_pb2, inference_pb2_grpc
from protos.binding import Binding
from protos.inference_pb2 import ModelInfo
from protos.limits import AUTO, DEFAULT_SUPPORT, MAX_DRAFT_TOKENS, MAX_SUPPORT, NumDraftTokens, NumGroups
from protos.parsing import ParsedRequests
from protos.status import TaskError
from protos.wire import SERVER_OPTIONS
from protos.worker_pb2 import (
    ENCODING_FULL,
    ENCODING_ONE_HOT,
    ENCODING_SPARSE,
    WorkerInfo,
)

ENCODINGS = {"sparse": ENCODING_SPARSE, "full": ENCODING_FULL, "one_hot": ENCODING_ONE_HOT}


class CoordinatorConfig(Binding):
    """What a coordinator serves, and how."""

    targets: tuple[str, ...] = Field(min_length=1)  # host:port each, of one model
    drafts: tuple[str, ...] = ()  # host:port each; none is plain decoding
    # Who shows it may ask how the deployment is; None: nobody may.
    control_token: SecretStr | None = Field(default=None, min_length=1)
    tokenizer_folder: Path | None = None  # None serves token ids only
    num_draft_tokens: NumDraftTokens = "auto"  # K unless a request says otherwise
    max_num_draft_tokens: int = Field(default=MAX_DRAFT_TOKENS, ge=0, le=MAX_DRAFT_TOKENS)
    num_groups: NumGroups = "auto"  # of sessions that a drafter takes turns with
    rule: Literal["token", "block"] = "token"
    encoding: Literal["sparse", "full", "one_hot"] = "sparse"
    support: int = Field(default=DEFAULT_SUPPORT, ge=1, le=MAX_SUPPORT)  # ids in a sparse row of q
    default_max_tokens: int = Field(default=256, ge=1)
    max_choices: int = Field(default=64, ge=1)
    max_waiting_sessions: int = Field(default=256, ge=0)
    draft_timeout_seconds: float = Field(default=0.25, gt=0)  # of a proposal, or longer where that is usual
    draft_prefill_timeout_seconds: float = Field(default=120.0, gt=0)
    verify_timeout_seconds: float = Field(default=120.0, gt=0)
    verify_prefill_timeout_seconds: float = Field(default=600.0, gt=0)
    target_patience_seconds: float = Field(default=30.0, ge=0)  # how long a session waits for a lost target
    max_migrations: int = Field(default=3, ge=0)  # of a session, to other targets when its own is lost
    resume_seconds: float = Field(default=60.0, ge=0)  # how long a request without a stream can be resumed
    max_kept_requests: int = Field(default=1024, ge=0)  # that wait for it; the oldest are forgotten
    max_kept_tokens: int = Field(default=1 << 18, ge=0)  # of all of them, prompts included


class CoordinatorServer:
    """Serves one deployment, from `start` to `stop`, within one event loop."""

    def __init__(self, config: CoordinatorConfig, text: Text | None = None) -> None:
        """A new life: sessions of an earlier one are strangers to the workers.

        `text` is what `config.tokenizer_folder` holds, where that has been loaded already.
        """
        self._config = config
        self._text = text
        self._id = f"coordinator-{secrets.token_hex(8)}"

    async def start(self) -> str:
        """Connect, check, bind and serve; returns the address.

        Raises TaskError when a worker cannot be reached or draft and target do not fit, TextError for a
        tokenizer that cannot be read. What was connected by then is closed again.
        """
        config = self._config
        targets = [WorkerClient("target", address, self._id) for address in config.targets]
        drafts = [WorkerClient("draft", address, self._id) for address in config.drafts]
        self._clients = [*targets, *drafts]
        async with contextlib.AsyncExitStack() as on_failure:
            for client in self._clients:
                await client.start()
                on_failure.push_async_callback(client.stop)
            check_alike([client.info for client in targets])
            for client in drafts:
                check_fit(targets[0].info, client.info)
            self._build_services(targets, drafts)
            address = await self._serve()
            on_failure.pop_all()
        return address

    async def stop(self, grace_seconds: float) -> None:
        """Take no further requests, let the running ones finish within the grace, and close."""
        for name in self._service_names:
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        self._timeline.end()  # a watcher never ends by itself
        await self._server.stop(grace_seconds)
        await self._service.end()
        for client in self._clients:
            await client.stop()

    def _build_services(self, targets: list[WorkerClient], drafts: list[WorkerClient]) -> None:
        config, target = self._config, targets[0].info
        draft_settings = DraftSettings(
            ENCODINGS[config.encoding],
            config.support,
            target.vocab_size,
            config.draft_timeout_seconds,
            config.draft_prefill_timeout_seconds,
        )
        verify_settings = VerifySettings(
            config.verify_timeout_seconds,
            config.verify_prefill_timeout_seconds,
            config.target_patience_seconds,
            config.max_migrations,
        )
        timeline = self._timeline = Timeline()
        verifiers = Spread([Verifier(client, verify_settings, timeline) for client in targets])
        drafters = None
        if drafts:
            drafters = Spread([Drafter(client, draft_settings, timeline) for client in drafts])
        if self._text is None and config.tokenizer_folder is not None:
            self._text = Text.load(config.tokenizer_folder)
        max_running = sum(verifier.num_slots for verifier in verifiers.workers)
        max_num_draft_tokens = config.max_num_draft_tokens if drafts else 0
        is_auto = config.num_draft_tokens == AUTO
        wanted = LONGEST if config.num_draft_tokens == AUTO else config.num_draft_tokens
        num_draft_tokens = min(wanted, max_num_draft_tokens)
        max_length = min(client.info.max_length for client in targets)
        limits = Limits(
            vocab_size=target.vocab_size,
            max_length=max_length,
            max_choices=config.max_choices,
            max_num_draft_tokens=max_num_draft_tokens,
            default_max_tokens=min(config.default_max_tokens, max_length),
            num_draft_tokens=num_draft_tokens,
            auto_draft_tokens=is_auto,
            rule=config.rule,
        )
        admission = Admission(max_running, config.max_waiting_sessions)
        choices = Choices(
            coordinator=self._id,
            policy=DraftPolicy(config.num_groups),
            drafters=drafters,
            verifiers=verifiers,
            verify_settings=verify_settings,
            text=self._text,
            limits=limits,
            end_token_ids=target.end_token_ids,
            admission=admission,
        )
        self._service = InferenceService(
            choices=choices,
            text=self._text,
            limits=limits,
            admission=admission,
            keep=KeepSettings(config.resume_seconds, config.max_kept_requests, config.max_kept_tokens),
            info=ModelInfo(
                target_model=target.model,
                draft_model=drafts[0].info.model if drafts else "",
                vocab_size=target.vocab_size,
                max_length=max_length,
                num_draft_tokens=num_draft_tokens,
                auto_draft_tokens=is_auto,
                max_num_draft_tokens=max_num_draft_tokens,
                max_choices=config.max_choices,
                end_token_ids=target.end_token_ids,
                max_running_sessions=max_running,
            ),
        )
        fleets = [Fleet(targets, verifiers.workers)]
        if drafters is not None:
            fleets.append(Fleet(drafts, drafters.workers))
        self._control = ControlService(config.control_token, self._service, fleets, timeline)

    async def _serve(self) -> str:
        self._server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[ParsedRequests()])
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        inference_pb2_grpc.add_InferenceServicer_to_server(self._service, self._server)
        control_pb2_grpc.add_ControlServicer_to_server(self._control, self._server)
        name = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
        self._service_names = ["", name]
        if self._config.is_loopback:
            reflection.enable_server_reflection(
                (name, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
            )
        port = self._server.add_insecure_port(self._config.address(self._config.port))
        await self._server.start()
        for served in self._service_names:
            await self._health.set(served, health_pb2.HealthCheckResponse.SERVING)
        return self._config.address(port)


def check_alike(targets: Sequence[WorkerInfo]) -> None:
    """Raise TaskError(FAILED_PRECONDITION) when two targets are not the same model: one law is served."""
    first = targets[0]
    for other in targets[1:]:
        for name in ("model", "vocab_size", "tokenizer_fingerprint", "end_token_ids", "dtype"):
            if getattr(first, name) != getattr(other, name):
                raise TaskError.mismatch(
                    f"the targets differ: {name} is {getattr(first, name)!r} and {getattr(other, name)!r}"
                )


def check_fit(target: WorkerInfo, draft: WorkerInfo) -> None:
    """Raise TaskError(FAILED_PRECONDITION) saying what differs when the drafter's ids mean other text."""
    both = (draft.tokenizer_fingerprint, target.tokenizer_fingerprint)
    if not all(both) and draft.vocab_size < target.vocab_size:
        raise TaskError.mismatch(
            f"the draft {draft.model} came without a tokenizer and has {draft.vocab_size} token ids, "
            f"the target {target.model} has {target.vocab_size}"
        )
    if all(both) and both[0] != both[1]:
        raise TaskError.mismatch(
            f"the tokenizers of the draft {draft.model} ({both[0][:12]}) and of the target {target.model} "
            f"({both[1][:12]}) differ: the same id is not the same text"
        )
