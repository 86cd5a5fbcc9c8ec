"""`outrider call` as a process: its options, pipes and signals, and the exit codes that scripts read.

Guards against slots that stay taken when it is interrupted, a command that cannot be ended, and errors
without words.
"""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.command_line import app
from tests.call_service import serving
from tests.pipelines import pipeline
from tests.test_service import all_is_free, draft_model, target_model
from tests.test_worker_client import eventually

SOON = 20.0


# ---- the command


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--concurrency", "0"], "--concurrency is 0; it must lie in 1..1024"),
        (["--retries", "-1"], "--retries is -1; it must lie in 0..100"),
        (["--concurrency", "1025"], "--concurrency is 1025; it must lie in 1..1024"),
        (["--concurrency", "inf"], "Invalid value for '--concurrency'"),
        (["--retries", "nan"], "Invalid value for '--retries'"),
        (["--retries", "101"], "--retries is 101; it must lie in 0..100"),
        (["--timeout", "nan"], "--timeout is nan; it must lie in 0.001..86400 s"),
        (["--timeout", "inf"], "--timeout is inf; it must lie in 0.001..86400 s"),
        (["--timeout", "0"], "--timeout is 0; it must lie in 0.001..86400 s"),
        (["--deployment", "../x"], "--deployment is '../x'; it must be 1 to 32 letters"),
        (["--stream", "--order", "kept"], "--order is kept"),
        (["--address", "localhost"], "--address is 'localhost'; it must be host:port"),
        (["--abort", "r"], "--abort ends a request and sends none"),
    ],
)
def test_an_option_that_cannot_be_is_refused(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["call", '{"prompt": "x"}', *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr


def test_an_input_that_is_neither_json_nor_a_file_is_refused(tmp_path: Path) -> None:
    for given in ("Hi there", str(tmp_path)):
        result = CliRunner().invoke(app, ["call", given, "--address", "127.0.0.1:1"])
        assert (result.exit_code, result.stdout) == (2, "")
        assert repr(given) in result.stderr


def test_without_a_deployment_the_error_says_how_to_start_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_STATE", str(tmp_path))
    result = CliRunner().invoke(app, ["call", '{"prompt": "x"}', "--deployment", "mine"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "'mine'" in result.stderr
    assert "outrider up" in result.stderr


def test_the_deployment_that_is_up_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []

    def read_state(name: str) -> Any:
        names.append(name)
        return SimpleNamespace(address=service.address)

    monkeypatch.setattr("cluster.deployment_state.read_state", read_state)
    with serving() as service:
        result = CliRunner().invoke(app, ["call", '{"prompt": "x"}'])
    assert (result.exit_code, names) == (0, ["default"])


def test_the_command_loads_neither_ray_nor_torch() -> None:
    code = (
        "import sys, cluster.calling, cluster.deployment_state, cluster.command_line;"
        "print(sorted({'ray', 'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# ---- pipes and signals


@contextlib.asynccontextmanager
async def process(address: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command with pipes."""
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cluster.command_line", "call", "--address", address, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()


def write(running: asyncio.subprocess.Process, *requests: dict[str, Any]) -> None:
    """Without waiting for the command to read it."""
    assert running.stdin is not None
    running.stdin.write(b"".join(json.dumps(request).encode() + b"\n" for request in requests))


async def read(running: asyncio.subprocess.Process) -> dict[str, Any]:
    assert running.stdout is not None
    return dict(json.loads(await asyncio.wait_for(running.stdout.readline(), SOON)))


async def test_a_pipe_that_stays_open_is_answered_as_it_comes() -> None:
    async with pipeline(target_model(), draft_model()) as service, process(service.address) as running:
        for i in range(3):
            write(running, {"id": i, "prompt": [i], "max_tokens": 2, "temperature": 0})
            assert (await read(running))["id"] == i
        assert running.stdin is not None
        running.stdin.close()
        assert await asyncio.wait_for(running.wait(), SOON) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_a_signal_ends_what_runs_keeps_what_it_had_and_frees_its_slots(number: int, code: int) -> None:
    """The input stays open: nobody waits for it."""
    async with (
        pipeline(target_model(0.005), draft_model()) as service,
        process(service.address, "--concurrency", "2") as running,
    ):
        long: dict[str, Any] = {"prompt": [1], "max_tokens": 4000}
        write(running, long, long, long)  # the third one has to wait
        await eventually(lambda: service.target.num_slots_used == 2, SOON)
        await asyncio.sleep(0.2)
        running.send_signal(number)
        for i in (1, 2):
            line = await read(running)
            assert (line["id"], line["error"]["code"]) == (i, "CANCELLED")
            assert line["partial"]["num_tokens"] == len(line["partial"]["token_ids"]) > 0
        assert await asyncio.wait_for(running.wait(), SOON) == code
        out, err = await running.communicate()
        assert (out, err) == (b"", b"")
        await all_is_free(service)


async def test_the_second_signal_ends_at_once() -> None:
    """Nobody reads the output, so that the command hangs in writing it."""
    async with process("127.0.0.1:1") as running:
        write(running, {"id": 0}, *({"id": "x" * 50_000} for _ in range(20)))
        await read(running)
        await asyncio.sleep(0.5)
        running.send_signal(signal.SIGINT)
        await asyncio.sleep(0.5)
        assert running.returncode is None
        running.send_signal(signal.SIGINT)
        await asyncio.wait_for(running.communicate(), SOON)
        assert running.returncode == -signal.SIGINT


async def test_a_reader_that_goes_ends_the_command_without_a_word() -> None:
    async with process("127.0.0.1:1") as running:
        assert running.stdout is not None
        write(running, {"nothing": 1})
        await read(running)
        running.stdout._transport.close()  # type: ignore[attr-defined]
        write(running, *({"nothing": i} for i in range(10)))
        assert await asyncio.wait_for(running.wait(), SOON) == 1
        assert running.stderr is not None
        assert await running.stderr.read() == b""
