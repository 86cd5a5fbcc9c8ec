"""How a deployment recovers: tokens a second over time, while a drafter and then the target is killed.

    python -m cluster.recovery_study --picture recovery.svg

A deployment of its own writes texts without a pause. The process of its drafter gets SIGKILL, later that of
its target; its keeper starts both again. Every stream must go on over both without an error, and every token
must come once: the end of each stream says how many there were.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from rich import box
from rich.console import Console
from rich.table import Table

from cluster.calls import OPTIONS
from cluster.deployment import private_deployment
from cluster.finding import find
from cluster.plan import Deployed
from cluster.progress import Steps
from cluster.staying_plan import StayingWish, prepare_staying
from protos import inference_pb2_grpc
from protos.inference_pb2 import GenerateRequest

BIN_SECONDS = 1.0
STARTUP_SECONDS = 300.0
PROMPT = "Write a long story about a lighthouse keeper and the sea."


@dataclass(frozen=True, slots=True)
class Blow:
    """A process that was killed."""

    name: str  # of its actor
    seconds: float  # from the begin of the record


@dataclass(slots=True)
class Record:
    """What the clients saw. Times are seconds from its begin."""

    begun: float = field(default_factory=time.monotonic)
    tokens: list[float] = field(default_factory=list)  # when each came
    num_texts: int = 0  # that ended with as many tokens as their usage says
    faults: list[str] = field(default_factory=list)
    blows: list[Blow] = field(default_factory=list)

    @property
    def now(self) -> float:
        """Since the begin."""
        return time.monotonic() - self.begun


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a blow cost."""

    blow: Blow
    before: float  # tokens/s, the mean since the blow before, or the begin
    lowest: float  # tokens/s of the worst bin behind it
    seconds: float | None  # until a bin had at least nine tenths of `before`; None: not within the record


def rates(tokens: Sequence[float], seconds: float) -> list[float]:
    """Tokens/s of each whole bin of the record."""
    counts = [0] * int(seconds / BIN_SECONDS)
    for when in tokens:
        if (number := int(when / BIN_SECONDS)) < len(counts):
            counts[number] += 1
    return [count / BIN_SECONDS for count in counts]


def recoveries(record: Record, seconds: float) -> list[Recovery]:
    """One for each blow; a bin in which it fell belongs to the time behind it."""
    speeds = rates(record.tokens, seconds)
    edges = [int(blow.seconds / BIN_SECONDS) for blow in record.blows]
    found, start = [], 0
    for blow, edge, end in zip(record.blows, edges, [*edges[1:], len(speeds)], strict=True):
        quiet, behind = speeds[start:edge], speeds[edge:end]
        before = sum(quiet) / len(quiet) if quiet else 0.0
        lowest = min(behind, default=0.0)
        # The first bin is partly from before the blow.
        back = next((i for i, speed in enumerate(behind) if i and speed >= 0.9 * before), None)
        found.append(Recovery(blow, before, lowest, None if back is None else back * BIN_SECONDS))
        start = edge + (back or 0)
    return found


async def _write(address: str, number: int, num_draft_tokens: int, record: Record) -> None:
    """One client: a text after another."""
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        while True:
            request = GenerateRequest(
                text=f"{PROMPT} ({number})",
                max_tokens=1000,
                ignore_end_tokens=True,
                seed=number,
                num_draft_tokens=num_draft_tokens,
            )
            num_tokens = 0
            try:
                async for reply in stub.Generate(request):
                    num_tokens += len(reply.tokens.tokens)
                    record.tokens += [record.now] * len(reply.tokens.tokens)
                    if reply.HasField("usage") and reply.usage.num_completion_tokens != num_tokens:
                        record.faults.append(
                            f"{num_tokens} tokens came of {reply.usage.num_completion_tokens}"
                        )
                record.num_texts += 1
            except grpc.aio.AioRpcError as error:
                record.faults.append(f"{error.code().name}: {error.details()}")
                await asyncio.sleep(1.0)


async def _watch(deployed: Deployed, wish: argparse.Namespace, steps: Steps) -> Record:
    record = Record()
    writers = [
        asyncio.create_task(_write(deployed.address, number, wish.draft_tokens, record))
        for number in range(wish.sessions)
    ]
    victims = [
        ("drafter-0", wish.settle_seconds),
        ("target-0", wish.settle_seconds + wish.pause_seconds),
    ]
    try:
        for name, when in victims:
            steps.say(f"Writing; {name} is killed at {when:.0f} s")
            await asyncio.sleep(when - record.now)
            os.kill(next(worker.pid for worker in deployed.workers if worker.name == name), signal.SIGKILL)
            record.blows.append(Blow(name, record.now))
        steps.say("Writing on")
        await asyncio.sleep(wish.settle_seconds + 2 * wish.pause_seconds - record.now)
    finally:
        for writer in writers:
            writer.cancel()
        await asyncio.gather(*writers, return_exceptions=True)
    return record


def draw(record: Record, seconds: float, title: str, file: Path) -> None:
    """The curve, as a picture of the kind that the file's name says."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots()
    speeds = rates(record.tokens, seconds)
    axes.step([i * BIN_SECONDS for i in range(len(speeds))], speeds, where="post", color="#0072B2")
    for blow in record.blows:
        axes.axvline(blow.seconds, color="#D55E00", linestyle="--", linewidth=1)
        axes.annotate(
            f" {blow.name} killed",
            (blow.seconds, 1.0),
            xycoords=("data", "axes fraction"),
            va="top",
            color="#D55E00",
            fontsize=9,
        )
    axes.set_xlabel("seconds")
    axes.set_ylabel("tokens/s, all streams")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)


def tell(record: Record, found: Sequence[Recovery], title: str) -> None:
    """The table, on standard output."""
    table = Table(box=box.MARKDOWN)
    table.add_column("killed", no_wrap=True)
    for name in ("at, s", "tokens/s before", "worst second", "back after, s"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        back = "not yet" if one.seconds is None else f"{one.seconds:.0f}"
        table.add_row(
            one.blow.name, f"{one.blow.seconds:.0f}", f"{one.before:.1f}", f"{one.lowest:.1f}", back
        )
    console = Console(width=110, highlight=False)
    console.print(title)
    console.print(table)
    console.print(
        f"{len(record.tokens)} tokens came; {record.num_texts} texts ended; faults: {record.faults}"
    )


def main() -> None:
    """Start the deployment, strike twice, print the table, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="demo", help="as for `outrider up`")
    parser.add_argument("--draft", default="demo", help="as for `outrider up`")
    parser.add_argument("--sessions", type=int, default=4, help="streams at once")
    parser.add_argument("--draft-tokens", type=int, default=2, help="K of every round, 1 or more")
    parser.add_argument("--settle-seconds", type=float, default=20.0, help="before the drafter is killed")
    parser.add_argument("--pause-seconds", type=float, default=40.0, help="behind each blow")
    parser.add_argument("--picture", type=Path, help="where to draw the curve: .svg or .png")
    wish = parser.parse_args()
    with Steps(Console(stderr=True, highlight=False)) as steps:
        staying = StayingWish(
            target=wish.target,
            draft=wish.draft,
            num_targets=1,
            num_drafters=1,
            num_draft_tokens=wish.draft_tokens,
            rule="token",
            num_slots=wish.sessions,
            max_length=None,
            num_threads=None,
            port=0,
        )
        plan = prepare_staying(staying, find(wish.target, wish.draft, steps.say)).plan
        with private_deployment(plan, steps.say, startup_seconds=STARTUP_SECONDS) as deployed:
            record = asyncio.run(_watch(deployed, wish, steps))
    seconds = wish.settle_seconds + 2 * wish.pause_seconds
    title = (
        f"{wish.sessions} streams, K = {wish.draft_tokens}, target {wish.target}, draft {wish.draft}: "
        "tokens/s while processes are killed and started again"
    )
    tell(record, recoveries(record, seconds), title)
    if wish.picture is not None:
        draw(record, seconds, title, wish.picture)
    if record.faults:
        sys.exit(1)


if __name__ == "__main__":
    main()
