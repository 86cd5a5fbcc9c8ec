"""Twice as many clients as there are places, for a while: who is refused, who is served, and what it costs.

Run from the project's root: `python -m tests.overload_run --clients 256 --seconds 120`. The models are tables
whose passes take a set time. Half of the places are sessions that run, half are sessions that wait.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc
import numpy as np
import psutil
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status
from rich.console import Console
from rich.table import Table

from protos import inference_pb2_grpc
from protos.inference_pb2 import GenerateRequest, TokenIds
from tests.fault_models import MAX_LENGTH, V, draft_law, greedy_text, target_law
from tests.fault_site import num_objects
from tests.pipelines import Pipeline, pipeline
from workers.server import WorkerConfig
from workers.table_model import TableModel

NUM_TOKENS = 48
PASS_SECONDS = 0.002
CLIENTS_A_CHANNEL = 16
LEAVING_SHARE, LATE_SHARE = 0.03, 0.03  # of calls that hang up half-way, and whose deadline is too short
SHORT_SECONDS, LONG_SECONDS = 0.3, 60.0
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
TEXTS = [tuple(greedy_text([i], NUM_TOKENS)) for i in range(V)]
RSS_SECONDS = 1.0


@dataclass
class Findings:
    """What clients and the process have seen."""

    served_seconds: list[float] = field(default_factory=list)
    refused_seconds: list[float] = field(default_factory=list)
    num_left: int = 0
    num_late: int = 0
    served: Counter[int] = field(default_factory=Counter)  # by client
    failures: list[str] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)  # each second
    left: Counter[str] = field(default_factory=Counter)  # objects of the coordinator beyond those before

    def fairness(self, num_clients: int) -> float:
        """Jain's index of what each client was served: 1 for all alike, 1/N for one alone."""
        counts = np.array([self.served[i] for i in range(num_clients)], dtype=float)
        return float(counts.sum() ** 2 / (num_clients * (counts**2).sum())) if counts.any() else 0.0


IsOver = Callable[[Findings, int], bool]  # for the client of this number


@contextlib.asynccontextmanager
async def small_service(num_running: int, num_waiting: int) -> AsyncIterator[Pipeline]:
    """With places for so many sessions."""

    def model(law: Any) -> TableModel:
        pace = (lambda _: PASS_SECONDS) if law is target_law else None
        return TableModel(law, V, num_slots=num_running, max_length=MAX_LENGTH, latency_seconds=pace)

    worker = WorkerConfig(min_shared_tokens=1)
    async with pipeline(
        model(target_law),
        model(draft_law),
        worker=worker,
        max_waiting_sessions=num_waiting,
        max_kept_requests=0,  # so that what is left is a leak
    ) as running:
        yield running


class Client:
    """Asks again and again, as soon as it may."""

    def __init__(self, number: int, stub: Any, findings: Findings) -> None:
        self._number = number
        self._stub = stub
        self._findings = findings
        self._random = Random(number)

    async def ask_until(self, is_over: IsOver) -> None:
        """Until it is over for this client, and what it asked by then is answered."""
        while not is_over(self._findings, self._number):
            dice = self._random.random()
            is_late = LEAVING_SHARE <= dice < LEAVING_SHARE + LATE_SHARE
            await self.ask(dice < LEAVING_SHARE, is_late)

    async def ask(self, leaves: bool = False, is_late: bool = False) -> None:
        """Once; hang up half-way, or with a deadline that is too short."""
        prompt = self._number % V
        request = GenerateRequest(
            token_ids=TokenIds(ids=[prompt]), max_tokens=NUM_TOKENS, temperature=0.0, ignore_end_tokens=True
        )
        call = self._stub.Generate(request, timeout=SHORT_SECONDS if is_late else LONG_SECONDS)
        said: list[int] = []
        begun = time.monotonic()
        try:
            async for reply in call:
                said += [token.id for token in reply.tokens.tokens]
                if leaves and said:
                    call.cancel()
                    self._findings.num_left += 1
                    return
        except grpc.aio.AioRpcError as error:
            await self._failed(error, is_late, time.monotonic() - begun)
            return
        if tuple(said) != TEXTS[prompt]:
            self._findings.failures.append(f"client {self._number} was told {said}")
        self._findings.served[self._number] += 1
        self._findings.served_seconds.append(time.monotonic() - begun)

    async def _failed(self, error: grpc.aio.AioRpcError, is_late: bool, seconds: float) -> None:
        """Come back when it is told to, or note that it should have been served."""
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and is_late:
            self._findings.num_late += 1
        elif error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and (pause := retry_seconds(error)) > 0:
            self._findings.refused_seconds.append(seconds)
            await asyncio.sleep(pause * self._random.uniform(0.5, 1.5))
        else:
            self._findings.failures.append(f"client {self._number}: {error.code().name} {error.details()}")


def retry_seconds(error: grpc.aio.AioRpcError) -> float:
    """When a refused call may come back; 0 where nothing says so."""
    status = rpc_status.from_call(error)
    retry = RetryInfo()
    if isinstance(status, Status) and any(detail.Unpack(retry) for detail in status.details):
        return float(retry.retry_delay.ToTimedelta().total_seconds())
    return 0.0


async def overload(num_clients: int, is_over: IsOver) -> Findings:
    """So many clients on half as many places; each asks until it is over."""
    findings = Findings()
    num_running = max(1, num_clients // 4)
    async with small_service(num_running, num_clients // 2 - num_running) as running:
        channels = [
            grpc.aio.insecure_channel(running.address, options=OWN_CONNECTION)
            for _ in range(-(-num_clients // CLIENTS_A_CHANNEL))
        ]
        stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in channels]
        clients = [Client(i, stubs[i // CLIENTS_A_CHANNEL], findings) for i in range(num_clients)]
        await clients[0].ask()  # what is made once is made by then
        before = num_objects()
        watching = asyncio.create_task(_watch_memory(findings))
        await asyncio.gather(*(client.ask_until(is_over) for client in clients))
        watching.cancel()
        await asyncio.gather(*(channel.close() for channel in channels))
        assert running.draft is not None
        async with asyncio.timeout(LONG_SECONDS):
            while running.target.num_slots_used or running.draft.num_slots_used:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        findings.left = num_objects() - before
    return findings


async def _watch_memory(findings: Findings) -> None:
    process = psutil.Process(os.getpid())
    while True:
        findings.rss_bytes.append(process.memory_info().rss)
        await asyncio.sleep(RSS_SECONDS)


def table_of(findings: Findings, num_clients: int) -> Table:
    """What a reader wants to know."""
    counts = [findings.served[i] for i in range(num_clients)]
    table = Table("overload", "found")
    table.add_row("requests served", f"{len(findings.served_seconds)}, {_spread(findings.served_seconds)}")
    table.add_row(
        "refused, with when to come back",
        f"{len(findings.refused_seconds)}, {_spread(findings.refused_seconds)}",
    )
    table.add_row("hung up half-way; deadline passed", f"{findings.num_left}; {findings.num_late}")
    table.add_row("failed though admitted, or told wrong", str(len(findings.failures)))
    table.add_row("served to a client, least to most", f"{min(counts)} to {max(counts)}")
    table.add_row("Jain's index of these", f"{findings.fairness(num_clients):.3f}")
    rss = [number / 2**20 for number in findings.rss_bytes]
    sizes = (rss[len(rss) // 4], rss[len(rss) // 2], rss[-1])
    table.add_row("resident MiB at a quarter, half, end", ", ".join(f"{size:.0f}" for size in sizes))
    table.add_row("the coordinator's objects left", str(findings.left.total()))
    return table


def _spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return "none"
    median, late, last = np.percentile(seconds, (50, 99, 100)) * 1e3
    return f"within {median:.0f} ms (median), {late:.0f} ms (of 100 the last), {last:.0f} ms (all)"


def main() -> None:
    """Exits with 1 where an admitted request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=120.0)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    end = time.monotonic() + arguments.seconds
    findings = asyncio.run(overload(arguments.clients, lambda *_: time.monotonic() >= end))
    Console().print(table_of(findings, arguments.clients))
    for failure in findings.failures[:20]:
        print(failure)
    raise SystemExit(bool(findings.failures))


if __name__ == "__main__":
    main()
