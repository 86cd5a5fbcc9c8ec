"""The forward pass of a Llama-like decoder over packed rows, with nothing in it that a pass does not need.

Knows the arithmetic of a layer. Does not know files, sessions, or who wants which logits. Projections that
read the same input are one product; attention reads the slots where they stand; the head runs on wanted rows
only.

N rows of a pass, H heads, G KV heads, D head dimension, C logit columns, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, silu

from workers.decoder_config import DecoderConfig
from workers.decoder_weights import LayerWeights, read_weights
from workers.norms import Norm, rms_norm_of
from workers.products import Form, Product, fastest_form
from workers.slot_cache import Places, SlotCache


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Norm  # [hidden]
    queries_keys_values: Product  # -> [N, (H + 2G) * D]
    query_norm: Norm | None  # [D]
    key_norm: Norm | None  # [D]
    output: Product  # -> [N, hidden]
    mlp_norm: Norm  # [hidden]
    gate_up: Product  # -> [N, 2 * intermediate]
    down: Product  # -> [N, hidden]
    window: int | None

    @classmethod
    def build(cls, weights: LayerWeights, form: Form, epsilon: float, window: int | None) -> "_Layer":
        def optional(weight: Tensor | None) -> Norm | None:
            return None if weight is None else rms_norm_of(weight, epsilon)

        return cls(
            attention_norm=rms_norm_of(weights.attention_norm, epsilon),
            queries_keys_values=form(*weights.queries_keys_values),
            query_norm=optional(weights.query_norm),
            key_norm=optional(weights.key_norm),
            output=form(*weights.output),
            mlp_norm=rms_norm_of(weights.mlp_norm, epsilon),
            gate_up=form(*weights.gate_up),
            down=form(*weights.down),
            window=window,
        )


class Decoder:
    """A stack of layers with its embedding and head. Pure arithmetic: the slots are given to each pass."""

    def __init__(
        self,
        config: DecoderConfig,
        tensors: dict[str, Tensor],
        *,
        rows: slice | Tensor,
        max_length: int,
        form: Form | None = None,
    ) -> None:
        """Take the weights out of `tensors`: see `read_weights`. `rows` of the head are computed.

        `form` is that of the products, by default the one that is fastest here.
        """
        self.config = config
        self.heads_per_kv_head = config.num_heads // config.num_kv_heads  # R
        weights = read_weights(config, tensors)
        self._embedding, self._norm = weights.embedding, rms_norm_of(weights.norm, config.norm_epsilon)
        self.dtype, self.device = self._embedding.dtype, self._embedding.device
        head = weights.head[rows]
        matrices = [weight for layer in weights.layers for weight, _ in layer.products]
        self.num_weights = sum(weight.numel() for weight in (*matrices, head))  # that a pass multiplies with
        form = form or fastest_form(matrices)
        del matrices
        self._layers = []
        assert len(config.windows) == config.num_layers, "each layer has a window, or none"
        for window in config.windows:  # a layer's stored form goes before the next one is brought into form
            self._layers.append(_Layer.build(weights.layers.pop(0), form, config.norm_epsilon, window))
        self.num_columns = len(head)  # C
        self._head = form(head, None)
        self._cos, self._sin = _rotations(config.inverse_frequencies, max_length, self.dtype, self.device)

    def logits(self, places: Places, wanted: Tensor, cache: SlotCache) -> tuple[Tensor, Tensor]:
        """Run the rows of a pass and write their keys and values.

        Returns the logits `[wanted, C]` of some rows, and whether all rows are finite, `[]`. If not, the pass
        has to be run again `guarded`: what is masked is multiplied by zero, and zero times infinity is NaN.
        """
        x = self._layers_of(places, cache, None)
        return self._head(self._norm(x[wanted])), x.isfinite().all()

    def guarded(self, places: Places, wanted: Tensor, cache: SlotCache) -> tuple[Tensor, Tensor]:
        """As `logits`, but keys and values that are not finite are written as zeros.

        Returns the logits and which rows `[N]` are broken. The logits of what stands before a broken row are
        right; those behind it, in this pass or in later ones, are without meaning.
        """
        broken = torch.zeros_like(places.tokens, dtype=torch.bool)
        x = self._layers_of(places, cache, broken)
        broken |= ~x.isfinite().all(dim=-1)
        return self._head(self._norm(x[wanted])), broken

    def _layers_of(self, places: Places, cache: SlotCache, broken: Tensor | None) -> Tensor:
        x = embedding(places.tokens, self._embedding)
        cos, sin = self._cos[places.positions], self._sin[places.positions]  # [N, 1, D]
        slots = cache.open(places)
        sizes = (self.config.num_heads, 2 * self.config.num_kv_heads)
        for index, layer in enumerate(self._layers):
            queries, keys_values = self._heads(layer, x, cos, sin).split_with_sizes(sizes, dim=1)
            if broken is not None:
                broken |= ~keys_values.isfinite().flatten(1).all(dim=1)
                keys_values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            slots.write(index, keys_values)
            x = x + layer.output(slots.attend(index, queries, layer.window))
            x += layer.down(_gated(layer.gate_up(layer.mlp_norm(x))))
        return x

    def _heads(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries, keys and values `[N, H + 2G, D]`, the first two rotated."""
        config = self.config
        num_heads, num_rotated = config.num_heads, config.num_heads + config.num_kv_heads
        heads = layer.queries_keys_values(layer.attention_norm(x)).view(len(x), -1, config.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            heads[:, :num_heads] = layer.query_norm(heads[:, :num_heads])
            heads[:, num_heads:num_rotated] = layer.key_norm(heads[:, num_heads:num_rotated])
        rotated = heads[:, :num_rotated]
        turned = rotated.roll(config.head_dim // 2, -1)
        rotated.mul_(cos).addcmul_(turned, sin)
        return heads


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)


def _rotations(
    inverse_frequencies: Sequence[float], max_length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin `[max_length + 1, 1, D]` of each position's angles.

    A head's halves are the two coordinates, as in the checkpoints: rotating is x * cos + roll(x, D/2) * sin
    with the first half of sin negated.
    """
    frequencies = torch.tensor(inverse_frequencies, dtype=torch.float32)
    angles = torch.arange(max_length + 1, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    pairs = (torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))
    return tuple(x[:, None].to(device=device, dtype=dtype) for x in pairs)  # type: ignore[return-value]
