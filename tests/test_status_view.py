"""What `ps` shows is what was found: the dead are shown as dead, and a rate of nothing is not shown."""

import json
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from cluster.deployment_state import DeploymentState
from cluster.deployment_status import ActorStatus, DeploymentReport
from cluster.status_view import as_json, view
from protos.control_pb2 import Totals
from protos.pass_cost import PassCost
from protos.worker_pb2 import BusyTime, PrefixCache

STATE = DeploymentState(
    name="night",
    address="127.0.0.1:7480",
    control_token="secret",
    workers=(),
    target="demo",
    draft="demo",
    target_folder=Path("/models/demo"),
    num_draft_tokens=3,
    rule="block",
    folder=Path("/tmp/outrider-1"),
    ray_address="127.0.0.1:6000",
    keeper_pid=10,
    keeper_started=time.time(),
    coordinator_pid=11,
    created_at=time.time(),
)
COORDINATOR = ActorStatus("coordinator", "coordinator", None, STATE.address, 11, 10**8, None, None, 2, "")
TARGET = ActorStatus("target-0", "target", "[demo]", "127.0.0.1:1", 12, 2 * 10**9, 32, 5, 2, "")
REPORT = DeploymentReport(
    state=STATE,
    uptime_seconds=3725.0,
    num_cores=4,
    memory_bytes=3 * 10**9,
    actors=(COORDINATOR, TARGET),
    num_running_sessions=2,
    num_waiting_sessions=1,
    totals=Totals(num_requests=7, num_drafts=10, num_draft_tokens=30, num_accepted_tokens=12),
    problems=(),
)


def _shown(report: DeploymentReport) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(view(report))
    return capture.get()


def test_a_healthy_deployment_is_shown_with_its_actors_and_rates() -> None:
    text = _shown(REPORT)
    assert "night at 127.0.0.1:7480, up 1 h 2 min: healthy" in text
    row = next(line for line in text.splitlines() if "target-0" in line)
    assert row.split() == ["target-0", "target", "[demo]", "12", "2.00", "GB", "5/32", "2", "healthy"]
    assert "2 running, 1 waiting" in text
    assert "acceptance 40.0%, mean acceptance length 2.20" in text
    assert "secret" not in text


def test_what_passes_take_is_shown_where_it_is_known() -> None:
    assert "a pass of" not in _shown(REPORT)
    cost = PassCost((1, 4, 64), (0.0381, 0.042, 0.3), 1e-6, 0.002)
    drafter = replace(TARGET, name="drafter-0", cost=PassCost((1,), (0.00312,), 0.0, 0.0))
    report = replace(REPORT, actors=(COORDINATOR, replace(TARGET, cost=cost), drafter))
    text = _shown(report)
    assert "a pass of target-0: 1 row 38 ms, 4 rows 42 ms, 16 rows 94 ms, 64 rows 300 ms\n" in text
    assert "a pass of drafter-0: 1 row 3.1 ms\n" in text
    assert "a plain step" in text
    coordinator, target, _ = json.loads(json.dumps(as_json(report)))["actors"]
    assert target["cost"]["rows"] == [1, 4, 64]
    assert target["cost"]["seconds"] == [0.0381, 0.042, 0.3]
    assert "cost" not in coordinator


def test_how_busy_a_worker_was_lately_is_shown_where_it_tells() -> None:
    busy = BusyTime(serving_seconds=100.0, busy_seconds=30.0, num_passes=7, num_rows=9, recent_share=0.937)
    report = replace(REPORT, actors=(COORDINATOR, replace(TARGET, busy=busy)))
    row = next(line for line in _shown(report).splitlines() if "target-0" in line)
    assert row.split()[-3:] == ["2", "94%", "healthy"]
    coordinator, target = json.loads(json.dumps(as_json(report)))["actors"]
    assert target["busy"] == {
        "serving_seconds": 100.0,
        "busy_seconds": 30.0,
        "num_passes": 7,
        "num_rows": 9,
        "recent_share": 0.937,
    }
    assert "busy" not in coordinator


def test_what_shared_prefixes_save_is_shown_where_there_were_prompts() -> None:
    assert "prompts of" not in _shown(replace(REPORT, actors=(replace(TARGET, prefixes=PrefixCache()),)))
    prefixes = PrefixCache(num_prefills=8, num_hits=6, num_prefill_tokens=1600, num_cached_tokens=900)
    report = replace(REPORT, actors=(COORDINATOR, replace(TARGET, prefixes=prefixes)))
    shared = "75% of 8 shared a prefix; 900 of 1600 tokens were there already"
    assert f"prompts of target-0: {shared}\n" in _shown(report)
    coordinator, target = json.loads(json.dumps(as_json(report)))["actors"]
    assert "prefixes" not in coordinator
    assert target["prefixes"] == {
        "num_prefills": 8,
        "num_hits": 6,
        "num_prefill_tokens": 1600,
        "num_cached_tokens": 900,
    }


def test_what_is_wrong_is_shown_with_what_to_do() -> None:
    dead = replace(TARGET, memory_bytes=None, num_slots=None, problem="its process is gone")
    problem = "target-0: its process is gone. To start anew: `outrider down night`"
    text = _shown(replace(REPORT, actors=(COORDINATOR, dead), problems=(problem,)))
    assert "not healthy" in text
    assert "`outrider down night`" in text
    shown = as_json(replace(REPORT, actors=(COORDINATOR, dead), problems=(problem,)))
    assert (shown["is_healthy"], shown["problems"]) == (False, [problem])
    assert shown["actors"][1]["problem"] == "its process is gone"
    assert "memory_bytes" not in shown["actors"][1]


def test_faults_are_counted_where_there_are_any() -> None:
    assert "mismatch" not in _shown(REPORT)
    assert "drafts that are not" not in _shown(REPORT)
    totals = Totals(num_requests=1, num_redraw_mismatches=3, num_fallbacks=2)
    shown = _shown(replace(REPORT, totals=totals))
    assert "3 drafts that are not their rows'" in shown
    assert "2 rounds without the drafter" in shown


def test_a_rate_of_nothing_and_a_silent_coordinators_counts_are_left_out() -> None:
    undrafted = replace(REPORT, totals=Totals(num_requests=1, num_completion_tokens=4))
    assert "acceptance" not in _shown(undrafted)
    assert "acceptance_rate" not in as_json(undrafted)
    silent = replace(REPORT, totals=None, num_running_sessions=None, num_waiting_sessions=None)
    assert "sessions: not known" in _shown(silent)
    assert {"totals", "num_sessions", "acceptance_rate"}.isdisjoint(as_json(silent))


def test_the_object_has_everything_but_the_token() -> None:
    text = json.dumps(as_json(REPORT))
    shown = json.loads(text)
    assert shown["totals"]["num_requests"] == 7
    assert shown["acceptance_rate"] == 0.4
    assert shown["nodes"] == [{"ray_address": "127.0.0.1:6000", "num_cores": 4, "memory_bytes": 3 * 10**9}]
    assert "secret" not in text
