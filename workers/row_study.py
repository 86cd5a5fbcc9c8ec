"""What q costs on the wire: bytes and microseconds a draft token, for any size of vocabulary.

    python -m workers.row_study --vocab-size 152000

Rows of logits are normal with a spread of 3, as peaked as a language model's. Coding is what a drafter does
with a row of counts, decoding what a target does with the bytes, its checks included; making the counts from
logits stands apart.
"""

import argparse
import timeit
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from protos.limits import DEFAULT_SUPPORT
from workers.counts import CountRow, quantise
from workers.rows import read_rows, write_rows
from workers.sampling import SamplingSettings, distribution

NUM_ROWS = 4  # of a proposal
NUM_REPEATS = 7


def rows_of(vocab_size: int, support: int, seed: int = 1) -> tuple[list[CountRow], list[int]]:
    """A proposal's rows and a token drawn from each."""
    rng = np.random.default_rng(seed)
    rows = [_counts(logits, support) for logits in _logits(vocab_size, rng)]
    return rows, [row.draw(rng.random()) for row in rows]


def _logits(vocab_size: int, rng: np.random.Generator) -> list[NDArray[np.float32]]:
    return [3 * rng.normal(size=vocab_size).astype(np.float32) for _ in range(NUM_ROWS)]


def _counts(logits: NDArray[np.float32], support: int) -> CountRow:
    q = distribution(logits, SamplingSettings(top_k=support))
    return quantise(q.probabilities, support, q.ids)


def _microseconds(work: Callable[[], object], number: int) -> float:
    """A row, at best: whatever disturbs only adds."""
    return min(timeit.repeat(work, number=number, repeat=NUM_REPEATS)) / number / NUM_ROWS * 1e6


def _cells(vocab_size: int, support: int) -> tuple[str, ...]:
    rows, tokens = rows_of(vocab_size, support)
    data = write_rows(rows, vocab_size)
    logits = _logits(vocab_size, np.random.default_rng(1))
    return (
        str(vocab_size),
        f"{len(data) / NUM_ROWS:.0f}",
        f"{_microseconds(lambda: write_rows(rows, vocab_size), 1000):.1f}",
        f"{_microseconds(lambda: read_rows(data, tokens, vocab_size), 1000):.1f}",
        f"{_microseconds(lambda: [_counts(row, support) for row in logits], 50):.0f}",
    )


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--vocab-size", default="49152,152000")
    parser.add_argument("--support", type=int, default=DEFAULT_SUPPORT, help="ids that a row has at most")
    wish = parser.parse_args()
    table = Table(box=box.MARKDOWN)
    for name in ("V", "bytes a token", "coded, us", "decoded, us", "counts from logits, us"):
        table.add_column(name, justify="right", no_wrap=True)
    for vocab_size in map(int, wish.vocab_size.split(",")):
        table.add_row(*_cells(vocab_size, wish.support))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
