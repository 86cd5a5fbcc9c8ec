"""What `outrider bench` does: find the models, time commands, start the engines, run them in turn, tell the
result.

Knows the order of these steps, and where results go. Ray and torch are loaded by none of them, but in the
processes that they start.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from cluster.baseline_process import BaselineFailed, BaselineProcess
from cluster.bench import (
    TRANSFORMERS,
    BenchFailed,
    Difference,
    Engine,
    Sample,
    engines,
    greedy_differences,
    measure,
)
from cluster.bench_closed_form import form_figures
from cluster.bench_commands import time_commands
from cluster.bench_conditions import assistant_in_words, with_load_at_the_end
from cluster.bench_load import Load, LoadSample, as_load, load_engines, measure_load
from cluster.bench_plan import BenchPlan, BenchWish, check_wish, prepare_bench
from cluster.bench_ratios import load_figures, rule_figures
from cluster.bench_report import Report, as_json, as_text
from cluster.bench_size import BenchSize
from cluster.bench_statistics import figures
from cluster.bench_timeline import E, Runs, save_timeline, watched
from cluster.deployment import DeploymentFailed, private_deployment
from cluster.first_token import FirstTokenFailed
from cluster.generation import GenerationFailed
from cluster.interrupts import interrupts
from cluster.memory import DoesNotFit
from cluster.outcome import DONE, FAILED, REFUSED, Refused, require_seconds, say_error, with_option
from cluster.plan import Deployed
from cluster.progress import Pace, Steps
from cluster.prompt_file import PromptsRefused
from cluster.recording import RecordingFailed
from cluster.told_costs import PassCosts, told_costs
from workers.checkpoints import ModelRefused

STANDARD_OUTPUT = Path("-")

_SETTLE_SECONDS = 8.0  # a new deployment is silent for 3, and then measures its passes for 2
_FAILURES = (
    ModelRefused,
    DeploymentFailed,
    DoesNotFit,
    BaselineFailed,
    BenchFailed,
    FirstTokenFailed,
    GenerationFailed,
    RecordingFailed,
)


@dataclass(frozen=True, slots=True)
class Outlets:
    """Where the result goes beside the table on standard output."""

    json: Path | None  # STANDARD_OUTPUT: instead of the table
    picture: Path | None
    timeline: Path | None = None


def run_bench(wish: BenchWish, outlets: Outlets, *, startup_seconds: float) -> int:
    """Do it, tell the result, and return the exit code. However it ends, what is known is told."""
    err = Console(stderr=True, highlight=False)
    try:
        check_wish(wish)
        require_seconds("startup_timeout", startup_seconds)
        _check_outlets(outlets, wish)
        with Steps(err) as steps:
            runs: Runs | None = None if outlets.timeline is None else {}
            run = _Run(prepare_bench(wish, steps.say), wish, steps, runs)
            try:
                run.measure(startup_seconds)
            finally:  # half an hour's samples are worth telling, whatever ended it
                steps.end()
                code = tell(run.report(), outlets, err, runs) if run.num_samples else FAILED
    except (Refused, PromptsRefused) as error:
        return say_error(err, with_option(str(error), _OPTIONS), REFUSED)
    except _FAILURES as error:
        return say_error(err, str(error), FAILED)
    return code


class _Run:
    """One benchmark under way, and what it has found so far."""

    def __init__(self, plan: BenchPlan, wish: BenchWish, steps: Steps, runs: Runs | None) -> None:
        """`runs` is filled for a timeline; None: none is wanted."""
        self._samples: list[Sample] = []
        self._load_samples: list[LoadSample] = []
        self._costs: dict[tuple[int, int, float], PassCosts] = {}  # just after each block of single requests
        self._runs = runs
        self._plan = plan
        self._wish = wish
        self._steps = steps
        self._size = BenchSize(plan, wish)
        self._conditions = plan.conditions
        self._first_token_seconds: dict[str, list[float]] = {}
        self._differences: dict[str, list[Difference]] | None = None
        self._contestants: list[Engine] = []

    @property
    def num_samples(self) -> int:
        """That are worth telling."""
        return len(self._samples) + len(self._load_samples)

    def measure(self, startup_seconds: float) -> None:
        """Run all of it. However it ends, no process is left."""
        steps, plan, wish, size = self._steps, self._plan, self._wish, self._size
        steps.note(plan.memory)
        steps.note(
            f"Some cold starts, then {size.num_runs} runs of texts of {wish.num_tokens} tokens: "
            f"about {1 + size.seconds / 60:.0f} min, as two cores do it with the demo pair."
        )
        with interrupts():
            if size.num_single_blocks:  # before anything else takes memory and cores
                self._first_token_seconds = time_commands(plan, wish, steps.say, startup_seconds)
            steps.say("Loading transformers with both models")
            with BaselineProcess(plan.baseline, startup_seconds) as baseline:
                if size.num_single_blocks:
                    assistant = assistant_in_words(baseline.ready)
                    self._conditions = replace(self._conditions, assistant=assistant)
                with private_deployment(plan.plan, steps.say, startup_seconds=startup_seconds) as deployed:
                    steps.say("Waiting for the workers to measure themselves")
                    time.sleep(_SETTLE_SECONDS)
                    pace = Pace(size.seconds)
                    if size.num_single_blocks:
                        alone = engines(baseline, deployed.address, plan.drafting)
                        with self._seen(alone, deployed) as self._contestants:
                            self._run_blocks(deployed, pace)
                    for load in plan.loads:
                        self._run_load(load, baseline, deployed, pace)
                if 0 in wish.temperatures:
                    self._differences = greedy_differences(self._samples, plan.prompts, baseline.gap)

    def report(self) -> Report:
        """What is known by now."""
        alone = [as_load(sample, len(self._plan.prompts)) for sample in self._samples]
        samples = [*alone, *self._load_samples]
        names = [engine.name for engine in self._contestants]
        return Report(
            conditions=with_load_at_the_end(self._conditions),
            questions=self._plan.questions,
            figures=tuple(figures(self._samples, self._contestants, TRANSFORMERS)),
            first_token_seconds=self._first_token_seconds,
            differences=self._differences,
            samples=tuple(self._samples),
            num_runs=self._size.num_runs,
            load_samples=tuple(self._load_samples),
            loads=tuple(load_figures(samples, self._plan.drafting)) if self._plan.loads else (),
            rules=tuple(rule_figures(samples, self._plan.drafting)),
            forms=tuple(form_figures(self._samples, names, self._plan.prompts, self._costs)),
        )

    def _run_blocks(self, deployed: Deployed, pace: Pace) -> None:
        steps, plan, wish, size = self._steps, self._plan, self._wish, self._size
        steps.say("Warming up every engine")
        blocks = measure(
            self._contestants,
            plan.prompts,
            num_tokens=wish.num_tokens,
            temperatures=wish.temperatures,
            num_repeats=wish.num_repeats,
        )
        for done, block in enumerate(blocks, start=1):
            self._samples += block
            first = block[0]
            costs = told_costs(deployed.address, deployed.control_token)
            if costs is not None:
                self._costs[first.repeat, first.question, first.temperature] = costs
            pace.done(size.single_block_seconds)
            question = plan.questions[first.question]
            steps.say(
                f"One request: {done} of {size.num_single_blocks} blocks done ({question.name}, temperature "
                f"{first.temperature:g}), about {pace.minutes_left:.0f} min left"
            )

    def _run_load(self, load: Load, baseline: BaselineProcess, deployed: Deployed, pace: Pace) -> None:
        steps, plan, wish, size = self._steps, self._plan, self._wish, self._size
        steps.say(f"{load.num_requests} requests at once: warming up every engine")
        batched = baseline if load.num_requests in wish.batched else None
        ways = load_engines(batched, deployed.address, plan.drafting)
        with self._seen(ways, deployed, f"{load.num_requests} requests, ") as contestants:
            blocks = measure_load(
                contestants, plan.prompts, load, num_tokens=wish.num_tokens, temperatures=wish.temperatures
            )
            for done, block in enumerate(blocks, start=1):
                self._load_samples += block
                pace.done(size.block_seconds(load))
                steps.say(
                    f"{load.num_requests} requests at once: {done} of {size.num_blocks(load)} blocks done "
                    f"(temperature {block[0].temperature:g}), about {pace.minutes_left:.0f} min left"
                )

    @contextlib.contextmanager
    def _seen(self, contestants: list[E], deployed: Deployed, load: str = "") -> Iterator[list[E]]:
        """The engines, recorded where a timeline is wanted."""
        if self._runs is None:
            yield contestants
            return
        with watched(contestants, deployed, self._runs, load) as recorded:
            yield recorded


def _check_outlets(outlets: Outlets, wish: BenchWish) -> None:
    """Refuse now what would lose the result after half an hour."""
    for name, file in (("json", outlets.json), ("picture", outlets.picture), ("timeline", outlets.timeline)):
        if file is not None and file != STANDARD_OUTPUT:
            _check_writable(name, file)
    if outlets.picture is None:
        return
    if 1 not in wish.num_requests:
        raise Refused("picture shows single requests; have 1 among --requests")
    try:
        from cluster.bench_picture import KINDS
    except ModuleNotFoundError as error:
        raise Refused(f"picture needs {error.name}: {sys.executable} -m pip install {error.name}") from None
    if outlets.picture.suffix not in KINDS:
        raise Refused(f"picture is {outlets.picture}; its name must end in {' or '.join(KINDS)}")


def _check_writable(name: str, file: Path) -> None:
    """What the file holds stays until there is something to put in its place."""
    try:
        existed = file.exists()
        file.open("a").close()
        if not existed:
            file.unlink()
    except OSError as error:
        raise Refused(f"{name} is {file}; it cannot be written: {error.strerror}") from None


def tell(report: Report, outlets: Outlets, err: Console, runs: Runs | None = None) -> int:
    """The files, then the table or JSON on standard output; returns the exit code."""
    code = DONE
    try:
        _write_files(report, outlets, runs or {})
    except OSError as error:  # a full disk, a folder gone meanwhile
        code = say_error(err, f"The result cannot be written: {error}", FAILED)
    try:
        print(json.dumps(as_json(report)) if outlets.json == STANDARD_OUTPUT else as_text(report), flush=True)
    except BrokenPipeError:  # whoever read it has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains at its exit
        code = FAILED
    except OSError as error:
        code = say_error(err, f"The result cannot be printed: {error}", FAILED)
    return code


def _write_files(report: Report, outlets: Outlets, runs: Runs) -> None:
    if outlets.json not in (None, STANDARD_OUTPUT):
        outlets.json.write_text(json.dumps(as_json(report), indent=1) + "\n")
    if outlets.picture is not None:
        from cluster.bench_picture import save

        save(report, outlets.picture)
    if outlets.timeline is not None and runs:
        save_timeline(outlets.timeline, runs, report.conditions.sentences())


_OPTIONS = {
    "num_tokens": "--tokens",
    "draft_lengths": "--draft-tokens",
    "num_threads": "--threads",
    "num_repeats": "--repeats",
    "num_requests": "--requests",
    "num_waves": "--waves",
    "num_blocks": "--blocks",
} | {
    name: "--" + name.replace("_", "-")
    for name in (
        "num_prompts",
        "prompts",
        "rules",
        "temperatures",
        "draft",
        "json",
        "picture",
        "timeline",
        "startup_timeout",
    )
}
