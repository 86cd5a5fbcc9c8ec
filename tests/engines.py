"""Every engine over tiny models, each beside the plain transformers model of the same weights.

Knows how each engine comes by its weights; what must hold of all of them stands in `test_language_model`.
"""

import copy
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tests.tiny_gguf import save_gguf
from tests.tiny_models import FAMILIES, VOCAB_SIZE
from workers.decoder_model import DecoderModel
from workers.language_model import Feed, LanguageModel
from workers.transformers_model import TransformersModel

NUM_SLOTS, MAX_LENGTH = 4, 48
TOLERANCE = 5e-5  # the tiny models' logits reach 8; other orders of the same sums differ by 3e-6
SIZES = {"num_slots": NUM_SLOTS, "max_length": MAX_LENGTH}


class Pair:
    """A model as transformers runs it, and an engine over the same weights."""

    def __init__(self, plain: PreTrainedModel, engine: LanguageModel) -> None:
        self.plain, self.engine = plain, engine

    def expected(self, tokens: list[int], num_logits: int | None = None) -> NDArray[np.float32]:
        """The plain model's logits for the last positions of a fresh, whole sequence (all by default)."""
        logits = plain_logits(self.plain, tokens)
        return logits if num_logits is None else logits[len(tokens) - num_logits :]

    def feed(
        self, slot: int, start: int, tokens: list[int], num_logits: int | None = None
    ) -> NDArray[np.float32]:
        wanted = len(tokens) if num_logits is None else num_logits
        return self.engine.forward([Feed(slot, start, tokens, wanted)])[0]


def plain_logits(model: PreTrainedModel, tokens: list[int]) -> NDArray[np.float32]:
    with torch.inference_mode():
        return np.asarray(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy())


def same(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


def some(draw: random.Random, length: int) -> list[int]:
    """Any tokens."""
    return [draw.randrange(VOCAB_SIZE) for _ in range(length)]


def transformers_pair(model: PreTrainedModel, **options: Any) -> Pair:
    return Pair(copy.deepcopy(model), TransformersModel(model, **SIZES | options))


def decoder_pair(model: PreTrainedModel, **options: Any) -> Pair:
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return Pair(model, DecoderModel(model.config.to_dict(), tensors, **SIZES | options))


def llama_cpp_pair(model: PreTrainedModel, **options: Any) -> Pair:
    """Skips the test where llama.cpp is not installed."""
    pytest.importorskip("llama_cpp", reason="the extra 'llama' is not installed")
    from workers.llama_cpp_model import LlamaCppModel

    with tempfile.TemporaryDirectory() as folder:  # the engine keeps the file open
        file = save_gguf(model, Path(folder) / "model.gguf")
        return Pair(model, LlamaCppModel(file, num_threads=1, **SIZES | options))


MakePair = Callable[..., Pair]  # keywords replace sizes


def _over(pair_of: MakePair, family: str, **changes: Any) -> MakePair:
    return lambda **options: pair_of(FAMILIES[family](**changes), **options)


ENGINES: dict[str, MakePair] = {
    **{f"transformers, {family}": _over(transformers_pair, family) for family in FAMILIES},
    **{f"decoder, {family}": _over(decoder_pair, family) for family in ("llama", "mistral", "qwen3")},
    "llama.cpp, llama": _over(llama_cpp_pair, "llama"),
    "llama.cpp, qwen3": _over(llama_cpp_pair, "qwen3"),
}
WINDOWED = ["transformers, mistral", "transformers, gemma3", "decoder, mistral"]
ONE_EACH = [
    "transformers, llama",
    "decoder, llama",
    "llama.cpp, llama",
]  # where the architecture is of no account
