"""What a round costs beside the models: the coordinator's own time, and round trips.

    python -m cluster.round_study --sessions 1,16,64,256 --draft-tokens 4

Drafter and target are real workers in processes of their own, with table models whose passes take next to no
time. This process is the coordinator without its public service; what the streams to clients cost is measured
apart, by a second run of these sessions through the service, with clients in a process of their own. Drafts
come from the target's own law, so nearly all are kept. CPU time is this process's, of all threads.
"""

import argparse
import asyncio
import contextlib
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import grpc
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from cluster.calls import OPTIONS
from cluster.module_process import last_words, serving_module, start_module
from coordinator.decoding import decode
from coordinator.draft_length import LONGEST, DraftLength
from coordinator.draft_policy import DraftPolicy
from coordinator.drafting import Drafter, DraftSettings
from coordinator.migrating import Target
from coordinator.server import CoordinatorConfig, CoordinatorServer
from coordinator.sessions import Session
from coordinator.spreading import Spread
from coordinator.usage import Tally
from coordinator.verifying import Verifier, VerifySettings
from coordinator.worker_client import WorkerClient
from protos import inference_pb2_grpc
from protos.inference_pb2 import GenerateRequest, TokenIds
from protos.limits import AUTO
from protos.prefix import TokenPrefix
from protos.worker_pb2 import ENCODING_SPARSE, RULE_TOKEN, Sampling
from workers.server import ModelIdentity, WorkerConfig, WorkerServer
from workers.table_model import TableModel

VOCAB_SIZE = 256
NUM_PROMPT_TOKENS = 32
NUM_ECHOES = 200
WARM_UP_TOKENS = 20
WRITING_SECONDS = 600.0  # for all clients' texts
PAUSE_SECONDS = 0.002  # about what the workers of the study take: processes that rest answer later
SETTINGS = DraftSettings(ENCODING_SPARSE, 64, VOCAB_SIZE, 10.0, 60.0)
PATIENCE = VerifySettings(60.0, 60.0, 30.0)


@dataclass(frozen=True, slots=True)
class Measured:
    """What one number of sessions cost."""

    num_sessions: int
    num_tokens: int
    num_rounds: int
    cpu_seconds: float
    seconds: float
    rounds: tuple[tuple[float, float], ...]  # seconds of each, and what the workers say that they took of it

    def cells(self, echoes_seconds: float, served_cpu_seconds: float) -> tuple[str, ...]:
        """For the table; `echoes_seconds` are those of two empty round trips.

        `served_cpu_seconds` are a token's, through the public service.
        """
        cpu_seconds = self.cpu_seconds / self.num_tokens
        whole = median(seconds for seconds, _ in self.rounds)
        beside = median(seconds - at_workers for seconds, at_workers in self.rounds)
        return (
            str(self.num_sessions),
            f"{self.num_tokens / self.num_rounds:.2f}",
            f"{1e3 * whole:.2f}",
            f"{1e3 * beside:.2f}",
            f"{1e3 * (beside - echoes_seconds):.2f}",
            f"{1e6 * cpu_seconds:.1f}",
            f"{1e6 * (served_cpu_seconds - cpu_seconds):.1f}",
            f"{self.num_tokens / self.seconds:.0f}",
        )


def _law(seed: int) -> TableModel:
    """One row for each last token, made beforehand; little of its mass is beyond the support of q."""
    rows = 4 * np.random.default_rng(seed).normal(size=(VOCAB_SIZE, VOCAB_SIZE)).astype(np.float32)
    return TableModel(lambda prefix: rows[prefix[-1]], VOCAB_SIZE, num_slots=1024, max_length=1 << 20)


async def _serve(role: Literal["draft", "target"]) -> None:
    """A worker, until its input closes."""
    identity = ModelIdentity(role, "", (), "table")
    server = WorkerServer(role, _law(1), identity, WorkerConfig(calibration_seconds=0.0))
    print(await server.start(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0.1)


@contextlib.asynccontextmanager
async def _connected(role: Literal["draft", "target"], address: str) -> AsyncIterator[WorkerClient]:
    client = WorkerClient(role, address, "study")
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


async def _echo_seconds(draft: WorkerClient, target: WorkerClient) -> float:
    """The median of two empty round trips, one to each worker, with the pauses that rounds have between."""
    times = []
    for _ in range(NUM_ECHOES):
        seconds = 0.0
        for client in (draft, target):
            await asyncio.sleep(PAUSE_SECONDS)
            seconds += await client.echo()
        times.append(seconds)
    return median(times)


async def _measure(clients: tuple[WorkerClient, WorkerClient], num_sessions: int, wish: Any) -> Measured:
    drafter, policy = Drafter(clients[0], SETTINGS), DraftPolicy()
    drafter.num_sessions = num_sessions
    verifiers = Spread([Verifier(clients[1], PATIENCE)])
    rounds: list[tuple[float, float]] = []
    tally = Tally()

    async def run(number: int) -> None:
        session = Session(
            id=f"study/{num_sessions}/{number}",
            choice=0,
            seed=number,
            tokens=TokenPrefix([number % VOCAB_SIZE] * NUM_PROMPT_TOKENS),
            num_prompt_tokens=NUM_PROMPT_TOKENS,
            max_tokens=wish.tokens,
            max_length=1 << 20,
            end_token_ids=frozenset(),
            sampling=Sampling(temperature=1.0, top_p=1.0),
            rule=RULE_TOKEN,
            num_draft_tokens=LONGEST if wish.draft_tokens == AUTO else int(wish.draft_tokens),
            draft_length=DraftLength() if wish.draft_tokens == AUTO else None,
            tally=tally,
        )
        last = time.monotonic()

        def emit(_: object) -> None:
            nonlocal last
            now = time.monotonic()
            if session.lap.draft_ns:  # a round of the kind that is measured
                rounds.append((now - last, (session.lap.draft_ns + session.lap.target_ns) / 1e9))
            last = now

        with verifiers.place() as place:
            await decode(session, drafter, Target(place, PATIENCE), policy, emit)

    began, cpu = time.monotonic(), _cpu_seconds()
    await asyncio.gather(*(run(number) for number in range(num_sessions)))
    return Measured(
        num_sessions,
        tally.num_completion_tokens,
        tally.num_rounds,
        _cpu_seconds() - cpu,
        time.monotonic() - began,
        tuple(rounds),
    )


async def _served_cpu_seconds(wish: Any, addresses: tuple[str, str], num_sessions: int) -> float:
    """Of a token that a client gets through the public service."""
    config = CoordinatorConfig(
        drafts=addresses[:1],
        targets=addresses[1:],
        num_draft_tokens=AUTO if wish.draft_tokens == AUTO else int(wish.draft_tokens),
    )
    server = CoordinatorServer(config)
    address = await server.start()
    try:
        for num_tokens in (WARM_UP_TOKENS, wish.tokens):
            load = (f"--write={address}", f"--sessions={num_sessions}", f"--tokens={num_tokens}")
            with tempfile.TemporaryFile() as log:
                cpu = _cpu_seconds()
                writer = start_module("cluster.round_study", *load, log=log)
                if await asyncio.to_thread(writer.wait, WRITING_SECONDS):
                    raise SystemExit(f"the clients failed: {last_words(log)}")
                cpu = _cpu_seconds() - cpu
        return cpu / float(num_sessions * wish.tokens)
    finally:
        await server.stop(0.0)


async def _write(address: str, num_sessions: int, num_tokens: int) -> None:
    """All clients, each with a text of its own, to their end."""
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def write(number: int) -> None:
            prompt = TokenIds(ids=[number % VOCAB_SIZE] * NUM_PROMPT_TOKENS)
            async for _ in stub.Generate(
                GenerateRequest(token_ids=prompt, seed=number, max_tokens=num_tokens)
            ):
                pass

        await asyncio.gather(*(write(number) for number in range(num_sessions)))


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def _study(wish: Any, addresses: tuple[str, str]) -> None:
    async with (
        _connected("draft", addresses[0]) as draft,
        _connected("target", addresses[1]) as target,
    ):
        echoes = await _echo_seconds(draft, target)
        table = Table(box=box.MARKDOWN)
        heads = (
            "sessions",
            "tokens a round",
            "round, ms",
            "beside workers, ms",
            "beyond echoes, ms",
            "CPU a token, us",
            "client streams, us",
            "tokens/s",
        )
        for name in heads:
            table.add_column(name, justify="right", no_wrap=True)
        for num_sessions in map(int, wish.sessions.split(",")):
            warm_up = argparse.Namespace(**{**vars(wish), "tokens": WARM_UP_TOKENS})
            await _measure((draft, target), num_sessions, warm_up)
            measured = await _measure((draft, target), num_sessions, wish)
            served = await _served_cpu_seconds(wish, addresses, num_sessions)
            table.add_row(*measured.cells(echoes, served))
        console = Console(width=110)
        console.print(
            f"K = {wish.draft_tokens}, {wish.tokens} tokens a session;"
            f" two empty round trips take {1e3 * echoes:.2f} ms"
        )
        console.print(table)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sessions", default="1,16,64,256,512")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--draft-tokens", default="4", help="K, or auto")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    parser.add_argument("--serve", choices=["draft", "target"], help=argparse.SUPPRESS)
    wish = parser.parse_args()
    if wish.serve:
        asyncio.run(_serve(wish.serve))
        return
    if wish.write:
        asyncio.run(_write(wish.write, int(wish.sessions), wish.tokens))
        return
    module = "cluster.round_study"
    with (
        serving_module(module, "--serve", "draft") as draft,
        serving_module(module, "--serve", "target") as target,
    ):
        asyncio.run(_study(wish, (draft, target)))


if __name__ == "__main__":
    main()
