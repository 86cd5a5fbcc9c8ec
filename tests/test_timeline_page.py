"""The page is one well-formed file that needs nothing else, and holds what was recorded."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.bench import Counts, Engine, Work, Written
from cluster.bench_timeline import Runs, save_timeline, watched
from cluster.busy_study import main as busy_study
from cluster.command_line import app
from cluster.plan import Deployed
from cluster.timeline_boxes import window
from cluster.timeline_page import Phase, page
from protos.control_pb2 import Span
from tests.test_timeline_boxes import span

SPANS = [
    span(0, 50, 0, 50, role="draft", first_pass=1, round=2, num_draft_tokens=4, num_tokens=4),
    span(50, 100, 5, 40, first_pass=1, round=2, num_draft_tokens=4, num_tokens=5),
    span(51, 100, 4, 40, first_pass=1, round=9, session="c/22", num_tokens=1),
]
VOID = {"meta", "br", "link", "input"}


class _Reader(HTMLParser):
    """Refuses tags that are not closed in order, and whatever would be fetched from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: dict[str, list[str]] = {}

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href", "srcset", "data", "action"} & {name for name, _ in attributes}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.text.setdefault(self.open[-1], []).append(data)


def read(html: str) -> _Reader:
    assert html.startswith("<!DOCTYPE html>")
    reader = _Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttpRequest|import\(", html)
    return reader


def phases_in(html: str) -> list[dict[str, Any]]:
    found = re.search(r"^const phases = (.*);$", html, re.M)
    assert found is not None
    told: list[dict[str, Any]] = json.loads(found[1])
    return told


def test_the_page_needs_nothing_else_and_has_a_table_of_shares() -> None:
    reader = read(page("A title", [Phase("K = 4", window(SPANS, 1.0))], ["A fact."]))
    assert reader.text["td"][:3] == ["drafter", "draft:1", "50.0 %"]
    assert "A fact." in "".join(reader.text["p"])
    assert "".join(reader.text["h1"]) == "A title"


def test_the_boxes_are_in_it_in_microseconds_of_the_window() -> None:
    [phase] = phases_in(page("t", [Phase("p", window(SPANS, 1.0))], []))
    assert (phase["us"], phase["tokens"]) == (100_000, 6)
    assert phase["groups"] == ["1, 22"]
    drafter, target = phase["lanes"]
    assert (drafter["name"], target["name"], target["busy"]) == ("drafter", "target", 0.4)
    [batch] = target["batches"]
    assert batch["us"] == [57_500, 97_500, 2_500]
    assert batch["tasks"][0] == [0, "1", 2, 4, 0, 5, 50_000, 52_500, 97_500, 100_000]


def test_several_phases_can_be_chosen_and_workers_of_a_role_are_numbered() -> None:
    other = Span()
    other.CopyFrom(SPANS[1])
    other.address = "target:2"
    two = page("t", [Phase("one", window(SPANS, 1.0)), Phase("two", window([*SPANS, other], 1.0))], [])
    reader = read(two)
    assert [text.strip() for text in reader.text["option"]] == ["one", "two"]
    assert [lane["name"] for lane in phases_in(two)[1]["lanes"]] == [
        "drafter",
        "target 1",
        "target 2",
    ]


def test_names_cannot_break_out_of_the_page() -> None:
    evil = "</script><script>alert(1)</script>"
    html = page(evil, [Phase(evil, window(SPANS, 1.0))], [evil])
    assert html.count("<script>") == 1
    assert phases_in(html)[0]["name"] == evil
    read(html)


def test_a_benchmark_keeps_the_run_of_each_engine_that_asked_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = iter([SPANS[:1], SPANS, SPANS[:2], []])

    class Recorder:
        def take(self) -> list[Span]:
            return next(taken)

    class Recording:
        def __init__(self, address: str, token: str) -> None:
            assert (address, token) == ("h:1", "secret")

        def __enter__(self) -> Recorder:
            return Recorder()

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr("cluster.bench_timeline.recording", Recording)
    deployed = Deployed(
        address="h:1", control_token="secret", workers=(), coordinator_pid=1, ray_address="h:2"
    )
    runs: Runs = {}
    engines = [Engine(name, name, lambda work: Written((), 1.0, Counts())) for name in ("ours", "theirs")]
    with watched(engines, deployed, runs) as (ours, theirs):
        for _ in range(3):
            ours.write(Work((1,), 1, 0.0, 0))
        theirs.write(Work((1,), 1, 0.0, 0))
    assert runs == {"ours": SPANS}
    save_timeline(tmp_path / "out.html", runs, ["Two cores."])
    read((tmp_path / "out.html").read_text())


def test_the_study_measures_both_workers_and_draws_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.html"
    load = "--sessions 3 --draft-tokens 2 --verify-ms 20 --settle-seconds 0.3 --seconds 0.5"
    monkeypatch.setattr("sys.argv", ["busy_study", *load.split(), "--timeline", str(file)])
    busy_study()
    table = capsys.readouterr().out
    assert re.search(r"\| target \| +[1-9]", table)
    assert re.search(r"\| draft  \| +[1-9]", table)
    html = file.read_text()
    read(html)
    [phase] = phases_in(html)
    assert [lane["name"] for lane in phase["lanes"]] == ["drafter", "target"]
    assert phase["tokens"]


def test_a_deployment_that_is_not_up_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["timeline", str(tmp_path / "out.html"), "--deployment", "none"])
    assert result.exit_code == 2
    assert "no deployment 'none' is up" in result.stderr
    assert not (tmp_path / "out.html").exists()
