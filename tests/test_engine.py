"""Loading a folder: the lean decoder takes what it is sure of, transformers the rest, with equal results."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.engines import plain_logits, same, some
from tests.tiny_models import FAMILIES, VOCAB_SIZE, save_tiny
from workers.checkpoints import ModelRefused
from workers.decoder_model import DecoderModel
from workers.engine import load_model, precision_of
from workers.language_model import Feed
from workers.transformers_model import TransformersModel

ENGINE_OF = {
    "llama": DecoderModel,
    "mistral": DecoderModel,
    "qwen3": DecoderModel,
    "gemma3": TransformersModel,
}


@pytest.fixture
def draw() -> random.Random:
    return random.Random(7)


@pytest.mark.parametrize("family", ENGINE_OF)
def test_a_folder_is_loaded_with_its_output_ids(family: str, tmp_path: Path, draw: random.Random) -> None:
    save_tiny(tmp_path, family, seed=3)
    tokens = some(draw, 10)
    expected = plain_logits(FAMILIES[family](seed=3), tokens)
    whole = load_model(tmp_path, num_slots=2, max_length=32)
    assert type(whole) is ENGINE_OF[family]
    same(whole.forward([Feed(0, 0, tokens, 10)])[0], expected)
    (tmp_path / "vocabulary.json").write_text(json.dumps([1, 5, 9]))
    reduced = load_model(tmp_path, num_slots=2, max_length=32)
    assert reduced.output_ids is not None
    assert reduced.output_ids.tolist() == [1, 5, 9]
    same(reduced.forward([Feed(0, 0, tokens, 10)])[0], expected[:, [1, 5, 9]])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_lower_precision_can_be_asked_for(family: str, tmp_path: Path, draw: random.Random) -> None:
    save_tiny(tmp_path, family)
    engine = load_model(tmp_path, num_slots=2, max_length=32, precision="bfloat16")
    tokens = some(draw, 10)
    logits = engine.forward([Feed(0, 0, tokens, 10)])[0]
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, plain_logits(FAMILIES[family](), tokens), rtol=0, atol=0.5)


def test_shards_are_one_model(tmp_path: Path, draw: random.Random) -> None:
    save_tiny(tmp_path, seed=3)
    whole = load_model(tmp_path, num_slots=1, max_length=32)
    (tmp_path / "model.safetensors").unlink()
    FAMILIES["llama"](3).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    shards = load_model(tmp_path, num_slots=1, max_length=32)
    assert type(shards) is DecoderModel
    feed = Feed(0, 0, some(draw, 10), 10)
    same(shards.forward([feed])[0], whole.forward([feed])[0])


def test_what_the_decoder_is_not_sure_of_is_run_as_transformers_runs_it(
    tmp_path: Path, draw: random.Random
) -> None:
    save_tiny(tmp_path, seed=3)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"embedding_multiplier": 1.0}))
    engine = load_model(tmp_path, num_slots=2, max_length=32)
    assert type(engine) is TransformersModel
    tokens = some(draw, 10)
    same(engine.forward([Feed(0, 0, tokens, 10)])[0], plain_logits(FAMILIES["llama"](seed=3), tokens))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"holds no config\.json"):
        load_model(tmp_path / "nowhere", num_slots=1, max_length=8)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(FAMILIES["llama"]().state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match="safetensors"):
        load_model(tmp_path, num_slots=1, max_length=8)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelRefused, match="load"):
        load_model(tmp_path, num_slots=1, max_length=8)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_weights_that_lack_a_layer_are_refused(family: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, family)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("layer_types", None)
    num_layers = config["num_hidden_layers"] + 1
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    message = rf"lacks \d+ weights, the first is model\.layers\.{num_layers - 1}"
    with pytest.raises(ModelRefused, match=message):
        load_model(tmp_path, num_slots=1, max_length=8)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_ids_that_pad_the_vocabulary_are_neither_scored_nor_taken(family: str, tmp_path: Path) -> None:
    """A padded head gives its padding a probability; drawn, it would be no text at all."""
    folder = save_tiny(tmp_path / "padded", family, vocab_size=VOCAB_SIZE + 12)
    engine = load_model(folder, num_slots=1, max_length=8)
    assert engine.vocab_size == VOCAB_SIZE
    (logits,) = engine.forward([Feed(0, 0, [1, 2], 2)])
    assert logits.shape == (2, VOCAB_SIZE)
    with pytest.raises(ValueError, match=f"token {VOCAB_SIZE} of slot 0 is not in"):
        engine.forward([Feed(0, 0, [VOCAB_SIZE], 1)])


@pytest.mark.demo
def test_the_demo_target_gets_its_own_logits_for_a_real_prompt(demo_target: Path) -> None:
    text = (
        "<|im_start|>user\nWhy is the sky blue, and why are sunsets red?<|im_end|>\n<|im_start|>assistant\n"
    )
    tokens = Tokenizer.from_file(str(demo_target / "tokenizer.json")).encode(text).ids
    model = AutoModelForCausalLM.from_pretrained(demo_target, dtype=torch.float32, local_files_only=True)
    expected = plain_logits(model, tokens)
    engine = load_model(demo_target, num_slots=2, max_length=256)
    assert type(engine) is DecoderModel
    engine.forward([Feed(1, 0, tokens[:11], 0), Feed(0, 0, tokens[5:20], 0)])
    logits = engine.forward([Feed(0, 15, tokens[:4], 4), Feed(1, 11, tokens[11:], len(tokens) - 11)])
    np.testing.assert_allclose(logits[1], expected[11:], rtol=0, atol=1e-3)


def test_a_shallow_draft_runs_in_eight_bits_and_a_target_never(tmp_path: Path, draw: random.Random) -> None:
    save_tiny(tmp_path)
    tokens = some(draw, 20)
    expected = plain_logits(FAMILIES["llama"](), tokens)
    feed = Feed(0, 0, tokens, 20)
    exact = load_model(tmp_path, role="draft", num_slots=1, max_length=32, precision="float32")
    same(exact.forward([feed])[0], expected)
    crude = load_model(tmp_path, role="draft", num_slots=1, max_length=32).forward([feed])[0]
    error = np.abs(crude - expected).mean() / np.abs(expected).mean()
    assert 0.001 < error < 0.2, "as crude as 8 bits are, and no cruder"
    same(load_model(tmp_path, role="target", num_slots=1, max_length=32).forward([feed])[0], expected)
    with pytest.raises(ModelRefused, match="int8 is not for a target"):
        load_model(tmp_path, role="target", num_slots=1, max_length=32, precision="int8")


def test_a_deep_draft_keeps_its_precision(tmp_path: Path) -> None:
    """What 8 bits cost adds up over the layers."""
    for num_layers, precision in ((4, "int8"), (5, "float32")):
        folder = save_tiny(tmp_path / str(num_layers), num_hidden_layers=num_layers)
        assert precision_of(folder, "draft", "auto", "cpu") == precision


def test_a_draft_that_the_decoder_does_not_run_keeps_its_precision(tmp_path: Path) -> None:
    assert precision_of(save_tiny(tmp_path, "gemma3"), "draft", "auto", "cpu") == "float32"


def test_a_kind_of_model_that_has_no_eight_bits_says_so(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gemma3")
    with pytest.raises(ModelRefused, match="does not run in int8"):
        load_model(tmp_path, role="draft", num_slots=1, max_length=32, precision="int8")
