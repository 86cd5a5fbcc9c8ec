"""How a report on the law looks: as tables for people, and as JSON.

Knows reports and how to name tokens; prints nothing.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from cluster.joint_law import Cell, Kind
from cluster.law_report import FALSE_ALARM, LEVEL, LawReport, Verdict
from cluster.terminal import printable

NUM_CELLS = 10
NameTokens = Callable[[Sequence[int]], str]

_WORDS = {
    Verdict.CONSISTENT: ("The samples are consistent with the target's law.", "bold green"),
    Verdict.INCONSISTENT: ("The samples are NOT consistent with the target's law.", "bold red"),
    Verdict.INCONCLUSIVE: ("The check is inconclusive.", "bold yellow"),
}


def law_tables(report: LawReport, name: NameTokens) -> Group:
    """What was checked and found, the likeliest cells, and the verdict."""
    return Group(_findings(report), Text(), _cells(report, name), Text(), _verdict(report))


def _findings(report: LawReport) -> Table:
    chi, accepted = report.chi_square, f"{report.num_accepted:,} of {report.num_judged:,} judged"
    table = Table(
        "checked", "found", "", title="The law of the service's samples, against p", title_justify="left"
    )
    drafts = f" of up to {len(report.num_accepted_per_pos)}" if report.num_draft_tokens else ""
    table.add_row(
        "samples",
        f"{report.num_samples:,} of {report.depth} tokens, {report.share_verified:.0%} of those behind"
        f" the first from rounds with drafts{drafts}",
    )
    table.add_row("samples cut short", f"{report.num_cut}", _mark(not report.num_cut))
    if report.num_targets > 1:
        num_others = len(report.differing_targets)
        table.add_row(
            "targets",
            f"{report.num_targets}, of which {num_others} give another row behind the prompt than the first",
            _mark(not report.differing_targets),
        )
    table.add_row(
        "rows of p",
        f"{report.num_rows}, for {report.num_checked:,} of the {report.num_tokens:,} sampled tokens",
    )
    table.add_row("tokens of probability 0", f"{len(report.impossible)}", _mark(not report.impossible))
    table.add_row(
        "joint law",
        f"chi-square {chi.statistic:.1f} at {chi.degrees_of_freedom} degrees of freedom,"
        f" p-value {_p_value(chi.p_value)}",
        _mark(chi.p_value >= LEVEL),
    )
    table.add_row(
        "samples independent",
        f"p-value {_p_value(report.pairs_p_value)}",
        _mark(report.pairs_p_value >= LEVEL),
    )
    if report.acceptance_p_value is not None and report.num_judged:
        table.add_row(
            "draft tokens kept",
            f"{accepted}, expected {report.expected_accepted:,.1f},"
            f" p-value {_p_value(report.acceptance_p_value)}",
            _mark(report.acceptance_p_value >= LEVEL),
        )
    elif report.num_judged:
        table.add_row("draft tokens kept", accepted)
    table.add_row(
        "drawn from their rows",
        f"{report.num_draft_tokens - report.num_mismatches:,} of {report.num_draft_tokens:,} draft tokens",
        _mark(not report.num_mismatches),
    )
    table.add_row("unusable rows of q", f"{report.num_unusable}", _mark(not report.num_unusable))
    return table


def _cells(report: LawReport, name: NameTokens) -> Table:
    table = Table("samples that begin with", "expected", "observed", title_justify="left")
    table.title = f"The likeliest of {len(report.partition.cells)} cells"
    for column in table.columns[1:]:
        column.justify = "right"
    likeliest = sorted(
        zip(report.partition.cells, report.counts, strict=True), key=lambda pair: -pair[0].mass
    )
    for cell, count in likeliest[:NUM_CELLS]:
        table.add_row(Text(_cell(cell, name)), f"{cell.mass * report.num_compared:.1f}", f"{count}")
    return table


def _verdict(report: LawReport) -> Text:
    sentence, style = _WORDS[report.verdict]
    text = Text(sentence, style)
    sentences = (*report.faults, *report.doubts, *report.limits)
    text.append("".join(f" {each}" for each in sentences), "not bold default")
    if report.verdict is Verdict.CONSISTENT:
        text.append(
            f" A sound deployment fails this check about once in {round(1 / FALSE_ALARM):,} times.",
            "not bold default",
        )
    elif report.verdict is Verdict.INCONSISTENT:
        text.append(
            " Check again with another seed: chance alone does not fail twice. If it fails again, do not use"
            " this deployment: start it anew and check it before use. Where it passes with --draft none, the"
            " drafter is at fault.",
            "not bold default",
        )
    else:
        text.append(" Check again with more time, or while the service has less to do.", "not bold default")
    return text


def _mark(is_fine: bool) -> Text:
    return Text("ok", "green") if is_fine else Text("FAULT", "bold red")


def _p_value(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else f"{value:.1e}"


def _cell(cell: Cell, name: NameTokens) -> str:
    if cell.kind is Kind.REST:
        return "anything else"
    begin = printable(json.dumps(name(cell.tokens), ensure_ascii=False)) if cell.tokens else ""
    if cell.kind is Kind.OTHER:
        return f"{begin} and any other token" if begin else "any other first token"
    return begin


def law_as_json(report: LawReport, name: NameTokens) -> dict[str, Any]:
    """Everything by name."""
    return {
        "verdict": report.verdict.value,
        "faults": list(report.faults),
        "doubts": list(report.doubts),
        "limits": list(report.limits),
        "num_samples": report.num_samples,
        "num_samples_wanted": report.num_wanted,
        "num_tokens_compared": report.depth,
        "num_rows": report.num_rows,
        "num_sampled_tokens": report.num_tokens,
        "num_checked_tokens": report.num_checked,
        "share_from_rounds_with_drafts": report.share_verified,
        "impossible": [
            {"prefix": list(each.prefix), "token": each.token, "text": name((*each.prefix, each.token))}
            for each in report.impossible
        ],
        "chi_square": report.chi_square.statistic,
        "degrees_of_freedom": report.chi_square.degrees_of_freedom,
        "chi_square_p_value": report.chi_square.p_value,
        "pairs_p_value": report.pairs_p_value,
        "num_draft_tokens": report.num_draft_tokens,
        "num_judged_tokens": report.num_judged,
        "num_accepted_tokens": report.num_accepted,
        "num_accepted_tokens_per_pos": list(report.num_accepted_per_pos),
        "expected_accepted_tokens": report.expected_accepted,
        "acceptance_p_value": report.acceptance_p_value,
        "num_redraw_mismatches": report.num_mismatches,
        "num_unusable_rows": report.num_unusable,
        "num_cut_samples": report.num_cut,
        "num_targets": report.num_targets,
        "differing_targets": list(report.differing_targets),
        "level": LEVEL,
        "cells": [
            {
                "kind": cell.kind.value,
                "tokens": list(cell.tokens),
                "text": name(cell.tokens),
                "expected": cell.mass * report.num_compared,
                "observed": count,
            }
            for cell, count in zip(report.partition.cells, report.counts, strict=True)
        ],
    }
