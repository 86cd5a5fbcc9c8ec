"""Which engine runs a model: llama.cpp a GGUF file, and a folder of safetensors the lean decoder where it is
certain to fit, else transformers.

Knows the engines and what a folder tells of the vocabulary. Importing this imports torch; transformers, which
takes seconds, only where it is needed.
"""

import json
import logging
from pathlib import Path

import torch

from workers.checkpoints import GGUF_SUFFIX, ModelRefused, read_json
from workers.decoder_config import NotADecoder
from workers.decoder_model import DecoderModel
from workers.fingerprint import tokens_by_id
from workers.language_model import LanguageModel

logger = logging.getLogger(__name__)


def load_model(
    folder: Path,
    *,
    num_slots: int,
    max_length: int,
    num_threads: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> LanguageModel:
    """Load a folder of safetensors, or a GGUF file; ModelRefused says why one does not fit.

    A `vocabulary.json` in the folder, a list of ids, is the `output_ids`; a `tokenizer.json` tells where the
    padding of the vocabulary begins. `num_threads` is torch's, for the whole process. A GGUF file has its own
    precision, runs on CPUs, and takes the `tokenizer.json` beside it.
    """
    if folder.suffix == GGUF_SUFFIX and folder.is_file():
        from workers.llama_cpp_model import LlamaCppModel

        return LlamaCppModel(
            folder,
            num_slots=num_slots,
            max_length=max_length,
            num_threads=num_threads,
            vocab_size=num_tokens(folder.parent),
        )
    if not (folder / "config.json").is_file():
        raise ModelRefused(f"folder {folder} holds no config.json")
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    vocabulary = folder / "vocabulary.json"
    output_ids = json.loads(vocabulary.read_text()) if vocabulary.is_file() else None
    try:
        return DecoderModel.load(
            folder,
            num_slots=num_slots,
            max_length=max_length,
            output_ids=output_ids,
            vocab_size=num_tokens(folder),
            dtype=dtype,
            device=device,
        )
    except NotADecoder as reason:
        logger.info("%s is run as transformers runs it, which is slower: %s", folder.name, reason)
    from workers.transformers_model import TransformersModel

    return TransformersModel.load(
        folder,
        num_slots=num_slots,
        max_length=max_length,
        output_ids=output_ids,
        vocab_size=num_tokens(folder),
        dtype=dtype,
        device=device,
    )


def num_tokens(folder: Path) -> int | None:
    """The largest id that the folder's tokenizer knows, plus one; None without a tokenizer."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    return max(tokens_by_id(read_json(file))) + 1
