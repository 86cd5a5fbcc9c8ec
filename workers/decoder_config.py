"""What a Llama-like decoder computes, read from config.json; or why it is not certain that it is one.

Knows transformers' names and meanings of these fields, for four model types. Whatever else stands in a
configuration, and a field that is missing although its default matters, is a reason not to take it: the
general engine then runs the model as transformers does. Knows no weights and no torch.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_REQUIRED = set(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    " max_position_embeddings rms_norm_eps hidden_act".split()
)
_REQUIRED_BY_TYPE = {"mistral": {"sliding_window"}, "qwen3": {"head_dim"}}  # their defaults are not neutral
_READ = set(
    "attention_bias head_dim layer_types max_window_layers mlp_bias model_type rope_parameters rope_scaling"
    " rope_theta sliding_window tie_word_embeddings use_sliding_window".split()
)
_WITHOUT_EFFECT = set(
    "_name_or_path architectures attention_dropout bos_token_id chunk_size_feed_forward dtype eos_token_id"
    " id2label initializer_range is_llama_config label2id output_attentions output_hidden_states pad_token_id"
    " pretraining_tp problem_type return_dict torch_dtype transformers.js_config transformers_version"
    " unsloth_fixed use_cache".split()
)
_MUST_BE = {"is_encoder_decoder": False, "rope_interleaved": False, "use_mrope": False}


class NotADecoder(ValueError):
    """The configuration may mean something that the decoder does not compute."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and constants of a decoder: RMS norms, rotary attention with shared keys, gated SiLU."""

    vocab_size: int  # V, padding included
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int  # H
    num_kv_heads: int  # G
    head_dim: int  # D
    max_length: int
    norm_epsilon: float
    is_tied: bool  # the head is the embedding
    windows: tuple[int | None, ...]  # by layer: how many positions a row sees, itself included; None: all
    inverse_frequencies: tuple[float, ...]  # [D/2] radians a position
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_head_norms: bool  # queries and keys are normed head by head

    @classmethod
    def read(cls, config: Json) -> "DecoderConfig":
        """The decoder that a config.json describes. Raises NotADecoder with the field and the reason."""
        if problem := next(_problems(config), None):
            raise NotADecoder(problem)
        hidden_size, num_heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or hidden_size // num_heads)
        return cls(
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden_size,
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(config["num_key_value_heads"]),
            head_dim=head_dim,
            max_length=int(config["max_position_embeddings"]),
            norm_epsilon=float(config["rms_norm_eps"]),
            is_tied=bool(config.get("tie_word_embeddings", False)),
            windows=_windows(config),
            inverse_frequencies=_inverse_frequencies(_rope(config), head_dim),
            has_qkv_bias=config["model_type"] == "qwen2" or _has_attention_bias(config),
            has_output_bias=_has_attention_bias(config),
            has_mlp_bias=config["model_type"] == "llama" and bool(config.get("mlp_bias", False)),
            has_head_norms=config["model_type"] == "qwen3",
        )


def _problems(config: Json) -> Iterator[str]:
    model_type = config.get("model_type")
    if model_type not in _MODEL_TYPES:
        yield f"model_type is {model_type!r}, known are {', '.join(_MODEL_TYPES)}"
        return
    for field in sorted(_REQUIRED | _REQUIRED_BY_TYPE.get(model_type, set())):
        if field not in config or (config[field] is None and field != "sliding_window"):
            yield f"{field} is missing"
    for field, value in config.items():
        if field in _MUST_BE:
            if value != _MUST_BE[field]:
                yield f"{field} is {value!r}, known is {_MUST_BE[field]!r}"
        elif field not in _READ | _WITHOUT_EFFECT | _REQUIRED:
            yield f"{field} is not known"
    if config.get("hidden_act") != "silu":
        yield f"hidden_act is {config.get('hidden_act')!r}, known is 'silu'"
    if config.get("num_attention_heads", 0) % config.get("num_key_value_heads", 1):
        yield "num_attention_heads is no multiple of num_key_value_heads"
    if model_type in ("llama", "mistral") and config.get("layer_types") is not None:
        yield f"layer_types is set, which {model_type} does not have"
    window = config.get("sliding_window")
    if window is not None and (type(window) is not int or window < 1):
        yield f"sliding_window is {window!r}, not a positive number"
    if model_type in ("qwen2", "qwen3"):
        yield from _window_problems(config)
    if model_type == "llama" and config.get("sliding_window") is not None:
        yield "sliding_window is set, which llama does not have"
    present = [
        config[field] for field in ("rope_parameters", "rope_scaling") if config.get(field) is not None
    ]
    if not all(isinstance(rope, dict) for rope in present):
        yield "the rotary parameters are no object"
    elif len(present) > 1 and present[0] != present[1]:
        yield "rope_parameters and rope_scaling differ"
    else:
        yield from _rope_problems(_rope(config))


def _window_problems(config: Json) -> Iterator[str]:
    """Of the types whose layers may slide one by one."""
    kinds = config.get("layer_types")
    if kinds is not None:
        if len(kinds) != config.get("num_hidden_layers"):
            yield f"layer_types has {len(kinds)} entries for {config.get('num_hidden_layers')} layers"
        if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
            yield f"layer_types has {unknown[0]}"
    if config.get("use_sliding_window", False):
        for field in ("sliding_window", *(() if kinds is not None else ("max_window_layers",))):
            if not isinstance(config.get(field), int):
                yield f"{field} is {config.get(field)!r}, not a number"


def _has_attention_bias(config: Json) -> bool:
    """The other types ignore the field."""
    return config["model_type"] in ("llama", "qwen3") and bool(config.get("attention_bias", False))


def _windows(config: Json) -> tuple[int | None, ...]:
    num_layers, window = int(config["num_hidden_layers"]), config.get("sliding_window")
    if config["model_type"] in ("llama", "mistral"):
        return (window,) * num_layers
    if not config.get("use_sliding_window", False):
        window = None
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers") or 0
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(config: Json) -> Json:
    """The rotary parameters under their present names, whichever way they are written."""
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    rope.setdefault("rope_theta", config.get("rope_theta"))
    rope["rope_type"] = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    return rope


_ROPE_FIELDS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}


def _rope_problems(rope: Json) -> Iterator[str]:
    rope_type = rope["rope_type"]
    if rope_type not in _ROPE_FIELDS:
        yield f"rope_type is {rope_type!r}, known are {', '.join(_ROPE_FIELDS)}"
        return
    fields = _ROPE_FIELDS[rope_type] | {"rope_theta"}
    wrong = [field for field in sorted(fields) if not _is_positive(rope.get(field))]
    for field in wrong:
        yield f"{field} of the rotary parameters is {rope.get(field)!r}, not a positive number"
    if rope_type == "llama3" and not wrong and not rope["low_freq_factor"] < rope["high_freq_factor"]:
        yield "low_freq_factor of the rotary parameters is not below high_freq_factor"
    if left := sorted(set(rope) - fields - {"rope_type"}):
        yield f"{left[0]} of the rotary parameters is not known for {rope_type}"


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _inverse_frequencies(rope: Json, head_dim: int) -> tuple[float, ...]:
    """[D/2] radians a position.

    'llama3' (Llama 3.1): wavelengths beyond a limit are stretched by `factor`, short ones stay, and between
    the two limits the frequency is interpolated.
    """
    frequencies = [float(rope["rope_theta"]) ** (-i / head_dim) for i in range(0, head_dim, 2)]
    if rope["rope_type"] == "linear":
        return tuple(frequency / rope["factor"] for frequency in frequencies)
    if rope["rope_type"] == "llama3":
        return tuple(_stretched(frequency, rope) for frequency in frequencies)
    return tuple(frequencies)


def _stretched(frequency: float, rope: Json) -> float:
    low, high, factor = (float(rope[name]) for name in ("low_freq_factor", "high_freq_factor", "factor"))
    turns = float(rope["original_max_position_embeddings"]) * frequency / (2 * math.pi)  # over that context
    share = min(max((turns - low) / (high - low), 0.0), 1.0)
    return (1 - share) * frequency / factor + share * frequency
