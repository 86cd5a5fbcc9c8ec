"""The lean decoder computes what transformers computes, in every form its configurations can take."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from tests.engines import Pair, decoder_pair, plain_logits, same, some
from tests.tiny_models import FAMILIES, VOCAB_SIZE, tiny_llama
from workers.decoder_config import NotADecoder
from workers.decoder_model import DecoderModel
from workers.language_model import Feed

SPOILT = VOCAB_SIZE - 1
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "linear rope": ("llama", {"rope_parameters": LINEAR}),
    "every head its own keys": ("llama", {"num_key_value_heads": 4}),
    "one head of keys": ("llama", {"num_key_value_heads": 1}),
    "heads narrower than hidden": ("llama", {"head_dim": 4}),
    "no window": ("mistral", {"sliding_window": None}),
    "some layers slide": ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "window switched off": ("qwen3", {"use_sliding_window": False, "sliding_window": 5}),
}


def with_random_biases(model: PreTrainedModel) -> PreTrainedModel:
    """transformers starts them at zero, and norms at one."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def ragged_passes_agree(model: PreTrainedModel) -> None:
    pair, draw = decoder_pair(with_random_biases(model)), random.Random(7)
    prompts = [some(draw, 17 + slot) for slot in range(4)]
    expected = [pair.expected(prompt) for prompt in prompts]
    for cuts in ([3, 3, 3, 3], [1, 5, 1, 16], [12, 12, 2, 2]):
        pair.engine.forward([Feed(slot, 0, prompts[slot][:cut], 0) for slot, cut in enumerate(cuts)])
        for width in (1, 3):  # as drafts are: the same number of rows in some slots
            feeds = [Feed(s, cut, prompts[s][cut : cut + width], width) for s, cut in enumerate(cuts)]
            for feed, logits in zip(feeds, pair.engine.forward(feeds[::-1])[::-1], strict=True):
                same(logits, expected[feed.slot][feed.start : feed.start + len(feed.tokens)])


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_gets_transformers_logits(variant: str) -> None:
    family, changes = VARIANTS[variant]
    ragged_passes_agree(FAMILIES[family](seed=2, **changes))


def test_qwen2_gets_transformers_logits() -> None:
    config = tiny_llama().config.to_dict()
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    kept = {name: config[name] for name in (*sizes, "num_key_value_heads", "max_position_embeddings")}
    torch.manual_seed(0)
    ragged_passes_agree(Qwen2ForCausalLM(Qwen2Config(**kept, initializer_range=0.3)).eval())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_not_a_bit_of_a_row_depends_on_the_tokens_behind_it_or_beside_it(
    family: str, dtype: torch.dtype
) -> None:
    """By a rounding it may depend on how many rows a pass has and how long its sessions are."""
    model = FAMILIES[family]()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    engine, draw = decoder_pair(model).engine, random.Random(3)
    prompt, seen = some(draw, 11), []
    for _ in range(8):
        engine.forward([Feed(slot, 0, some(draw, 11) if slot else prompt, 0) for slot in range(3)])
        tails = [[7, 9, *some(draw, 2)], some(draw, 4), some(draw, 2)]
        seen.append(engine.forward([Feed(s, 11, tail, len(tail)) for s, tail in enumerate(tails)])[0][:2])
    assert all(np.array_equal(rows, seen[0]) for rows in seen)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma3"}, "model_type is 'gemma3'"),
        ({"logit_scale": 0.5}, "logit_scale is not known"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads"),
        ({"sliding_window": 8}, "sliding_window is set"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types is set"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope_type is 'yarn'"),
        ({"rope_parameters": LINEAR | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor .* not known"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor .* is None"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": None}, "rope_theta .* is None"),
        ({"rope_interleaved": True}, "rope_interleaved is True"),
        ({"num_hidden_layers": 1}, "9 weights are left over, the first is model.layers.1"),
        ({"num_hidden_layers": 3}, "model.layers.2.* is missing"),
        ({"hidden_size": 64, "head_dim": 8}, "has shape"),
        ({"tie_word_embeddings": False}, None),
        ({"attention_bias": True}, "q_proj.bias is missing"),
        ({"rope_scaling": LINEAR}, "rope_parameters and rope_scaling differ"),
        ({"rope_parameters": "linear"}, "no object"),
        ({"model_type": "qwen2"}, "q_proj.bias is missing"),
        ({"model_type": "qwen3"}, "q_norm.weight is missing"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "1 entries for 2 layers"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "chunked"]}, "layer_types has chunked"),
        ({"model_type": "qwen3", "use_sliding_window": True}, "sliding_window is None"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
        ({"model_type": "qwen2", "sliding_window": True}, "sliding_window is True"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 5.0}}, "low_freq_factor .* is not below"),
        ({"rope_parameters": LINEAR | {"factor": 0}}, "factor .* is 0"),
    ],
)
def test_what_is_not_certain_is_left_to_transformers(change: dict[str, Any], message: str | None) -> None:
    model = tiny_llama()
    tensors = dict(copy.deepcopy(model).state_dict())
    config = model.config.to_dict() | change
    if message is None:
        DecoderModel(config, tensors, num_slots=1, max_length=8)
        assert not tensors, "the weights are taken"
        return
    with pytest.raises(NotADecoder, match=message):
        DecoderModel(config, tensors, num_slots=1, max_length=8)


def test_a_head_of_its_own_counts_more_than_the_word_that_it_is_tied() -> None:
    model = tiny_llama()
    config = model.config.to_dict() | {"tie_word_embeddings": True}
    engine = DecoderModel(config, dict(copy.deepcopy(model).state_dict()), num_slots=1, max_length=16)
    tokens = some(random.Random(5), 9)
    same(engine.forward([Feed(0, 0, tokens, 9)])[0], plain_logits(model, tokens))


def test_rotary_parameters_are_read_as_older_files_write_them() -> None:
    model = tiny_llama(rope_parameters=LLAMA3)
    config = model.config.to_dict()
    config.pop("rope_parameters")
    old = {name: value for name, value in LLAMA3.items() if name not in ("rope_type", "rope_theta")}
    config |= {"rope_theta": 500000.0, "rope_scaling": old | {"type": "llama3"}}
    engine = DecoderModel(config, dict(model.state_dict()), num_slots=1, max_length=48)
    tokens = some(random.Random(7), 40)
    same(engine.forward([Feed(0, 0, tokens, 40)])[0], decoder_pair(model).expected(tokens))


@pytest.fixture
def spoiling() -> Pair:
    """A pair whose last token makes numbers that are not finite."""
    model = tiny_llama()
    model.model.embed_tokens.weight.data[SPOILT] = torch.nan
    return decoder_pair(model)


def sound(draw: random.Random, length: int) -> list[int]:
    return [token % SPOILT for token in some(draw, length)]


def test_what_stands_before_a_broken_position_is_right_and_what_follows_is_nan(spoiling: Pair) -> None:
    """Masked positions are multiplied by zero, and zero times NaN is NaN: drafts would spoil their judge."""
    tokens = sound(random.Random(7), 12)
    spoiling.feed(0, 0, tokens[:9], 0)
    logits = spoiling.feed(0, 9, [*tokens[9:11], SPOILT, 5])
    same(logits[:2], spoiling.expected(tokens[:11], 2))
    assert np.isnan(logits[2:]).all()
    assert np.isnan(spoiling.feed(0, 13, [7])).all(), "the slot is broken"
    same(spoiling.feed(0, 11, tokens[11:]), spoiling.expected(tokens, 1))  # cut back, it is sound again


def test_a_broken_position_is_remembered_though_its_logits_were_not_wanted(spoiling: Pair) -> None:
    draw = random.Random(7)
    spoiling.feed(0, 0, [1, 2, SPOILT, 3], 0)
    neighbour = sound(draw, 6)
    ours, other = spoiling.engine.forward([Feed(0, 4, [4], 1), Feed(1, 0, neighbour, 6)])
    assert np.isnan(ours).all()
    same(other, spoiling.expected(neighbour))


def test_a_broken_position_is_broken_where_it_is_copied_to(spoiling: Pair) -> None:
    spoiling.feed(0, 0, [1, 2, SPOILT, 3], 0)
    spoiling.feed(2, 0, [4, SPOILT, 4], 0)
    spoiling.engine.copy(0, 1, 4)
    spoiling.engine.copy(0, 2, 2)
    assert np.isnan(spoiling.feed(1, 4, [5])).all()
    same(spoiling.feed(2, 2, [5]), spoiling.expected([1, 2, 5], 1))


def test_numbers_that_are_not_finite_do_not_outlive_their_session(spoiling: Pair) -> None:
    draw = random.Random(7)
    prompts = [sound(draw, 5), sound(draw, 20)]
    spoiling.feed(0, 0, [1, 2, 3, 4, 5, 6, 7, SPOILT, 8], 0)
    spoiling.engine.truncate(0, 0)
    spoiling.engine.forward([Feed(slot, 0, prompt[:-1], 0) for slot, prompt in enumerate(prompts)])
    logits = spoiling.engine.forward([Feed(s, len(p) - 1, p[-1:], 1) for s, p in enumerate(prompts)])
    for prompt, row in zip(prompts, logits, strict=True):
        same(row, spoiling.expected(prompt, 1))


def test_long_contexts_get_transformers_logits() -> None:
    """Attention works in blocks of hundreds of positions."""
    for family in ("llama", "mistral"):
        pair = decoder_pair(FAMILIES[family](max_position_embeddings=1300), max_length=1300)
        draw = random.Random(7)
        lengths = (1250, 1000, 1249, 3)
        prompts = [some(draw, length) for length in lengths]
        pair.engine.forward([Feed(slot, 0, prompt[:-3], 0) for slot, prompt in enumerate(prompts[:3])])
        feeds = [Feed(slot, length - 3, prompts[slot][-3:], 3) for slot, length in enumerate(lengths)]
        for prompt, logits in zip(prompts, pair.engine.forward(feeds), strict=True):
            same(logits, pair.expected(prompt, 3))


def test_weights_that_transformers_would_not_use_are_not_used() -> None:
    """A bias in the file of a model that is configured without one."""
    tensors = dict(tiny_llama(attention_bias=True).state_dict())
    with pytest.raises(NotADecoder, match="weights are left over"):
        DecoderModel(tiny_llama().config.to_dict(), tensors, num_slots=1, max_length=8)
