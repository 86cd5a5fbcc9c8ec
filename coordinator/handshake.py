"""Asking a worker who it is, before every stream. Knows what a worker tells; holds no connection."""

from typing import Any

import grpc

from protos.status import TaskError
from protos.wire import PROTOCOL_VERSION
from protos.worker_pb2 import HandshakeRequest, WorkerInfo

HANDSHAKE_SECONDS = 10.0


async def shake_hands(call: Any, worker: str, coordinator: str) -> WorkerInfo:
    """What the worker says of itself. Raises TaskError when it does not, or speaks another version.

    `call` is the stub's method; `worker` names the worker in errors.
    """
    request = HandshakeRequest(protocol_version=PROTOCOL_VERSION, coordinator=coordinator)
    try:
        info: WorkerInfo | None = await call(request, timeout=HANDSHAKE_SECONDS)
    except grpc.aio.AioRpcError as error:
        raise TaskError(error.code(), f"{worker} refused the handshake: {error.details()}") from None
    if info is None:  # so grpc.aio says that it does not parse
        raise TaskError.data_loss(f"what {worker} says of itself is damaged")
    if info.protocol_version != PROTOCOL_VERSION:
        raise TaskError.mismatch(
            f"{worker} speaks protocol version {info.protocol_version}, this coordinator {PROTOCOL_VERSION}"
        )
    return info


def model_of(info: WorkerInfo) -> WorkerInfo:
    """What a worker must have in common with its earlier lives: all but the life and its capacity."""
    model = WorkerInfo()
    model.CopyFrom(info)
    for name in ("epoch", "num_slots", "task_credits", "byte_credits", "computes_on"):
        model.ClearField(name)
    return model
