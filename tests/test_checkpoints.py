"""Where models come from and which are refused: tiny folders, one fault each."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

from workers.checkpoints import (
    CheckpointInfo,
    ModelRefused,
    check,
    check_pair,
)
from workers.fingerprint import fingerprint

TOKENS = ("<end>", "a", "b", "c", "ab")
MERGES = [("a", "b")]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 6,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "eos_token_id": 0,
}
Make = Callable[..., Path]


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def make_tokenizer(tokens: tuple[str, ...] = TOKENS, merges: list[tuple[str, str]] = MERGES) -> Tokenizer:
    tokenizer = Tokenizer(BPE(vocab={token: id_ for id_, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes a checkpoint that is fit, but for the changes to its config."""

    def make(name: str = "model", tokenizer: Tokenizer | None = None, **changes: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        write_json(folder / "config.json", CONFIG | changes)
        tensors: dict[str, NDArray[Any]] = {
            "embed": np.zeros((8, 6), np.float16),
            "norm": np.zeros(6, np.float32),
        }
        save_file(tensors, folder / "model.safetensors")
        (tokenizer or make_tokenizer()).save(str(folder / "tokenizer.json"))
        return folder

    return make


def test_a_fit_checkpoint_is_described_from_its_files_alone(make: Make) -> None:
    folder = make()
    info = check(folder, role="target")
    assert info == CheckpointInfo(
        folder=folder,
        model_type="llama",
        vocab_size=8,
        context_length=64,
        num_layers=3,
        num_kv_heads=1,
        head_dim=3,
        weight_bytes=8 * 6 * 2 + 6 * 4,
        num_parameters=8 * 6 + 6,
        end_token_ids=(0,),
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        output_ids=None,
    )
    assert len(info.tokenizer_fingerprint) == 64


def test_shards_count_together(make: Make) -> None:
    folder = make()
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    save_file({"head": np.zeros((8, 6), np.float16)}, folder / "model-2.safetensors")
    weight_map = dict.fromkeys(("embed", "norm"), "model-1.safetensors") | {"head": "model-2.safetensors"}
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    info = check(folder)
    assert (info.weight_bytes, info.num_parameters) == (2 * 8 * 6 * 2 + 6 * 4, 2 * 8 * 6 + 6)


def test_sizes_are_found_in_a_nested_text_config(make: Make) -> None:
    folder = make(text_config={"num_hidden_layers": 7, "head_dim": 5}, model_type="gemma3")
    info = check(folder)
    assert (info.model_type, info.num_layers, info.head_dim, info.vocab_size) == ("gemma3", 7, 5, 8)


@pytest.mark.parametrize(("ids", "expected"), [(3, (3,)), ([3, 1], (3, 1)), (None, (0,))])
def test_end_tokens_of_the_generation_config_come_first(make: Make, ids: Any, expected: tuple[int]) -> None:
    folder = make()
    write_json(folder / "generation_config.json", {"eos_token_id": ids})
    assert check(folder).end_token_ids == expected


def test_a_reduced_vocabulary_is_read_and_checked(make: Make) -> None:
    folder = make()
    write_json(folder / "vocabulary.json", [1, 4, 7])
    assert check(folder).output_ids == (1, 4, 7)
    for wrong in ([], [4, 1], [1, 1], [-1], [8], [1.0], ["1"]):
        write_json(folder / "vocabulary.json", wrong)
        with pytest.raises(
            ModelRefused, match=r"vocabulary\.json that is not an ascending list of ids from 0 to 7"
        ):
            check(folder)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "mamba2"}, "model_type 'mamba2'.*cannot be cut back.*choose a decoder"),
        ({"model_type": "recurrent_gemma"}, "model_type 'recurrent_gemma'.*cannot be cut back"),
        ({"model_type": "m", "text_config": {"model_type": "qwen3_5_text"}}, "model_type 'qwen3_5'"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types 'linear_attention'.*cut back"),
        ({"layers_block_type": ["mamba"]}, "layers_block_type 'mamba'"),
        ({"architectures": ["BertForMaskedLM"]}, "'BertForMaskedLM'.*do not continue a text"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder True.*only a decoder"),
        ({"alibi": True}, "ALiBi"),
        ({"model_type": "bloom"}, "model_type 'bloom'.*ALiBi"),
        ({"model_type": "mpt"}, "model_type 'mpt'.*ALiBi"),
        ({"model_type": "mpt", "attn_config": {"alibi": True}}, "model_type 'mpt'.*ALiBi"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling of type 'dynamic'.*longest row of the batch"),
        ({"rope_scaling": {"type": "su"}}, "rope_scaling of type 'su'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters of type 'longrope'"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
            "rope_parameters of type 'dynamic'",
        ),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping 30.0"),
        ({"model_type": "gemma2"}, "attn_logit_softcapping 50.0"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config 'gptq'"),
        ({"auto_map": {"AutoModel": "model.Own"}}, "code of its own .auto_map in config.json"),
        ({"vocab_size": None}, "vocab_size None in config.json, expected a positive whole number"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers '3'"),
    ],
)
def test_models_that_do_not_fit_are_refused(make: Make, changes: dict[str, Any], sentence: str) -> None:
    folder = make(**changes)
    with pytest.raises(ModelRefused, match=sentence) as refusal:
        check(folder)
    assert str(folder) in str(refusal.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": None},
        {"model_type": "falcon", "alibi": False},
        {"model_type": "mpt", "attn_config": {"alibi": False}},
        {"model_type": "gemma2", "attn_logit_softcapping": None},
        {"architectures": None},
    ],
)
def test_models_that_only_look_similar_are_taken(make: Make, changes: dict[str, Any]) -> None:
    check(make(**changes))


def test_files_that_are_missing_or_damaged_are_named(make: Make) -> None:
    folder = make()
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelRefused, match=r"damaged config\.json"):
        check(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelRefused, match=r"config\.json that is not a JSON object"):
        check(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelRefused, match=r"has no config\.json"):
        check(folder)


def test_code_beside_the_tokenizer_is_refused(make: Make) -> None:
    folder = make()
    write_json(folder / "tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}})
    with pytest.raises(ModelRefused, match=r"auto_map in tokenizer_config\.json"):
        check(folder)


@pytest.mark.parametrize("kept_bytes", [0, 7, 40, -1])
def test_truncated_weights_are_refused(make: Make, kept_bytes: int) -> None:
    folder = make()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept_bytes])
    with pytest.raises(ModelRefused, match=r"truncated or damaged model\.safetensors"):
        check(folder)


@pytest.mark.parametrize("shard", ["model-1.safetensors", "../outside.safetensors"])
def test_a_shard_that_the_index_names_must_be_there(make: Make, shard: str) -> None:
    folder = make()
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"embed": shard}})
    with pytest.raises(ModelRefused, match=f"lacks {shard}, which model.safetensors.index.json names"):
        check(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickle_weights_are_refused_by_name(make: Make, name: str) -> None:
    folder = make()
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ModelRefused, match=f"as pickle only .{name}.*save it as safetensors"):
        check(folder)


def test_a_folder_without_weights_is_refused(make: Make) -> None:
    folder = make()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match=r"neither model\.safetensors nor"):
        check(folder)


def test_only_a_target_needs_a_tokenizer(make: Make) -> None:
    folder = make()
    (folder / "tokenizer.json").unlink()
    assert check(folder, role="draft").tokenizer_fingerprint == ""
    with pytest.raises(ModelRefused, match=r"has no tokenizer\.json"):
        check(folder, role="target")


# Pairs


def test_a_pair_with_one_tokenizer_fits_whatever_its_padding_and_end_tokens(make: Make) -> None:
    target = check(make("target"))
    check_pair(target, check(make("draft", vocab_size=16, eos_token_id=[0, 3])))


def test_a_draft_without_a_tokenizer_needs_the_vocabulary_size_of_the_target(make: Make) -> None:
    target, same, other = make("target"), make("same"), make("other", vocab_size=16)
    for folder in (same, other):
        (folder / "tokenizer.json").unlink()
    check_pair(check(target), check(same))
    with pytest.raises(ModelRefused, match=r"no tokenizer\.json, and vocab_size 16 against 8"):
        check_pair(check(target), check(other))
    with pytest.raises(ModelRefused, match=r"has no tokenizer\.json: a target needs one"):
        check_pair(check(same), check(target))


def test_a_pair_with_other_tokens_is_refused_with_examples(make: Make) -> None:
    target = check(make("target"))
    draft = check(make("draft", make_tokenizer(("<end>", "b", "a", "c", "ab", "d"))))
    with pytest.raises(ModelRefused) as refusal:
        check_pair(target, draft)
    assert str(draft.folder) in str(refusal.value)
    assert str(target.folder) in str(refusal.value)
    assert "6 and 5 tokens and differ at 3 ids (draft and target: 'b' and 'a' at 1, 'a' and 'b' at 2" in str(
        refusal.value
    )


def test_a_pair_that_cuts_text_differently_is_refused(make: Make) -> None:
    target = check(make("target"))
    tokenizer = make_tokenizer(merges=[])
    tokenizer.pre_tokenizer = pre_tokenizers.Digits()
    with pytest.raises(ModelRefused, match="same tokens, but differ in merges and pre-tokenizer:"):
        check_pair(target, check(make("draft", tokenizer)))
    tokenizer = make_tokenizer()
    tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(ModelRefused, match="differ in normalizer:"):
        check_pair(target, check(make("lower", tokenizer)))


def test_the_fingerprint_is_of_the_meaning_not_of_the_layout() -> None:
    tokenizer = json.loads(make_tokenizer().to_str())
    older = json.loads(make_tokenizer().to_str())
    older["model"]["merges"] = ["a b"]
    older["padding"] = {"pad_id": 0}
    assert fingerprint(older) == fingerprint(tokenizer)

    with_added = make_tokenizer()
    with_added.add_special_tokens([AddedToken("<new>", special=True)])
    assert fingerprint(json.loads(with_added.to_str())) != fingerprint(tokenizer)
    unigram = json.loads(Tokenizer(Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False)).to_str())
    other = json.loads(Tokenizer(Unigram([("<unk>", 0.0), ("b", -1.0)], 0, False)).to_str())
    assert fingerprint(unigram) != fingerprint(other)


def test_torch_is_never_loaded(make: Make) -> None:
    """Guards against an import that would cost other processes seconds and hundreds of megabytes."""
    script = (
        "import sys; from pathlib import Path; from workers import checkpoints, model_names;"
        "info = checkpoints.check(Path(sys.argv[1])); checkpoints.check_pair(info, info);"
        "import gguf, huggingface_hub, safetensors.numpy, tokenizers;"  # what is imported late
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script, str(make())], check=True, timeout=60)
