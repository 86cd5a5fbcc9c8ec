"""A Llama-like decoder's weights, from their names in a checkpoint to the products that a pass makes.

Knows the names and shapes. Every weight must be there, have its shape, and none may be left over: a left-over
weight would be a part of the model that the decoder does not compute. Knows no arithmetic.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.decoder_config import DecoderConfig, NotADecoder

Matrix = tuple[Tensor, Tensor | None]  # weight [O, I], bias [O] or None

_LEFT_OVER = "rotary_emb.inv_freq"  # old checkpoints store it; it follows from the configuration


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """What one layer multiplies with; projections of the same input are stacked."""

    attention_norm: Tensor  # [hidden]
    queries_keys_values: Matrix  # [(H + 2G) * D, hidden]
    query_norm: Tensor | None  # [D]
    key_norm: Tensor | None  # [D]
    output: Matrix  # [hidden, H * D]
    mlp_norm: Tensor  # [hidden]
    gate_up: Matrix  # [2 * intermediate, hidden]
    down: Matrix  # [hidden, intermediate]

    @property
    def products(self) -> tuple[Matrix, ...]:
        """All matrices."""
        return self.queries_keys_values, self.output, self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder."""

    embedding: Tensor  # [V, hidden]
    layers: list[LayerWeights]
    norm: Tensor  # [hidden]
    head: Tensor  # [V, hidden], the embedding where the two are tied


def read_weights(config: DecoderConfig, tensors: dict[str, Tensor]) -> DecoderWeights:
    """Take all weights out of `tensors`, which is empty behind it.

    Raises NotADecoder when one is missing, has another shape, or is left over.
    """
    reader = _Reader(config, tensors)
    embedding = reader.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    head = embedding
    if (
        not config.is_tied or "lm_head.weight" in tensors
    ):  # a head of its own counts more than the word for it
        own = reader.take("lm_head.weight", *embedding.shape)
        head = embedding if config.is_tied and torch.equal(own, embedding) else own
    layers = [reader.layer(f"model.layers.{layer}") for layer in range(config.num_layers)]
    weights = DecoderWeights(embedding, layers, reader.take("model.norm.weight", config.hidden_size), head)
    if left := sorted(name for name in tensors if not name.endswith(_LEFT_OVER)):
        raise NotADecoder(f"{len(left)} weights are left over, the first is {left[0]}")
    return weights


class _Reader:
    def __init__(self, config: DecoderConfig, tensors: dict[str, Tensor]) -> None:
        self._config, self._tensors = config, tensors

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise NotADecoder(f"the weight {name} is missing")
        if tensor.shape != shape:
            raise NotADecoder(f"the weight {name} has shape {tuple(tensor.shape)}, expected {shape}")
        return tensor

    def layer(self, name: str) -> LayerWeights:
        config = self._config
        queries, keys = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
        intermediate_size = config.intermediate_size
        projections = (("q", queries), ("k", keys), ("v", keys))
        return LayerWeights(
            attention_norm=self.take(f"{name}.input_layernorm.weight", config.hidden_size),
            queries_keys_values=self._stacked(
                [(f"{name}.self_attn.{which}_proj", size) for which, size in projections],
                config.hidden_size,
                config.has_qkv_bias,
            ),
            query_norm=self._head_norm(f"{name}.self_attn.q_norm.weight"),
            key_norm=self._head_norm(f"{name}.self_attn.k_norm.weight"),
            output=self._stacked(
                [(f"{name}.self_attn.o_proj", config.hidden_size)], queries, config.has_output_bias
            ),
            mlp_norm=self.take(f"{name}.post_attention_layernorm.weight", config.hidden_size),
            gate_up=self._stacked(
                [(f"{name}.mlp.{which}_proj", intermediate_size) for which in ("gate", "up")],
                config.hidden_size,
                config.has_mlp_bias,
            ),
            down=self._stacked(
                [(f"{name}.mlp.down_proj", config.hidden_size)], intermediate_size, config.has_mlp_bias
            ),
        )

    def _head_norm(self, name: str) -> Tensor | None:
        return self.take(name, self._config.head_dim) if self._config.has_head_norms else None

    def _stacked(self, projections: list[tuple[str, int]], num_inputs: int, has_bias: bool) -> Matrix:
        """The projections of one input as one matrix."""
        weights = [self.take(f"{name}.weight", size, num_inputs) for name, size in projections]
        biases = [self.take(f"{name}.bias", size) for name, size in projections if has_bias]
        if len(weights) == 1:
            return weights[0], biases[0] if biases else None
        return torch.cat(weights), torch.cat(biases) if biases else None
