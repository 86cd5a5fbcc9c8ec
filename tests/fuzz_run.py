"""The long form of `test_fuzz`: so many messages, and a table of what came of them.

Run from the project's root: `python -m tests.fuzz_run --messages 100000 --seed 1`.
"""

import argparse
import asyncio
import logging
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.fuzzing import Findings, fuzzed

TURNS = 50  # between looks at the number of messages


async def fuzz(num_messages: int, seed: int, first_turn: int = 0) -> Findings:
    """Turns of one seed until so many messages were sent."""
    with tempfile.TemporaryDirectory() as folder:
        async with fuzzed(Path(folder)) as fuzzer:
            while fuzzer.findings.num_messages < num_messages:
                await fuzzer.run(seed, first_turn, TURNS)
                first_turn += TURNS
            return fuzzer.findings


def table_of(findings: Findings, seconds: float) -> Table:
    """A line for each kind of message."""
    table = Table("messages", "number", "of them with a result", "refused")
    for kind in sorted({kind for kind, _ in findings.answers}):
        answers = {answer: number for (k, answer), number in findings.answers.items() if k == kind}
        num_results = answers.pop("OK", 0)
        refused = ", ".join(f"{number} {answer}" for answer, number in sorted(answers.items()))
        table.add_row(kind, str(num_results + sum(answers.values())), str(num_results), refused)
    table.caption = f"{findings.num_messages} messages in {seconds:.0f} s, {len(findings.failures)} failures"
    return table


def main() -> None:
    """Exits with 1 where anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first-turn", type=int, default=0, help="to begin where a failure was found")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # refusals and reconnects by the thousand
    begun = time.monotonic()
    findings = asyncio.run(fuzz(arguments.messages, arguments.seed, arguments.first_turn))
    console = Console()
    console.print(table_of(findings, time.monotonic() - begun))
    for failure in findings.failures[:20]:
        console.print(failure, markup=False)
    raise SystemExit(bool(findings.failures))


if __name__ == "__main__":
    main()
