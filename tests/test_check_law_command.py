"""`outrider check-law` as a person types it: tables or JSON, sentences for what is refused, exit codes."""

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from cluster.check_law_command import INTERRUPTED
from cluster.command_line import app
from cluster.outcome import DONE, FAILED, REFUSED
from cluster.progress import Steps
from tests.law_faults import CONTROL_TOKEN, TARGET_SECONDS
from tests.laws import random_table
from tests.pipelines import pipeline
from workers.table_model import TableModel

V = 256


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """What a deployment's file says, of one that runs in a thread; its tokens are bytes."""
    folder = tmp_path_factory.mktemp("target")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    ready: Future[tuple[str, str]] = Future()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        table = random_table(V, 5, spread=2.0)
        async with pipeline(
            TableModel(table, V, num_slots=32, latency_seconds=lambda _: TARGET_SECONDS),
            TableModel(table, V, num_slots=32),
            control_token=CONTROL_TOKEN,
        ) as running:
            ready.set_result((running.address, running.target_address))
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    address, target_address = ready.result(timeout=30)
    yield SimpleNamespace(
        address=address,
        control_token=CONTROL_TOKEN,
        workers=[SimpleNamespace(role="target", address=target_address)],
        target="bytes",
        target_folder=folder,
        rule="token",
    )
    loop.call_soon_threadsafe(stop.set)
    thread.join(timeout=30)
    loop.close()


def check_law(monkeypatch: pytest.MonkeyPatch, state: Any, *options: str) -> Any:
    monkeypatch.setattr("cluster.deployment_state.read_state", lambda name: state)
    return CliRunner().invoke(app, ["check-law", *options])


def test_a_person_gets_tables_and_the_verdict(
    served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = check_law(monkeypatch, served, "--samples", "256", "--seed", "3")
    assert result.exit_code == DONE, result.stderr
    assert "The samples are consistent with the target's law." in result.stdout
    assert "chi-square" in result.stdout
    assert "behind 'For example' with --seed 3" in result.stderr
    assert "Sampling: " in result.stderr


def test_a_program_gets_one_object_which_a_seed_repeats_in_its_expectations(
    served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--samples", "128", "--json", "--prompt", "ab", "--tokens", "2", "--top-k", "5")
    first, second = (json.loads(check_law(monkeypatch, served, *options).stdout) for _ in range(2))
    assert first["verdict"] == "consistent"
    assert (first["num_samples"], first["num_tokens_compared"]) == (128, 2)
    assert first["seed"] != second["seed"]
    expected = [[cell["expected"] for cell in found["cells"]] for found in (first, second)]
    assert expected[0] == pytest.approx(expected[1])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--samples", "3"), "--samples is 3; it must be greater than or equal to 16"),
        (("--tokens", "1"), "--tokens is 1; it must be greater than or equal to 2"),
        (("--top-k", "-1"), "--top-k is -1; it must be greater than or equal to 0"),
        (("--seed", "-1"), "--seed is -1; it must be greater than or equal to 0"),
        (("--max-seconds", "0"), "--max-seconds is 0; it must lie in 0.001..86400 s"),
        (("--max-seconds", "1e9"), "--max-seconds is 1e+09; it must lie in 0.001..86400 s"),
        (("--deployment", "a/b"), "--deployment is 'a/b'; it must be 1 to 32 letters"),
        (("--prompt", "a" * 5000), "--prompt has 5000 tokens, a sample up to 5 more; the context holds 4096"),
        (("--prompt", ""), "--prompt is empty"),
    ],
)
def test_an_option_that_cannot_be_is_refused_in_a_sentence(
    served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], sentence: str
) -> None:
    result = check_law(monkeypatch, served, *options)
    assert result.exit_code == REFUSED
    assert f"Error: {sentence}" in result.stderr


def test_without_a_deployment_it_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    result = check_law(monkeypatch, None, "--deployment", "lost")
    assert result.exit_code == FAILED
    assert "No deployment 'lost' is up" in result.stderr


def test_a_target_that_cannot_be_reached_is_a_sentence(
    served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = SimpleNamespace(
        **{**vars(served), "workers": [SimpleNamespace(role="target", address="127.0.0.1:1")]}
    )
    result = check_law(monkeypatch, lost)
    assert result.exit_code == FAILED
    assert "Error: UNAVAILABLE from the target" in result.stderr


def test_ctrl_c_ends_it_in_a_word(served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(steps: Steps, step: str) -> None:
        if step.startswith("Sampling"):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Steps, "say", interrupt)
    result = check_law(monkeypatch, served)
    assert (result.exit_code, result.stdout) == (INTERRUPTED, "")
    assert result.stderr.endswith("Interrupted.\n")


def test_the_state_file_is_not_needed_for_help(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["check-law", "--help"], env={"OUTRIDER_STATE": str(tmp_path)})
    assert result.exit_code == DONE
    assert not list(tmp_path.iterdir())
