"""Clients that ask a deployment without pause while a script of faults runs, and their history.

Knows requests and when faults are due; what is promised is the history's to know.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from protos.inference_pb2 import AbortRequest, GenerateRequest, TokenIds
from tests.fault_history import SAMPLE_PROMPT, SAMPLE_TOKENS, Kind, Record, violations
from tests.fault_models import V, greedy_text
from tests.fault_script import CLIENTS, Fault
from tests.fault_site import Site

NUM_CLIENTS = 8
CHOICES_OF_A_SAMPLE = 16
SEEDED_TOKENS = 60
SEEDS = (3, 5, 8)  # of texts whose undisturbed form is known
CALL_SECONDS = 60.0  # beyond the patience of a session
RETURNING_SHARE = 0.7  # of clients that hung up
CAN_RESUME = "resume_from" in GenerateRequest.DESCRIPTOR.fields_by_name
PAUSE_SECONDS = 0.1  # of a client that was refused


@dataclass
class History:
    """All calls of a run, and the faults of clients among what was done."""

    records: list[Record] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)


class Clients:
    """Some clients of one site, which ask until they are told to stop."""

    def __init__(self, site: Site, seed: int, references: dict[int, list[int]]) -> None:
        """`references` are undisturbed texts by seed, from `undisturbed_texts`."""
        self.history = History()
        self._site = site
        self._random = Random(seed)
        self._references = references
        self._numbers = itertools.count(1)
        self._running: dict[Record, asyncio.Task[None]] = {}
        self._stopping = False

    async def live_through(self, faults: Sequence[Fault]) -> None:
        """Ask while the faults happen, each at its time; then until all calls are over."""
        asking = [asyncio.create_task(self._ask_on()) for _ in range(NUM_CLIENTS)]
        begun = time.monotonic()
        happening: list[asyncio.Task[None]] = []
        for fault in faults:
            await asyncio.sleep(begun + fault.at - time.monotonic())
            happening.append(asyncio.create_task(self._do(fault)))
        await asyncio.gather(*happening)
        self._stopping = True
        await asyncio.gather(*asking)

    def broken(self) -> list[str]:
        """The promises that were broken to these clients, in words."""
        return [
            f"{record.kind} call {record.request.request_id}: {violation}"
            for record in self.history.records
            for violation in violations(record, self._reference(record))
        ]

    def _reference(self, record: Record) -> list[int] | None:
        request = record.request
        if record.kind == "greedy":
            return greedy_text(request.token_ids.ids, request.max_tokens)
        return self._references[request.seed] if record.kind == "seeded" else None

    async def _do(self, fault: Fault) -> None:
        if fault.kind not in CLIENTS:
            await self._site.do(fault)
            return
        if not self._running:
            return
        record = list(self._running)[fault.number % len(self._running)]
        self.history.done[fault.kind] += 1
        if fault.kind == "cancel":
            record.has_left = True
            self._running[record].cancel()
        else:
            record.was_aborted = True
            await self._site.stub.Abort(AbortRequest(request_id=record.request.request_id), timeout=5)

    async def _ask_on(self) -> None:
        while not self._stopping:
            record = self._next_call()
            self.history.records.append(record)
            await self._follow(record, record.request)
            if record.has_left and self._comes_back(record):
                request = GenerateRequest()
                request.CopyFrom(record.request)
                getattr(request, "resume_from").extend(map(len, record.texts))  # noqa: B009
                await self._follow(record, request)
            if record.status is not None:
                await asyncio.sleep(PAUSE_SECONDS)

    async def _follow(self, record: Record, request: GenerateRequest) -> None:
        call = self._site.stub.Generate(request, timeout=CALL_SECONDS)
        self._running[record] = asyncio.create_task(record.follow(call))
        await asyncio.wait([self._running[record]])
        del self._running[record]

    def _comes_back(self, record: Record) -> bool:
        """Whether the client asks for the rest of a call that has begun, as it knows, and was not aborted."""
        is_there = "started" in record.events and not record.was_aborted
        return CAN_RESUME and is_there and self._random.random() < RETURNING_SHARE

    def _next_call(self) -> Record:
        kind: Kind = self._random.choices(("greedy", "seeded", "sample"), (4, 2, 4))[0]
        request = GenerateRequest(request_id=f"r{next(self._numbers)}", ignore_end_tokens=True)
        request.rule = self._random.choice(("token", "block"))
        if kind == "greedy":
            request.temperature = 0.0
            request.token_ids.ids.extend(self._random.choices(range(V), k=self._random.randint(1, 20)))
            request.max_tokens = self._random.randint(20, 120)
            request.auto_draft_tokens = self._random.random() < 0.3
        elif kind == "seeded":
            request.MergeFrom(seeded_request(self._random.choice(SEEDS)))
        else:
            request.token_ids.ids.extend(SAMPLE_PROMPT)
            request.max_tokens, request.n = SAMPLE_TOKENS, CHOICES_OF_A_SAMPLE
            request.seed = self._random.getrandbits(64)
        return Record(kind, request)


def seeded_request(seed: int) -> GenerateRequest:
    """One whose text hangs on its seed alone: drafted for, it would hang on the drafter's health too."""
    ids = TokenIds(ids=[seed % V, 1])
    return GenerateRequest(token_ids=ids, max_tokens=SEEDED_TOKENS, seed=seed, num_draft_tokens=0)


async def undisturbed_texts(site: Site) -> dict[int, list[int]]:
    """By seed, before anything happens."""
    texts = {}
    for seed in SEEDS:
        request = seeded_request(seed)
        request.ignore_end_tokens = True
        record = Record("seeded", request)
        await record.follow(site.stub.Generate(request, timeout=CALL_SECONDS))
        assert record.is_complete, f"the deployment does not work undisturbed: {record}"
        texts[seed] = record.texts[0]
    return texts
