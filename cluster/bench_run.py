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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

from rich.console import Console

from cluster.baseline_process import BaselineFailed, BaselineProcess
from cluster.bench import (
    ASSISTED,
    NUM_FIRST_TOKENS,
    TRANSFORMERS,
    BenchFailed,
    Difference,
    Engine,
    Sample,
    engines,
    greedy_differences,
    measure,
    outrider,
)
from cluster.bench_conditions import assistant_in_words, with_load_at_the_end
from cluster.bench_plan import BenchPlan, BenchWish, check_wish, prepare_bench
from cluster.bench_report import Report, as_json, as_text
from cluster.bench_statistics import figures
from cluster.bench_timeline import Runs, save_timeline, watched
from cluster.deployment import DeploymentFailed, private_deployment
from cluster.finding import NO_DRAFT
from cluster.first_token import FirstTokenFailed, seconds_of_command, seconds_of_transformers
from cluster.generation import GenerationFailed
from cluster.interrupts import interrupts
from cluster.memory import DoesNotFit
from cluster.outcome import DONE, FAILED, REFUSED, Refused, require_seconds, say_error, with_option
from cluster.progress import Steps
from cluster.prompt_file import PromptsRefused
from cluster.recording import RecordingFailed
from workers.checkpoints import ModelRefused

STANDARD_OUTPUT = Path("-")

_TYPICAL_TOKENS_PER_SECOND = 13
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
        _check_outlets(outlets)
        with Steps(err) as steps:
            runs: Runs | None = None if outlets.timeline is None else {}
            run = _Run(prepare_bench(wish, steps.say), wish, steps, runs)
            try:
                run.measure(startup_seconds)
            finally:  # half an hour's samples are worth telling, whatever ended it
                steps.end()
                code = tell(run.report(), outlets, err, runs) if run.samples else FAILED
    except (Refused, PromptsRefused) as error:
        return say_error(err, with_option(str(error), _OPTIONS), REFUSED)
    except _FAILURES as error:
        return say_error(err, str(error), FAILED)
    return code


class _Run:
    """One benchmark under way, and what it has found so far."""

    def __init__(self, plan: BenchPlan, wish: BenchWish, steps: Steps, runs: Runs | None) -> None:
        """`runs` is filled for a timeline; None: none is wanted."""
        self.samples: list[Sample] = []
        self._runs = runs
        self._plan = plan
        self._wish = wish
        self._steps = steps
        self._conditions = plan.conditions
        self._first_token_seconds: dict[str, list[float]] = {}
        self._differences: dict[str, list[Difference]] | None = None
        self._contestants: list[Engine] = []

    def measure(self, startup_seconds: float) -> None:
        """Run all of it. However it ends, no process is left."""
        steps, plan, wish = self._steps, self._plan, self._wish
        steps.note(plan.memory)
        minutes = 1 + self._num_runs() * wish.num_tokens / _TYPICAL_TOKENS_PER_SECOND / 60
        steps.note(
            f"Some cold starts, then {self._num_runs()} runs of {wish.num_tokens} tokens, one at a time: "
            f"about {minutes:.0f} min, as two cores do it with the demo pair."
        )
        with interrupts():
            self._time_commands(startup_seconds)
            steps.say("Loading transformers with both models")
            with BaselineProcess(plan.baseline, startup_seconds) as baseline:
                self._conditions = replace(self._conditions, assistant=assistant_in_words(baseline.ready))
                with private_deployment(plan.plan, steps.say, startup_seconds=startup_seconds) as deployed:
                    steps.say("Waiting for the workers to measure themselves")
                    time.sleep(_SETTLE_SECONDS)
                    self._contestants = engines(baseline, deployed.address, plan.draft_lengths)
                    with contextlib.ExitStack() as recording:
                        if self._runs is not None:
                            self._contestants = recording.enter_context(
                                watched(self._contestants, deployed, self._runs)
                            )
                        self._run_blocks()
                if 0 in wish.temperatures:
                    self._differences = greedy_differences(self.samples, plan.prompts, baseline.gap)

    def report(self) -> Report:
        """What is known by now."""
        return Report(
            conditions=with_load_at_the_end(self._conditions),
            questions=self._plan.questions,
            figures=tuple(figures(self.samples, self._contestants, TRANSFORMERS)),
            first_token_seconds=self._first_token_seconds,
            differences=self._differences,
            samples=tuple(self.samples),
            num_runs=self._num_runs(),
        )

    def _num_blocks(self) -> int:
        return self._wish.num_repeats * len(self._plan.prompts) * len(self._wish.temperatures)

    def _num_runs(self) -> int:
        return self._num_blocks() * (2 + len(self._plan.draft_lengths))

    def _run_blocks(self) -> None:
        steps, plan, wish = self._steps, self._plan, self._wish
        steps.say("Warming up every engine")
        begun = time.monotonic()
        blocks = measure(
            self._contestants,
            plan.prompts,
            num_tokens=wish.num_tokens,
            temperatures=wish.temperatures,
            num_repeats=wish.num_repeats,
        )
        for done, block in enumerate(blocks, start=1):
            self.samples += block
            minutes = (time.monotonic() - begun) / done * (self._num_blocks() - done) / 60
            question = plan.questions[block[0].question]
            steps.say(
                f"{done} of {self._num_blocks()} blocks done ({question.name}, temperature "
                f"{block[0].temperature:g}), about {minutes:.0f} min left"
            )

    def _time_commands(self, startup_seconds: float) -> None:
        """From command to first token, in turns, before anything else takes memory and cores."""
        plan, wish = self._plan, self._wish

        def of_transformers(assistant: Path | None) -> float:
            models = plan.baseline.model_copy(update={"assistant": assistant})
            return seconds_of_transformers(models, plan.prompts[0], startup_seconds)

        def of_outrider(draft: str) -> float:
            return seconds_of_command(self._generate(draft, startup_seconds))

        commands: list[tuple[list[str], Callable[[], float]]] = [
            ([TRANSFORMERS], partial(of_transformers, None)),
            ([ASSISTED], partial(of_transformers, plan.baseline.assistant)),
            ([outrider(0)], partial(of_outrider, NO_DRAFT)),
            # The first token comes before any draft, so that one K is as good as another.
            ([outrider(k) for k in plan.draft_lengths if k], partial(of_outrider, wish.draft)),
        ]
        for turn, (names, run) in product(range(1, NUM_FIRST_TOKENS + 1), commands):
            if names:
                self._steps.say(
                    f"Timing commands to their first token, {turn} of {NUM_FIRST_TOKENS}: {names[-1]}"
                )
                seconds = run()
                for name in names:
                    self._first_token_seconds.setdefault(name, []).append(seconds)

    def _generate(self, draft: str, startup_seconds: float) -> Sequence[str]:
        options = {
            "target": self._wish.target,
            "draft": draft,
            "max-tokens": 2,
            "temperature": 0,
            "startup-timeout": startup_seconds,
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        return ["generate", *words, "--", self._plan.questions[0].text]


def _check_outlets(outlets: Outlets) -> None:
    """Refuse now what would lose the result after half an hour."""
    for name, file in (("json", outlets.json), ("picture", outlets.picture), ("timeline", outlets.timeline)):
        if file is not None and file != STANDARD_OUTPUT:
            _check_writable(name, file)
    if outlets.picture is None:
        return
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
} | {
    name: "--" + name.replace("_", "-")
    for name in (
        "num_prompts",
        "prompts",
        "temperatures",
        "draft",
        "json",
        "picture",
        "timeline",
        "startup_timeout",
    )
}
