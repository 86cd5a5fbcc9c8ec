"""Tiny random models of several architectures, built in milliseconds, and whole model folders made of them.

Knows configurations and seeds only. The weights are drawn wide, so that attention is sharp and a wrong
position, mask or neighbour moves the logits visibly; the texts that come out mean nothing.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

END_TOKEN = "<|end|>"
SPECIAL_TOKENS = [END_TOKEN, "<|system|>", "<|user|>", "<|assistant|>"]
END_ID = 256  # the bytes come first
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
MAX_LENGTH = 128
WINDOW = 8
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_LENGTH,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": END_ID,
    "pad_token_id": None,
}


def tiny_llama(seed: int = 0, **changes: Any) -> PreTrainedModel:
    return _seeded(seed, lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE | changes)))


def tiny_mistral(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """All layers slide, over 8 positions."""
    return _seeded(
        seed, lambda: MistralForCausalLM(MistralConfig(**_SHAPE | {"sliding_window": WINDOW} | changes))
    )


def tiny_gemma3(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Three layers, of which the last is full and the others slide; their scaling is not 1/sqrt(head_dim)."""
    own: dict[str, Any] = {
        "num_hidden_layers": 3,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 5,
    }
    return _seeded(seed, lambda: Gemma3ForCausalLM(Gemma3TextConfig(**_SHAPE | own | changes)))


def tiny_qwen3(seed: int = 0, **changes: Any) -> PreTrainedModel:
    return _seeded(seed, lambda: Qwen3ForCausalLM(Qwen3Config(**_SHAPE | changes)))


FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": tiny_llama,
    "mistral": tiny_mistral,
    "gemma3": tiny_gemma3,
    "qwen3": tiny_qwen3,
}


def save_tiny(folder: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Write a model folder as on the hub: safetensors, configuration, byte-level tokenizer, chat template."""
    FAMILIES[family](seed, **changes).save_pretrained(folder)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TOKEN,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return folder


def byte_level_tokenizer() -> Tokenizer:
    """A token for each byte, in the order of `ByteLevel`'s alphabet, then the special tokens: 260 ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def _seeded(seed: int, build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
    model.eval()
    return model
