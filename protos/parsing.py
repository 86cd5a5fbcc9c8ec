"""Requests that do not parse are refused as such: by itself gRPC calls them UNKNOWN, like a fault of ours.

Knows the four kinds of calls and the bytes of their requests; not what they ask.
"""

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from protos.status import TaskError

Handler = Any  # a grpc.RpcMethodHandler, which the stubs type without the fields that are replaced here


class _NotParsed(Exception):
    """A request of a stream is not the message that the method takes."""


class ParsedRequests(grpc.aio.ServerInterceptor):
    """INVALID_ARGUMENT for a request that does not parse, and for a stream from the first such message on."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The method's handler, which sees parsed requests only."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        kind = "stream" if handler.request_streaming else "unary"
        kind += "_stream" if handler.response_streaming else "_unary"
        check = _each_checked if handler.request_streaming else _checked
        behaviour = _refusing(getattr(handler, kind), check, handler_call_details.method)
        return handler._replace(
            request_deserializer=_lenient(handler.request_deserializer), **{kind: behaviour}
        )


def _lenient(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """The error in place of the message, since what a deserializer raises never reaches the method."""

    def parsed(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return _NotParsed()

    return parsed


def _refusing(behaviour: Callable[..., Any], check: Callable[[Any], Any], method: str) -> Callable[..., Any]:
    """The same for checked requests; gRPC tells coroutines from generators by their definition."""
    status = rpc_status.to_status(
        TaskError.invalid("request", f"of {method} does not parse as the message that it takes").to_status()
    )

    async def call(request: Any, context: Any) -> Any:
        try:
            return await behaviour(check(request), context)
        except _NotParsed:
            await context.abort_with_status(status)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async with contextlib.aclosing(behaviour(check(request), context)) as replies:
                async for reply in replies:
                    yield reply
        except _NotParsed:
            await context.abort_with_status(status)

    return stream if inspect.isasyncgenfunction(behaviour) else call


def _checked(request: Any) -> Any:
    if isinstance(request, _NotParsed):
        raise request
    return request


async def _each_checked(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)
