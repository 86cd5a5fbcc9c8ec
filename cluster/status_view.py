"""How the state of deployments looks: a table for people, an object for programs.

Pure functions from reports to text and JSON. Knows no process, service or console.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cluster.deployment_status import ActorStatus, DeploymentReport
from cluster.terminal import plural
from protos.control_pb2 import Totals
from protos.pass_cost import PassCost, PassShape
from protos.worker_pb2 import PrefixCache

GB = 1e9
_SHOWN_ROWS = (1, 4, 16, 64, 256)
_ROWS_IN_WORDS = (
    "rows: 1 of a target is a plain step; K drafts are K passes of a drafter and K + 1 rows of a target"
)
_COUNTS = (
    "num_requests",
    "num_completion_tokens",
    "num_rounds",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_fallbacks",
    "num_unusable_rows",
    "num_redraw_mismatches",
    "num_migrations",
)


def view(report: DeploymentReport) -> Group:
    """The deployment on a screen: a headline, its actors, its counts, its problems."""
    state = report.state
    models = f"target {state.target}"
    if state.draft is not None:
        models += f", draft {state.draft}, {state.draft_tokens_in_words}"
    lines = [
        Text(f"{state.name}", "bold")
        + Text(f" at {state.address}, up {_duration(report.uptime_seconds)}: ", "not bold")
        + (Text("not healthy", "bold red") if report.problems else Text("healthy", "green")),
        Text(f"{models}, {state.rule} rule"),
        Text(
            f"node {state.ray_address.rpartition(':')[0]} (this machine): {report.num_cores} cores,"
            f" {report.memory_bytes / GB:.1f} GB used by {plural(len(report.actors), 'actor')} and Ray"
        ),
    ]
    passes = [Text(f"a pass of {actor.name}: {_cost(actor.cost)}") for actor in report.actors if actor.cost]
    if passes:
        passes.append(Text(_ROWS_IN_WORDS, "dim"))
    prompts = [
        Text(f"prompts of {actor.name}: {_prefixes(actor.prefixes)}")
        for actor in report.actors
        if actor.prefixes and actor.prefixes.num_prefills
    ]
    return Group(
        *lines,
        _table(report.actors),
        *passes,
        *prompts,
        Text(_counts(report)),
        *map(Text, report.problems),
    )


def _table(actors: Sequence[ActorStatus]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("actor", "role", "model"):
        table.add_column(name, overflow="fold")
    for name in ("pid", "memory", "slots", "sessions", "busy"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("health", overflow="fold")
    for actor in actors:
        slots = "" if actor.num_slots is None else f"{actor.num_slots_used}/{actor.num_slots}"
        table.add_row(
            actor.name,
            actor.role,
            Text(actor.model or ""),
            str(actor.pid),
            "" if actor.memory_bytes is None else f"{actor.memory_bytes / GB:.2f} GB",
            slots,
            "" if actor.num_sessions is None else str(actor.num_sessions),
            "" if actor.busy is None else f"{actor.busy.recent_share:.0%}",
            _health(actor),
        )
    return table


def _health(actor: ActorStatus) -> Text:
    if actor.problem:
        return Text(actor.problem, "red")
    return Text(actor.notice, "yellow") if actor.notice else Text("healthy", "green")


def _cost(cost: PassCost) -> str:
    """Of sessions at their start; the rest is in the object for programs."""
    shown = [rows for rows in _SHOWN_ROWS if rows <= cost.rows[-1]]
    return ", ".join(
        f"{plural(rows, 'row')} {_milliseconds(cost.pass_seconds(PassShape(rows, 0, 1)))} ms"
        for rows in shown
    )


def _prefixes(prefixes: PrefixCache) -> str:
    """How often a prompt, or its beginning, was there already, and what that saved."""
    share = f"{prefixes.num_hits / prefixes.num_prefills:.0%} of {prefixes.num_prefills} shared a prefix"
    return f"{share}; {prefixes.num_cached_tokens} of {prefixes.num_prefill_tokens} tokens were there already"


def _milliseconds(seconds: float) -> str:
    """Two digits at least."""
    return f"{1000 * seconds:.{0 if seconds >= 0.01 else 1 if seconds >= 0.001 else 2}f}"


def _counts(report: DeploymentReport) -> str:
    """What the coordinator has counted; a rate of nothing is left out."""
    totals = report.totals
    if totals is None:
        return "sessions: not known"
    parts = [
        f"sessions: {report.num_running_sessions} running, {report.num_waiting_sessions} waiting",
        f"{plural(totals.num_requests, 'request')}, {plural(totals.num_completion_tokens, 'token')},"
        f" {plural(totals.num_rounds, 'round')}",
    ]
    if report.acceptance_rate is not None and report.mean_acceptance_length is not None:
        parts.append(
            f"acceptance {report.acceptance_rate:.1%}, mean acceptance length"
            f" {report.mean_acceptance_length:.2f}"
        )
    return "; ".join([*parts, *_faults(totals, sum(actor.num_broken_rows for actor in report.actors))])


def _faults(totals: Totals, num_broken_rows: int) -> list[str]:
    """What should not occur and did."""
    counts = {
        "rows of logits that are not finite": num_broken_rows,
        "rounds without the drafter, which failed": totals.num_fallbacks,
        "unusable rows of q": totals.num_unusable_rows,
        "drafts that are not their rows'": totals.num_redraw_mismatches,
        "moves to another target": totals.num_migrations,
    }
    return [f"{count} {what}" for what, count in counts.items() if count]


def as_json(report: DeploymentReport) -> dict[str, Any]:
    """Everything by name; what is not known or does not exist is left out. Holds no token."""
    state = report.state
    sessions = {"running": report.num_running_sessions, "waiting": report.num_waiting_sessions}
    return _known(
        {
            "name": state.name,
            "address": state.address,
            "is_healthy": not report.problems,
            "problems": list(report.problems),
            "uptime_seconds": report.uptime_seconds,
            "target": state.target,
            "draft": state.draft,
            "num_draft_tokens": state.num_draft_tokens,
            "rule": state.rule,
            "folder": str(state.folder),
            "keeper_pid": state.keeper_pid,
            "nodes": [
                {
                    "ray_address": state.ray_address,
                    "num_cores": report.num_cores,
                    "memory_bytes": report.memory_bytes,
                }
            ],
            "actors": [_actor_as_json(actor) for actor in report.actors],
            "num_sessions": _known(sessions) or None,
            "totals": report.totals and {name: getattr(report.totals, name) for name in _COUNTS},
            "acceptance_rate": report.acceptance_rate,
            "mean_acceptance_length": report.mean_acceptance_length,
        }
    )


def _actor_as_json(actor: ActorStatus) -> dict[str, Any]:
    fields = {name: getattr(actor, name) for name in ActorStatus.__dataclass_fields__ if name != "problem"}
    fields["cost"] = actor.cost and asdict(actor.cost)
    for name in ("busy", "prefixes"):
        message = getattr(actor, name)
        fields[name] = message and {
            field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields
        }
    return _known(fields | {"is_healthy": not actor.problem, "problem": actor.problem or None})


def _known(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _duration(seconds: float) -> str:
    """In the two largest units."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    units = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    first = next((i for i, (count, _) in enumerate(units) if count), 3)
    return " ".join(f"{count} {unit}" for count, unit in units[first : first + 2])
