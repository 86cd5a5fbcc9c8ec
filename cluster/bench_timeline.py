"""The timeline of a benchmark: of each way to run the deployment, the run in which it was asked most.

Knows engines and recordings; neither places nor draws (`cluster.timeline_boxes`, `cluster.timeline_page`).
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from cluster.bench import Engine
from cluster.bench_load import LoadEngine
from cluster.plan import Deployed
from cluster.recording import Recorder, recording
from cluster.timeline_boxes import window
from cluster.timeline_page import DRAWN_SECONDS, Phase, save
from protos.control_pb2 import Span

Runs = dict[str, Sequence[Span]]  # by engine and number of requests, what the busiest run asked
E = TypeVar("E", Engine, LoadEngine)


@contextlib.contextmanager
def watched(contestants: Iterable[E], deployed: Deployed, runs: Runs, load: str = "") -> Iterator[list[E]]:
    """The engines, whose runs on `deployed` are recorded into `runs` until the block ends.

    `load` stands before an engine's name. Raises RecordingFailed, and so do the runs.
    """
    with recording(deployed.address, deployed.control_token) as recorder:
        yield [_watched(engine, recorder, runs, f"{load}{engine.name}") for engine in contestants]


def save_timeline(file: Path, runs: Runs, facts: Sequence[str]) -> None:
    """Write the beginning of each run. Raises OSError."""
    phases = [Phase(name, window(runs[name], DRAWN_SECONDS)) for name in sorted(runs)]
    save(file, "Outrider: who was busy when in the benchmark", phases, facts)


def _watched(engine: E, recorder: Recorder, runs: Runs, name: str) -> E:
    def write(*works: Any) -> Any:
        written = engine.write(*works)
        spans = recorder.take()
        if len(spans) > len(runs.get(name, ())):  # an engine that is not the deployment's has none
            runs[name] = spans
        return written

    return replace(engine, write=write)
