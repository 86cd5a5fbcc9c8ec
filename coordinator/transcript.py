"""What a request has said so far, apart from the streams that read it.

Knows events, their order and who reads them; not how tokens come about. What was said is never changed, so
whoever reads it later, from wherever, reads what was sent before.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import grpc
from google.rpc.error_details_pb2 import ErrorInfo

from protos.inference_pb2 import Finished, FinishReason, GenerateReply, Token, Tokens
from protos.status import DOMAIN, TaskError


class Transcript:
    """The events of one request's choices, in the order in which they came to be."""

    def __init__(self, num_choices: int) -> None:
        """Nothing has been said."""
        self.num_tokens = [0] * num_choices  # committed, by choice
        self.unfinished = set(range(num_choices))
        self._events: list[GenerateReply] = []
        self._failure: TaskError | None = None
        self._stream = 0  # the one that reads; those of lower numbers are over
        self._changed = asyncio.Event()

    def commit(self, choice: int, tokens: Sequence[Token]) -> None:
        """A round of this choice committed these."""
        event = Tokens(choice=choice, first_index=self.num_tokens[choice], tokens=tokens)
        self.num_tokens[choice] += len(tokens)
        self._say(GenerateReply(tokens=event))

    def finish(self, choice: int, reason: "FinishReason", text: str = "") -> None:
        """The choice is complete; `text` was held back for a character that was not."""
        self.unfinished.remove(choice)
        self._say(GenerateReply(finished=Finished(choice=choice, reason=reason, text=text)))

    def fail(self, error: TaskError) -> None:
        """Some choice cannot go on: the stream ends with this, behind what was committed."""
        self._failure = error
        self._changed.set()

    def go_on(self) -> None:
        """What failed is tried again."""
        self._failure = None

    def ids(self, choice: int) -> list[int]:
        """The choice's committed tokens."""
        chunks = (event.tokens for event in self._events if event.HasField("tokens"))
        return [token.id for chunk in chunks if chunk.choice == choice for token in chunk.tokens]

    def begin_stream(self) -> int:
        """The number of a new stream, which is the one that reads from now on: an older one ends."""
        self._stream += 1
        self._changed.set()
        return self._stream

    def is_read_by(self, stream: int) -> bool:
        """Whether no newer stream has begun."""
        return self._stream == stream

    async def read(self, stream: int, start: Sequence[int]) -> AsyncGenerator[GenerateReply, None]:
        """Behind the first `start[c]` tokens of each choice c, as it comes, until all choices are finished.

        Raises TaskError: what the request fails with and how far it came, or ABORTED once a newer stream
        reads.
        """
        position = 0
        while self._stream == stream:
            if position < len(self._events):
                event = _behind(self._events[position], start)
                position += 1
                if event is not None:
                    yield event
            elif self._failure is not None:
                raise self._interrupted(self._failure)
            elif not self.unfinished:
                return
            else:
                self._changed.clear()
                await self._changed.wait()
        raise TaskError(grpc.StatusCode.ABORTED, "another stream reads this request now")

    def _say(self, event: GenerateReply) -> None:
        self._events.append(event)
        self._changed.set()

    def _interrupted(self, error: TaskError) -> TaskError:
        """The error, with how many tokens of each choice stay committed."""
        counts = ",".join(map(str, self.num_tokens))
        info = ErrorInfo(reason="INTERRUPTED", domain=DOMAIN, metadata={"num_committed_tokens": counts})
        return TaskError(error.code, error.message, *error.details, info)


def _behind(event: GenerateReply, start: Sequence[int]) -> GenerateReply | None:
    """The event without the tokens before `start` of its choice; None when nothing is left of it."""
    if not event.HasField("tokens"):
        return event
    chunk = event.tokens
    num_known = start[chunk.choice] - chunk.first_index
    if num_known <= 0:
        return event
    if num_known >= len(chunk.tokens):
        return None
    rest = Tokens(choice=chunk.choice, first_index=start[chunk.choice], tokens=chunk.tokens[num_known:])
    return GenerateReply(tokens=rest)
