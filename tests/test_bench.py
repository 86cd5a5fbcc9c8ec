"""A benchmark's runs: fair in their order, equal in length; commands timed; all of it once on a real Ray."""

import contextlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner, Result

from cluster import bench_commands, bench_run
from cluster.bench import (
    TRANSFORMERS,
    BenchFailed,
    Counts,
    Difference,
    Engine,
    Sample,
    Work,
    Written,
    greedy_differences,
    measure,
    outrider,
)
from cluster.bench_load import LoadEngine, LoadRun
from cluster.command_line import app
from cluster.first_token import FirstTokenFailed, seconds_of_command
from cluster.interrupts import Interrupted
from tests.tiny_models import MAX_LENGTH, save_tiny
from workers.baseline_tasks import BaselineReady

PROMPTS = [(1, 2), (3,), (4, 5, 6)]


def _engine(name: str, log: list[tuple[str, Work]], length: int | None = None) -> Engine:
    def write(work: Work) -> Written:
        log.append((name, work))
        return Written(tuple(range(length or work.num_tokens)), 0.1, Counts())

    return Engine(name, name, write)


def test_every_engine_gets_the_same_work_in_an_order_that_changes() -> None:
    log: list[tuple[str, Work]] = []
    engines = [_engine(name, log) for name in "abcd"]
    blocks = list(measure(engines, PROMPTS, num_tokens=5, temperatures=(1.0, 0.0), num_repeats=2))
    assert [(block[0].repeat, block[0].question, block[0].temperature) for block in blocks] == [
        (repeat, question, temperature)
        for repeat in (0, 1)
        for question in (0, 1, 2)
        for temperature in (1.0, 0.0)
    ]
    runs = log[len(engines) :]  # behind the warm-up
    orders = []
    for first in range(0, len(runs), len(engines)):
        block = runs[first : first + len(engines)]
        assert len({work for _, work in block}) == 1
        orders.append("".join(name for name, _ in block))
    assert all(sorted(order) == list("abcd") for order in orders)
    assert len(set(orders)) > len(orders) // 2
    seeds = Counter(work.seed for _, work in runs)
    assert seeds == dict.fromkeys(range(6), 2 * len(engines))  # one a question and repeat


def test_a_text_of_another_length_ends_the_benchmark() -> None:
    with pytest.raises(BenchFailed, match="short wrote 4 tokens of 5"):
        list(measure([_engine("short", [], 4)], PROMPTS, num_tokens=5, temperatures=(0.0,), num_repeats=1))


def test_greedy_texts_are_compared_token_by_token() -> None:
    texts = {TRANSFORMERS: (7, 8, 9), "same": (7, 8, 9), "other": (7, 5, 9)}
    samples = [
        Sample(
            engine, temperature, 1, repeat, Written(text if temperature == 0 else (0, 0, 0), 0.1, Counts())
        )
        for engine, text in texts.items()
        for temperature, repeat in ((0.0, 0), (0.0, 1), (1.0, 0))
    ]
    asked: list[tuple[int, ...]] = []

    def gap(prompt: tuple[int, ...]) -> float:
        asked.append(prompt)
        return 0.25

    assert greedy_differences(samples, PROMPTS, gap) == {"same": [], "other": [Difference(1, 1, 0.25)]}
    assert asked == [(3, 7)]


def test_a_command_is_timed_to_its_first_byte() -> None:
    assert seconds_of_command(["--version"]) > 0


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(FirstTokenFailed, match="ended with 2: Error: --max-tokens is 0"):
        seconds_of_command(["generate", "--max-tokens=0", "text"])


def test_the_command_loads_neither_ray_nor_torch() -> None:
    code = (
        "import sys, cluster.bench_run, cluster.bench_picture;"
        "print(sorted({'ray', 'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pair and two questions."""
    folder = tmp_path_factory.mktemp("bench")
    save_tiny(folder / "target", seed=0)
    save_tiny(folder / "draft", seed=1)
    questions = [{"category": name, "turns": [f"Say {name}."]} for name in ("first", "second")]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, questions)))
    return folder


def _bench(folder: Path, *options: str) -> Result:
    models = ["--target", str(folder / "target"), "--draft", str(folder / "draft")]
    prompts = ["--prompts", str(folder / "prompts.jsonl"), "--num-prompts", "2"]
    return CliRunner().invoke(app, ["bench", *models, *prompts, *options])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--num-prompts", "3"], "has 2 questions in 2 categories; num_prompts is 3"),
        (["--draft-tokens", "3,65"], "--draft-tokens has 65; each K must lie in 0..64"),
        (["--draft-tokens", "three"], "--draft-tokens"),
        (["--temperatures", "nan"], "--temperatures has nan; each must lie in 0..100"),
        (["--tokens", "0"], "--tokens is 0; it must lie in 1..100000"),
        (
            ["--tokens", str(MAX_LENGTH)],
            "--prompts is too long in first, line 1: it has 13 tokens; with 128",
        ),
        (["--draft", "none"], "--draft is none"),
        (["--startup-timeout", "nan"], "--startup-timeout is nan; it must lie in"),
        (["--json", "/no/such/folder/file"], "--json is /no/such/folder/file; it cannot be written: No such"),
        (["--picture", "/proc/picture.svg"], "--picture is /proc/picture.svg; it cannot be written"),
        (["--requests", "1,257"], "--requests has 257; each must lie in 1..256"),
        (["--requests", "1,two"], "--requests"),
        (["--waves", "0"], "--waves is 0; it must lie in 1..100000"),
        (["--blocks", "0"], "--blocks is 0; it must lie in 1..100000"),
        (["--rules", "token,both"], "--rules"),
        (
            ["--requests", "2", "--picture", "p.svg"],
            "--picture shows single requests; have 1 among --requests",
        ),
        (["--picture", "picture.gif"], "--picture is picture.gif; its name must end in .svg or .png"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(
    options: list[str], sentence: str, folder: Path
) -> None:
    result = _bench(folder, *options)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stdout == ""


def test_a_picture_without_matplotlib_is_refused_with_the_remedy(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "cluster.bench_picture", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    result = _bench(folder, "--picture", str(folder / "picture.svg"))
    assert result.exit_code == 2
    assert "-m pip install matplotlib" in result.stderr


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are not timed: that would start a deployment each. Nobody waits for workers that settle."""
    monkeypatch.setattr(bench_run, "_SETTLE_SECONDS", 0.0)
    for name in ("seconds_of_command", "seconds_of_transformers"):
        monkeypatch.setattr(bench_commands, name, lambda *_: 1.5)


@pytest.mark.ray
@pytest.mark.usefixtures("untimed")
def test_a_benchmark_measures_all_engines_and_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.recording.SETTLE_SECONDS", 0.05)
    picture, file, timeline = folder / "picture.svg", folder / "report.json", folder / "timeline.html"
    loads = ["--requests", "1,3", "--blocks", "2", "--batched", "3", "--rules", "token,block"]
    files = ["--picture", str(picture), "--json", str(file), "--timeline", str(timeline)]
    result = _bench(folder, "--tokens", "12", "--draft-tokens", "2,auto", *loads, *files)
    assert result.exit_code == 0, result.stderr
    told = json.loads(file.read_text())
    assert len(told["samples"]) == 2 * 2 * 6
    assert len(told["load_samples"]) == 2 * 2 * 5
    assert told["num_runs"] == len(told["samples"]) + len(told["load_samples"])
    assert {load["run"]["num_tokens"] for load in told["load_samples"]} == {3 * 12}
    assert {(f["num_requests"], f["num_blocks"]) for f in told["loads"]} == {(1, 2), (3, 2)}
    assert all(f["auto_of_it"]["median"] > 0 for f in told["loads"] if "auto" not in f["engine"])
    assert len(told["rules"]) == 2 * 2
    assert {p["engine"] for p in told["closed_form"]} == {f["engine"] for f in told["loads"]} - {TRANSFORMERS}
    assert all(p["reached"]["median"] > 0 for p in told["closed_form"])
    assert all(len(sample["written"]["tokens"]) == 12 for sample in told["samples"])
    drafted = [f for f in told["figures"] if f["engine"] == "Outrider, K = 2"]
    assert all(f["q_bytes_per_draft_token"] > 0 and f["round"]["draft"] > 0 for f in drafted)
    assert all(f["first_token_seconds"] == 1.5 for f in told["figures"])
    engines = {figures["engine"] for figures in told["figures"]}
    assert told["greedy_differences"] == {engine: [] for engine in engines - {TRANSFORMERS}}
    assert "| 0 | Outrider, K = 2" in result.stdout
    assert "<svg" in picture.read_text()
    page = timeline.read_text()
    assert ">Outrider, K = 2</option>" in page
    assert ">3 requests, Outrider, K = 2</option>" in page
    assert psutil.Process().children() == []


@pytest.fixture
def unstarted(untimed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither transformers nor a deployment is started."""
    ready = BaselineReady(
        num_assistant_tokens=20, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.4
    )
    doubles = {
        "BaselineProcess": SimpleNamespace(ready=ready),
        "private_deployment": SimpleNamespace(address="127.0.0.1:1", control_token="t"),
    }
    for name, double in doubles.items():
        monkeypatch.setattr(bench_run, name, lambda *_, double=double, **__: contextlib.nullcontext(double))


@pytest.mark.usefixtures("unstarted")
@pytest.mark.parametrize(
    ("error", "code"),
    [(Interrupted(15), 143), (BenchFailed("d wrote 3 tokens of 4"), 1), (OSError("nobody expects this"), 1)],
)
def test_a_benchmark_that_ends_early_tells_what_it_has(
    error: BaseException, code: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fourth run of d, the third behind the warm-up, does not come to its end."""
    log: list[tuple[str, Work]] = []
    engines = [_engine(TRANSFORMERS, log), _engine("d", log)]

    def fail_at_last(work: Work) -> Written:
        if sum(name == "d" for name, _ in log) == 3:
            raise error
        return engines[1].write(work)

    monkeypatch.setattr(bench_run, "engines", lambda *_: [engines[0], Engine("d", "d", fail_at_last)])
    result = _bench(folder, "--tokens", "4", "--draft-tokens", "0", "--json", "-")
    assert result.exit_code == code
    told = json.loads(result.stdout)
    assert (len(told["samples"]), told["greedy_differences"]) == (4, None)
    assert told["notes"][0] == f"Ended after 4 of {told['num_runs']} runs; what follows is of these."


@pytest.mark.usefixtures("unstarted")
def test_blocks_of_many_requests_are_told_though_a_later_one_was_cut(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is interrupted in its third block, the fourth time that it writes."""
    num_times = 0

    def write(works: Sequence[Work], num_at_once: int) -> LoadRun:
        nonlocal num_times
        num_times += 1
        if num_times == 4:
            raise Interrupted(2)
        return LoadRun(len(works) * works[0].num_tokens, 0.5, Counts())

    monkeypatch.setattr(bench_run, "load_engines", lambda *_: [LoadEngine(outrider(0), write)])
    result = _bench(folder, "--tokens", "4", "--draft-tokens", "0", "--requests", "3", "--temperatures", "1")
    assert result.exit_code == 130
    assert "Many requests at once" in result.stdout
    assert "- Ended after 2 of 8 runs; what follows is of these." in result.stdout
    assert "| 1 |        3 |      2 | Outrider, K = 0 |     24.0 |" in result.stdout
    assert "Speed:" not in result.stdout
