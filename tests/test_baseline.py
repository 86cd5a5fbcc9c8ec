"""transformers' own generation for the benchmark: the law that was asked for, honest counts, no process left.

Guards against comparing with another law (top_k is 50 unless said otherwise), and with texts that end early.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from cluster import baseline_process
from cluster.baseline_process import BaselineFailed, BaselineProcess
from cluster.first_token import seconds_of_transformers
from tests.pipelines import generate, pipeline
from tests.tiny_models import END_ID, save_tiny
from workers.baseline import Baseline
from workers.baseline_tasks import BaselineBatch, BaselineModels, BaselineTask, GapTask
from workers.engine import load_model

PROMPT = tuple(b"a question")
LOADING_SECONDS = 300.0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "target", seed=0)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "other", seed=1)


def _plain(num_tokens: int, temperature: float = 0.0, seed: int = 0) -> BaselineTask:
    return BaselineTask(
        kind="plain", prompt=PROMPT, num_tokens=num_tokens, temperature=temperature, seed=seed
    )


def _assisted(num_tokens: int, temperature: float = 0.0) -> BaselineTask:
    return _plain(num_tokens, temperature).model_copy(update={"kind": "assisted"})


async def test_greedy_texts_are_those_of_the_engine(target: Path, other: Path) -> None:
    """All three ways to write them, on other code each."""
    baseline = Baseline(BaselineModels(target=target, assistant=other, num_threads=1))
    plain, assisted = baseline.write(_plain(24)), baseline.write(_assisted(24))
    models = [load_model(folder, num_slots=1, max_length=64) for folder in (target, other)]
    async with pipeline(*models, num_draft_tokens=2) as running:
        ours = await generate(
            running.stub, list(PROMPT), max_tokens=24, temperature=0.0, ignore_end_tokens=True
        )
    assert plain.tokens == assisted.tokens == ours.ids()
    assert (plain.num_rounds, plain.num_drafts, plain.num_draft_tokens) == (24, 0, 0)
    assert plain.num_accepted_tokens == 0


def test_an_assistant_that_is_the_target_has_every_draft_accepted(target: Path) -> None:
    baseline = Baseline(BaselineModels(target=target, assistant=target, num_threads=1))
    text = baseline.write(_assisted(40))
    assert text.num_accepted_tokens == text.num_draft_tokens > 0
    assert text.num_rounds + text.num_accepted_tokens == len(text.tokens) == 40
    assert 0 < text.num_drafts <= text.num_rounds


def test_sampling_reaches_beyond_the_fifty_likeliest_tokens(target: Path) -> None:
    """At a high temperature all 260 ids are nearly alike: four of five draws lie beyond the 50 likeliest."""
    baseline = Baseline(BaselineModels(target=target, assistant=None, num_threads=1))
    tokens = baseline.write(_plain(60, temperature=100.0)).tokens
    sequence = torch.tensor([[*PROMPT, *tokens]])
    with torch.inference_mode():
        logits = baseline._target(sequence).logits[0, len(PROMPT) - 1 : -1]
    ranks = (logits > logits.gather(1, torch.tensor(tokens)[:, None])).sum(dim=1)
    assert (ranks >= 50).float().mean() > 0.5


def test_what_the_models_files_say_of_sampling_changes_no_text(
    target: Path, other: Path, tmp_path: Path
) -> None:
    """`generate` takes from them whatever a task leaves out."""
    own = {"repetition_penalty": 5.0, "min_p": 0.5, "eos_token_id": END_ID, "num_assistant_tokens": 7}
    folders = []
    for folder in (target, other):
        folders.append(shutil.copytree(folder, tmp_path / folder.name))
        (folders[-1] / "generation_config.json").write_text(json.dumps(own))
    without, with_own = (
        Baseline(BaselineModels(target=pair[0], assistant=pair[1], num_threads=1))
        for pair in ((target, other), folders)
    )
    for task in (_plain(24), _plain(24, temperature=2.0), _assisted(24)):
        assert with_own.write(task).tokens == without.write(task).tokens
    assert (without.ready().num_assistant_tokens, with_own.ready().num_assistant_tokens) == (20, 7)


def test_texts_go_on_behind_end_tokens(target: Path) -> None:
    """At this temperature each of 600 draws is an end token with a chance of about 1 in 260."""
    baseline = Baseline(BaselineModels(target=target, assistant=None, num_threads=1))
    texts = [baseline.write(_plain(100, temperature=100.0, seed=seed)).tokens for seed in range(6)]
    assert all(len(text) == 100 for text in texts)
    assert any(END_ID in text[:-1] for text in texts)


def test_a_batch_has_the_texts_of_its_prompts_alone(target: Path) -> None:
    """Prompts of several lengths: what pads them must change no text, and end tokens end none."""
    baseline = Baseline(BaselineModels(target=target, assistant=None, num_threads=1))
    prompts = (PROMPT, PROMPT[:3], PROMPT * 3)
    batch = BaselineBatch(prompts=prompts, num_tokens=24, temperature=0.0, seed=0)
    alone = [baseline.write(_plain(24).model_copy(update={"prompt": prompt})).tokens for prompt in prompts]
    found = baseline.write_batch(batch)
    assert list(found.texts) == alone
    assert found.seconds > 0
    warm = baseline.write_batch(batch.model_copy(update={"temperature": 100.0, "num_tokens": 100}))
    assert [len(text) for text in warm.texts] == [100] * 3
    assert len(set(warm.texts)) == 3


def test_the_gap_is_that_of_the_two_best_logits(target: Path) -> None:
    baseline = Baseline(BaselineModels(target=target, assistant=None, num_threads=1))
    with torch.inference_mode():
        best, second = baseline._target(torch.tensor([PROMPT])).logits[0, -1].topk(2).values.tolist()
    assert baseline.gap(GapTask(prompt=PROMPT)).gap == pytest.approx(best - second, rel=1e-3)


def test_the_process_answers_as_the_model_and_ends_with_its_block(target: Path, other: Path) -> None:
    models = BaselineModels(target=target, assistant=other, num_threads=1)
    with BaselineProcess(models, LOADING_SECONDS) as process:
        pid = process.pid
        assert process.ready.num_assistant_tokens == 20
        answered = process.write(_plain(8))
        batch = BaselineBatch(prompts=(PROMPT, PROMPT[:3]), num_tokens=8, temperature=0.0, seed=0)
        assert process.write_batch(batch).texts[0] == answered.tokens
    assert not psutil.pid_exists(pid)
    assert answered.tokens == Baseline(models).write(_plain(8)).tokens


def test_the_process_ends_when_its_owner_is_gone(target: Path) -> None:
    """Its owner's end closes its standard input, which is all that even a killed one does."""
    models = BaselineModels(target=target, assistant=None, num_threads=1)
    process = subprocess.run(
        [sys.executable, "-m", "workers.baseline"],
        input=models.model_dump_json() + "\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0
    assert process.stdout.count("\n") == 1


def test_a_process_that_fails_says_its_last_words(tmp_path: Path) -> None:
    models = BaselineModels(target=tmp_path, assistant=None, num_threads=1)
    with (
        pytest.raises(BaselineFailed, match="transformers' generate ended: "),
        BaselineProcess(models, LOADING_SECONDS),
    ):
        pass


def test_a_process_that_stands_still_is_ended(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"_PROMPT_SECONDS": 0.1, "_SECONDS_A_TOKEN": 0.05}.items():
        monkeypatch.setattr(baseline_process, name, seconds)
    models = BaselineModels(target=target, assistant=None, num_threads=1)
    with BaselineProcess(models, LOADING_SECONDS) as process:
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(BaselineFailed, match=r"said nothing within 0\.3 s"):
            process.write(_plain(4))
        assert not psutil.pid_exists(process.pid)


def test_loading_has_an_end(target: Path) -> None:
    models = BaselineModels(target=target, assistant=None, num_threads=1)
    process = BaselineProcess(models, 0.2)
    with pytest.raises(BaselineFailed, match=r"said nothing within 0\.2 s"), process:
        pass
    assert not psutil.pid_exists(process.pid)


def test_first_tokens_are_timed_with_and_without_an_assistant(target: Path, other: Path) -> None:
    children = psutil.Process().children()
    for assistant in (None, other):
        models = BaselineModels(target=target, assistant=assistant, num_threads=1)
        assert seconds_of_transformers(models, PROMPT, LOADING_SECONDS) > 0
    assert psutil.Process().children() == children
