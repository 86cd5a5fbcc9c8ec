"""Passes of fixed shape, which a GPU replays as a captured graph: one launch instead of hundreds.

Knows the decoder, its slots, and CUDA graphs; the same code runs uncaptured on a CPU, which is how it is
tested there. A pass of few rows a slot is padded to a shape of a small set: all slots up to the highest one
fed, the same number of rows each. Rows that nobody feeds stand at the position that no row sees.

A graph is captured the first time that its shape is met, which holds up that pass. All graphs share one pool
of memory and one buffer for their logits.

B slots of a pass, T rows of each, S positions that they may see, C logit columns.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from workers.decoder import Decoder
from workers.language_model import Feed
from workers.slot_cache import Places, Run, SlotCache, sent

logger = logging.getLogger(__name__)

MAX_ROWS = 16  # of a slot; longer feeds are prefills, whose arithmetic hides the launches
MAX_PASS_ROWS = 256  # padding included: beyond, too, arithmetic hides them
MIN_SEEN = 256

Shape = tuple[int, int, int]  # B, T, S


class StaticPasses:
    """The passes of one decoder over one cache, by shape."""

    def __init__(self, decoder: Decoder, cache: SlotCache, num_slots: int, max_length: int) -> None:
        """On a CUDA device passes are captured, elsewhere they just run."""
        self._decoder, self._cache = decoder, cache
        self._num_slots, self._max_length = num_slots, max_length
        self._passes: dict[Shape, _StaticPass | None] = {}  # None: its graph could not be captured
        self._logits: Tensor | None = None  # made by the first pass, for all
        self._pool = torch.cuda.graph_pool_handle() if decoder.device.type == "cuda" else None

    def fits(self, feeds: Sequence[Feed]) -> bool:
        """Whether all feeds are short, little of the pass is padding, and its graph could be captured."""
        num_rows = sum(len(feed.tokens) for feed in feeds)
        if max(len(feed.tokens) for feed in feeds) > MAX_ROWS:
            return False
        num_slots, rows_a_slot, _ = shape = self._shape(feeds)
        if num_slots * rows_a_slot > min(MAX_PASS_ROWS, max(8 * num_rows, MAX_ROWS)):
            return False
        with self._on_device():
            return self._pass(shape) is not None

    def run(self, feeds: Sequence[Feed], wanted: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The logits `[wanted, C]` of some rows of the packed pass, and whether all rows are finite, `[]`."""
        shape = self._shape(feeds)
        _, num_rows, _ = shape
        rows = [feed.slot * num_rows + i for feed in feeds for i in range(len(feed.tokens))]
        with self._on_device():
            static = self._pass(shape)
            assert static is not None, "`fits` was asked"
            return static.run(feeds, rows, [rows[i] for i in wanted])

    def steps(self, slots: Sequence[int], positions: Sequence[Sequence[int | None]]) -> "Steps | None":
        """Passes of one row a slot; `positions[i]` are those of pass i, None where a slot is not fed.

        None where their graph could not be captured.
        """
        end = 1 + max(place for row in positions for place in row if place is not None)
        shape = self._shape([Feed(slot, end - 1, (0,), 0) for slot in slots])
        with self._on_device():
            static = self._pass(shape)
            return None if static is None else Steps(static, slots, positions, self._max_length)

    def _pass(self, shape: Shape) -> "_StaticPass | None":
        if shape not in self._passes:
            num_rows = min(MAX_PASS_ROWS, self._num_slots * MAX_ROWS)
            if self._logits is None:
                size = (num_rows, self._decoder.num_columns)
                self._logits = torch.empty(size, dtype=self._decoder.dtype, device=self._decoder.device)
            try:
                self._passes[shape] = _StaticPass(
                    self._decoder, self._cache, shape, self._max_length, self._logits, self._pool
                )
            except RuntimeError:  # out of memory, most likely
                logger.exception("passes of shape %s cannot be captured; they run step by step", shape)
                self._passes[shape] = None
        return self._passes[shape]

    def _on_device(self) -> AbstractContextManager[Any]:
        """Streams and graphs belong to the device that is current."""
        device = self._decoder.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def _shape(self, feeds: Sequence[Feed]) -> Shape:
        return (
            _power(1 + max(feed.slot for feed in feeds), 1, self._num_slots),
            _power(max(len(feed.tokens) for feed in feeds), 1, MAX_ROWS),
            _power(max(feed.start + len(feed.tokens) for feed in feeds), MIN_SEEN, self._max_length),
        )


def _power(size: int, least: int, most: int) -> int:
    """The smallest power of two that holds `size`, within limits."""
    return min(max(1 << (size - 1).bit_length(), least), most)


class _StaticPass:
    """One shape: inputs that stay in place, and what computes the logits from them."""

    def __init__(
        self,
        decoder: Decoder,
        cache: SlotCache,
        shape: Shape,
        idle_position: int,
        logits: Tensor,
        pool: Any,
    ) -> None:
        """`logits` `[at least B * T, C]` takes the result, until the next pass of any shape."""
        num_slots, num_rows, num_seen = shape
        device = self.device = decoder.device
        slots = torch.arange(num_slots).repeat_interleave(num_rows)
        self._idle = torch.stack((slots, torch.full_like(slots, idle_position), torch.zeros_like(slots)))
        self._host, self._copied = self._idle.clone(), None
        if device.type == "cuda":
            self._host, self._copied = self._host.pin_memory(), torch.cuda.Event()
        self._idle_there = self._idle.to(device, copy=True)
        self._table = self._idle.to(device, copy=True)  # on a CPU, too, apart from what it is reset to
        self._logits, self._finite = logits[: len(slots)], torch.ones((), dtype=torch.bool, device=device)
        run = Run(slice(0, len(slots)), slice(0, num_slots), num_rows, start=0, end=num_seen, num_seen=0)
        wanted = torch.arange(len(slots), device=device)

        def compute() -> None:
            places = Places(self._table, [run], decoder.heads_per_kv_head, decoder.dtype)
            result, finite = decoder.logits(places, wanted, cache)
            self._logits.copy_(result)
            self._finite.copy_(finite)

        self._compute = compute if device.type != "cuda" else _captured(compute, pool)

    def run(self, feeds: Sequence[Feed], rows: Sequence[int], wanted: Sequence[int]) -> tuple[Tensor, Tensor]:
        """`rows` are those of the feeds' tokens, in order, `wanted` those whose logits are."""
        if self._copied is not None:
            self._copied.synchronize()  # what was sent last may still be on its way
        self._host.copy_(self._idle)
        where = torch.tensor(rows, dtype=torch.long)
        self._host[1, where] = torch.tensor(
            [feed.start + i for feed in feeds for i in range(len(feed.tokens))]
        )
        self._host[2, where] = torch.tensor([token for feed in feeds for token in feed.tokens])
        self._table.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._compute()
        return self._logits[sent(torch.tensor(wanted, dtype=torch.long), self.device)], self._finite

    def step(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """One row a slot, all of it known on the device."""
        self._table.copy_(self._idle_there)
        self._table[1, rows] = positions
        self._table[2, rows] = tokens
        self._compute()
        return self._logits[rows], self._finite.clone()


class Steps:
    """Consecutive passes of one row a slot, whose tokens need not be known to the host."""

    def __init__(
        self,
        static: _StaticPass,
        slots: Sequence[int],
        positions: Sequence[Sequence[int | None]],
        idle_position: int,
    ) -> None:
        """See `StaticPasses.steps`."""
        self._static = static
        places = [[idle_position if place is None else place for place in row] for row in positions]
        table = sent(torch.tensor([slots, *places], dtype=torch.long), static.device)
        self._rows, self._positions = table[0], table[1:]

    def run(self, index: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Feed `tokens` `[B]`: the logits behind each, `[B, C]`, and whether all rows are finite, `[]`."""
        return self._static.step(self._rows, self._positions[index], tokens)


def _captured(compute: Callable[[], None], pool: Any) -> Callable[[], None]:
    """What replays the kernels of `compute`, whose inputs and outputs stay where they are."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # libraries allocate their workspaces at the first call
            compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        compute()
    return graph.replay
