"""Which kinds of model can be used: a cache that can be cut back, and logits that depend on the prefix only.

Knows the fields of config.json, under the names transformers gives them. Does not know files or weights.
"""

from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]

FITTING = "a decoder with attention layers only, such as Llama, Mistral, Qwen2, Qwen3 or Gemma 3"

_TRIMMABLE_LAYERS = {"full_attention", "sliding_attention"}
_STATEFUL_MODEL_TYPES = {  # transformers 5.24: classes with _is_stateful, and those with convolution layers
    *("bailing_hybrid", "bamba", "deepseek_v4", "falcon_h1", "falcon_mamba", "glm5_next", "granitemoehybrid"),
    *(
        "jamba",
        "kimi_linear",
        "lara_mini",
        "lfm2",
        "lfm2_moe",
        "lfm2_vl",
        "lfm3",
        "lfm3_vl",
        "mamba",
        "mamba2",
    ),
    *("minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "minimax", "nemotron_h", "nemotron_h_omni", "olmo_hybrid"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp", "recurrent_gemma", "rwkv", "xlstm", "zamba"),
    *("zamba2", "zaya"),
}
_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_ALIBI_BY_DEFAULT = {"bloom", "mpt"}
_SOFTCAPPED_BY_DEFAULT = {"gemma2", "vaultgemma"}
_BATCH_ROPE_TYPES = {"dynamic", "longrope", "su"}


def why_unfit(config: Json) -> str | None:
    """What in a configuration rules the model out, as the middle of a sentence, or None."""
    return next(_faults(config | (config.get("text_config") or {}), str(config.get("model_type", ""))), None)


def _faults(config: Json, model_type: str) -> Iterator[str]:
    def fault(field: str, value: object, why: str) -> str:
        return f"has {field} {value!r} in config.json, {why}"

    kinds = {model_type, str(config.get("model_type", "")).removesuffix("_text")}
    for kind in sorted(kinds & _STATEFUL_MODEL_TYPES):
        yield fault("model_type", kind, "which keeps a state that cannot be cut back to an earlier length")
    for field in ("layer_types", "layers_block_type"):
        for layer_type in config.get(field) or ():
            if layer_type not in _TRIMMABLE_LAYERS:
                yield fault(field, layer_type, "layers whose cache cannot be cut back to an earlier length")
    architectures = config.get("architectures") or []
    if architectures and not any(name.endswith(_GENERATING) for name in architectures):
        yield fault("architectures", architectures, "which do not continue a text")
    if config.get("is_encoder_decoder"):
        yield fault("is_encoder_decoder", True, "but only a decoder alone continues its own text")

    alibi_default = bool(kinds & _ALIBI_BY_DEFAULT)
    if config.get("alibi") or (config.get("attn_config") or {}).get("alibi", alibi_default):
        yield fault("model_type", model_type, "with ALiBi, whose biases the attention used here does not add")
    softcap_default = 50.0 if kinds & _SOFTCAPPED_BY_DEFAULT else None
    softcap = config.get("attn_logit_softcapping", softcap_default)
    if softcap is not None:
        yield fault("attn_logit_softcapping", softcap, "which the attention used here does not apply")
    for field in ("rope_parameters", "rope_scaling"):
        for rope_type in _rope_types(config.get(field)):
            if rope_type in _BATCH_ROPE_TYPES:
                yield fault(f"{field} of type", rope_type, "which looks at the longest row of the batch")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        yield fault("quantization_config", method, "but only plain floating-point weights are loaded")


def _rope_types(parameters: Any) -> Iterator[str]:
    """The types in one set of rotary parameters, or in one set for each type of layer."""
    if isinstance(parameters, dict):
        yield from (str(parameters[key]) for key in ("rope_type", "type") if key in parameters)
        for nested in parameters.values():
            yield from _rope_types(nested)
