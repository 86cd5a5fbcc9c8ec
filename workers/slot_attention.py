"""Attention over slots: where the rows of a packed pass belong, and how each sees its own slot and no other.

Knows torch and the calls that transformers makes of an attention function. Knows no model and no tokens.

N rows of a pass, T tokens of a feed, H heads, G KV heads, D head dimension.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from workers.checkpoints import ModelRefused
from workers.feeds import wanted_rows
from workers.language_model import Feed

# Keywords of an attention call that say nothing about its result. Any other that is set is refused.
_HARMLESS = {"cache", "output_attentions", "position_embeddings", "position_ids", "return_dict", "use_cache"}


class Pass:
    """Where the rows of one pass belong: the same for all layers, so worked out once."""

    def __init__(self, feeds: Sequence[Feed], device: torch.device, dtype: torch.dtype) -> None:
        rows = [(feed.slot, feed.start + i, token) for feed in feeds for i, token in enumerate(feed.tokens)]
        table = torch.tensor(rows, dtype=torch.long).T.contiguous().to(device)
        self.slots, self.positions, self.tokens = table.unbind()  # [N] each
        self._feeds, self._device, self._dtype = feeds, device, dtype
        self._spans: dict[int | None, list[tuple[slice, int, slice, torch.Tensor | None]]] = {}

    def wanted(self) -> torch.Tensor:
        """The packed rows whose logits are wanted, in order."""
        return torch.tensor(wanted_rows(self._feeds), dtype=torch.long, device=self._device)

    def spans(self, window: int | None) -> list[tuple[slice, int, slice, torch.Tensor | None]]:
        """For each feed its rows, slot, the held positions that they see, and a mask where not all see all.

        `window` counts the positions that a row sees, itself included. The mask, `[T, positions]` of 0 and
        -inf in the model's dtype, is added to the scores.
        """
        if window not in self._spans:
            spans, row = [], 0
            for feed in self._feeds:
                rows = slice(row, row := row + len(feed.tokens))
                end = feed.start + len(feed.tokens)
                begin = 0 if window is None else max(0, feed.start - window + 1)
                spans.append((rows, feed.slot, slice(begin, end), self._mask(feed.start, begin, end, window)))
            self._spans[window] = spans
        return self._spans[window]

    def _mask(self, start: int, begin: int, end: int, window: int | None) -> torch.Tensor | None:
        if end - start == 1:
            return None
        seen = torch.arange(begin, end, device=self._device)
        row = torch.arange(start, end, device=self._device)[:, None]
        hidden = seen > row
        if window is not None:
            hidden |= seen <= row - window
        return torch.zeros_like(hidden, dtype=self._dtype).masked_fill_(hidden, -torch.inf)


class SlotAttention:
    """The keys and values of all slots, layer by layer, and the attention that reads and writes them."""

    def __init__(self, name: str, num_slots: int, max_length: int) -> None:
        """`name` is the model's, for refusals."""
        self.windows: dict[int, int | None] = {}  # by layer, as the model asked for them
        self.rows: Pass | None = None  # of the pass that runs
        self._name = name
        self._num_slots, self._max_length = num_slots, max_length
        self._cache: dict[
            int, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # by layer, [num_slots, G, max_length, D]

    @property
    def layers(self) -> set[int]:
        """The layers that have kept keys and values."""
        return set(self._cache)

    def copy(self, source: int, slot: int, length: int) -> None:
        """Put the first `length` positions of one slot into another."""
        with torch.inference_mode():  # as the cache was made
            for tensors in self._cache.values():
                for tensor in tensors:
                    tensor[slot, :, :length] = tensor[source, :, :length]

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,  # [1, H, N, D]
        key: torch.Tensor,  # [1, G, N, D]
        value: torch.Tensor,  # [1, G, N, D of the values]
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **keywords: Any,
    ) -> tuple[torch.Tensor, None]:
        """One layer's attention, `[1, N, H, D]`: write the rows to their slots, let each see its own."""
        self._refuse_keywords(module, {"attention_mask": attention_mask, **keywords})
        assert self.rows is not None
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        if layer not in self._cache:  # sized by what the first pass shows; untouched pages cost nothing
            sizes = [(self._num_slots, x.shape[1], self._max_length, x.shape[3]) for x in (key, value)]
            self._cache[layer] = (key.new_empty(sizes[0]), value.new_empty(sizes[1]))
            self.windows[layer] = sliding_window
        keys, values = self._cache[layer]
        keys[self.rows.slots, :, self.rows.positions] = key[0].transpose(0, 1)
        values[self.rows.slots, :, self.rows.positions] = value[0].transpose(0, 1)
        outputs = [
            scaled_dot_product_attention(
                query[:, :, rows],
                keys[slot : slot + 1, :, seen],
                values[slot : slot + 1, :, seen],
                attn_mask=mask,
                scale=scaling,
                enable_gqa=True,
            )
            for rows, slot, seen, mask in self.rows.spans(sliding_window)
        ]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
        return output.transpose(1, 2), None

    def _refuse_keywords(self, module: torch.nn.Module, keywords: dict[str, Any]) -> None:
        """Refuse what would change the result and is not honoured: softcap, sinks, biases, masks."""
        if keywords.pop("is_causal", None) is False or getattr(module, "is_causal", True) is False:
            raise ModelRefused(f"{self._name} does not fit: is_causal is False, its rows see later positions")
        if keywords.get("dropout") == 0:
            del keywords["dropout"]
        for name, value in keywords.items():
            if name not in _HARMLESS and value is not None and value is not False:
                shown = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
                raise ModelRefused(f"{self._name} does not fit: its attention asks for {name} {shown}")
