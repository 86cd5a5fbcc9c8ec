"""What is llama.cpp's own: loading, precisions, refusals, silence; and the law with it at both ends.

`test_language_model` has what it shares with the other engines.
"""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from numpy.typing import NDArray

pytest.importorskip("llama_cpp", reason="the extra 'llama' is not installed")

import llama_cpp

from tests.engines import MAX_LENGTH, SIZES, llama_cpp_pair, plain_logits, same, some
from tests.laws import assert_follows, plain_law
from tests.pipelines import generate, pipeline
from tests.test_law import sample
from tests.tiny_gguf import add_tokenizer, finish, save_gguf, save_tiny_gguf
from tests.tiny_models import END_ID, VOCAB_SIZE, WINDOW, tiny_gemma3, tiny_llama
from workers.checkpoints import ModelRefused, Role, check
from workers.engine import load_model
from workers.language_model import Feed
from workers.llama_cpp_context import LlamaCppContext
from workers.llama_cpp_model import LlamaCppModel
from workers.sampling import SamplingSettings

V = 3  # of the law's models


@pytest.fixture
def draw() -> random.Random:
    return random.Random(7)


def load(file: Path, role: Role = "target", **options: int) -> LlamaCppModel:
    return LlamaCppModel(file, role=role, num_threads=1, **SIZES | options)


async def test_greedy_text_is_that_of_transformers(tmp_path: Path) -> None:
    """Drafts by another model, so that some are kept and others cut."""
    files = [save_tiny_gguf(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    plain, prompt = tiny_llama(0), [5, 200, 7]
    expected = list(prompt)
    while len(expected) < 40 and (expected[-1] != END_ID or len(expected) == len(prompt)):
        expected.append(int(plain_logits(plain, expected)[-1].argmax()))
    async with pipeline(*map(load, files), end_token_ids=(END_ID,), num_draft_tokens=3) as running:
        generated = await generate(running.stub, prompt, max_tokens=40 - len(prompt), temperature=0.0)
    assert generated.usage.num_draft_tokens > 0
    assert generated.ids() == tuple(expected[len(prompt) :])


@pytest.mark.parametrize("rule", ["token", "block"])
async def test_sequences_follow_the_law_of_the_plain_model(rule: str, tmp_path: Path) -> None:
    """llama.cpp drafts and verifies; the law is enumerated with transformers over the target's weights."""
    models = [tiny_llama(seed, vocab_size=V, eos_token_id=None) for seed in (0, 1)]
    target, draft = (
        load(save_gguf(model, tmp_path / f"{i}.gguf"), num_slots=128, max_length=16)
        for i, model in enumerate(models)
    )
    memory: dict[tuple[int, ...], NDArray[np.float32]] = {}

    def next_logits(prefix: Sequence[int]) -> NDArray[np.float32]:
        prefix = tuple(prefix)
        if prefix not in memory:
            memory[prefix] = plain_logits(models[0], list(prefix))[-1]
        return memory[prefix]

    settings = SamplingSettings(temperature=4.0)  # the tiny models are surer of themselves than a law may be
    async with pipeline(target, draft, rule=rule, num_draft_tokens=3) as running:
        samples = await sample(running, [1, 0, 2], 5, 2048, seed=0, temperature=4.0)
    assert_follows(samples, plain_law(next_logits, [1, 0, 2], V, 5, settings))


@pytest.mark.parametrize("name", ["Q8_0", "Q5_0", "Q4_0", "Q4_1"])
def test_p_of_a_quantised_file_is_the_same_to_the_bit_in_any_pass(
    name: str, tmp_path: Path, draw: random.Random
) -> None:
    """Sums in another order would change a rounding here and there, and what follows by percents.

    The heads are wide enough for another order, the layers and rows many enough for a changed rounding.
    """
    length = 120
    model = tiny_llama(hidden_size=64, intermediate_size=96, head_dim=64, num_hidden_layers=8)
    engine = load(save_gguf(model, tmp_path / "model.gguf", GGMLQuantizationType[name]), max_length=length)
    tokens, others = some(draw, length), some(draw, length)
    (expected,) = engine.forward([Feed(0, 0, tokens, length)])
    for size, beside in itertools.product((1, 2, 3, 7, 50), (0, 1, 3)):
        pieces = []
        for start in range(0, length, size):
            feeds = [Feed(2, start, tokens[start : start + size], len(tokens[start : start + size]))]
            if beside and start:
                feeds += [Feed(slot, 0, others[: beside + slot], 1) for slot in (1, 3)]
            pieces.append(engine.forward(feeds)[0])
        assert (np.concatenate(pieces) == expected).all(), f"in pieces of {size}, beside {beside}"


def test_k_quants_may_draft(tmp_path: Path) -> None:
    """Some processors add them up in another order from 8 rows on: targets they may be where none does."""
    model = tiny_llama(hidden_size=256, intermediate_size=256)
    file = save_gguf(model, tmp_path / "float32.gguf")
    quantised = tmp_path / "q4_k.gguf"
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S
    assert llama_cpp.llama_model_quantize(bytes(file), bytes(quantised), parameters) == 0
    assert check(quantised).dtype == "q4_k"
    load(quantised, role="draft")


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_weights_of_less_precision_give_the_logits_of_what_they_stand_for(name: str, tmp_path: Path) -> None:
    """Up to the rounding of each row, which is to 8 bits and a scale a block for the quantised ones."""
    kind = GGMLQuantizationType[name]
    model = tiny_llama(hidden_size=64, intermediate_size=96, initializer_range=0.1)
    engine = load(save_gguf(model, tmp_path / "model.gguf", kind))
    for weights in model.parameters():
        if weights.ndim > 1:
            stored = dequantize(quantize(weights.detach().numpy(), kind), kind)
            weights.data = torch.from_numpy(stored.reshape(weights.shape))
    tokens = list(range(30))
    (logits,) = engine.forward([Feed(1, 0, tokens, 30)])
    expected = plain_logits(model, tokens)
    difference = np.abs(logits - expected).max() / np.abs(expected).max()
    print(name, difference)
    assert difference < (0.04 if "Q" in name else 0.01)


def test_ids_that_pad_the_vocabulary_are_neither_scored_nor_taken(tmp_path: Path) -> None:
    file = save_tiny_gguf(tmp_path, vocab_size=VOCAB_SIZE + 12)
    engine = load_model(file, num_slots=1, max_length=8, num_threads=1)
    assert isinstance(engine, LlamaCppModel)
    assert engine.vocab_size == VOCAB_SIZE
    (logits,) = engine.forward([Feed(0, 0, [1, 2], 2)])
    same(logits, plain_logits(tiny_llama(vocab_size=VOCAB_SIZE + 12), [1, 2])[:, :VOCAB_SIZE])
    with pytest.raises(ValueError, match=f"token {VOCAB_SIZE} of slot 0 is not in"):
        engine.forward([Feed(0, 0, [VOCAB_SIZE], 1)])


def test_a_window_stays_right_after_a_rollback_across_its_edge(draw: random.Random) -> None:
    """llama.cpp looks GELU up in a table of float16, which shows by 2e-3; a window that is lost, by 0.1."""
    pair = llama_cpp_pair(tiny_gemma3(query_pre_attn_scalar=8))  # llama.cpp scales by 1/sqrt(D)
    for kept in range(1, 2 * WINDOW + 2):
        tokens, again = some(draw, 2 * WINDOW + 3), some(draw, 3)
        pair.feed(0, 0, tokens, 0)
        pair.engine.truncate(0, kept)
        expected = pair.expected(tokens[:kept] + again, len(again))
        np.testing.assert_allclose(pair.feed(0, kept, again), expected, rtol=0, atol=1e-2)


def test_a_window_can_be_cut_back_to_long_ago(draw: random.Random) -> None:
    """llama.cpp's default is to forget what is far behind the window."""
    model = tiny_gemma3(query_pre_attn_scalar=8, max_position_embeddings=1600)
    pair = llama_cpp_pair(model, num_slots=1, max_length=1600)
    tokens, again = some(draw, 1500), some(draw, 3)
    pair.feed(0, 0, tokens, 0)
    expected = pair.expected(tokens[:300] + again, len(again))
    np.testing.assert_allclose(pair.feed(0, 300, again), expected, rtol=0, atol=1e-2)


def test_a_pass_longer_than_llama_cpp_takes_at_once_is_one_pass(draw: random.Random) -> None:
    pair = llama_cpp_pair(tiny_llama(max_position_embeddings=700), num_slots=3, max_length=700)
    sequences = [some(draw, 650) for _ in range(3)]
    feeds = [Feed(slot, 0, tokens, 2) for slot, tokens in enumerate(sequences)]
    for tokens, logits in zip(sequences, pair.engine.forward(feeds), strict=True):
        same(logits, pair.expected(tokens, 2))


def test_every_slot_can_be_full_at_once(draw: random.Random) -> None:
    """Whatever the cells' order has become: slots share them."""
    pair = llama_cpp_pair(tiny_llama())
    for _ in range(3):
        for slot in range(SIZES["num_slots"]):
            pair.engine.truncate(slot, draw.randrange(MAX_LENGTH))
        sequences = [some(draw, MAX_LENGTH) for _ in range(SIZES["num_slots"])]
        feeds = [Feed(slot, 0, tokens, 3) for slot, tokens in enumerate(sequences)]
        for tokens, logits in zip(sequences, pair.engine.forward(feeds), strict=True):
            same(logits, pair.expected(tokens, 3))


def test_a_pass_that_fails_midway_forgets_what_it_may_have_overwritten(
    draw: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = llama_cpp_pair(tiny_llama())
    tokens = some(draw, 20)
    pair.feed(0, 0, tokens, 0)
    decode = LlamaCppContext.decode

    def fail(*args: Any) -> NDArray[np.float32]:
        decode(*args)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(LlamaCppContext, "decode", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        pair.feed(0, 10, [1, 2, 3])
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"start 11 of slot 0 is not in 0\.\.10"):
        pair.feed(0, 11, [1])
    same(pair.feed(0, 10, [4]), pair.expected([*tokens[:10], 4], 1))


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(save_tiny_gguf(tmp_path)).forward([Feed(0, 0, [1, 2], 1)])
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "model.gguf").read_bytes()[:-4000])
    with pytest.raises(ModelRefused):
        load(tmp_path / "cut.gguf")
    assert capfd.readouterr() == ("", "")


def test_more_slots_than_llama_cpp_has_sequences_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"num_slots 257 exceeds the 256 sequences of llama\.cpp"):
        load(save_tiny_gguf(tmp_path), num_slots=257)


# What does not fit is refused before it serves, in words.


def test_truncated_weights_are_refused_in_llama_cpps_words(tmp_path: Path) -> None:
    file = save_tiny_gguf(tmp_path)
    file.write_bytes(file.read_bytes()[:-4000])
    with pytest.raises(ModelRefused, match=r"does not load in llama\.cpp \(.*not within the file bounds"):
        load(file)


def test_a_recurrent_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="is recurrent, with a state that cannot be cut back"):
        load(save_mamba(tmp_path / "mamba.gguf"))


def save_mamba(file: Path) -> Path:
    """One layer of zeros."""
    hidden, inner, state, rank = 16, 32, 4, 1
    writer = GGUFWriter(file, "mamba")
    writer.add_context_length(MAX_LENGTH)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    add_tokenizer(writer, VOCAB_SIZE)
    shapes = {
        "token_embd.weight": (VOCAB_SIZE, hidden),
        "output_norm.weight": (hidden,),
        "blk.0.attn_norm.weight": (hidden,),
        "blk.0.ssm_in.weight": (2 * inner, hidden),
        "blk.0.ssm_conv1d.weight": (inner, 4),
        "blk.0.ssm_conv1d.bias": (inner,),
        "blk.0.ssm_x.weight": (rank + 2 * state, inner),
        "blk.0.ssm_dt.weight": (inner, rank),
        "blk.0.ssm_dt.bias": (inner,),
        "blk.0.ssm_a": (inner, state),
        "blk.0.ssm_d": (inner,),
        "blk.0.ssm_out.weight": (hidden, inner),
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    finish(writer)
    return file


def test_a_cache_that_cannot_be_cut_back_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaCppContext, "cut", lambda *_: False)
    with pytest.raises(ModelRefused, match="its cache cannot be cut back to 0 positions"):
        load(save_tiny_gguf(tmp_path))


def test_a_cache_that_is_not_cut_back_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaCppContext, "cut", lambda *_: True)
    with pytest.raises(ModelRefused, match=r"a pass fails, llama\.cpp answers a pass of 9 rows with -1"):
        load(save_tiny_gguf(tmp_path))


def test_a_model_whose_rows_depend_on_their_neighbours_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = LlamaCppContext.decode

    def scaled_by_the_batch(*args: Any) -> NDArray[np.float32]:
        _, _tokens, _positions, sequences, _wanted = args
        return decode(*args) * np.float32(1 + 1e-2 * len(set(sequences)))

    monkeypatch.setattr(LlamaCppContext, "decode", scaled_by_the_batch)
    with pytest.raises(
        ModelRefused, match="cannot be a target: its logits depend on how many rows a pass has"
    ):
        load(save_tiny_gguf(tmp_path))
