"""Tables and numbers as a benchmark shows them: Markdown that lines up, intervals in brackets, dashes.

Knows rich's tables and estimates; none of the figures.
"""

from collections.abc import Sequence
from io import StringIO

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from cluster.bench_statistics import Estimate

ABSENT = "–"
_WIDTH = 180  # no table is wider


def table(heads: Sequence[str]) -> Table:
    """An empty one; numbers are to the right, engines to the left."""
    empty = Table(box=MARKDOWN)
    for head in heads:
        empty.add_column(head, justify="left" if head == "engine" else "right", no_wrap=True)
    return empty


def markdown(filled: Table) -> str:
    """Its lines."""
    console = Console(file=StringIO(), width=_WIDTH)
    with console.capture() as text:
        console.print(filled)
    return "\n".join(line.rstrip() for line in text.get().splitlines() if line.strip())


def number(value: float | None, digits: int) -> str:
    """A dash for what does not exist."""
    return ABSENT if value is None else f"{value:.{digits}f}"


def interval(estimate: Estimate | None, digits: int) -> str:
    """The middle, and the interval where there is one."""
    if estimate is None:
        return ABSENT
    middle = f"{estimate.median:.{digits}f}"
    if estimate.low is None or estimate.high is None:
        return middle
    return f"{middle} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"
