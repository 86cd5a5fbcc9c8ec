"""Which GGUF files are refused before anything is loaded, and what is read from the others.

Works without llama.cpp.
"""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from cluster.bench_plan import BenchWish, prepare_bench
from cluster.finding import find
from cluster.outcome import Refused
from cluster.private_run import Models, Wish, prepare
from cluster.prompt_file import OWN_QUESTIONS
from cluster.staying_plan import StayingWish, prepare_staying
from tests.tiny_gguf import save_gguf, save_tiny_gguf
from tests.tiny_models import END_ID, MAX_LENGTH, VOCAB_SIZE, save_tiny, tiny_llama
from workers.checkpoints import ModelRefused, Role, check, check_pair
from workers.gguf_header import read_header
from workers.model_names import resolve


@pytest.fixture(autouse=True)
def _as_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: True if name == "llama_cpp" else find_spec(name)
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return save_tiny_gguf(tmp_path / "whole")


def saying(tmp_path: Path, change: Callable[[GGUFWriter], None], **config: Any) -> Path:
    """A file without a tokenizer beside it, whose header says something more."""
    return save_gguf(tiny_llama(**config), tmp_path / "said.gguf", change=change)


def test_a_file_is_described_from_its_header_alone(file: Path) -> None:
    info = check(resolve(str(file), role="target", progress=print), role="target")
    assert (info.folder, info.gguf) == (file.parent, file)
    assert (info.model_type, info.dtype, info.vocab_size, info.context_length) == (
        "llama",
        "float32",
        VOCAB_SIZE,
        MAX_LENGTH,
    )
    assert (info.num_layers, info.num_kv_heads, info.head_dim) == (2, 2, 8)
    assert info.end_token_ids == (END_ID,)
    assert info.num_parameters == sum(p.numel() for p in tiny_llama().parameters())
    assert 0 <= info.weight_bytes - 4 * info.num_parameters < 64


def test_a_file_and_a_folder_of_the_same_tokenizer_are_a_pair(file: Path, tmp_path: Path) -> None:
    folder = check(save_tiny(tmp_path / "folder"), role="target")
    check_pair(folder, check(file))
    check_pair(check(file, role="target"), folder)


def test_the_header_is_what_the_gguf_package_reads(file: Path) -> None:
    header, reader = read_header(file), GGUFReader(file)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata.keys() == fields.keys()
    for name, field in fields.items():
        assert header.metadata[name] == field.contents(), name
    assert [(t.name, t.num_elements, t.kind) for t in header.tensors] == [
        (t.name, t.n_elements, t.tensor_type) for t in reader.tensors
    ]


_NO_WHOLE_NUMBERS = {"FLOAT32": 0.5, "FLOAT64": 0.1, "BOOL": True, "STRING": "é"}
VALUES = [
    (kind.name.lower(), kind, _NO_WHOLE_NUMBERS.get(kind.name, 7))
    for kind in gguf.GGUFValueType
    if kind is not gguf.GGUFValueType.ARRAY
]


def test_values_of_every_kind_are_read(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        for name, kind, value in VALUES:
            writer.add_key_value(name, value, kind)
        writer.add_array("lists", [[1, 2], [3]])

    metadata = read_header(saying(tmp_path, change)).metadata
    assert {name: metadata[name] for name, _, _ in VALUES} == {name: value for name, _, value in VALUES}
    assert metadata["lists"] == [[1, 2], [3]]


@pytest.mark.parametrize("length", [0, 3, 4, 20, 60, 500, 5000])
def test_a_truncated_header_is_refused(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ModelRefused, match=r"model\.gguf' is no GGUF file, or is cut off"):
        check(file)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"GGML", "it begins with b'GGML'"),
        (4, b"\x01\0\0\0", "its format has version 1"),
        (4, b"\0\0\0\x03", "its format has version 50331648"),
        (16, b"\xff" * 8, "a string of [0-9]+ bytes at byte"),
        (24, b"\xff" * 8, "a string of 18446744073709551615 bytes"),
    ],
)
def test_a_damaged_header_is_refused(file: Path, at: int, value: bytes, message: str) -> None:
    content = bytearray(file.read_bytes())
    content[at : at + len(value)] = value
    file.write_bytes(content)
    with pytest.raises(ModelRefused, match=message):
        check(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w.add_key_value("general.type", "adapter", gguf.GGUFValueType.STRING),
            "'adapter', not a m",
        ),
        (lambda w: w.add_uint16("split.count", 3), "is one of 3 parts"),
        (lambda w: w.add_ssm_state_size(16), "with ssm layers, whose state cannot be cut back"),
        (lambda w: w.add_wkv_head_size(64), "with wkv layers"),
        (lambda w: w.add_causal_attention(False), "its positions see later ones"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "longrope"),
        (lambda w: w.kv_data[0].pop("llama.context_length"), "has llama.context_length None in its header"),
        (lambda w: w.kv_data[0].pop("tokenizer.ggml.tokens"), "has tokenizer.ggml.tokens None in its header"),
        (lambda w: w.kv_data[0].pop("tokenizer.ggml.token_type"), "has tokenizer.ggml.token_type None"),
        (lambda w: w.kv_data[0].pop("general.architecture"), "names no general.architecture"),
    ],
)
def test_what_a_header_rules_out_is_refused(
    change: Callable[[GGUFWriter], None], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelRefused, match=message):
        check(saying(tmp_path, change))


def test_an_encoder_is_refused(file: Path) -> None:
    content = file.read_bytes().replace(b"\5\0\0\0\0\0\0\0llama", b"\2\0\0\0\0\0\0\0t5", 1)
    file.write_bytes(content)
    with pytest.raises(ModelRefused, match="architecture 't5', but only a decoder alone"):
        check(file)


@pytest.mark.parametrize("role", ["draft", "target"])
def test_only_a_draft_may_lack_the_tokenizer(file: Path, role: Role) -> None:
    (file.parent / "tokenizer.json").unlink()
    if role == "draft":
        assert check(file, role=role).tokenizer_fingerprint == ""
        return
    with pytest.raises(ModelRefused, match=r"has no tokenizer\.json beside it"):
        check(file, role=role)


def test_another_models_tokenizer_beside_the_file_is_noticed(file: Path) -> None:
    tokenizer = file.parent / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    tokenizer.write_text(json.dumps(content))
    message = rf"does not fit the tokenizer\.json beside it: id {vocabulary['b']} is 'a', there 'b'"
    with pytest.raises(ModelRefused, match=message):
        check(file)


def test_a_tokenizer_with_more_ids_than_the_file_is_noticed(file: Path) -> None:
    tokenizer = file.parent / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": VOCAB_SIZE, "content": "<|more|>"})
    tokenizer.write_text(json.dumps(content))
    with pytest.raises(ModelRefused, match=rf"id {VOCAB_SIZE} is nothing, there '<\|more\|>'"):
        check(file)


def test_most_of_the_weights_name_the_precision(tmp_path: Path) -> None:
    model = tiny_llama(hidden_size=64, intermediate_size=96)
    file = save_gguf(model, tmp_path / "small.gguf", GGMLQuantizationType.Q8_0)
    info = check(file)
    assert info.dtype == "q8_0"
    assert info.weight_bytes < 1.2 * info.num_parameters


def test_without_the_extra_the_sentence_says_what_to_install(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelRefused, match=r"needs llama\.cpp, .* run .* -m pip install llama-cpp-python"):
        check(file)


def test_a_name_that_is_no_file_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"'models/none\.gguf' does not exist"):
        resolve("models/none.gguf", role="draft", progress=print)
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelRefused, match=r"is a file: give the folder .*, or a \*\.gguf file"):
        resolve(str(tmp_path / "weights.bin"), role="draft", progress=print)


def test_a_link_keeps_the_name_that_says_what_it_is(file: Path, tmp_path: Path) -> None:
    """The hub's cache links to files that are named by their hash."""
    (tmp_path / "blob").write_bytes(file.read_bytes())
    link = tmp_path / "linked.gguf"
    link.symlink_to(tmp_path / "blob")
    assert resolve(str(link), role="draft", progress=print) == link


def test_plans_name_the_file_that_a_worker_loads(file: Path) -> None:
    models = {"target": str(file), "draft": str(file)}
    found = find(**models, say=print)
    staying = prepare_staying(
        StayingWish(
            **models,
            num_targets=1,
            num_drafters=1,
            num_draft_tokens=3,
            rule="token",
            num_slots=2,
            max_length=64,
            num_threads=1,
            port=7480,
        ),
        found,
    )
    wish = Wish("Hi", None, False, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=7, max_tokens=8)
    private = prepare(wish, Models(**models), found)
    for plan in (staying.plan, private.plan):
        assert [(s.folder, s.gguf) for _, _, s in plan.workers()] == [(file.parent, file)] * 2


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_benchmark_needs_models_that_transformers_runs(role: str, file: Path, tmp_path: Path) -> None:
    models = {"target": str(save_tiny(tmp_path / "folder")), "draft": str(tmp_path / "folder")}
    models[role] = str(file)
    wish = BenchWish(
        target=models["target"],
        draft=models["draft"],
        draft_lengths=(1,),
        num_prompts=1,
        num_tokens=8,
        temperatures=(0.0,),
        num_threads=1,
        num_repeats=1,
        prompts=OWN_QUESTIONS,
    )
    with pytest.raises(Refused, match=rf"{role} is .*model\.gguf; a benchmark compares with transformers"):
        prepare_bench(wish, print)
