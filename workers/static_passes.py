"""Passes of fixed shape, which a GPU replays as a captured graph: one launch instead of hundreds.

Knows the decoder, its slots, and CUDA graphs; the same code runs uncaptured on a CPU, which is how it is
tested there. A pass of few rows a slot is padded to a shape of a small set: all slots up to the highest one
fed, the same number of rows each. Rows that nobody feeds stand at the position that no row sees.

A graph is captured the first time that its shape is met, which holds up that pass; there are at most
log2(num_slots) * log2(MAX_ROWS) * log2(max_length / MIN_SEEN) of them.

B slots of a pass, T rows of each, S positions that they may see, C logit columns.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workers.decoder import Decoder
from workers.language_model import Feed
from workers.slot_cache import Places, Run, SlotCache

MAX_ROWS = 16  # of a slot; longer feeds are prefills, whose arithmetic hides the launches
MIN_SEEN = 256

Shape = tuple[int, int, int]  # B, T, S


class StaticPasses:
    """The passes of one decoder over one cache, by shape."""

    def __init__(self, decoder: Decoder, cache: SlotCache, num_slots: int, max_length: int) -> None:
        """On a CUDA device passes are captured, elsewhere they just run."""
        self._decoder, self._cache = decoder, cache
        self._num_slots, self._max_length = num_slots, max_length
        self._passes: dict[Shape, _StaticPass] = {}

    def fits(self, feeds: Sequence[Feed]) -> bool:
        """Whether all feeds are short enough."""
        return all(len(feed.tokens) <= MAX_ROWS for feed in feeds)

    def logits(self, feeds: Sequence[Feed], wanted: Sequence[int]) -> Tensor:
        """The logits `[wanted, C]` of some rows of the packed pass."""
        shape = self._shape(feeds)
        if shape not in self._passes:
            self._passes[shape] = _StaticPass(self._decoder, self._cache, shape, self._max_length)
        _, num_rows, _ = shape
        rows = [feed.slot * num_rows + i for feed in feeds for i in range(len(feed.tokens))]
        output = self._passes[shape].run(feeds, rows)
        return output[torch.tensor([rows[i] for i in wanted], dtype=torch.long, device=output.device)]

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

    def __init__(self, decoder: Decoder, cache: SlotCache, shape: Shape, idle_position: int) -> None:
        num_slots, num_rows, num_seen = shape
        device = decoder.device
        slots = torch.arange(num_slots).repeat_interleave(num_rows)
        self._idle = torch.stack((slots, torch.full_like(slots, idle_position), torch.zeros_like(slots)))
        self._host = self._idle.clone()
        if device.type == "cuda":
            self._host = self._host.pin_memory()
        self._table = self._idle.to(device)
        run = Run(slice(0, len(slots)), slice(0, num_slots), num_rows, start=0, end=num_seen, num_seen=0)

        def compute() -> Tensor:
            places = Places(self._table, [run], decoder.heads_per_kv_head, decoder.dtype)
            return decoder.logits(places, torch.arange(len(slots), device=device), cache)

        self._compute = _captured(compute) if device.type == "cuda" else compute

    def run(self, feeds: Sequence[Feed], rows: Sequence[int]) -> Tensor:
        """`rows` are those of the feeds' tokens, in order; `[B * T, C]`, valid until the next run."""
        self._host.copy_(self._idle)
        where = torch.tensor(rows, dtype=torch.long)
        self._host[1, where] = torch.tensor(
            [feed.start + i for feed in feeds for i in range(len(feed.tokens))]
        )
        self._host[2, where] = torch.tensor([token for feed in feeds for token in feed.tokens])
        self._table.copy_(self._host, non_blocking=True)
        return self._compute()


def _captured(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """What replays the kernels of `compute`, whose inputs and output stay where they are."""
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for _ in range(2):  # libraries allocate their workspaces at the first call
            compute()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = compute()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay
