"""How busy each worker was between two looks at a deployment. Arithmetic; asks nothing."""

from collections.abc import Iterable
from dataclasses import dataclass

from protos.control_pb2 import DeploymentStatus


@dataclass(frozen=True, slots=True)
class BusyShare:
    """One worker's time between the looks."""

    role: str  # "target" or "draft"
    address: str
    share: float  # 0..1 of the time, in passes for tasks
    num_passes: int
    num_rows: int  # tokens that these passes were fed

    @property
    def in_words(self) -> str:
        """For a line of a report."""
        rows = f", {self.num_rows / self.num_passes:.1f} rows each" if self.num_passes else ""
        return f"{self.role} at {self.address} busy {self.share:.0%}: {self.num_passes} passes{rows}"


def busy_shares(before: DeploymentStatus, after: DeploymentStatus) -> Iterable[BusyShare]:
    """Of each worker that answered at both looks within one life, in the order of the second."""
    earlier = {worker.address: worker for worker in before.workers if worker.HasField("busy")}
    for worker in after.workers:
        was = earlier.get(worker.address)
        if was is None or not worker.HasField("busy"):
            continue
        seconds = worker.busy.serving_seconds - was.busy.serving_seconds
        if was.process_id != worker.process_id or seconds <= 0:
            continue  # another life, which began at 0
        yield BusyShare(
            role=worker.role,
            address=worker.address,
            share=min(1.0, (worker.busy.busy_seconds - was.busy.busy_seconds) / seconds),
            num_passes=worker.busy.num_passes - was.busy.num_passes,
            num_rows=worker.busy.num_rows - was.busy.num_rows,
        )
