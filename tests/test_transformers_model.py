"""What is the transformers engine's own: loading, heads, refusals. `test_language_model` has the rest."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from tests.engines import MAX_LENGTH, NUM_SLOTS, plain_logits, same, some, transformers_pair
from tests.tiny_models import FAMILIES, VOCAB_SIZE, WINDOW, tiny_gemma3, tiny_llama, tiny_qwen3
from workers.checkpoints import ModelRefused
from workers.language_model import Feed
from workers.transformers_model import TransformersModel

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
    "initializer_range": 0.3,
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small spend their time on waiting for a second thread, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def draw() -> random.Random:
    return random.Random(7)


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_that_are_not_held_are_never_read(family: str, draw: random.Random) -> None:
    """The cache is not cleared when it is reserved: it may hold anything, NaN too."""
    pair = transformers_pair(FAMILIES[family]())
    assert isinstance(pair.engine, TransformersModel)
    with torch.inference_mode():
        for keys, values in pair.engine._attention._cache.values():
            keys.fill_(torch.nan)
            values.fill_(torch.nan)
    tokens = some(draw, 20)
    pair.engine.forward([Feed(0, 0, tokens[:11], 0), Feed(2, 0, tokens, 0)])
    same(pair.feed(0, 11, tokens[11:]), pair.expected(tokens, 9))


def test_the_head_runs_on_wanted_rows_only(draw: random.Random) -> None:
    pair, model = transformers_pair(tiny_llama()), tiny_llama()
    rows: list[int] = []
    engine = TransformersModel(model, num_slots=NUM_SLOTS, max_length=MAX_LENGTH)
    model.get_output_embeddings().register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape[1]))
    first, second = some(draw, 6), some(draw, 8)
    engine.forward([Feed(0, 0, first, 0), Feed(1, 0, second, 0)])
    logits = engine.forward([Feed(0, 6, [1], 1), Feed(1, 8, [2, 3, 4], 2)])
    assert rows == [0, 3]
    same(logits[1], pair.expected([*second, 2, 3, 4], 2))


@pytest.mark.parametrize("family", FAMILIES)
def test_output_ids_are_columns_of_the_full_logits(family: str, draw: random.Random) -> None:
    ids = sorted(draw.sample(range(VOCAB_SIZE), 40))
    pair = transformers_pair(FAMILIES[family](), output_ids=ids)
    tokens = some(draw, 12)
    logits = pair.feed(0, 0, tokens, 5)
    assert pair.engine.output_ids is not None
    assert pair.engine.output_ids.tolist() == ids
    assert pair.engine.vocab_size == VOCAB_SIZE
    same(logits, pair.expected(tokens, 5)[:, ids])


def test_output_ids_keep_what_a_model_does_to_its_logits_after_the_head(draw: random.Random) -> None:
    ids = [3, 40, 63]
    cohere = Cohere2ForCausalLM(Cohere2Config(**SMALL, sliding_window=WINDOW, logit_scale=3.0))
    for model in (cohere.eval(), tiny_gemma3(final_logit_softcapping=2.0)):
        pair = transformers_pair(model, output_ids=ids)
        tokens = [token % 64 for token in some(draw, 20)]
        same(pair.feed(0, 0, tokens), pair.expected(tokens)[:, ids])


@pytest.mark.parametrize(
    ("output_ids", "message"),
    [
        ([], "at least 1 id"),
        ([5, 4], "do not ascend"),
        ([4, 4], "do not ascend"),
        ([-1, 4], "from -1 to 4 .* 0..259"),
        ([4, 260], "from 4 to 260 .* 0..259"),
    ],
)
def test_bad_output_ids_are_refused(output_ids: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transformers_pair(tiny_llama(), output_ids=output_ids)


def test_a_pass_that_fails_midway_forgets_what_it_may_have_overwritten(draw: random.Random) -> None:
    model = tiny_llama()
    engine = TransformersModel(model, num_slots=NUM_SLOTS, max_length=MAX_LENGTH)
    engine.forward([Feed(0, 0, some(draw, 20), 0)])

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    hook = model.get_output_embeddings().register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.forward([Feed(0, 10, [1, 2, 3], 3)])
    hook.remove()
    with pytest.raises(ValueError, match=r"start 11 of slot 0 is not in 0\.\.10"):
        engine.forward([Feed(0, 11, [1], 1)])
    engine.forward([Feed(0, 10, [1, 2, 3], 3)])


# What does not fit is refused before it serves, in words.

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}


class PositionsIgnored(LlamaForCausalLM):
    def forward(self, position_ids: Any = None, logits_to_keep: Any = 0, **inputs: Any) -> Any:
        return super().forward(logits_to_keep=logits_to_keep, **inputs)


class MaskOfItsOwn(LlamaForCausalLM):
    def forward(self, position_ids: Any = None, logits_to_keep: Any = 0, **inputs: Any) -> Any:
        length = inputs["input_ids"].shape[1]
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
        return super().forward(
            position_ids=position_ids, attention_mask=mask, logits_to_keep=logits_to_keep, **inputs
        )


def with_a_window_lost() -> PreTrainedModel:
    kinds = ["sliding_attention", "full_attention"]
    model = tiny_qwen3(layer_types=kinds, use_sliding_window=True, sliding_window=100)
    attention: Any = model.get_submodule("model.layers.0.self_attn")
    attention.sliding_window = None
    return model


def with_both_directions() -> PreTrainedModel:
    model = tiny_llama()
    model.config.is_causal = False
    for layer in range(2):
        attention: Any = model.get_submodule(f"model.layers.{layer}.self_attn")
        attention.is_causal = False
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)),
            "no position_ids",
        ),
        (lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL)), "asks for softcap 50.0"),
        (lambda: GptOssForCausalLM(GptOssConfig(**SMALL, num_local_experts=4)), "asks for s_aux of shape"),
        (
            lambda: Lfm2ForCausalLM(Lfm2Config(**SMALL, layer_types=["conv", "full_attention"])),
            "of type conv",
        ),
        (lambda: tiny_llama(rope_parameters=LONGROPE), "rope_type longrope"),
        (
            lambda: tiny_llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rope_type dynamic",
        ),
        (lambda: tiny_llama().base_model, "LlamaModel does not fit: its forward takes no logits_to_keep"),
        (lambda: PositionsIgnored(LlamaConfig(**SMALL)), "PositionsIgnored .* logits differ by"),
        (lambda: MaskOfItsOwn(LlamaConfig(**SMALL)), "asks for attention_mask of shape"),
        (with_a_window_lost, "layer 0 attends with window None, configured is 100"),
        (with_both_directions, "is_causal is False"),
    ],
)
def test_an_architecture_that_does_not_fit_is_refused(
    build: Callable[[], PreTrainedModel], message: str
) -> None:
    with pytest.raises(ModelRefused, match=message):
        TransformersModel(build().eval(), num_slots=2, max_length=32)


@pytest.mark.demo
def test_the_demo_target_gets_its_own_logits_for_a_real_prompt(demo_target: Path) -> None:
    text = (
        "<|im_start|>user\nWhy is the sky blue, and why are sunsets red?<|im_end|>\n<|im_start|>assistant\n"
    )
    tokens = Tokenizer.from_file(str(demo_target / "tokenizer.json")).encode(text).ids
    model = AutoModelForCausalLM.from_pretrained(demo_target, dtype=torch.float32, local_files_only=True)
    expected = plain_logits(model, tokens)
    engine = TransformersModel(model, num_slots=2, max_length=256)
    engine.forward([Feed(1, 0, tokens[:11], 0), Feed(0, 0, tokens[5:20], 0)])
    logits = engine.forward([Feed(0, 15, tokens[:4], 4), Feed(1, 11, tokens[11:], len(tokens) - 11)])
    np.testing.assert_allclose(logits[1], expected[11:], rtol=0, atol=1e-3)
