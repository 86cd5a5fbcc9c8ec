"""The transformers engine says what the plain model says, whatever lies beside it or lay there before."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
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

from tests.tiny_models import FAMILIES, VOCAB_SIZE, WINDOW, save_tiny, tiny_gemma3, tiny_llama, tiny_qwen3
from workers.checkpoints import ModelRefused
from workers.language_model import Feed, LanguageModel
from workers.transformers_model import TransformersModel

NUM_SLOTS, MAX_LENGTH = 4, 48
TOLERANCE = 5e-5  # the tiny models' logits reach 8; other orders of the same sums differ by 3e-6

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


class Pair:
    """A model as transformers runs it, and the engine over the same weights."""

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        self.plain = copy.deepcopy(model)
        self.engine = TransformersModel(model, **{"num_slots": NUM_SLOTS, "max_length": MAX_LENGTH} | options)

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


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small spend their time on waiting for a second thread, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(FAMILIES[request.param]())


@pytest.fixture
def llama() -> Pair:
    return Pair(tiny_llama())


@pytest.fixture
def draw() -> random.Random:
    return random.Random(7)


def some(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(VOCAB_SIZE) for _ in range(length)]


def test_it_is_a_language_model(llama: Pair) -> None:
    engine: LanguageModel = llama.engine
    assert (engine.num_slots, engine.max_length, engine.vocab_size) == (NUM_SLOTS, MAX_LENGTH, VOCAB_SIZE)
    assert engine.output_ids is None


def test_a_whole_sequence_gets_the_plain_models_logits(pair: Pair, draw: random.Random) -> None:
    tokens = some(draw, 4 * WINDOW)
    logits = pair.feed(1, 0, tokens)
    assert logits.dtype == np.float32
    same(logits, pair.expected(tokens))


def test_a_prompt_in_chunks_gets_the_logits_of_one_piece(pair: Pair, draw: random.Random) -> None:
    tokens = some(draw, 30)
    for chunk in (1, 2, 7, 29):
        pieces = [pair.feed(0, i, tokens[i : i + chunk]) for i in range(0, len(tokens), chunk)]
        same(np.concatenate(pieces), pair.expected(tokens))


def test_a_session_gets_the_same_logits_alone_and_beside_any_others(pair: Pair, draw: random.Random) -> None:
    prompt, block = some(draw, 13), some(draw, 5)
    expected = pair.expected(prompt + block, len(block))
    for _ in range(12):
        slots = draw.sample(range(NUM_SLOTS), draw.randint(1, NUM_SLOTS))
        prompts = {slot: some(draw, draw.randint(1, 25)) for slot in slots} | {slots[0]: prompt}
        blocks = {slot: some(draw, draw.randint(1, 9)) for slot in slots} | {slots[0]: block}
        pair.engine.forward([Feed(slot, 0, prompts[slot], 0) for slot in slots])
        draw.shuffle(slots)
        feeds = [Feed(slot, len(prompts[slot]), blocks[slot], len(blocks[slot])) for slot in slots]
        logits = pair.engine.forward(feeds)
        mine = next(i for i, feed in enumerate(feeds) if feed.tokens is block)
        same(logits[mine], expected)


def test_logits_never_depend_on_later_tokens(pair: Pair, draw: random.Random) -> None:
    prompt = some(draw, 10)
    expected = pair.expected(prompt)
    for length in (1, 3, 20):
        same(pair.feed(2, 0, prompt + some(draw, length))[: len(prompt)], expected)


def test_neighbours_that_share_a_prefix_do_not_see_each_other(pair: Pair, draw: random.Random) -> None:
    prompt, tails = some(draw, 12), [some(draw, 4) for _ in range(NUM_SLOTS)]
    pair.engine.forward([Feed(slot, 0, prompt, 0) for slot in range(NUM_SLOTS)])
    logits = pair.engine.forward([Feed(slot, len(prompt), tail, 4) for slot, tail in enumerate(tails)])
    for tail, rows in zip(tails, logits, strict=True):
        same(rows, pair.expected(prompt + tail, 4))


@pytest.mark.parametrize("seed", range(5))
def test_after_any_feeds_and_rollbacks_a_slot_is_as_if_freshly_prefilled(pair: Pair, seed: int) -> None:
    """Against caches trimmed one too many or too few: output right, later tokens wrong."""
    draw = random.Random(seed)
    kept: list[list[int]] = [[] for _ in range(NUM_SLOTS)]
    for _ in range(25):
        for slot in range(NUM_SLOTS):
            if draw.random() < 0.3:
                length = draw.randint(0, MAX_LENGTH)
                pair.engine.truncate(slot, length)
                kept[slot] = kept[slot][:length]
        feeds = []
        for slot in draw.sample(range(NUM_SLOTS), draw.randint(1, NUM_SLOTS)):
            start = len(kept[slot]) if draw.random() < 0.6 else draw.randint(0, len(kept[slot]))
            start = min(start, MAX_LENGTH - 1)
            tokens = some(draw, draw.randint(1, min(12, MAX_LENGTH - start)))
            kept[slot] = kept[slot][:start] + tokens
            feeds.append(Feed(slot, start, tokens, draw.randint(0, len(tokens))))
        for feed, logits in zip(feeds, pair.engine.forward(feeds), strict=True):
            same(logits, pair.expected(kept[feed.slot], feed.num_logits))


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_window_stays_right_after_a_rollback_across_its_edge(family: str, draw: random.Random) -> None:
    pair = Pair(FAMILIES[family]())
    for kept in range(1, 2 * WINDOW + 2):
        tokens, again = some(draw, 2 * WINDOW + 3), some(draw, 3)
        pair.feed(0, 0, tokens, 0)
        pair.engine.truncate(0, kept)
        same(pair.feed(0, kept, again), pair.expected(tokens[:kept] + again, len(again)))
        same(pair.feed(0, kept + 3, again[:1]), pair.expected(tokens[:kept] + again + again[:1], 1))


def test_a_slot_can_be_filled_to_its_last_position_and_no_further(pair: Pair, draw: random.Random) -> None:
    tokens = some(draw, MAX_LENGTH)
    same(pair.feed(3, 0, tokens), pair.expected(tokens))
    with pytest.raises(
        ValueError, match=r"1 tokens of slot 3 from start 48 are not in 1\.\.0 \(max_length 48\)"
    ):
        pair.feed(3, MAX_LENGTH, [1])
    same(pair.feed(3, MAX_LENGTH - 1, tokens[-1:]), pair.expected(tokens, 1))


def test_a_freed_slot_shows_its_next_user_nothing(pair: Pair, draw: random.Random) -> None:
    pair.feed(1, 0, some(draw, MAX_LENGTH), 0)
    pair.engine.truncate(1, 0)
    tokens = some(draw, 9)
    same(pair.feed(1, 0, tokens), pair.expected(tokens))
    with pytest.raises(ValueError, match=r"start 10 of slot 1 is not in 0\.\.9"):
        pair.feed(1, 10, [1])


def test_positions_that_are_not_held_are_never_read(pair: Pair, draw: random.Random) -> None:
    """The cache is not cleared when it is reserved: it may hold anything, NaN too."""
    with torch.inference_mode():
        for keys, values in pair.engine._attention._cache.values():
            keys.fill_(torch.nan)
            values.fill_(torch.nan)
    tokens = some(draw, 20)
    pair.engine.forward([Feed(0, 0, tokens[:11], 0), Feed(2, 0, tokens, 0)])
    same(pair.feed(0, 11, tokens[11:]), pair.expected(tokens, 9))


def test_a_new_feed_below_the_held_length_shortens_the_slot(llama: Pair, draw: random.Random) -> None:
    llama.feed(0, 0, some(draw, 20), 0)
    llama.feed(0, 5, [1, 2], 0)
    with pytest.raises(ValueError, match=r"start 8 of slot 0 is not in 0\.\.7"):
        llama.feed(0, 8, [1])


def test_a_truncated_slot_holds_exactly_what_was_kept(llama: Pair, draw: random.Random) -> None:
    tokens = some(draw, 20)
    for kept in (19, 7, 1, 0):
        llama.feed(0, 0, tokens, 0)
        llama.engine.truncate(0, kept)
        with pytest.raises(ValueError, match=rf"start {kept + 1} of slot 0 is not in 0\.\.{kept}"):
            llama.feed(0, kept + 1, [1])
        same(llama.feed(0, kept, [1]), llama.expected([*tokens[:kept], 1], 1))


def test_truncate_leaves_shorter_slots_alone(llama: Pair, draw: random.Random) -> None:
    tokens = some(draw, 6)
    llama.feed(0, 0, tokens, 0)
    llama.engine.truncate(0, 20)
    with pytest.raises(ValueError, match=r"start 7 of slot 0 is not in 0\.\.6"):
        llama.feed(0, 7, [1])
    same(llama.feed(0, 6, [1]), llama.expected([*tokens, 1], 1))


def test_each_feed_gets_logits_for_as_many_last_positions_as_it_wants(
    pair: Pair, draw: random.Random
) -> None:
    wanted = [2, 0, 6, 1]
    sequences = [some(draw, 6) for _ in wanted]
    feeds = [Feed(slot, 0, sequences[slot], num) for slot, num in enumerate(wanted)]
    logits = pair.engine.forward(feeds)
    for tokens, num, rows in zip(sequences, wanted, logits, strict=True):
        assert rows.shape == (num, VOCAB_SIZE)
        same(rows, pair.expected(tokens, num))


def test_the_head_runs_on_wanted_rows_only(draw: random.Random) -> None:
    pair, model = Pair(tiny_llama()), tiny_llama()
    rows: list[int] = []
    engine = TransformersModel(model, num_slots=NUM_SLOTS, max_length=MAX_LENGTH)
    model.get_output_embeddings().register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape[1]))
    first, second = some(draw, 6), some(draw, 8)
    engine.forward([Feed(0, 0, first, 0), Feed(1, 0, second, 0)])
    logits = engine.forward([Feed(0, 6, [1], 1), Feed(1, 8, [2, 3, 4], 2)])
    assert rows == [0, 3]
    same(logits[1], pair.expected([*second, 2, 3, 4], 2))


def test_no_feeds_no_logits(llama: Pair) -> None:
    assert llama.engine.forward([]) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_output_ids_are_columns_of_the_full_logits(family: str, draw: random.Random) -> None:
    ids = sorted(draw.sample(range(VOCAB_SIZE), 40))
    pair = Pair(FAMILIES[family](), output_ids=ids)
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
        pair = Pair(model, output_ids=ids)
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
        Pair(tiny_llama(), output_ids=output_ids)


GOOD = Feed(0, 10, [1, 2, 3], 3)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Feed(4, 0, [1], 1), r"slot 4 is not in 0\.\.3"),
        (Feed(-1, 0, [1], 1), r"slot -1 is not in 0\.\.3"),
        (Feed(0, 10, [4], 1), "slot 0 is fed twice"),
        (Feed(1, 1, [1], 1), r"start 1 of slot 1 is not in 0\.\.0"),
        (Feed(1, -1, [1], 1), r"start -1 of slot 1 is not in 0\.\.0"),
        (Feed(1, 0, [], 0), r"0 tokens of slot 1 from start 0 are not in 1\.\.48"),
        (Feed(1, 0, [1] * 49, 1), r"49 tokens of slot 1 from start 0 are not in 1\.\.48"),
        (Feed(1, 0, [1, 260, 2], 1), r"token 260 of slot 1 is not in 0\.\.259"),
        (Feed(1, 0, [1, -1, 2], 1), r"token -1 of slot 1 is not in 0\.\.259"),
        (Feed(1, 0, [1, 2], 3), r"num_logits 3 of slot 1 is not in 0\.\.2"),
        (Feed(1, 0, [1, 2], -1), r"num_logits -1 of slot 1 is not in 0\.\.2"),
    ],
)
def test_a_refused_pass_names_the_fault_and_changes_nothing(
    bad: Feed, message: str, draw: random.Random
) -> None:
    pair = Pair(tiny_llama())
    tokens = some(draw, 20)
    pair.feed(0, 0, tokens, 0)
    with pytest.raises(ValueError, match=message):
        pair.engine.forward([GOOD, bad])
    same(pair.feed(0, 20, [7]), pair.expected([*tokens, 7], 1))
    with pytest.raises(ValueError, match=r"start 1 of slot 1 is not in 0\.\.0"):
        pair.feed(1, 1, [1])


def test_a_pass_that_fails_midway_forgets_what_it_may_have_overwritten(draw: random.Random) -> None:
    model = tiny_llama()
    engine = TransformersModel(model, num_slots=NUM_SLOTS, max_length=MAX_LENGTH)
    engine.forward([Feed(0, 0, some(draw, 20), 0)])

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    hook = model.get_output_embeddings().register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.forward([GOOD])
    hook.remove()
    with pytest.raises(ValueError, match=r"start 11 of slot 0 is not in 0\.\.10"):
        engine.forward([Feed(0, 11, [1], 1)])
    engine.forward([GOOD])


def test_bad_truncates_are_refused(llama: Pair) -> None:
    with pytest.raises(ValueError, match=r"slot 4 is not in 0\.\.3"):
        llama.engine.truncate(4, 0)
    with pytest.raises(ValueError, match="length -1 of slot 0 is below 0"):
        llama.engine.truncate(0, -1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_slots": 0}, "num_slots 0 is below 1"),
        ({"max_length": 0}, "max_length 0 is below 1"),
        ({"max_length": 129}, "max_length 129 exceeds the 128 positions of LlamaForCausalLM"),
    ],
)
def test_bad_sizes_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pair(tiny_llama(), **options)


@pytest.mark.parametrize("max_length", [1, 2, 5])
def test_one_short_slot_is_enough(max_length: int) -> None:
    pair = Pair(tiny_llama(), num_slots=1, max_length=max_length)
    tokens = list(range(max_length))
    same(pair.feed(0, 0, tokens), pair.expected(tokens))


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


def test_a_folder_is_loaded_with_its_output_ids(tmp_path: Path, draw: random.Random) -> None:
    save_tiny(tmp_path, "qwen3", seed=3)
    tokens = some(draw, 10)
    expected = plain_logits(tiny_qwen3(seed=3), tokens)
    whole = TransformersModel.load(tmp_path, num_slots=2, max_length=32)
    same(whole.forward([Feed(0, 0, tokens, 10)])[0], expected)
    (tmp_path / "vocabulary.json").write_text(json.dumps([1, 5, 9]))
    reduced = TransformersModel.load(tmp_path, num_slots=2, max_length=32)
    same(reduced.forward([Feed(0, 0, tokens, 10)])[0], expected[:, [1, 5, 9]])


def test_a_lower_precision_can_be_asked_for(tmp_path: Path, draw: random.Random) -> None:
    engine = TransformersModel.load(save_tiny(tmp_path), num_slots=2, max_length=32, dtype=torch.bfloat16)
    tokens = some(draw, 10)
    logits = engine.forward([Feed(0, 0, tokens, 10)])[0]
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, plain_logits(tiny_llama(), tokens), rtol=0, atol=0.5)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"holds no config\.json"):
        TransformersModel.load(tmp_path / "nowhere", num_slots=1, max_length=8)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(tiny_llama().state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match="safetensors"):
        TransformersModel.load(tmp_path, num_slots=1, max_length=8)


def test_weights_that_lack_a_layer_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ModelRefused, match=r"lacks 9 weights, the first is model\.layers\.2"):
        TransformersModel.load(tmp_path, num_slots=1, max_length=8)


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


def test_ids_that_pad_the_vocabulary_are_neither_scored_nor_taken(tmp_path: Path) -> None:
    """A padded head gives its padding a probability; drawn, it would be no text at all."""
    folder = save_tiny(tmp_path / "padded", vocab_size=VOCAB_SIZE + 12)
    engine = TransformersModel.load(folder, num_slots=1, max_length=8)
    assert engine.vocab_size == VOCAB_SIZE
    (logits,) = engine.forward([Feed(0, 0, [1, 2], 2)])
    assert logits.shape == (2, VOCAB_SIZE)
    with pytest.raises(ValueError, match=f"token {VOCAB_SIZE} of slot 0 is not in"):
        engine.forward([Feed(0, 0, [VOCAB_SIZE], 1)])
