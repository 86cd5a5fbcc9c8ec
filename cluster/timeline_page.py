"""A timeline as one HTML file that needs nothing else: who was busy when, by lane and group.

Knows windows of boxes and a template; computes no place in time (`cluster.timeline_boxes`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cluster.timeline_boxes import Lane, Window

DRAWN_SECONDS = 5.0  # of a phase: more is not looked at, and makes the file large
MAX_LISTED = 12  # sessions of a group in the legend
_NAMES = {"draft": "drafter", "target": "target"}


@dataclass(frozen=True, slots=True)
class Phase:
    """Something that was measured, and when who worked for it."""

    name: str
    window: Window


def page(title: str, phases: Sequence[Phase], facts: Sequence[str]) -> str:
    """The HTML of one or more phases, of which the page shows one at a time; `facts` stand below them."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    template = environment.get_template("timeline_page.html")
    return template.render(title=title, phases=[_phase(phase) for phase in phases], facts=facts)


def save(file: Path, title: str, phases: Sequence[Phase], facts: Sequence[str]) -> None:
    """Write the page. Raises OSError."""
    file.write_text(page(title, phases, facts), encoding="utf-8")


def _phase(phase: Phase) -> dict[str, Any]:
    window = phase.window
    group_of = {session: i for i, group in enumerate(window.groups) for session in group}
    names = _lane_names(window.lanes)
    return {
        "name": phase.name,
        "us": (window.ended_ns - window.begun_ns) / 1e3,
        "tokens": window.num_tokens,
        "groups": [_listed(group) for group in window.groups],
        "lanes": [
            _lane(lane, name, window.begun_ns, group_of)
            for lane, name in zip(window.lanes, names, strict=True)
        ],
    }


def _lane_names(lanes: Sequence[Lane]) -> list[str]:
    """Workers of a role that has several are numbered."""
    roles = [lane.role for lane in lanes]
    return [
        _NAMES[role] + (f" {roles[:i].count(role) + 1}" if roles.count(role) > 1 else "")
        for i, role in enumerate(roles)
    ]


def _lane(lane: Lane, name: str, begun_ns: int, group_of: dict[str, int]) -> dict[str, Any]:
    """Times are microseconds since the window began; a task is a list, in the template's order."""

    def us(ns: int) -> int:
        return round((ns - begun_ns) / 1e3)

    return {
        "name": name,
        "role": lane.role,
        "address": lane.address,
        "busy": round(lane.busy_share, 4),
        "wire": round(lane.wire_share, 4),
        "rows": 1 + max(lane.rows, default=0),
        "meanSessions": _mean([len(batch.tasks) for batch in lane.batches]),
        "meanMs": _mean([(batch.ready_ns - batch.begun_ns) / 1e6 for batch in lane.batches]),
        "batches": [
            {
                "row": row,
                "us": [us(batch.begun_ns), us(batch.ready_ns), round(batch.slack_ns / 1e3)],
                "tasks": [
                    [
                        group_of.get(task.session, -1),
                        task.session,
                        task.round,
                        task.num_draft_tokens,
                        task.num_sent_tokens,
                        task.num_tokens,
                        us(task.asked_ns),
                        us(task.arrived_ns),
                        us(task.ready_ns),
                        us(task.answered_ns),
                    ]
                    for task in batch.tasks
                ],
            }
            for batch, row in zip(lane.batches, lane.rows, strict=True)
        ],
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _listed(group: Sequence[str]) -> str:
    """Its sessions, in words."""
    ordered = sorted(group, key=lambda session: (len(session), session))
    words = ", ".join(ordered[:MAX_LISTED])
    return words + (f" and {len(ordered) - MAX_LISTED} more" if len(ordered) > MAX_LISTED else "")
