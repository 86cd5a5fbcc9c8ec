"""A worker process that the fault harness may kill, stop and slow down: a table model behind the real server.

`python -m tests.fault_worker ROLE PORT` prints its address and serves until its input closes. A SIGUSR1 makes
its passes slow for a while.
"""

import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from typing import cast

from tests.fault_models import MAX_LENGTH, V, draft_law, target_law
from workers.server import ModelIdentity, Role, WorkerConfig, WorkerServer
from workers.table_model import TableModel

NUM_SLOTS = 64
LEASE_SECONDS = 3.0  # a release may be lost like any message
PASS_SECONDS = {"target": 0.004, "draft": 0.001}
SLOW_PASS_SECONDS, SLOW_FOR_SECONDS = 0.15, 1.0


class Pace:
    """What a pass takes, whatever is in it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._slow_until = 0.0

    def slow_down(self) -> None:
        self._slow_until = time.monotonic() + SLOW_FOR_SECONDS

    def __call__(self, lengths: Sequence[int]) -> float:
        return SLOW_PASS_SECONDS if time.monotonic() < self._slow_until else self._seconds


async def serve(role: Role, port: int) -> None:
    """Until the input closes."""
    loop = asyncio.get_running_loop()
    pace = Pace(PASS_SECONDS[role])
    loop.add_signal_handler(signal.SIGUSR1, pace.slow_down)
    law = target_law if role == "target" else draft_law
    server = WorkerServer(
        role,
        TableModel(law, V, num_slots=NUM_SLOTS, max_length=MAX_LENGTH, latency_seconds=pace),
        ModelIdentity(role, "", (), "table"),
        WorkerConfig(port=port, lease_seconds=LEASE_SECONDS, min_shared_tokens=1),
    )
    print(await server.start(), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    await server.stop(0.1)


if __name__ == "__main__":
    asyncio.run(serve(cast(Role, sys.argv[1]), int(sys.argv[2])))
