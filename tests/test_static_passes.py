"""Passes of fixed shape say what passes of any shape say: on a CPU uncaptured, on a GPU as graphs."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engines import MAX_LENGTH, NUM_SLOTS, some
from tests.tiny_models import FAMILIES, tiny_llama
from workers.decoder_model import DecoderModel
from workers.language_model import Feed, Logits
from workers.static_passes import MAX_ROWS, StaticPasses

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def weights_of(family: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    model = FAMILIES[family]()
    return model.config.to_dict(), dict(copy.deepcopy(model).state_dict())


class Static(DecoderModel):
    """Runs passes of fixed shape wherever it is."""

    def __init__(self, family: str, weights: tuple[dict[str, Any], dict[str, Tensor]] | None = None) -> None:
        config, tensors = weights or weights_of(family)
        super().__init__(config, tensors, num_slots=NUM_SLOTS, max_length=MAX_LENGTH)
        self._static = StaticPasses(self._decoder, self._cache, self.num_slots, self.max_length)


def ragged_model(family: str) -> DecoderModel:
    return DecoderModel(*weights_of(family), num_slots=NUM_SLOTS, max_length=MAX_LENGTH)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_passes_of_fixed_shape_say_what_others_say(family: str) -> None:
    draw = random.Random(7)
    static, ragged = Static(family), ragged_model(family)
    texts = [some(draw, 48) for _ in range(4)]
    held = [0] * 4
    for _ in range(40):
        feeds = []
        for slot in draw.sample(range(4), draw.randint(1, 4)):
            if held[slot] > 30:
                held[slot] = draw.randint(0, 9)  # rolled back
            length = draw.choice([1, 1, 4, 5, MAX_ROWS])
            tokens = texts[slot][held[slot] : held[slot] + length]
            feeds.append(Feed(slot, held[slot], tokens, draw.randint(0, length)))
            held[slot] += length
        for left, right in zip(static.forward(feeds), ragged.forward(feeds), strict=True):
            np.testing.assert_allclose(left, right, rtol=0, atol=5e-5)


def test_a_slot_is_fed_to_its_last_position() -> None:
    """The rows that pad a pass must stand neither in the slot's last positions nor beyond the tables."""
    static, ragged = Static("llama"), ragged_model("llama")
    tokens = some(random.Random(7), 48)
    for model in (static, ragged):
        model.forward([Feed(3, 0, tokens[:45], 0), Feed(0, 0, tokens[:3], 0)])

    def last(model: DecoderModel) -> list[Logits]:
        return model.forward([Feed(3, 45, tokens[45:], 3), Feed(0, 3, tokens[3:4], 1)])

    for left, right in zip(last(static), last(ragged), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=5e-5)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_says_what_the_cpu_says(dtype: torch.dtype) -> None:
    draw = random.Random(7)
    model = tiny_llama()
    config = model.config.to_dict()
    plain = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    on_gpu, on_cpu = (
        DecoderModel(config, weights, num_slots=NUM_SLOTS, max_length=MAX_LENGTH)
        for weights in (
            {name: tensor.cuda() for name, tensor in plain.items()},
            {name: tensor.float() for name, tensor in plain.items()},
        )
    )
    tolerance = 5e-4 if dtype == torch.float32 else 0.5
    tokens = [some(draw, 48) for _ in range(4)]
    for start, length in ((0, 20), (20, 1), (21, 4), (25, 1), (23, 4), (27, 1), (20, 18)):  # and rolled back
        feeds = [Feed(s, start, t[start : start + length], length) for s, t in enumerate(tokens)]
        for left, right in zip(on_gpu.forward(feeds), on_cpu.forward(feeds), strict=True):
            np.testing.assert_allclose(left, right, rtol=0, atol=tolerance)
