"""How a benchmark is told: the tables to the letter, the plain sentence, JSON without NaN, the picture."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from rich.console import Console

from cluster.bench import ASSISTED, TRANSFORMERS, Counts, Difference, Sample, Written, outrider
from cluster.bench_conditions import Conditions
from cluster.bench_picture import draw, save
from cluster.bench_report import Report, as_json, as_text, sentences, verdict
from cluster.bench_run import Outlets, tell
from cluster.bench_statistics import Estimate, Figures, Round
from cluster.outcome import FAILED
from cluster.prompt_file import Question

NO_DRAFTS = Figures(
    engine=TRANSFORMERS,
    temperature=1.0,
    tokens_per_second=Estimate(10.0, 9.5, 10.5),
    of_transformers=None,
    of_plain=None,
    share_drafted=None,
    acceptance_rate=None,
    mean_acceptance_length=None,
    mean_min_pq=None,
    accepted_of_judged=None,
    q_bytes_per_draft_token=None,
    round=None,
    num_fallbacks=0,
)
PLAIN = replace(
    NO_DRAFTS,
    engine=outrider(0),
    tokens_per_second=Estimate(12.0, 11.0, 13.0),
    of_transformers=Estimate(1.2, 1.1, 1.3),
    round=Round(None, 0.5, 80.0, 0.25),
)
DRAFTED = replace(
    PLAIN,
    engine=outrider(3),
    tokens_per_second=Estimate(9.0, 8.0, 10.0),
    of_transformers=Estimate(0.9, 0.85, 0.95),
    of_plain=Estimate(0.75, 0.7, 0.8),
    share_drafted=0.98,
    acceptance_rate=0.1,
    mean_acceptance_length=1.3,
    mean_min_pq=0.28,
    accepted_of_judged=0.27,
    q_bytes_per_draft_token=390.6,
    round=Round(30.0, 1.0, 100.0, 0.5),
)
CONDITIONS = Conditions(
    "target a, draft b", "float32", "a machine", "load", "prompts", "sampling", "", "versions"
)
TEXT = Written((1, 2), 0.2, Counts())
REPORT = Report(
    conditions=CONDITIONS,
    questions=(Question("math", "1 + 1?", 4),),
    figures=(NO_DRAFTS, PLAIN, DRAFTED),
    first_token_seconds={TRANSFORMERS: [6.04, 5.9, 20.0], outrider(3): [14.96]},
    differences={outrider(0): [], outrider(3): [Difference(0, 1, 0.0004)]},
    samples=tuple(Sample(engine, 0.0, 0, 0, TEXT) for engine in (TRANSFORMERS, outrider(0), outrider(3))),
    num_runs=3,
)
SPEED = """\
| T | engine          |          tokens/s |   of transformers |      of own plain | first token, s |
|---|-----------------|-------------------|-------------------|-------------------|----------------|
| 1 | transformers    |  10.0 [9.5, 10.5] |                 – |                 – |            6.0 |
| 1 | Outrider, K = 0 | 12.0 [11.0, 13.0] | 1.20 [1.10, 1.30] |                 – |              – |
| 1 | Outrider, K = 3 |   9.0 [8.0, 10.0] | 0.90 [0.85, 0.95] | 0.75 [0.70, 0.80] |           15.0 |
"""
DRAFTS = """\
| T | engine          | drafted | accepted | length | Σ min(p, q) | acc./judged | q bytes | draft | wire | target | rest | round |
|---|-----------------|---------|----------|--------|-------------|-------------|---------|-------|------|--------|------|-------|
| 1 | transformers    |       – |        – |      – |           – |           – |       – |     – |    – |      – |    – |     – |
| 1 | Outrider, K = 0 |       – |        – |      – |           – |           – |       – |     – |  0.5 |   80.0 |  0.2 |  80.8 |
| 1 | Outrider, K = 3 |    0.98 |    0.100 |   1.30 |       0.280 |       0.270 |     391 |  30.0 |  1.0 |  100.0 |  0.5 | 131.5 |
"""  # noqa: E501


def test_the_tables_are_markdown_with_dashes_for_what_is_absent() -> None:
    assert SPEED in as_text(REPORT)
    assert DRAFTS in as_text(REPORT)


@pytest.mark.parametrize(
    ("ratio", "outcome"),
    [
        (
            Estimate(0.75, 0.7, 0.8),
            "0.75 [0.70, 0.80] times plain decoding by the same engine: it does not pay",
        ),
        (Estimate(1.25, 1.1, 1.4), "1.25 [1.10, 1.40] times plain decoding by the same engine: it pays"),
        (
            Estimate(1.25, 0.9, 1.6),
            "1.25 [0.90, 1.60] times plain decoding by the same engine: no clear difference",
        ),
        (Estimate(1.25, None, None), "1.25 times plain decoding by the same engine: too few prompts to tell"),
    ],
)
def test_the_result_is_said_in_one_plain_sentence(ratio: Estimate, outcome: str) -> None:
    worse = replace(DRAFTED, engine=outrider(5), of_plain=Estimate(0.5, 0.4, 0.6))
    report = replace(REPORT, figures=(NO_DRAFTS, PLAIN, replace(DRAFTED, of_plain=ratio), worse))
    sentence = verdict(report, 1.0)
    assert sentence.startswith("At temperature 1, drafting with K = 3, the best K here, is " + outcome)
    assert sentence.endswith("; without drafts, Outrider is 1.20 [1.10, 1.30] times transformers' generate.")


def test_greedy_texts_that_differ_are_placed_with_the_gap_there() -> None:
    told = sentences(REPORT)
    assert "Outrider, K = 0: 1 of 1 greedy texts are transformers' generate's." in told
    [part] = [sentence for sentence in told if sentence.startswith("Outrider, K = 3: 0 of 1")]
    assert part.endswith(": token 2 of math, line 4, 0.0004.")


def test_failed_rounds_and_an_early_end_are_said() -> None:
    failed = replace(DRAFTED, num_fallbacks=7)
    told = sentences(replace(REPORT, figures=(NO_DRAFTS, PLAIN, failed), num_runs=12))
    assert told[0] == "Ended after 3 of 12 runs; what follows is of these."
    assert "Outrider, K = 3 at temperature 1: the drafter failed 7 rounds." in told


def test_json_leaves_out_what_is_absent() -> None:
    told = json.loads(json.dumps(as_json(REPORT), allow_nan=False))
    plain, drafted = told["figures"][0], told["figures"][2]
    assert "acceptance_rate" not in plain
    assert (drafted["acceptance_rate"], drafted["first_token_seconds"]) == (0.1, 14.96)
    assert (plain["first_token_seconds"], plain["first_token_seconds_range"]) == (6.04, [5.9, 20.0])
    assert "first_token_seconds" not in told["figures"][1]
    assert told["samples"][0]["written"]["tokens"] == [1, 2]
    assert told["questions"] == [{"category": "math", "line": 4}]


def test_few_prompts_are_said() -> None:
    few = "Prompts: only 1 of 1 categories; a figure to go by needs at least 13, one a category."
    assert few in sentences(REPORT)
    enough = tuple(Question(f"category {i}", "1 + 1?", i) for i in range(13))
    assert few[:13] not in "".join(sentences(replace(REPORT, questions=enough)))
    one = tuple(replace(question, category="math") for question in enough)
    assert any("only 13 of 1 categories" in s for s in sentences(replace(REPORT, questions=one)))


def test_a_closed_pipe_leaves_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    files = Outlets(tmp_path / "report.json", tmp_path / "picture.svg")
    with os.fdopen(writing, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert tell(REPORT, files, Console(stderr=True)) == FAILED
    assert json.loads((tmp_path / "report.json").read_text())["num_runs"] == 3
    assert "<svg" in (tmp_path / "picture.svg").read_text()


def test_files_that_cannot_be_written_leave_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert tell(REPORT, Outlets(Path("/dev/full"), None), Console(stderr=True)) == FAILED
    out, err = capsys.readouterr()
    assert SPEED in out
    assert "Error: The result cannot be written: [Errno 28]" in err


def _widths(axes: Axes) -> list[float]:
    return [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)]


def test_the_picture_shows_speeds_with_intervals_and_rounds_by_parts(tmp_path: Path) -> None:
    greedy = tuple(replace(f, temperature=0.0) for f in REPORT.figures)
    report = replace(REPORT, figures=REPORT.figures + greedy)
    speeds, rounds = draw(report).axes
    engines = [TRANSFORMERS, outrider(0), outrider(3)]
    assert [label.get_text() for label in speeds.get_yticklabels()] == engines
    assert _widths(speeds) == [10.0, 12.0, 9.0] * 2
    legend = speeds.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["temperature 1", "temperature 0"]
    assert [label.get_text() for label in rounds.get_yticklabels()] == engines[1:]
    assert _widths(rounds) == [0, 30, 0.5, 1, 80, 100, 0.25, 0.5]
    assert rounds.texts[1].get_text() == "132 ms, 1.30 tokens:\n101 ms a token"
    for kind in ("svg", "png"):
        save(report, tmp_path / f"picture.{kind}")
    assert "<svg" in (tmp_path / "picture.svg").read_text()
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_rounds_is_drawn_all_the_same() -> None:
    only = replace(NO_DRAFTS, engine=ASSISTED, tokens_per_second=Estimate(5.0, None, None))
    assert len(draw(replace(REPORT, figures=(NO_DRAFTS, only))).axes) == 2
