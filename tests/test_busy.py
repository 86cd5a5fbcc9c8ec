"""Busy shares: a worker counts its own time, the last seconds of it, and two looks give the time between."""

import pytest

from cluster.busy_shares import BusyShare, busy_shares
from protos.control_pb2 import DeploymentStatus, WorkerHealth
from protos.worker_pb2 import BusyTime
from tests.test_jobs import PROMPT, draft_task
from tests.test_worker_server import at, plain, serving, until
from workers.busy import Busy

SECOND = 10**9


class Clock:
    def __init__(self) -> None:
        self.now = 1_700 * SECOND + 500_000_000

    def __call__(self) -> int:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += round(seconds * SECOND)


def _work(busy: Busy, clock: Clock, seconds: float) -> None:
    busy.begin()
    clock.pass_by(seconds)
    busy.count(2, 7)
    busy.end()


def test_time_at_work_passes_and_rows_add_up() -> None:
    clock = Clock()
    busy = Busy(clock)
    for _ in range(3):
        _work(busy, clock, 0.25)
        clock.pass_by(0.75)
    told = busy.to_message()
    assert (told.serving_seconds, told.busy_seconds) == (3.0, 0.75)
    assert (told.num_passes, told.num_rows, busy.num_passes) == (6, 21, 6)
    assert told.recent_share == pytest.approx(0.25)


def test_the_pass_at_hand_counts_up_to_now_and_once() -> None:
    clock = Clock()
    busy = Busy(clock)
    clock.pass_by(1)
    busy.begin()
    clock.pass_by(3)
    for _ in range(2):
        told = busy.to_message()
        assert (told.busy_seconds, told.recent_share) == (3.0, 0.75)
    busy.end()
    assert busy.to_message().busy_seconds == 3.0


def test_the_recent_share_forgets_what_is_long_over() -> None:
    clock = Clock()
    busy = Busy(clock)
    _work(busy, clock, 30)
    assert busy.to_message().recent_share == 1.0
    clock.pass_by(5)
    assert busy.to_message().recent_share == pytest.approx(0.5, abs=0.05)  # of 10 seconds and a part of one
    clock.pass_by(6.5)
    told = busy.to_message()
    assert (told.recent_share, told.busy_seconds) == (0.0, 30.0)


def test_what_is_kept_does_not_grow() -> None:
    clock = Clock()
    busy = Busy(clock)
    for _ in range(400):
        _work(busy, clock, 0.2)
        clock.pass_by(0.2)
    assert len(busy._by_second) <= 11
    assert busy.to_message().recent_share == pytest.approx(0.5, abs=0.02)


async def test_a_worker_counts_its_tasks_passes_and_not_those_that_measure() -> None:
    async with serving(calibration_seconds=2.0) as worker:
        (reply,) = await worker.connect().ask(plain(PROMPT, "s"))
        await until(lambda: worker.server.status().cost.rows[-1:] == [8])
        told = worker.server.status().busy
        assert (told.num_passes, told.num_rows) == (1, len(PROMPT))
        assert 0 < told.busy_seconds < told.serving_seconds
        assert reply.verify.times.first_pass == 0


async def test_k_drafts_are_k_passes_and_a_task_tells_its_first_one() -> None:
    async with serving(role="draft", calibration_seconds=0.0) as worker:
        stream = worker.connect()
        (first,) = await stream.ask(draft_task(at(PROMPT, "s"), 3))
        told = worker.server.status().busy
        assert (told.num_passes, told.num_rows) == (3, len(PROMPT) + 2)
        (second,) = await stream.ask(draft_task(at(PROMPT, "t"), 2))
        assert (first.draft.times.first_pass, second.draft.times.first_pass) == (0, 3)


def _worker(pid: int, serving: float, busy: float, passes: int = 0, rows: int = 0) -> WorkerHealth:
    time = BusyTime(serving_seconds=serving, busy_seconds=busy, num_passes=passes, num_rows=rows)
    return WorkerHealth(role="target", address="h:1", process_id=pid, busy=time)


def test_two_looks_give_what_was_between() -> None:
    before = DeploymentStatus(workers=[_worker(7, 10.0, 4.0, 100, 300)])
    after = DeploymentStatus(workers=[_worker(7, 14.0, 7.0, 150, 500)])
    [share] = busy_shares(before, after)
    assert share == BusyShare("target", "h:1", 0.75, 50, 200)
    assert share.in_words == "target at h:1 busy 75%: 50 passes, 4.0 rows each"
    [idle] = busy_shares(after, DeploymentStatus(workers=[_worker(7, 15.0, 7.0, 150, 500)]))
    assert idle.in_words == "target at h:1 busy 0%: 0 passes"


@pytest.mark.parametrize(
    "after", [_worker(8, 14.0, 1.0), _worker(7, 10.0, 4.0), WorkerHealth(role="target", address="h:1")]
)
def test_another_life_no_time_and_no_answer_give_no_share(after: WorkerHealth) -> None:
    before = DeploymentStatus(workers=[_worker(7, 10.0, 4.0)])
    assert list(busy_shares(before, DeploymentStatus(workers=[after]))) == []
    assert list(busy_shares(DeploymentStatus(), before)) == []
