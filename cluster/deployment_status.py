"""How a deployment that stays is doing: its file, its processes, and what its coordinator says, put together.

Knows the operating system's accounts and the control service. Changes nothing, and needs no Ray: a stopped or
dead part is told from what the system says of its process, the rest from what the coordinator sees.
"""

import time
from collections.abc import Container, Iterable
from dataclasses import dataclass

import grpc
import psutil

from cluster.deployment_state import DeploymentState
from cluster.machine import usable_cores
from protos import control_pb2_grpc
from protos.authorization import metadata
from protos.control_pb2 import DeploymentStatus, GetDeploymentStatusRequest, Totals, WorkerHealth
from protos.pass_cost import PassCost
from protos.worker_pb2 import BusyTime, PrefixCache

Memory = dict[int, int]  # bytes of each living process of the deployment
ANSWER_SECONDS = 3.0  # the coordinator itself waits a second for its workers
_RAY_PROCESSES = ("gcs_server", "raylet")  # without either Ray ends its actors


@dataclass(frozen=True, slots=True)
class ActorStatus:
    """One actor. None: not known, or there is no such thing."""

    name: str
    role: str
    model: str | None
    address: str
    pid: int
    memory_bytes: int | None
    num_slots: int | None
    num_slots_used: int | None
    num_sessions: int | None
    problem: str  # in words; empty when healthy
    cost: PassCost | None = None  # what passes of its model take
    busy: BusyTime | None = None  # how much of its time its model was at work
    prefixes: PrefixCache | None = None  # what its sessions have taken over from others
    num_broken_rows: int = 0  # of p that were no distribution
    notice: str | None = None  # what is odd though it serves, in words


@dataclass(frozen=True, slots=True)
class DeploymentReport:
    """One deployment."""

    state: DeploymentState
    uptime_seconds: float
    num_cores: int
    memory_bytes: int  # of all its processes
    actors: tuple[ActorStatus, ...]  # the coordinator first
    num_running_sessions: int | None  # None: the coordinator does not answer
    num_waiting_sessions: int | None
    totals: Totals | None
    problems: tuple[str, ...]  # sentences: what is wrong, and what to do; none when all is well

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted of all drafted tokens; None when nothing was drafted."""
        totals = self.totals
        return (
            totals.num_accepted_tokens / totals.num_draft_tokens
            if totals and totals.num_draft_tokens
            else None
        )

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted tokens a drafting round; None when nothing was drafted."""
        totals = self.totals
        return 1 + totals.num_accepted_tokens / totals.num_drafts if totals and totals.num_drafts else None


def examine(state: DeploymentState) -> DeploymentReport:
    """Look at the deployment. Takes ANSWER_SECONDS at most, and milliseconds when all is well."""
    memory = {pid: _memory(pid) for pid in state.processes()}
    answer = _ask(state) if memory else "does not run"  # the token is not for whoever has the port by now
    status = answer if isinstance(answer, DeploymentStatus) else None
    actors = (_coordinator(state, memory, answer), *_workers(state, memory, status))
    return DeploymentReport(
        state=state,
        uptime_seconds=max(0.0, time.time() - state.created_at),
        num_cores=usable_cores(),
        memory_bytes=sum(memory.values()),
        actors=actors,
        num_running_sessions=status.num_running_sessions if status else None,
        num_waiting_sessions=status.num_waiting_sessions if status else None,
        totals=status.totals if status else None,
        problems=tuple(_problems(state, memory, actors)),
    )


def _ask(state: DeploymentState) -> DeploymentStatus | str:
    """What the coordinator says, or why it says nothing."""
    with grpc.insecure_channel(state.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            stub = control_pb2_grpc.ControlStub(channel)
            request = GetDeploymentStatusRequest()
            token = metadata(state.control_token)
            status: DeploymentStatus = stub.GetStatus(request, timeout=ANSWER_SECONDS, metadata=token)
            return status
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"does not answer within {ANSWER_SECONDS:g} s"
            return f"does not answer ({error.code().name}: {error.details()})"


def _coordinator(state: DeploymentState, memory: Memory, answer: DeploymentStatus | str) -> ActorStatus:
    pid, silence, num_sessions = state.coordinator_pid, "", None
    if isinstance(answer, str):
        silence = answer
    else:
        pid, num_sessions = answer.process_id or pid, answer.num_running_sessions
    return ActorStatus(
        name="coordinator",
        role="coordinator",
        model=None,
        address=state.address,
        pid=pid,
        memory_bytes=memory.get(pid),
        num_slots=None,
        num_slots_used=None,
        num_sessions=num_sessions,
        problem=_process_problem(pid, memory) or silence,
    )


def _workers(
    state: DeploymentState, memory: Memory, status: DeploymentStatus | None
) -> Iterable[ActorStatus]:
    told = {worker.address: worker for worker in status.workers} if status else {}
    for worker in state.workers:
        health = told.get(worker.address, WorkerHealth(problem="not known: the coordinator does not answer"))
        pid = health.process_id or worker.pid  # another one since it was started again
        yield ActorStatus(
            name=worker.name,
            role=worker.role,
            model=worker.model,
            address=worker.address,
            pid=pid,
            memory_bytes=memory.get(pid),
            num_slots=health.num_slots or None,
            num_slots_used=health.num_slots_used if health.num_slots else None,
            num_sessions=health.num_sessions if status else None,
            problem=_process_problem(pid, memory) or ("" if health.is_healthy else health.problem),
            cost=_cost(health),
            busy=health.busy if health.HasField("busy") else None,
            prefixes=health.prefixes if health.HasField("prefixes") else None,
            num_broken_rows=health.num_broken_rows,
            notice=health.notice or None,
        )


def _cost(health: WorkerHealth) -> PassCost | None:
    """What it tells of its passes, if that can be."""
    try:
        return PassCost.from_message(health.cost) if health.HasField("cost") else None
    except ValueError:
        return None


def _problems(state: DeploymentState, memory: Memory, actors: Iterable[ActorStatus]) -> Iterable[str]:
    down = f"`outrider down {state.name}`"
    if not memory:
        yield f"All its processes have ended without `outrider down`; {down} removes what they left behind."
        return
    if problem := _process_problem(state.keeper_pid, memory):
        yield f"The keeper (pid {state.keeper_pid}): {problem}. All else goes on; {down} ends it as well."
    names = {_name(pid) for pid in memory}
    if lost := [name for name in _RAY_PROCESSES if name not in names]:
        yield (
            f"Ray has lost {' and '.join(lost)}, so its actors will end. To start anew: {down}, then"
            " `outrider up`."
        )
    sick = [f"{actor.name}: {actor.problem}" for actor in actors if actor.problem]
    if sick:
        yield f"{'; '.join(sick)}. To start anew: {down}, then `outrider up`."


def _process_problem(pid: int, members: Container[int]) -> str:
    """What is wrong with a process as such; '' when it runs."""
    try:
        status = psutil.Process(pid).status() if pid in members else psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        status = psutil.STATUS_ZOMBIE
    if status == psutil.STATUS_ZOMBIE:
        return "its process is gone"
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return f"its process is stopped (`kill -CONT {pid}` lets it go on)"
    return ""


def _name(pid: int) -> str:
    """The program's; '' for a dead process."""
    try:
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else process.name()
    except psutil.Error:
        return ""


def _memory(pid: int) -> int:
    """Bytes that the process takes; pages shared with others count in part, where the system tells."""
    try:
        memory = psutil.Process(pid).memory_full_info()
        return int(getattr(memory, "pss", 0) or memory.rss)
    except psutil.Error:
        return 0
