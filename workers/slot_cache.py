"""Keys and values of numbered slots, and the attention of a pass over them.

Knows torch; not the model's weights, nor which tokens the slots stand for. Nothing is copied, joined or
padded to attend: a slot's keys stand in one block, and neighbouring slots that are fed alike are one call on
a view of their blocks.

N rows of a pass, T rows of a feed, H heads, G KV heads, R = H/G, D head dimension.
"""

import contextlib
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from workers.language_model import Feed

# Slots that are fed alike share a call while that costs fewer than this many idle positions: about what
# a call of its own costs (50 us against some 80 ns to read a position's keys and values of one layer).
_CALL_POSITIONS = 512


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring slots that feed the same number of rows each: one call a layer."""

    rows: slice  # of the pass
    slots: slice
    num_rows: int  # T, of each slot
    start: int  # the first position of any row
    end: int  # one past the last position of any row
    num_seen: int  # positions that the slots' last rows see, summed

    @property
    def num_slots(self) -> int:
        """Slots in the call."""
        return int(self.slots.stop - self.slots.start)

    def first_seen(self, window: int | None) -> int:
        """The first position that any row sees."""
        return 0 if window is None else max(0, self.start - window + 1)

    @property
    def num_idle(self) -> int:
        """Positions that the call goes through and no row sees."""
        return self.num_slots * self.end - self.num_seen


def in_call_order(feeds: Sequence[Feed]) -> list[int]:
    """Indices of the feeds such that those which can share a call are neighbours."""
    return sorted(range(len(feeds)), key=lambda i: (len(feeds[i].tokens), feeds[i].slot))


def runs_of(feeds: Sequence[Feed]) -> list[Run]:
    """The calls for feeds in call order."""
    runs: list[Run] = []
    row = 0
    for feed in feeds:
        end_row, end = row + len(feed.tokens), feed.start + len(feed.tokens)
        slots = slice(feed.slot, feed.slot + 1)
        run = Run(slice(row, end_row), slots, len(feed.tokens), feed.start, end, num_seen=end)
        if runs and (joined := _joined(runs[-1], run)):
            runs[-1] = joined
        else:
            runs.append(run)
        row = end_row
    return runs


def _joined(before: Run, run: Run) -> Run | None:
    if before.num_rows != run.num_rows or before.slots.stop != run.slots.start:
        return None
    both = Run(
        rows=slice(before.rows.start, run.rows.stop),
        slots=slice(before.slots.start, run.slots.stop),
        num_rows=run.num_rows,
        start=min(before.start, run.start),
        end=max(before.end, run.end),
        num_seen=before.num_seen + run.num_seen,
    )
    return both if both.num_idle - before.num_idle <= _CALL_POSITIONS else None


class SlotCache:
    """[layers, num_slots, 2G, max_length + 1, D]: keys, then values. Untouched pages cost nothing."""

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        max_length: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Zeros, since masked positions are multiplied by zero and must be finite."""
        shape = (num_layers, num_slots, 2 * num_kv_heads, max_length + 1, head_dim)  # one that no row sees
        self.block = _zeros(shape, dtype, device)
        self.layers = self.block.unbind()  # [num_slots, 2G, max_length + 1, D] each
        self.num_kv_heads = num_kv_heads  # G

    def copy(self, source: int, slot: int, length: int) -> None:
        """Put the first `length` positions of one slot into another."""
        self.block[:, slot, :, :length].copy_(self.block[:, source, :, :length])

    def open(self, places: "Places") -> "PassCache":
        """The slots as one pass reads and writes them."""
        return PassCache(self, places)


class PassCache:
    """What one pass reads and writes. Views are made for all layers at once: each costs as much as a norm."""

    def __init__(self, cache: SlotCache, places: "Places") -> None:
        self._cache, self._places = cache, places
        self._written: Sequence[Tensor] | None = None  # by layer, where a pass that feeds one slot writes
        if places.only is not None:  # a copy of a block, several times faster than scattering
            slot, positions = places.only
            self._written = cache.block[:, slot, :, positions].unbind()
        self._calls: dict[int | None, list[_Call]] = {}  # by window

    def write(self, layer: int, keys_values: Tensor) -> None:
        """Put keys and values `[N, 2G, D]` of one layer where the rows of the pass belong."""
        if self._written is not None:
            self._written[layer].copy_(keys_values.transpose(0, 1))
        else:
            self._cache.layers[layer][self._places.slots, :, self._places.positions] = keys_values

    def attend(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        """What the rows' queries `[N, H, D]` see of their own slots: `[N, H * D]`."""
        if window not in self._calls:
            masks = self._places.masks(window)
            self._calls[window] = [self._call(run, mask, window) for run, mask in masks]
        calls = self._calls[window]
        if len(calls) == 1:
            return calls[0].attend(layer, queries)
        return torch.cat([call.attend(layer, queries[call.run.rows]) for call in calls])

    def _call(self, run: Run, mask: Tensor | None, window: int | None) -> "_Call":
        seen = self._cache.block[:, run.slots, :, run.first_seen(window) : run.end]
        keys, values = seen.tensor_split((self._cache.num_kv_heads,), dim=2)
        return _Call(run, mask, keys.unbind(), values.unbind())


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of attention a layer."""

    run: Run
    mask: Tensor | None
    keys: Sequence[Tensor]  # by layer, [slots, G, seen, D]
    values: Sequence[Tensor]

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        """The R heads that share keys are R rows of one head, so that nothing is repeated."""
        run, keys = self.run, self.keys[layer]
        num_slots, num_kv_heads, _, head_dim = keys.shape
        if run.num_rows == 1:  # they stand so already
            rows = queries.view(num_slots, num_kv_heads, -1, head_dim)
            seen = scaled_dot_product_attention(rows, keys, self.values[layer], attn_mask=self.mask)
            return seen.reshape(len(queries), -1)
        rows = queries.view(num_slots, run.num_rows, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        folded = rows.reshape(num_slots, num_kv_heads, -1, head_dim)
        seen = scaled_dot_product_attention(folded, keys, self.values[layer], attn_mask=self.mask)
        return seen.reshape(rows.shape).permute(0, 3, 1, 2, 4).reshape(len(queries), -1)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take no memory on a CPU before they are written: torch would write them at once.

    And little when they are: numpy asks for pages of 2 MB, of which a slot's first position touches hundreds.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on its way to a device, without waiting for what the device is at."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Places:
    """Where the rows of one pass belong: the same for all layers, so worked out once."""

    def __init__(self, table: Tensor, runs: list[Run], heads_per_kv_head: int, dtype: torch.dtype) -> None:
        """`table` `[3, N]`: each row's slot, position and token."""
        self.slots, self.positions, self.tokens = table.unbind()  # [N] each
        self.only: tuple[int, slice] | None = None  # slot and positions of a pass that feeds one slot
        self._runs, self._heads_per_kv_head, self._dtype = runs, heads_per_kv_head, dtype
        self._masks: dict[int | None, list[tuple[Run, Tensor | None]]] = {}

    @classmethod
    def of(
        cls, feeds: Sequence[Feed], heads_per_kv_head: int, dtype: torch.dtype, device: torch.device
    ) -> "Places":
        """The places of feeds in call order."""
        rows = [(feed.slot, feed.start + i, token) for feed in feeds for i, token in enumerate(feed.tokens)]
        table = sent(torch.tensor(rows, dtype=torch.long).T.contiguous(), device)
        places = cls(table, runs_of(feeds), heads_per_kv_head, dtype)
        if len(feeds) == 1:
            places.only = (feeds[0].slot, slice(feeds[0].start, feeds[0].start + len(feeds[0].tokens)))
        return places

    def masks(self, window: int | None) -> list[tuple[Run, Tensor | None]]:
        """Each call with what its rows may not see, `[slots, 1, R * T, seen]` of 0 and -inf, or None: all.

        `window` counts the positions that a row sees, itself included.
        """
        if window not in self._masks:
            self._masks[window] = [(run, self._mask(run, window)) for run in self._runs]
        return self._masks[window]

    def _mask(self, run: Run, window: int | None) -> Tensor | None:
        if run.num_rows == 1 and run.num_idle == 0:
            return None
        seen = torch.arange(run.first_seen(window), run.end, device=self.positions.device)
        row = self.positions[run.rows].view(run.num_slots, 1, run.num_rows, 1)
        hidden = seen > row
        if window is not None:
            hidden |= seen <= row - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device)
        return mask.masked_fill_(hidden, -torch.inf).repeat(1, 1, self._heads_per_kv_head, 1)
