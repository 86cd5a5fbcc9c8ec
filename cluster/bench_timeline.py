"""The timeline of a benchmark: of each way to run the deployment, the run in which it was asked most.

Knows engines and recordings; neither places nor draws (`cluster.timeline_boxes`, `cluster.timeline_page`).
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from cluster.bench import Engine, Work, Written
from cluster.plan import Deployed
from cluster.recording import Recorder, recording
from cluster.timeline_boxes import window
from cluster.timeline_page import DRAWN_SECONDS, Phase, save
from protos.control_pb2 import Span

Runs = dict[str, Sequence[Span]]  # of each engine, what its busiest run asked


@contextlib.contextmanager
def watched(contestants: Iterable[Engine], deployed: Deployed, runs: Runs) -> Iterator[list[Engine]]:
    """The engines, whose runs on `deployed` are recorded into `runs` until the block ends.

    Raises RecordingFailed, and so do the runs.
    """
    with recording(deployed.address, deployed.control_token) as recorder:
        yield [_watched(engine, recorder, runs) for engine in contestants]


def save_timeline(file: Path, runs: Runs, facts: Sequence[str]) -> None:
    """Write the beginning of each run. Raises OSError."""
    phases = [Phase(name, window(runs[name], DRAWN_SECONDS)) for name in sorted(runs)]
    save(file, "Outrider: who was busy when in the benchmark", phases, facts)


def _watched(engine: Engine, recorder: Recorder, runs: Runs) -> Engine:
    def write(work: Work) -> Written:
        written = engine.write(work)
        spans = recorder.take()
        if len(spans) > len(runs.get(engine.name, ())):  # an engine that is not the deployment's has none
            runs[engine.name] = spans
        return written

    return replace(engine, write=write)
