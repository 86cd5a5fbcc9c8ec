"""Spans of a deployment's tasks, recorded while something is measured.

Knows the control service's Watch, one thread and one list; not what the spans show.
"""

import contextlib
import time
from collections.abc import Iterator
from threading import Lock, Thread
from typing import Any

import grpc

from protos import control_pb2_grpc
from protos.authorization import metadata
from protos.control_pb2 import Span, Spans, WatchRequest

BEGIN_SECONDS = 10.0
SETTLE_SECONDS = 0.25  # within which the coordinator tells what it knows; it waits 0.05 between messages


class RecordingFailed(RuntimeError):
    """The sentence says why nothing is recorded."""


class Recorder:
    """What a coordinator tells, from when `recording` yields until its block ends."""

    def __init__(self, messages: Iterator[Spans]) -> None:
        """`messages` come from a call that is open; `recording` makes it."""
        self._messages = messages
        self._lock = Lock()
        self._spans: list[Span] = []
        self._num_lost = 0
        self._problem = ""

    def take(self) -> list[Span]:
        """The spans of tasks answered since the last call, or since the begin; waits until they are there.

        Raises RecordingFailed when the call has ended, or when some were lost.
        """
        time.sleep(SETTLE_SECONDS)
        with self._lock:
            spans, self._spans = self._spans, []
            num_lost, self._num_lost = self._num_lost, 0
        if self._problem:
            raise RecordingFailed(f"The coordinator tells no more of its tasks: {self._problem}.")
        if num_lost:
            raise RecordingFailed(f"{num_lost} tasks were answered faster than they could be recorded.")
        return spans

    def run(self) -> None:
        """Read until the call ends; for a thread of its own."""
        try:
            for message in self._messages:
                with self._lock:
                    self._spans += message.spans
                    self._num_lost += message.num_lost
            self._problem = "the call is over"
        except grpc.RpcError as error:
            self._problem = _words(error)


@contextlib.contextmanager
def recording(address: str, control_token: str) -> Iterator[Recorder]:
    """Record what the coordinator at `address` asks while the block runs. Raises RecordingFailed."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub: Any = control_pb2_grpc.ControlStub(channel)
        try:
            grpc.channel_ready_future(channel).result(BEGIN_SECONDS)
            call = stub.Watch(WatchRequest(), metadata=metadata(control_token))
            next(call)  # it watches from now on
        except grpc.FutureTimeoutError:
            raise RecordingFailed(f"{address} does not answer within {BEGIN_SECONDS:g} s.") from None
        except grpc.RpcError as error:
            raise RecordingFailed(f"{address} does not tell of its tasks: {_words(error)}.") from None
        recorder = Recorder(call)
        thread = Thread(target=recorder.run, name="recording", daemon=True)
        thread.start()
        try:
            yield recorder
        finally:
            call.cancel()
            thread.join()


def recorded(address: str, control_token: str, seconds: float) -> list[Span]:
    """What is answered within so many seconds from now. Raises RecordingFailed."""
    with recording(address, control_token) as recorder:
        time.sleep(seconds)
        return recorder.take()


def _words(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}"
