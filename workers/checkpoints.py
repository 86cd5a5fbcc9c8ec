"""Whether a checkpoint is fit, by its files: refusals before any weight is loaded.

Knows the files of a checkpoint, as transformers writes them. Does not know torch or transformers, which the
processes that import this must not load; what only the loaded model can tell, the engine checks.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from workers.fingerprint import difference, fingerprint
from workers.model_kinds import FITTING, why_unfit

Role = Literal["draft", "target"]
Json = dict[str, Any]

GGUF_SUFFIX = ".gguf"
SHALLOW_LAYERS = 4  # at most, of a model whose passes are short whatever runs them

_NO_TOKENIZER = ("has no tokenizer.json", "a target needs one; save its fast tokenizer there")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class ModelRefused(ValueError):
    """The sentence says which model, what is wrong with it, and what would fit."""


class ModelUnreachable(ModelRefused):
    """The model may be fit, but the hub or the package registry did not give it."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What a checkpoint's files tell without loading it."""

    folder: Path  # with the tokenizer
    model_type: str
    vocab_size: int  # V, padding included
    context_length: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    weight_bytes: int  # as stored
    num_parameters: int
    end_token_ids: tuple[int, ...]
    tokenizer_fingerprint: str  # '' without tokenizer.json
    output_ids: tuple[int, ...] | None  # ascending ids of a reduced output vocabulary; None: all V
    gguf: Path | None = None  # the file that holds the weights, where they are not safetensors in the folder
    dtype: str = "float32"  # what they are computed in, or for GGUF stored as
    num_tied: int = 0  # parameters that are embedding and head at once, of which an engine holds two forms

    @property
    def is_shallow(self) -> bool:
        """Whether the model has so few layers that 8 bits cost little and a second thread brings little."""
        return self.num_layers <= SHALLOW_LAYERS

    def num_threads(self, most: int) -> int:
        """How many threads, at most `most`, its passes are worth: they wait for each other at every step."""
        return 1 if self.is_shallow else most


def check(folder: Path, *, role: Role = "draft") -> CheckpointInfo:
    """Check a checkpoint's files and tell what they say. A target needs a tokenizer, a draft may lack it.

    `folder` may be a GGUF file. Raises ModelRefused for what is missing or damaged, for code and pickles, and
    for kinds of model whose cache cannot be cut back or whose logits depend on other rows of the batch.
    """
    if folder.suffix == GGUF_SUFFIX and folder.is_file():
        from workers.gguf_checkpoints import check_gguf  # imports this module

        return check_gguf(folder, role=role)
    files = sorted(folder.glob(f"*{GGUF_SUFFIX}"))
    if files and not (folder / "config.json").exists():
        raise refused(folder, "has no config.json", f"name the file in it, {files[0]}")
    config = read_json(folder / "config.json")
    _refuse_code(folder, config)
    if fault := why_unfit(config):
        raise refused(folder, fault, f"choose {FITTING}")
    text_config = config | (config.get("text_config") or {})  # models of several modalities nest it

    tokenizer_fingerprint = ""
    if (folder / "tokenizer.json").exists():
        tokenizer_fingerprint = fingerprint(read_json(folder / "tokenizer.json"))
    elif role == "target":
        raise refused(folder, *_NO_TOKENIZER)

    vocab_size = _size(folder, text_config, "vocab_size")
    num_heads = _size(folder, text_config, "num_attention_heads", "n_head", "n_heads")
    hidden_size = _size(folder, text_config, "hidden_size", "n_embd", "d_model")
    sizes = [_tensor_sizes(folder, shard) for shard in weight_files(folder)]
    return CheckpointInfo(
        folder=folder,
        model_type=str(config.get("model_type", "")),
        vocab_size=vocab_size,
        context_length=_size(folder, text_config, "max_position_embeddings", "n_positions", "max_seq_len"),
        num_layers=_size(folder, text_config, "num_hidden_layers", "n_layer", "n_layers"),
        num_kv_heads=_size(folder, text_config, "num_key_value_heads", "num_kv_heads", default=num_heads),
        head_dim=_size(folder, text_config, "head_dim", default=hidden_size // num_heads),
        weight_bytes=sum(num_bytes for num_bytes, _ in sizes),
        num_parameters=sum(num_parameters for _, num_parameters in sizes),
        end_token_ids=_end_token_ids(folder, text_config),
        tokenizer_fingerprint=tokenizer_fingerprint,
        output_ids=_output_ids(folder, vocab_size),
        num_tied=vocab_size * hidden_size if text_config.get("tie_word_embeddings") else 0,
    )


def _refuse_code(folder: Path, config: Json) -> None:
    tokenizer_config = folder / "tokenizer_config.json"
    if "auto_map" in config:
        problem = "brings code of its own (auto_map in config.json)"
        raise refused(folder, problem, f"choose {FITTING}")
    if tokenizer_config.exists() and "auto_map" in read_json(tokenizer_config):
        problem = "brings code of its own (auto_map in tokenizer_config.json)"
        raise refused(folder, problem, "save it with a fast tokenizer")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the weights, in order; each of them exists."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        shards = sorted(set(read_json(index).get("weight_map", {}).values()))
        for shard in shards:
            if Path(shard).name != shard or not (folder / shard).exists():
                raise refused(folder, f"lacks {shard}, which {index.name} names", "fetch the model again")
        if shards:
            return [folder / shard for shard in shards]
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        problem = f"has its weights as pickle only ({pickles[0]}), which can run code when read"
        raise refused(folder, problem, "save it as safetensors")
    problem = f"has neither {single.name} nor a {index.name} that names shards"
    raise refused(folder, problem, "save it as safetensors")


def _tensor_sizes(folder: Path, file: Path) -> tuple[int, int]:
    """Bytes and number of elements of all tensors in a safetensors file, from its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy") as tensors:
            num_elements = sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
        with file.open("rb") as raw:
            header_bytes = int.from_bytes(raw.read(8), "little")
    except (SafetensorError, OSError) as error:
        problem = f"has a truncated or damaged {file.name} ({error})"
        raise refused(folder, problem, "fetch or save the model again") from None
    return file.stat().st_size - 8 - header_bytes, num_elements  # the format allows no gaps


def _size(folder: Path, config: Json, *names: str, default: int | None = None) -> int:
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if not isinstance(value, int) or value < 1:
        problem = f"has {names[0]} {value!r} in config.json, expected a positive whole number"
        raise refused(folder, problem, "save it again with a complete configuration")
    return value


def _end_token_ids(folder: Path, config: Json) -> tuple[int, ...]:
    generation_config = folder / "generation_config.json"
    ids = read_json(generation_config).get("eos_token_id") if generation_config.exists() else None
    ids = config.get("eos_token_id") if ids is None else ids
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    return tuple(int(id_) for id_ in ids)


def _output_ids(folder: Path, vocab_size: int) -> tuple[int, ...] | None:
    vocabulary = folder / "vocabulary.json"
    if not vocabulary.exists():
        return None
    ids = read_json(vocabulary, kind=list)
    if not ids or ids != sorted({id_ for id_ in ids if type(id_) is int and 0 <= id_ < vocab_size}):
        problem = f"has a vocabulary.json that is not an ascending list of ids from 0 to {vocab_size - 1}"
        raise refused(folder, problem, "write it anew, or remove it to use the whole vocabulary")
    return tuple(ids)


def check_pair(target: CheckpointInfo, draft: CheckpointInfo) -> None:
    """Refuse a pair in which a token id does not mean the same text to both.

    `vocab_size` may differ where the tokenizers agree: ids past the tokenizer's are padding. End tokens may
    differ: the target's count. A draft without a tokenizer is taken at its word if its `vocab_size` is equal.
    """
    if not target.tokenizer_fingerprint:
        raise refused(target.folder, *_NO_TOKENIZER)
    if not draft.tokenizer_fingerprint and draft.vocab_size != target.vocab_size:
        problem = f"has no tokenizer.json, and vocab_size {draft.vocab_size} against {target.vocab_size}"
        raise refused(draft.folder, problem, "choose a draft with the target's tokenizer")
    if draft.tokenizer_fingerprint not in ("", target.tokenizer_fingerprint):
        ours, theirs = (read_json(info.folder / "tokenizer.json") for info in (draft, target))
        problem = f"does not fit target {str(target.folder)!r}: {difference(ours, theirs)}"
        raise refused(draft.folder, problem, "choose a draft with the target's tokenizer")


def read_json(file: Path, kind: type = dict) -> Any:
    """A model's JSON file, which must hold an object, or a `kind`. Raises ModelRefused."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise refused(file.parent, f"has no {file.name}", "give the folder of a whole model") from None
    except (OSError, ValueError) as error:
        raise refused(file.parent, f"has a damaged {file.name} ({error})", "fetch the model again") from None
    if not isinstance(value, kind):
        problem = f"has a {file.name} that is not a JSON {'object' if kind is dict else 'list'}"
        raise refused(file.parent, problem, "fetch the model again")
    return value


def refused(model: str | Path, problem: str, remedy: str) -> ModelRefused:
    """What is wrong with a model, and what to do, as one sentence."""
    return ModelRefused(f"Model {str(model)!r} {problem}: {remedy}.")
