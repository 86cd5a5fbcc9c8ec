"""The Control service: how the deployment is doing, told to whoever shows the control token.

Knows workers and counts; changes nothing.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from grpc_status import rpc_status
from pydantic import SecretStr

from coordinator.service import InferenceService
from coordinator.timeline import Timeline
from coordinator.worker_client import WorkerClient
from protos.authorization import require
from protos.control_pb2 import (
    Circuit,
    DeploymentStatus,
    GetDeploymentStatusRequest,
    Spans,
    WatchRequest,
    WorkerHealth,
)
from protos.control_pb2_grpc import ControlServicer
from protos.status import TaskError

STATUS_SECONDS = 1.0  # for a worker to say how it is


class Worker(Protocol):
    """What sessions know of a worker."""

    num_sessions: int  # that are placed on it

    @property
    def problem(self) -> str:
        """What is wrong with it, in words; empty when nothing is."""

    @property
    def notice(self) -> str:
        """What is odd about it though it serves, in words."""

    @property
    def circuit(self) -> "Circuit":
        """Whether sessions ask it."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers of one role, in one order."""

    clients: Sequence[WorkerClient]
    workers: Sequence[Worker]


class ControlService(ControlServicer):
    """GetStatus over one coordinator's workers and requests, and Watch."""

    def __init__(
        self, token: SecretStr | None, service: InferenceService, fleets: Sequence[Fleet], timeline: Timeline
    ) -> None:
        """Without a token every call is refused."""
        self._token = token
        self._service = service
        self._fleets = fleets
        self._timeline = timeline
        self._begun = time.monotonic()

    async def GetStatus(
        self,
        request: GetDeploymentStatusRequest,
        context: grpc.aio.ServicerContext[GetDeploymentStatusRequest, DeploymentStatus],
    ) -> DeploymentStatus:
        """See control.proto."""
        await self._require_token(context)
        asked = [
            _ask(client, worker)
            for fleet in self._fleets
            for client, worker in zip(fleet.clients, fleet.workers, strict=True)
        ]
        return DeploymentStatus(
            workers=await asyncio.gather(*asked),
            num_running_sessions=self._service.num_running_sessions,
            num_waiting_sessions=self._service.num_waiting_sessions,
            totals=self._service.totals(),
            uptime_seconds=time.monotonic() - self._begun,
            process_id=os.getpid(),
        )

    async def Watch(
        self, request: WatchRequest, context: grpc.aio.ServicerContext[WatchRequest, Spans]
    ) -> None:
        """See control.proto. A coroutine that writes, for the reason that `Generate` is one."""
        await self._require_token(context)
        async with contextlib.aclosing(self._timeline.watch()) as batches:
            async for spans in batches:
                await context.write(spans)

    async def _require_token(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            require(self._token, context.invocation_metadata())
        except TaskError as error:
            await context.abort_with_status(rpc_status.to_status(error.to_status()))


async def _ask(client: WorkerClient, worker: Worker) -> WorkerHealth:
    """What the worker says of itself, or what is wrong with it, and what its sessions know."""
    health = WorkerHealth(
        role=client.role,
        model=client.model_name,
        address=client.address,
        num_sessions=worker.num_sessions,
        circuit=worker.circuit,
        notice=worker.notice,
    )
    problem = worker.problem
    try:
        status = await client.status(STATUS_SECONDS)
    except TaskError as error:
        health.problem = error.message
        return health
    health.process_id = status.process_id
    health.num_slots, health.num_slots_used = status.num_slots, status.num_slots_used
    health.num_broken_rows = status.num_broken_rows
    if status.HasField("cost"):
        health.cost.CopyFrom(status.cost)
    if status.HasField("busy"):
        health.busy.CopyFrom(status.busy)
    if status.HasField("prefixes"):
        health.prefixes.CopyFrom(status.prefixes)
    health.problem = problem if client.is_connected else "answers, but its task stream is down"
    health.is_healthy = not health.problem
    return health
