"""Has one target judge a proposal, once.

Knows the target's client and what an answer must be like; not what is done about a target that gives none.
"""

import time
from dataclasses import dataclass

from coordinator.sessions import Session
from coordinator.timeline import Timeline
from coordinator.worker_client import WorkerClient
from protos.control_pb2 import CIRCUIT_UNSPECIFIED, Circuit
from protos.status import TaskError
from protos.worker_pb2 import VerifyResult, VerifyTask


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """How the target is asked."""

    timeout_seconds: float  # of one attempt
    prefill_timeout_seconds: float  # of one attempt where the target holds nothing of the session
    patience_seconds: float  # of a round, from when its target was lost
    max_migrations: int = 3  # of a session, to other targets


class Verifier:
    """One target, seen from its sessions."""

    def __init__(
        self, client: WorkerClient, settings: VerifySettings, timeline: Timeline | None = None
    ) -> None:
        """Ask `client`, which has started, as `settings` say; `timeline` gets to know of it."""
        self._timeline = timeline or Timeline()
        self.num_slots = client.info.num_slots
        self.num_sessions = 0  # that are placed here
        self.client = client
        self._settings = settings

    @property
    def is_ready(self) -> bool:
        """Whether the target can be asked now."""
        return self.client.is_connected

    @property
    def problem(self) -> str:
        """What its sessions know against the target: nothing that its connection does not show."""
        return ""

    @property
    def notice(self) -> str:
        """What is odd about a target that answers: nothing that its sessions see."""
        return ""

    @property
    def circuit(self) -> "Circuit":
        """None: a target is asked until patience ends."""
        return CIRCUIT_UNSPECIFIED

    def forget(self, session: Session) -> None:
        """The session is over."""
        self.client.release(session.id)

    async def ask(self, session: Session, task: VerifyTask) -> VerifyResult:
        """The verdict on the task's proposal; `task` gets to say where the session stands.

        Raises TaskError: what the target said, what is wrong with its answer, or that there is none.
        """
        client, seat = self.client, session.target_seat
        info, length = client.info, len(session.tokens)
        is_prefill = seat.epoch != info.epoch or seat.length == 0
        timeout_seconds = (
            self._settings.prefill_timeout_seconds if is_prefill else self._settings.timeout_seconds
        )
        task.state.CopyFrom(seat.state(session, info.epoch, timeout_seconds))
        asked_ns = time.monotonic_ns()
        try:
            reply = await client.ask(task, timeout_seconds)
        except TaskError as error:
            if error.worker_length is not None:
                if not 0 <= error.worker_length < task.state.start:  # so this ends
                    raise TaskError.internal("the target asks for tokens that it was sent") from None
                seat.epoch, seat.length = info.epoch, error.worker_length
            raise
        result = reply.verify
        if result.digest != task.digest:
            raise TaskError.data_loss("the verdict is on another proposal")
        if result.num_accepted > len(task.proposal.tokens) // 4 or result.token >= info.vocab_size:
            raise TaskError.internal(f"the target's verdict cannot be: {result.num_accepted} accepted")
        seat.epoch, seat.length = info.epoch, length
        if self._timeline.is_watched:
            self._timeline.record("target", client.address, task, asked_ns, reply)
        return result
