"""Whether a GGUF file is fit to be used, and what its header says: refusals before any weight is loaded.

Knows the fields of a GGUF header and the tokenizer.json that must lie beside a target's. Does not know
llama.cpp, beyond whether it is installed; what only the loaded model can tell, the engine checks
(`workers.llama_cpp_model`).
"""

import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from workers.checkpoints import CheckpointInfo, Role, read_json, refused
from workers.fingerprint import fingerprint, tokens_by_id
from workers.gguf_header import GgufHeader, GgufTensor, read_header
from workers.model_kinds import FITTING

_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")  # of the text, of a turn, of a message
_NORMAL_TOKEN = 1  # of gguf.TokenType; converters respell others, and invent some for padding
_STATES = ("ssm", "wkv", "shortconv", "kda")  # parts of a header that only layers with a state have
_ENCODERS = ("t5", "t5encoder")


def check_gguf(file: Path, *, role: Role) -> CheckpointInfo:
    """Check a GGUF file and tell what its header says: see `workers.checkpoints.check`.

    The tokenizer is that of the tokenizer.json beside the file: the header names a way of cutting text into
    words, but does not write it down.
    """
    if importlib.util.find_spec("llama_cpp") is None:
        remedy = f"run {sys.executable} -m pip install llama-cpp-python, which compiles it in some minutes"
        raise refused(file, "needs llama.cpp, which is not installed", remedy)
    header = read_header(file)
    if fault := next(_faults(header), None):
        raise refused(file, fault, f"choose {FITTING}")
    tokens, kinds = (
        _field(file, header, f"tokenizer.ggml.{name}", list) for name in ("tokens", "token_type")
    )
    tokenizer_fingerprint = ""
    if (file.parent / "tokenizer.json").exists():
        tokenizer = read_json(file.parent / "tokenizer.json")
        _compare(file, tokens, kinds, tokens_by_id(tokenizer))
        tokenizer_fingerprint = fingerprint(tokenizer)
    elif role == "target":
        raise refused(
            file, "has no tokenizer.json beside it", "put the one of the model that it was made from there"
        )
    num_heads = _size(file, header, "attention.head_count")
    end_tokens = [header.metadata.get(f"tokenizer.ggml.{name}") for name in _END_TOKENS]
    return CheckpointInfo(
        folder=file.parent,
        gguf=file,
        model_type=_architecture(header),
        vocab_size=len(tokens),
        context_length=_size(file, header, "context_length"),
        num_layers=_size(file, header, "block_count"),
        num_kv_heads=_size(file, header, "attention.head_count_kv", default=num_heads),
        head_dim=_size(
            file,
            header,
            "attention.key_length",
            default=_size(file, header, "embedding_length") // num_heads,
        ),
        weight_bytes=header.weight_bytes,
        num_parameters=sum(tensor.num_elements for tensor in header.tensors),
        end_token_ids=tuple(sorted({id_ for id_ in end_tokens if isinstance(id_, int)})),
        tokenizer_fingerprint=tokenizer_fingerprint,
        output_ids=None,
        dtype=dtype_of(header.tensors),
    )


def dtype_of(tensors: Sequence[GgufTensor]) -> str:
    """What most of the weights are stored as: 'float32', 'q8_0', 'q4_k' and so on."""
    from gguf import GGMLQuantizationType

    sizes: Counter[int] = Counter()
    for tensor in tensors:
        sizes[tensor.kind] += tensor.num_elements
    kind = max(sizes, key=lambda kind: sizes[kind])
    names = {int(known): known.name.lower() for known in GGMLQuantizationType}
    name = names.get(kind, f"type {kind}")
    return {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}.get(name, name)


def _faults(header: GgufHeader) -> Iterator[str]:
    metadata, architecture = header.metadata, _architecture(header)
    if (kind := metadata.get("general.type", "model")) != "model":
        yield f"has general.type {kind!r}, not a model"
    if not architecture or not header.tensors:
        yield "names no general.architecture" if not architecture else "holds no tensors"
    if (number := metadata.get("split.count", 1)) > 1:
        yield f"is one of {number} parts; join them with llama.cpp's gguf-split, or"
    if architecture in _ENCODERS:
        yield f"has architecture {architecture!r}, but only a decoder alone continues its own text"
    for state in _STATES:
        if any(name.startswith(f"{architecture}.{state}.") for name in metadata):
            yield f"has architecture {architecture!r} with {state} layers, whose state cannot be cut back"
    if metadata.get(f"{architecture}.attention.causal") is False:
        yield f"has {architecture}.attention.causal False: its positions see later ones"
    scaling = metadata.get(f"{architecture}.rope.scaling.type")
    if scaling == "longrope" or any("rope_factors_long" in tensor.name for tensor in header.tensors):
        yield "has two sets of rotary factors (longrope), chosen by the size of the cache"


def _architecture(header: GgufHeader) -> str:
    return str(header.metadata.get("general.architecture", ""))


def _field(file: Path, header: GgufHeader, name: str, kind: type) -> Any:
    value = header.metadata.get(name)
    if not isinstance(value, kind) or not value:
        raise refused(file, f"has {name} {value!r} in its header", "fetch the file again")
    return value


def _size(file: Path, header: GgufHeader, name: str, default: int | None = None) -> int:
    """A positive whole number of the architecture's; the largest, where each layer has its own."""
    name = f"{_architecture(header)}.{name}"
    value = header.metadata.get(name, default)
    value = max(value) if isinstance(value, list) and value else value
    if not isinstance(value, int) or value < 1:
        raise refused(file, f"has {name} {value!r} in its header", "choose a file that names its sizes")
    return value


def _compare(file: Path, tokens: list[str], kinds: list[int], by_id: dict[int, str]) -> None:
    """Refuse a tokenizer.json that gives other tokens to the file's ids: files of several models often share
    a folder.
    """
    if len(kinds) != len(tokens):
        problem = f"has {len(tokens)} tokens and {len(kinds)} kinds of token in its header"
        raise refused(file, problem, "fetch the file again")
    other = [
        id_
        for id_, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == _NORMAL_TOKEN and by_id.get(id_) != token
    ]
    if other or max(by_id, default=-1) >= len(tokens):
        id_ = other[0] if other else max(by_id)
        ours = repr(tokens[id_]) if id_ < len(tokens) else "nothing"
        problem = f"does not fit the tokenizer.json beside it: id {id_} is {ours}, there {by_id.get(id_)!r}"
        raise refused(file, problem, "put the one of the model that it was made from there")
