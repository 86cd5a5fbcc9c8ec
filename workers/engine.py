"""Which engine runs a model: llama.cpp a GGUF file, and a folder of safetensors the lean decoder where it is
certain to fit, else transformers.

Knows the engines and what a folder tells of the vocabulary. Importing this imports torch; transformers, which
takes seconds, only where it is needed.
"""

import json
import logging
from pathlib import Path
from typing import Literal

import torch

from workers.checkpoints import GGUF_SUFFIX, SHALLOW_LAYERS, ModelRefused, Role, read_json
from workers.decoder_config import DecoderConfig, NotADecoder
from workers.decoder_model import DecoderModel
from workers.fingerprint import tokens_by_id
from workers.language_model import LanguageModel
from workers.products import int8

logger = logging.getLogger(__name__)


Precision = Literal["auto", "float32", "bfloat16", "float16", "int8"]
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.float32,
}


def load_model(
    source: Path,
    *,
    role: Role = "target",
    num_slots: int,
    max_length: int,
    num_threads: int | None = None,
    precision: Precision = "auto",
    device: str = "cpu",
) -> LanguageModel:
    """Load a folder of safetensors, or a GGUF file; ModelRefused says why one does not fit.

    A `vocabulary.json` in the folder, a list of ids, is the `output_ids`; a `tokenizer.json` tells where the
    padding of the vocabulary begins. `num_threads` is torch's, for the whole process. `precision` is resolved
    by `precision_of`. A GGUF file has its own, runs on CPUs, and takes the `tokenizer.json` beside it.
    """
    if source.suffix == GGUF_SUFFIX and source.is_file():
        if (precision, device) != ("auto", "cpu"):
            words = f"precision {precision} on device {device}"
            raise ModelRefused(
                f"file {source} has its own precision and runs on CPUs; it does not take {words}"
            )
        from workers.llama_cpp_model import LlamaCppModel

        return LlamaCppModel(
            source,
            role=role,
            num_slots=num_slots,
            max_length=max_length,
            num_threads=num_threads,
            vocab_size=num_tokens(source.parent),
        )
    if not (source / "config.json").is_file():
        raise ModelRefused(f"folder {source} holds no config.json")
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    vocabulary = source / "vocabulary.json"
    output_ids = json.loads(vocabulary.read_text()) if vocabulary.is_file() else None
    vocab_size, chosen = num_tokens(source), precision_of(source, role, precision, device)
    try:
        return DecoderModel.load(
            source,
            num_slots=num_slots,
            max_length=max_length,
            output_ids=output_ids,
            vocab_size=vocab_size,
            form=int8 if chosen == "int8" else None,
            dtype=_DTYPES[chosen],
            device=device,
        )
    except NotADecoder as reason:
        logger.info("%s is run as transformers runs it, which is slower: %s", source.name, reason)
    if chosen == "int8" and precision != "auto":
        raise ModelRefused(f"folder {source} does not run in int8: its kind of model takes another precision")
    from workers.transformers_model import TransformersModel

    return TransformersModel.load(
        source,
        num_slots=num_slots,
        max_length=max_length,
        output_ids=output_ids,
        vocab_size=vocab_size,
        dtype=_DTYPES[chosen],
        device=device,
    )


def precision_of(folder: Path, role: Role, precision: Precision, device: str) -> Precision:
    """What "auto" means for a model: bfloat16 on a GPU, on a CPU float32, and int8 for a shallow draft.

    What 8 bits cost adds up over the layers, so a deep draft is left as it is. A target in int8 is refused:
    its p would depend on the tokens beside it. In any other precision it depends on how many rows a pass has
    and how long its sessions are, by a rounding, and never on what was drafted.
    """
    if precision == "int8" and (role == "target" or device != "cpu"):
        who = (
            "a target, whose p would depend on the rows beside it" if role == "target" else f"device {device}"
        )
        raise ModelRefused(f"precision int8 is not for {who}; choose float32 or bfloat16")
    if precision != "auto":
        return precision
    if device != "cpu":
        return "bfloat16"
    return "int8" if role == "draft" and _is_shallow_decoder(folder) else "float32"


def _is_shallow_decoder(folder: Path) -> bool:
    """Whether 8 bits are to be had, in this build of torch too, and cost little."""
    try:
        shape = DecoderConfig.read(read_json(folder / "config.json"))
    except NotADecoder:
        return False
    return shape.num_layers <= SHALLOW_LAYERS and torch.backends.quantized.engine not in ("none", None)


def num_tokens(folder: Path) -> int | None:
    """The largest id that the folder's tokenizer knows, plus one; None without a tokenizer."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    return max(tokens_by_id(read_json(file)), default=-1) + 1 or None
