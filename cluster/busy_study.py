"""How busy drafter and target are with many sessions, where both have equally much to do.

    python -m cluster.busy_study --sessions 16 --draft-tokens 4 --timeline busy.html

Both are real workers in processes of their own, with table models that sleep in a pass for as long as a real
one might compute: a + b * rows for the target, a / K + b * rows for each of a draft's K steps. So K * t_d is
t_v, however many sessions are worked on together. The drafter has the target's law: nearly all is kept.
The coordinator, its public service and the clients are this process.

The bound is what M groups could do at best with no wire and no Python: all sessions have a round of N tokens
in max(K t_d + t_v, M K t_d, M t_v), each for a group's share of the rows. Where M is not given it is the best
one's.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc
import numpy as np
from pydantic import SecretStr
from rich import box
from rich.console import Console
from rich.table import Table

from cluster.busy_shares import BusyShare, busy_shares
from cluster.module_process import serving_module
from cluster.recording import recorded
from cluster.timeline_boxes import Window, window
from cluster.timeline_page import DRAWN_SECONDS, Phase, save
from coordinator.overlap import NUM_GROUPS
from coordinator.server import CoordinatorConfig, CoordinatorServer
from protos import control_pb2_grpc, inference_pb2_grpc
from protos.authorization import metadata
from protos.control_pb2 import GetDeploymentStatusRequest, Span
from protos.inference_pb2 import GenerateRequest, TokenIds
from protos.limits import AUTO
from workers.server import ModelIdentity, WorkerConfig, WorkerServer
from workers.table_model import TableModel

VOCAB_SIZE = 64  # no more than a row of q holds
NUM_PROMPT_TOKENS = 32
TOKEN = "study"


@dataclass(frozen=True, slots=True)
class Counted:
    """What all sessions did within some seconds."""

    num_tokens: int
    num_rounds: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Committed."""
        return self.num_tokens / self.seconds


def pass_seconds(wish: argparse.Namespace, role: str) -> tuple[float, float]:
    """What a pass of `role` takes beside its rows, and for each of them."""
    num_rows = wish.sessions * (wish.draft_tokens + 1)
    fixed = wish.verify_ms * (1 - wish.growth) / 1e3
    return fixed / (
        wish.draft_tokens if role == "draft" else 1
    ), wish.verify_ms * wish.growth / 1e3 / num_rows


def bound(wish: argparse.Namespace, tokens_a_round: float) -> float:
    """Tokens/s at best, with rounds of so many."""

    def turn(num_groups: int) -> float:
        share = -(-wish.sessions // num_groups)
        fixed, per_row = pass_seconds(wish, "target")
        verification: float = fixed + per_row * share * (wish.draft_tokens + 1)
        fixed, per_row = pass_seconds(wish, "draft")
        draft: float = wish.draft_tokens * (fixed + per_row * share)
        return max(draft + verification, num_groups * draft, num_groups * verification)

    choices = [m for m in NUM_GROUPS if m <= wish.sessions] if wish.groups == AUTO else [int(wish.groups)]
    return float(wish.sessions) * tokens_a_round / min(map(turn, choices))


async def _serve(wish: argparse.Namespace) -> None:
    """A worker, until its input closes."""
    role: Literal["draft", "target"] = wish.serve
    fixed, per_row = pass_seconds(wish, role)
    rows = 4 * np.random.default_rng(1).normal(size=(VOCAB_SIZE, VOCAB_SIZE)).astype(np.float32)
    model = TableModel(
        lambda prefix: rows[prefix[-1]],
        VOCAB_SIZE,
        num_slots=wish.sessions,
        max_length=1 << 20,
        latency_seconds=lambda lengths: fixed + per_row * sum(lengths),
    )
    config = WorkerConfig(calibration_seconds=0.0)
    server = WorkerServer(role, model, ModelIdentity(role, "", (), "table"), config)
    print(await server.start(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0.1)


async def _write(stub: Any, number: int) -> None:
    """One client, whose text does not end."""
    prompt = TokenIds(ids=[number % VOCAB_SIZE] * NUM_PROMPT_TOKENS)
    async for _ in stub.Generate(GenerateRequest(token_ids=prompt, seed=number, max_tokens=1 << 19)):
        pass


async def _measure(address: str, wish: argparse.Namespace) -> tuple[list[BusyShare], list[Span], Counted]:
    """Shares by the workers' own account, and spans and counts of the same seconds."""
    async with grpc.aio.insecure_channel(address) as channel:
        texts = inference_pb2_grpc.InferenceStub(channel)
        ask: Any = control_pb2_grpc.ControlStub(channel).GetStatus
        request, token = GetDeploymentStatusRequest(), metadata(TOKEN)
        writers = [asyncio.create_task(_write(texts, number)) for number in range(wish.sessions)]
        try:
            await asyncio.sleep(wish.settle_seconds)
            before, begun = await ask(request, metadata=token), time.monotonic()
            spans = await asyncio.to_thread(recorded, address, TOKEN, wish.seconds)
            after, ended = await ask(request, metadata=token), time.monotonic()
            for writer in writers:
                if writer.done():
                    writer.result()  # raises why
        finally:
            for writer in writers:
                writer.cancel()
            await asyncio.gather(*writers, return_exceptions=True)
    counted = Counted(
        after.totals.num_completion_tokens - before.totals.num_completion_tokens,
        after.totals.num_rounds - before.totals.num_rounds,
        ended - begun,
    )
    return list(busy_shares(before, after)), spans, counted


async def _study(
    wish: argparse.Namespace, draft: str, target: str
) -> tuple[list[BusyShare], list[Span], Counted]:
    config = CoordinatorConfig(
        targets=(target,),
        drafts=(draft,),
        control_token=SecretStr(TOKEN),
        num_draft_tokens=wish.draft_tokens,
        num_groups=wish.groups if wish.groups == AUTO else int(wish.groups),
    )
    server = CoordinatorServer(config)
    address = await server.start()
    try:
        return await _measure(address, wish)
    finally:
        await server.stop(0.0)


def tell(wish: argparse.Namespace, shares: Sequence[BusyShare], seen: Window, counted: Counted) -> None:
    """The table, on standard output."""
    drawn = {(lane.role, lane.address): lane for lane in seen.lanes}
    table = Table(box=box.MARKDOWN)
    for name in ("worker", "busy", "busy as drawn", "passes", "rows each"):
        table.add_column(name, justify="left" if name == "worker" else "right", no_wrap=True)
    for share in shares:
        lane = drawn.get((share.role, share.address))
        table.add_row(
            share.role,
            f"{share.share:.1%}",
            f"{lane.busy_share:.1%}" if lane else "",
            str(share.num_passes),
            f"{share.num_rows / share.num_passes:.1f}" if share.num_passes else "",
        )
    console = Console(width=110, highlight=False)
    console.print(_conditions(wish))
    groups = ", ".join(str(len(group)) for group in seen.groups)
    tokens_a_round = counted.num_tokens / max(counted.num_rounds, 1)
    speed, most = counted.tokens_per_second, bound(wish, tokens_a_round)
    console.print(
        f"{speed:.0f} tokens/s with {tokens_a_round:.2f} tokens a round: {speed / most:.2f} of the bound, "
        f"{most:.0f}; sessions worked on together: {groups}"
    )
    console.print(table)


def _conditions(wish: argparse.Namespace) -> str:
    return (
        f"{wish.sessions} sessions, K = {wish.draft_tokens}; table models with K t_d = t_v:"
        f" {wish.verify_ms:g} ms for all sessions at once, {wish.growth:.0%} of it in proportion to the rows."
    )


def main() -> None:
    """Measure, print the table, draw the timeline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--draft-tokens", type=int, default=4, help="K, 1 or more")
    parser.add_argument("--verify-ms", type=float, default=170.0, help="t_v of all sessions at once")
    parser.add_argument("--growth", type=float, default=0.8, help="the part of it that grows with the rows")
    parser.add_argument("--groups", default=AUTO, help="M that take turns, or auto")
    parser.add_argument("--settle-seconds", type=float, default=3.0, help="before what is measured")
    parser.add_argument("--seconds", type=float, default=10.0, help="that are measured")
    parser.add_argument("--timeline", type=Path, help="an HTML file to draw the measured time to")
    parser.add_argument("--serve", choices=["draft", "target"], help=argparse.SUPPRESS)
    wish = parser.parse_args()
    if wish.serve:
        asyncio.run(_serve(wish))
        return
    load = [f"--{name}={getattr(wish, name.replace('-', '_'))}" for name in _LOAD]
    with (
        serving_module("cluster.busy_study", "--serve", "draft", *load) as draft,
        serving_module("cluster.busy_study", "--serve", "target", *load) as target,
    ):
        shares, spans, counted = asyncio.run(_study(wish, draft, target))
    tell(wish, shares, window(spans, wish.seconds), counted)
    if wish.timeline is not None:
        phase = Phase("the study", window(spans, DRAWN_SECONDS))
        save(wish.timeline, "Outrider: who was busy when", [phase], [_conditions(wish)])


_LOAD = ("sessions", "draft-tokens", "verify-ms", "growth")  # what workers are told


if __name__ == "__main__":
    main()
