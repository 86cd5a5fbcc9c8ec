"""Who was asked what, when: spans of tasks, for those who watch.

Knows answered tasks and watchers; not what is made of the spans. While nobody watches nothing is kept, and
asking costs a look at an empty list. What a watcher has not read is bounded: it loses the oldest.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import Literal

from protos.control_pb2 import Span, Spans
from protos.worker_pb2 import DraftTask, TaskReply, VerifyTask

MAX_UNREAD = 1 << 16
MAX_SPANS = 2000  # of a message, which stays well below what gRPC takes
PAUSE_SECONDS = 0.05  # between messages, so that a busy coordinator writes few


class Timeline:
    """Of one coordinator."""

    def __init__(self) -> None:
        """Nobody watches."""
        self._watchers: list[_Watcher] = []
        self._has_ended = False

    @property
    def is_watched(self) -> bool:
        """Whether anybody wants spans: where nobody does, there is nothing to record."""
        return bool(self._watchers)

    def record(
        self,
        role: Literal["draft", "target"],
        address: str,
        task: DraftTask | VerifyTask,
        asked_ns: int,
        reply: TaskReply,
    ) -> None:
        """A task that has been answered just now, without an error."""
        if isinstance(task, DraftTask):
            times, num_draft_tokens = reply.draft.times, task.num_draft_tokens
            num_tokens = len(reply.draft.proposal.tokens) // 4
        else:
            times, num_draft_tokens = reply.verify.times, len(task.proposal.tokens) // 4
            num_tokens = reply.verify.num_accepted + 1
        span = Span(
            role=role,
            address=address,
            session=task.state.session,
            round=task.state.round,
            num_draft_tokens=num_draft_tokens,
            num_sent_tokens=len(task.state.tokens) // 4,
            asked_ns=asked_ns,
            answered_ns=time.monotonic_ns(),
            times=times if times.total_ns else None,
            num_tokens=num_tokens,
        )
        for watcher in self._watchers:
            watcher.add(span)

    async def watch(self) -> AsyncGenerator[Spans, None]:
        """What is recorded from now on, until `end`; the first message is empty and comes at once."""
        watcher = _Watcher()
        self._watchers.append(watcher)
        try:
            yield Spans()
            while not self._has_ended:
                await watcher.some.wait()
                yield watcher.take()
                await asyncio.sleep(PAUSE_SECONDS)
            while watcher.some.is_set():
                yield watcher.take()
        finally:
            self._watchers.remove(watcher)

    def end(self) -> None:
        """Nobody is to watch any longer: those who do get what there is."""
        self._has_ended = True
        for watcher in self._watchers:
            watcher.some.set()  # wakes it; what it takes last is empty


class _Watcher:
    """What one of them has not read yet."""

    def __init__(self) -> None:
        self.some = asyncio.Event()
        self._spans: deque[Span] = deque(maxlen=MAX_UNREAD)
        self._num_lost = 0

    def add(self, span: Span) -> None:
        self._num_lost += len(self._spans) == MAX_UNREAD
        self._spans.append(span)
        self.some.set()

    def take(self) -> Spans:
        """The oldest, as many as a message may have."""
        spans = Spans(num_lost=self._num_lost)
        self._num_lost = 0
        for _ in range(min(len(self._spans), MAX_SPANS)):
            spans.spans.append(self._spans.popleft())
        if not self._spans:
            self.some.clear()
        return spans
