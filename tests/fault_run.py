"""The long form of `test_fault_scripts`: one script of many faults, and what was done and what held.

Run from the project's root: `python -m tests.fault_run --faults 1000 --seed 1`. `--show` prints the script,
`--replay FILE` runs one that was printed. What is checked holds for as long as the coordinator lives.
"""

import argparse
import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.fault_clients import Clients, undisturbed_texts
from tests.fault_history import law_p_value, sample_law, samples_of
from tests.fault_script import KINDS, Fault, script
from tests.fault_site import MOST_LEFT, num_objects, site

NUM_TARGETS = NUM_DRAFTS = 2
WORKERS = tuple(f"{role}-{i}" for role in ("target", "draft") for i in range(2))
SECONDS_A_FAULT = 0.6  # so that most of a run is spent between faults, not within all of them at once
WARM_SECONDS = 3.0
LEAST_P_VALUE = 1e-6


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has found."""

    clients: Clients
    done: Counter[str]  # faults that happened, by kind
    settled_seconds: float
    left: Counter[str]  # objects of the coordinator beyond those before
    seconds: float


async def run(faults: Sequence[Fault], seed: int) -> Outcome:
    """Live through the script."""
    async with site(NUM_TARGETS, NUM_DRAFTS) as running:
        references = await undisturbed_texts(running)
        warm = Clients(running, seed + 1, references)  # what is made once is made by then
        await warm.live_through([Fault(WARM_SECONDS, "cancel", "-", 0.0, 0)])
        await running.settle()
        del warm
        before = num_objects()
        begun = time.monotonic()
        clients = Clients(running, seed, references)
        await clients.live_through(faults)
        seconds = time.monotonic() - begun
        settled_seconds = await running.settle()
        done = running.done + clients.history.done
        return Outcome(clients, done, settled_seconds, num_objects() - before, seconds)


def tables_of(outcome: Outcome, num_faults: int) -> tuple[list[Table], bool]:
    """What to show, and whether every promise held."""
    faults = Table("fault", "times")
    for kind in KINDS:
        faults.add_row(kind, str(outcome.done[kind]))
    faults.add_row("all", f"{outcome.done.total()} of {num_faults} in {outcome.seconds:.0f} s", style="bold")
    records = outcome.clients.history.records
    calls = Table("calls", "complete", "unavailable", "left", "aborted", "tokens", "longest pause")
    for kind in ("greedy", "seeded", "sample"):
        those = [record for record in records if record.kind == kind]
        calls.add_row(
            kind,
            str(sum(record.is_complete for record in those)),
            str(sum(record.status is not None and not record.has_left for record in those)),
            str(sum(record.has_left for record in those)),
            str(sum(record.was_aborted for record in those)),
            str(sum(len(text) for record in those for text in record.texts)),
            f"{max((record.longest_pause_seconds for record in those), default=0.0):.1f} s",
        )
    broken = outcome.clients.broken()
    samples = samples_of(records)
    p_value = law_p_value(samples, sample_law())
    left = outcome.left.total()
    names = ", ".join(f"{number} {name}" for name, number in outcome.left.items())
    checks = Table("promise", "found", "held")
    for promise, found, held in (
        ("each token once, in order; every call ends", f"{len(broken)} violations", not broken),
        ("the joint law of samples", f"p-value {p_value:.3g} of {len(samples)}", p_value > LEAST_P_VALUE),
        ("slots and tasks back to zero", f"within {outcome.settled_seconds:.1f} s", True),
        ("the coordinator's objects back to what they were", f"{left} more {names}", left <= MOST_LEFT),
    ):
        checks.add_row(promise, found, "yes" if held else "NO")
    for violation in broken[:20]:
        checks.add_row("", violation, "")
    return [faults, calls, checks], not broken and p_value > LEAST_P_VALUE and left <= MOST_LEFT


def main() -> None:
    """Exits with 1 where a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="of the script; as many as the faults need"
    )
    parser.add_argument("--replay", type=Path, help="a script to run instead, a fault a line")
    parser.add_argument("--show", action="store_true", help="print the script and do nothing")
    arguments = parser.parse_args()
    if arguments.replay is not None:
        faults = tuple(Fault.read(line) for line in arguments.replay.read_text().splitlines() if line)
    else:
        seconds = arguments.seconds or SECONDS_A_FAULT * arguments.faults
        faults = script(arguments.seed, arguments.faults, seconds, WORKERS)
    if arguments.show:
        print("\n".join(map(str, faults)))
        return
    logging.disable(logging.CRITICAL)  # lost and found workers by the hundred
    tables, held = tables_of(asyncio.run(run(faults, arguments.seed)), len(faults))
    for table in tables:
        Console().print(table)
    raise SystemExit(not held)


if __name__ == "__main__":
    main()
