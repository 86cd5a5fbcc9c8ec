"""Errors that travel: one exception that is a google.rpc.Status with details, inside a reply or on a call.

Knows status codes and their details; not who raises them, nor what is done about them.
"""

from typing import Self

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

DOMAIN = "outrider"
_MAX_QUOTED = 128  # characters: errors travel in trailers, of which gRPC takes 8 KiB


class TaskError(Exception):
    """A failure with a gRPC code and rich details, of one task or one call."""

    def __init__(self, code: grpc.StatusCode, message: str, *details: Message) -> None:
        """`details` are google.rpc messages such as ErrorInfo, BadRequest, RetryInfo."""
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details

    @classmethod
    def invalid(cls, field: str, problem: str) -> Self:
        """INVALID_ARGUMENT with a field violation."""
        violation = BadRequest.FieldViolation(field=field, description=problem)
        return cls(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"{field} {problem}",
            BadRequest(field_violations=[violation]),
        )

    @classmethod
    def unknown(cls, field: str, name: str) -> Self:
        """NOT_FOUND: what the field names is not there, or no longer."""
        return cls(grpc.StatusCode.NOT_FOUND, f"{field} is {name[:_MAX_QUOTED]!r}, which is not known here")

    @classmethod
    def out_of_step(cls, length: int, message: str) -> Self:
        """FAILED_PRECONDITION with the worker's length: send the tokens from there."""
        info = ErrorInfo(reason="OUT_OF_STEP", domain=DOMAIN, metadata={"length": str(length)})
        return cls(grpc.StatusCode.FAILED_PRECONDITION, message, info)

    @classmethod
    def mismatch(cls, message: str) -> Self:
        """FAILED_PRECONDITION for two parties that do not fit."""
        return cls(grpc.StatusCode.FAILED_PRECONDITION, message, ErrorInfo(reason="MISMATCH", domain=DOMAIN))

    @classmethod
    def stale(cls, message: str) -> Self:
        """ABORTED: an old epoch or round; nothing was touched."""
        return cls(grpc.StatusCode.ABORTED, message, ErrorInfo(reason="STALE", domain=DOMAIN))

    @classmethod
    def other_life(cls, message: str) -> Self:
        """ABORTED: the worker lives in another epoch than the task names; nothing was touched."""
        info = ErrorInfo(reason="OTHER_LIFE", domain=DOMAIN)
        return cls(grpc.StatusCode.ABORTED, message, info)

    @classmethod
    def exhausted(cls, message: str, retry_seconds: float) -> Self:
        """RESOURCE_EXHAUSTED, with when to try again."""
        return cls(grpc.StatusCode.RESOURCE_EXHAUSTED, message, _retry(retry_seconds))

    @classmethod
    def unavailable(cls, message: str, retry_seconds: float = 1.0) -> Self:
        """UNAVAILABLE, with when to try again."""
        return cls(grpc.StatusCode.UNAVAILABLE, message, _retry(retry_seconds))

    @classmethod
    def deadline(cls, message: str) -> Self:
        """DEADLINE_EXCEEDED."""
        return cls(grpc.StatusCode.DEADLINE_EXCEEDED, message)

    @classmethod
    def data_loss(cls, message: str) -> Self:
        """DATA_LOSS: what arrived is not what was sent."""
        return cls(grpc.StatusCode.DATA_LOSS, message)

    @classmethod
    def internal(cls, message: str) -> Self:
        """INTERNAL: a fault of ours. The message has an id, never a stack trace."""
        return cls(grpc.StatusCode.INTERNAL, message)

    def to_status(self) -> Status:
        """The error as a message."""
        status = Status(code=self.code.value[0], message=self.message)
        for detail in self.details:
            status.details.add().Pack(detail)
        return status

    @classmethod
    def from_status(cls, status: Status) -> Self:
        """The inverse of `to_status`; unknown details are dropped."""
        details: list[Message] = []
        for packed in status.details:
            for kind in (ErrorInfo, BadRequest, RetryInfo):
                detail = kind()
                if packed.Unpack(detail):
                    details.append(detail)
        return cls(_CODES.get(status.code, grpc.StatusCode.UNKNOWN), status.message, *details)

    @property
    def worker_length(self) -> int | None:
        """What an out-of-step worker says that it holds, 0 if it does not; None for every other error."""
        for detail in self.details:
            if isinstance(detail, ErrorInfo) and detail.reason == "OUT_OF_STEP":
                length = detail.metadata.get("length", "")
                return int(length) if length.isdecimal() and len(length) <= 10 else 0
        return None

    @property
    def is_other_life(self) -> bool:
        """Whether the worker lives in another epoch than the task names."""
        return any(isinstance(detail, ErrorInfo) and detail.reason == "OTHER_LIFE" for detail in self.details)


_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def _retry(seconds: float) -> RetryInfo:
    delay = Duration()
    delay.FromNanoseconds(int(seconds * 1e9))
    return RetryInfo(retry_delay=delay)
