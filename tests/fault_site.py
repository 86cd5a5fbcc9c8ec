"""A deployment that faults can be put into: worker processes behind proxies, and a coordinator here.

Knows how each kind of fault is done; not when, nor what it must not do to anybody. All that it promises lasts
as long as the coordinator, which no fault here ends.
"""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast
from unittest import mock

import grpc

from cluster.module_process import last_words, start_module
from coordinator import drafting, handshake
from coordinator.server import CoordinatorConfig, CoordinatorServer
from protos import inference_pb2_grpc, worker_pb2_grpc
from protos.inference_pb2 import GetModelInfoRequest
from protos.worker_pb2 import GetStatusRequest
from tests.fault_messages import Direction, MessageFaults, What, faulty_clients
from tests.fault_proxy import FaultProxy
from tests.fault_script import CONNECTIONS, PROCESSES, Fault
from tests.fault_worker import LEASE_SECONDS

ROOT = str(Path(__file__).parents[1])
KEPT_SECONDS = 2.0  # for clients that come back
MOST_LEFT = 32  # objects beyond those before: what is known of pairs of workers; sessions have ten each
# Each wait is short beside a script, and the patience longer than all that a script can do to one worker.
WAITS: dict[str, Any] = {
    "draft_timeout_seconds": 0.25,
    "draft_prefill_timeout_seconds": 0.5,
    "verify_timeout_seconds": 0.5,
    "verify_prefill_timeout_seconds": 0.5,
    "target_patience_seconds": 30.0,
    "resume_seconds": KEPT_SECONDS,
}
SETTLING_SECONDS = LEASE_SECONDS + 12.0  # for slots whose release was lost, and workers that come back


class WorkerProcess:
    """One address behind which worker processes live one after another."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.port = 0
        self._life: subprocess.Popen[bytes] | None = None
        self._turns = asyncio.Lock()  # one fault at a time

    async def start(self) -> None:
        """Begin a life, at the port of the last one. Raises RuntimeError with its last words."""
        with tempfile.TemporaryFile() as log:
            arguments = (self.role, str(self.port))
            life = start_module("tests.fault_worker", *arguments, log=log, PYTHONPATH=ROOT)
            self._life = life
            assert life.stdout is not None
            address = (await asyncio.to_thread(life.stdout.readline)).decode().strip()
            if not address:
                raise RuntimeError(f"the {self.role} worker did not start: {last_words(log)}")
        self.port = int(address.rpartition(":")[2])

    async def end(self) -> None:
        """As kill -9 does."""
        life, self._life = self._life, None
        if life is not None:
            life.kill()
            await asyncio.to_thread(life.communicate)  # closes the pipes and collects it

    async def suffer(self, kind: str, seconds: float) -> None:
        """A fault of PROCESSES, from its begin to its end."""
        async with self._turns:
            assert self._life is not None
            if kind == "kill":
                await self.end()
                await asyncio.sleep(seconds)
                await self.start()
            elif kind == "stop":
                os.kill(self._life.pid, signal.SIGSTOP)
                await asyncio.sleep(seconds)
                os.kill(self._life.pid, signal.SIGCONT)
            else:
                os.kill(self._life.pid, signal.SIGUSR1)

    async def num_left(self) -> int:
        """Slots in use and tasks at hand, as it says itself."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            stub: Any = {"target": worker_pb2_grpc.TargetStub, "draft": worker_pb2_grpc.DraftStub}[self.role]
            status = await stub(channel).GetStatus(GetStatusRequest(), timeout=5, wait_for_ready=True)
        return int(status.num_slots_used + status.num_tasks)


class Site:
    """The deployment, and its faults."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names` are those of the workers: a role, a hyphen, a number."""
        self.workers = {name: WorkerProcess(name.partition("-")[0]) for name in names}
        self._proxies = {name: FaultProxy() for name in names}
        self._addresses: dict[str, str] = {}
        self._messages: dict[str, MessageFaults] = {}  # by address
        self._done: Counter[str] = Counter()  # to processes

    @property
    def done(self) -> Counter[str]:
        """The faults that have happened, by kind: one that waits for a message may never meet it."""
        parts: list[FaultProxy | MessageFaults] = [*self._proxies.values(), *self._messages.values()]
        return sum((part.done for part in parts), self._done)

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        """Everything runs, and ends with the stack."""
        for name, worker in self.workers.items():
            stack.push_async_callback(worker.end)
            stack.push_async_callback(self._proxies[name].stop)
        await asyncio.gather(*(worker.start() for worker in self.workers.values()))
        for name, worker in self.workers.items():
            self._addresses[name] = await self._proxies[name].start(worker.port)
        stack.enter_context(faulty_clients(self._messages))
        stack.enter_context(mock.patch.object(handshake, "HANDSHAKE_SECONDS", 0.5))
        stack.enter_context(mock.patch.object(drafting, "GRACE_SECONDS", 0.1))
        stack.enter_context(mock.patch.object(drafting, "FAULT_PAUSE_SECONDS", 0.4))
        addresses: dict[str, list[str]] = {"targets": [], "drafts": []}
        for name, address in self._addresses.items():
            addresses[f"{self.workers[name].role}s"].append(address)
        waits = {name: value for name, value in WAITS.items() if name in CoordinatorConfig.model_fields}
        config = CoordinatorConfig(**{**addresses, **waits, "num_draft_tokens": 3})
        self._coordinator = CoordinatorServer(config)
        address = await self._coordinator.start()
        stack.push_async_callback(self._coordinator.stop, 0.1)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        self.stub: Any = inference_pb2_grpc.InferenceStub(channel)

    async def do(self, fault: Fault) -> None:
        """Any fault but a client's, from its begin to its end."""
        what, _, direction = fault.kind.partition("-")
        proxy = self._proxies[fault.whom]
        if fault.kind in PROCESSES:
            await self.workers[fault.whom].suffer(fault.kind, fault.seconds)
            self._done[fault.kind] += 1
        elif fault.kind in CONNECTIONS:
            await self._do_to_connections(proxy, fault)
        elif what == "corrupt":
            proxy.corrupt(cast(Direction, direction), fault.number)
        elif what == "truncate":
            proxy.truncate(cast(Direction, direction), fault.number)
        else:
            faults = self._messages[self._addresses[fault.whom]]
            faults.arm(cast(What, what), cast(Direction, direction))

    async def _do_to_connections(self, proxy: FaultProxy, fault: Fault) -> None:
        if fault.kind == "cut":
            proxy.cut()
        elif fault.kind == "delay":
            proxy.delay(fault.seconds)
        else:
            await proxy.blackhole(fault.seconds)

    async def nobody_is_left(self) -> float:
        """Wait until nobody holds a slot or a task any more; how long that took. Raises TimeoutError."""
        begun = time.monotonic()
        async with asyncio.timeout(SETTLING_SECONDS):
            while await self._num_left():  # noqa: ASYNC110 - workers tell nobody
                await asyncio.sleep(0.1)
        return time.monotonic() - begun

    async def settle(self) -> float:
        """The same, and wait until nothing is kept for clients that may come back."""
        seconds = await self.nobody_is_left()
        await asyncio.sleep(1.2 * KEPT_SECONDS)
        return seconds

    async def _num_left(self) -> int:
        info = await self.stub.GetModelInfo(GetModelInfoRequest(), timeout=5)
        num_left = info.num_running_sessions + info.num_waiting_sessions
        num_left += sum(not client.is_connected for client in self._coordinator._clients)
        return int(num_left) + sum([await worker.num_left() for worker in self.workers.values()])


def num_objects() -> Counter[str]:
    """The coordinator's objects in this process, by class: what of them grows is a leak."""
    gc.collect()
    kinds = (type(thing) for thing in gc.get_objects())
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("coordinator."))


@contextlib.asynccontextmanager
async def site(num_targets: int, num_drafts: int) -> AsyncIterator[Site]:
    """So many workers of each role, and a coordinator."""
    names = [f"target-{i}" for i in range(num_targets)] + [f"draft-{i}" for i in range(num_drafts)]
    async with contextlib.AsyncExitStack() as stack:
        running = Site(names)
        await running.start(stack)
        yield running
