"""A benchmark as a picture: tokens a second by engine, and a round by parts.

Knows matplotlib, an extra of this distribution, and figures; computes none of them. Colours are of Okabe and
Ito's palette, which people with any colour vision tell apart.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cluster.bench_report import Report
from cluster.bench_statistics import Estimate, Figures

KINDS = (".svg", ".png")
_TEMPERATURE_COLOURS = ("#0072B2", "#56B4E9", "#000000", "#999999")
_PART_COLOURS = {"draft": "#E69F00", "wire": "#CC79A7", "target": "#009E73", "rest": "#999999"}
_ROOM_FOR_WORDS = 1.5  # right of the longest bar, times its length


def draw(report: Report) -> Figure:
    """The picture, not yet in a file."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    speeds, rounds = figure.subplots(1, 2)
    _draw_speeds(speeds, report.figures)
    _draw_rounds(rounds, [f for f in report.figures if f.round is not None])
    figure.suptitle(f"Outrider beside transformers: {report.conditions.pair}", fontsize=11)
    figure.supxlabel(f"{report.conditions.machine}; {report.conditions.numbers}", fontsize=8, color="#555555")
    return figure


def save(report: Report, file: Path) -> None:
    """Write the picture in the kind that the file's name says, one of KINDS."""
    draw(report).savefig(file, dpi=150)


def _draw_speeds(axes: Axes, figures: Sequence[Figures]) -> None:
    """A group of bars an engine, one a temperature."""
    engines = list(dict.fromkeys(f.engine for f in figures))
    temperatures = list(dict.fromkeys(f.temperature for f in figures))
    height = 0.8 / len(temperatures)
    for i, temperature in enumerate(temperatures):
        here = [f for f in figures if f.temperature == temperature]
        places = [engines.index(f.engine) + (i - (len(temperatures) - 1) / 2) * height for f in here]
        axes.barh(
            places,
            [f.tokens_per_second.median for f in here],
            height,
            xerr=_error_bars([f.tokens_per_second for f in here]),
            color=_TEMPERATURE_COLOURS[i % len(_TEMPERATURE_COLOURS)],
            error_kw={"capsize": 2, "elinewidth": 1, "ecolor": "#333333"},
            label=f"temperature {temperature:g}",
        )
    _finish(axes, engines, "Tokens a second: median over the prompts, at least 95 % intervals", "tokens/s")


def _draw_rounds(axes: Axes, figures: Sequence[Figures]) -> None:
    """A stacked bar for each K, of the first temperature: at others the parts are much the same."""
    if not figures:
        axes.set_axis_off()
        return
    figures = [f for f in figures if f.temperature == figures[0].temperature]
    for part, colour in _PART_COLOURS.items():
        starts = [_sum_before(f, part) for f in figures]
        axes.barh(
            range(len(figures)),
            [_part(f, part) for f in figures],
            0.6,
            starts,
            color=colour,
            label=part,
        )
    longest = 0.0
    for place, f in enumerate(figures):
        assert f.round is not None
        tokens = f.mean_acceptance_length or 1.0
        words = f"{f.round.total:.0f} ms, {tokens:.2f} tokens:\n{f.round.total / tokens:.0f} ms a token"
        axes.annotate(
            words, (f.round.total, place), (4, 0), textcoords="offset points", va="center", fontsize=8
        )
        longest = max(longest, f.round.total)
    axes.set_xlim(0, longest * _ROOM_FOR_WORDS)
    _finish(
        axes, [f.engine for f in figures], f"A mean round at temperature {figures[0].temperature:g}", "ms"
    )


def _sum_before(figures: Figures, part: str) -> float:
    parts = list(_PART_COLOURS)
    return sum(_part(figures, before) for before in parts[: parts.index(part)])


def _part(figures: Figures, part: str) -> float:
    """A part of its round in ms, 0 for the drafts of a plain one."""
    return float(getattr(figures.round, part) or 0.0)


def _error_bars(estimates: Sequence[Estimate]) -> list[list[float]]:
    """Distances of the intervals' ends from the medians, 0 where there is no interval."""
    return [
        [0.0 if e.low is None else e.median - e.low for e in estimates],
        [0.0 if e.high is None else e.high - e.median for e in estimates],
    ]


def _finish(axes: Axes, names: Sequence[str], title: str, unit: str) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(unit)
    # Below the axes, so that it hides no bar.
    axes.legend(fontsize=8, frameon=False, ncols=4, loc="upper right", bbox_to_anchor=(1, -0.12))
    axes.spines[["top", "right"]].set_visible(False)
