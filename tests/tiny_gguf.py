"""The tiny random models of `tests.tiny_models` as GGUF files, the same weights bit for bit.

Knows how llama.cpp names and orders what transformers names and orders otherwise.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tests.tiny_models import END_ID, FAMILIES, SPECIAL_TOKENS, byte_level_tokenizer

Json = dict[str, Any]

_IN_A_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_IN_A_GEMMA3_LAYER = _IN_A_LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OUTSIDE = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def save_tiny_gguf(folder: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Write model.gguf, and the tokenizer.json that belongs to it."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    return save_gguf(FAMILIES[family](seed, **changes), folder / "model.gguf")


def save_gguf(
    model: PreTrainedModel,
    file: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    change: Callable[[GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write a byte-level model; matrices as `kind`. `change` may add what else the header shall say."""
    config = model.config.get_text_config()
    architecture = {"llama": "llama", "qwen3": "qwen3", "gemma3_text": "gemma3"}[config.model_type]
    writer = GGUFWriter(file, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    if architecture == "gemma3":
        writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    else:
        writer.add_rope_freq_base(rope["rope_theta"])
    add_tokenizer(writer, config.vocab_size)
    change(writer)
    for name, weights in _tensors(model, architecture):
        quantised = kind if weights.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(weights, quantised), raw_dtype=quantised)
    finish(writer)
    return file


def finish(writer: GGUFWriter) -> None:
    """Write it all."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: GGUFWriter, vocab_size: int) -> None:
    """That of `byte_level_tokenizer`, cut or padded to `vocab_size` ids."""
    tokens = sorted(byte_level_tokenizer().get_vocab().items(), key=lambda entry: entry[1])
    words = [token for token, _ in tokens] + [f"[PAD{id_}]" for id_ in range(len(tokens), vocab_size)]
    kinds = [
        TokenType.CONTROL if word in SPECIAL_TOKENS else TokenType.NORMAL for word in words[: len(tokens)]
    ]
    kinds += [TokenType.UNUSED] * (vocab_size - len(tokens))
    words, kinds = words[:vocab_size], kinds[:vocab_size]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types(kinds)
    writer.add_token_merges(["Ġ t"])  # llama.cpp wants a list; its tokenizer is not used
    if vocab_size > END_ID:
        writer.add_eos_token_id(END_ID)


def _tensors(model: PreTrainedModel, architecture: str) -> Iterator[tuple[str, NDArray[np.float32]]]:
    config = model.config.get_text_config()
    names = _IN_A_GEMMA3_LAYER if architecture == "gemma3" else _IN_A_LAYER
    for name, parameter in model.named_parameters():
        weights = parameter.detach().float().numpy()
        parts = name.removeprefix("model.").removesuffix(".weight").split(".", 2)
        if architecture == "gemma3" and parts[-1].endswith("norm"):
            weights = weights + 1  # Gemma's norms multiply by 1 + weight
        if architecture == "llama" and parts[-1] in ("self_attn.q_proj", "self_attn.k_proj"):
            is_query = parts[-1] == "self_attn.q_proj"
            weights = _to_neighbours(
                weights, config.num_attention_heads if is_query else config.num_key_value_heads
            )
        if parts[0] == "layers":
            yield f"blk.{parts[1]}.{names[parts[2]]}.weight", np.ascontiguousarray(weights)
        else:
            yield f"{_OUTSIDE[parts[0]]}.weight", np.ascontiguousarray(weights)


def _to_neighbours(weights: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Each head's output rows in the order of llama.cpp's rotation for Llama: i and i + D/2 side by side."""
    rows, columns = weights.shape
    halves = weights.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)
