"""What a figure must be given with: models, precision, threads, machine, prompts, versions.

Asks the operating system and the installed distributions. Measures nothing.
"""

import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path

import psutil

from cluster.bench import Rule
from cluster.bench_load import Load
from cluster.machine import usable_cores
from cluster.prompt_file import OWN_QUESTIONS, Question
from workers.baseline_tasks import BaselineReady

_DISTRIBUTIONS = ("outrider", "torch", "transformers", "ray", "grpcio")


@dataclass(frozen=True, slots=True)
class Conditions:
    """The circumstances of one benchmark, in words."""

    pair: str
    numbers: str  # precision, threads, requests at once, rule
    machine: str
    load: str
    prompts: str
    sampling: str
    assistant: str
    versions: str

    def sentences(self) -> list[str]:
        """Those that are known."""
        known = [str(getattr(self, field.name)) for field in fields(self)]
        return [words[:1].upper() + words[1:] + "." for words in known if words]


def conditions(
    *,
    target: str,
    draft: str,
    num_threads: int,
    file: Path,
    questions: Sequence[Question],
    num_tokens: int,
    temperatures: Sequence[float],
    num_repeats: int,
    num_requests: Sequence[int],
    loads: Sequence[Load],
    rules: Sequence[Rule],
) -> Conditions:
    """What holds before the first run; `assistant` is known only when transformers has loaded."""
    name = "the project's own" if file == OWN_QUESTIONS else file.name
    categories = ", ".join(
        category if count == 1 else f"{count} {category}"
        for category, count in Counter(question.category for question in questions).items()
    )
    times = "" if num_repeats == 1 else f", {num_repeats} times each"
    return Conditions(
        pair=f"target {target}, draft {draft}",
        numbers=(
            f"float32 on CPU, {_threads(num_threads)} for every engine; {_at_once(num_requests, loads)};"
            " Outrider runs a draft of few layers in int8, in 1 thread, and judges by the"
            f" {' and the '.join(rules)} rule"
        ),
        machine=f"{_processor()}, {usable_cores()} cores, {psutil.virtual_memory().total / 1e9:.0f} GB",
        load=f"load average {os.getloadavg()[0]:.2f} at the start",
        prompts=f"{len(questions)} first turns of {name} ({categories})",
        sampling=(
            f"{num_tokens} tokens each{times}, end tokens ignored, temperature "
            + " and ".join(f"{temperature:g}" for temperature in temperatures)
            + ", no top-k, top-p or min-p; the prompt's pass counts into tokens/s"
        ),
        assistant="",
        versions=", ".join(f"{name} {version(name)}" for name in _DISTRIBUTIONS)
        + f", Python {platform.python_version()}",
    )


def with_load_at_the_end(known: Conditions) -> Conditions:
    """Adds the load average after the last run; the runs themselves make up most of it."""
    return replace(known, load=f"{known.load}, {os.getloadavg()[0]:.2f} at the end (the runs included)")


def assistant_in_words(ready: BaselineReady) -> str:
    """How transformers drafts by its own defaults."""
    return (
        "transformers assisted: the draft with its whole head as assistant_model, "
        f"num_assistant_tokens {ready.num_assistant_tokens} ({ready.num_assistant_tokens_schedule}), "
        f"assistant_confidence_threshold {ready.assistant_confidence_threshold} (transformers' defaults, "
        "or the draft's own)"
    )


def _at_once(num_requests: Sequence[int], loads: Sequence[Load]) -> str:
    """How many requests, and in how many blocks of how many texts where there are several."""
    words = ["one request at a time"] if 1 in num_requests else []
    for load in loads:
        blocks = "1 block" if load.num_blocks == 1 else f"{load.num_blocks} blocks"
        words.append(f"{load.num_requests} requests at once in {blocks} of {load.num_texts}")
    return ", ".join(words)


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _processor() -> str:
    """The processor's name as Linux tells it; elsewhere what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
