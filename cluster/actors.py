"""The processes of a deployment as Ray actors: drafters, targets, a coordinator.

Knows how such a process lives: its loop, its signals, its threads. Does not know where it is placed
(`cluster.placement`), nor what it serves. Ray is not needed here: `ray.remote` wraps these classes elsewhere.

The actors are plain ones, and the asyncio loop runs in a thread of its own: an async actor's constructor runs
off the main thread, where no signal handler can be set. Whatever is heavy is imported in `start`, so that the
coordinator never loads torch and Ray can make all three at once.
"""

import asyncio
import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field, SecretStr

from cluster.machine import processor_name
from protos.settings import Settings
from protos.status import TaskError

DRAIN_SECONDS = 10.0  # what SIGTERM leaves to the tasks at hand


class WorkerSettings(Settings):
    """Which model a worker loads, and how."""

    name: str  # for people
    folder: Path
    gguf: Path | None = None  # the file that holds the weights, where they are not safetensors in the folder
    num_slots: int = Field(ge=1)  # sequences held at once
    max_length: int = Field(ge=1)  # positions of each
    num_threads: int = Field(ge=1)  # torch's; Ray would leave one to an actor that reserves no core
    precision: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"  # of safetensors
    device: str = "cpu"  # torch's name of it
    shares_prefixes: bool = (
        True  # a session takes over what others, also past ones, have computed of its prompt
    )


class _Server(Protocol):
    async def start(self) -> str: ...

    async def stop(self, grace_seconds: float) -> None: ...


class _Life:
    """One server in this process, on a loop in a thread of its own, until it is stopped or SIGTERM comes.

    Stands apart from the actors because Ray takes a class with a single coroutine method for an async actor.
    """

    def __init__(self) -> None:
        self._server: _Server | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="asyncio", daemon=True).start()
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def serve(self, build: Callable[[], _Server]) -> str:
        """Start the server that `build` makes, and return its address: it serves by then."""

        async def start() -> str:
            server = build()  # here, as servers and channels belong to the loop that they are made in
            address = await server.start()
            self._server = server
            return address

        return asyncio.run_coroutine_threadsafe(start(), self._loop).result()

    def drain(self, grace_seconds: float) -> None:
        """Stop the server, if there is one."""
        asyncio.run_coroutine_threadsafe(self._drain(grace_seconds), self._loop).result()

    async def _drain(self, grace_seconds: float) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace_seconds)

    def _on_sigterm(self, _signal: int, _frame: object) -> None:
        """Drain and exit with 0. The next SIGTERM has its default meaning: the end, at once."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        asyncio.run_coroutine_threadsafe(self._drain_and_exit(), self._loop)

    async def _drain_and_exit(self) -> None:
        try:
            await self._drain(DRAIN_SECONDS)
        finally:
            os._exit(0)  # from this thread nothing gentler ends a Ray process


class _Actor:
    """What the three have in common."""

    def __init__(self) -> None:
        """Take SIGTERM over from Ray. Must run on the main thread, as it does in an actor that is not
        async.
        """
        self._life = _Life()

    def pid(self) -> int:
        """The process that this actor lives in."""
        return os.getpid()

    def stop(self, grace_seconds: float) -> None:
        """Stop serving and let what is at hand finish, within the grace. `ray.kill` would run nothing."""
        self._life.drain(grace_seconds)


class _Worker(_Actor):
    """A model behind a worker's server."""

    _role: Literal["draft", "target"]

    def start(self, settings: WorkerSettings, control_token: str | None = None, port: int = 0) -> str:
        """Load the model and serve it at `port`, or any free one; returns the address.

        Raises ModelRefused when the model does not fit.
        """
        with _uncollected():
            from workers.checkpoints import check
            from workers.engine import load_model, precision_of
            from workers.passes import model_thread
            from workers.server import ModelIdentity, WorkerConfig, WorkerServer
            from workers.slots import MIN_SHARED_TOKENS

        source = settings.gguf or settings.folder
        info = check(source, role=self._role)
        thread = model_thread()
        model = thread.submit(
            load_model,
            source,
            role=self._role,
            num_slots=settings.num_slots,
            max_length=settings.max_length,
            num_threads=settings.num_threads,
            precision=settings.precision,
            device=settings.device,
        ).result()
        dtype = info.dtype
        if settings.gguf is None:
            dtype = precision_of(source, self._role, settings.precision, settings.device)
        identity = ModelIdentity(settings.name, info.tokenizer_fingerprint, info.end_token_ids, dtype)
        config = WorkerConfig(
            port=port,
            min_shared_tokens=MIN_SHARED_TOKENS if settings.shares_prefixes else None,
            control_token=None if control_token is None else SecretStr(control_token),
            computes_on=processor_name(settings.device),
        )
        return self._life.serve(lambda: WorkerServer(self._role, model, identity, config, thread))


class DrafterActor(_Worker):
    """Proposes draft tokens."""

    _role = "draft"


class TargetActor(_Worker):
    """Verifies proposals."""

    _role = "target"


class CoordinatorActor(_Actor):
    """Owns the requests. Never loads torch."""

    def prepare(self, tokenizer_folder: Path) -> None:
        """Load what `start` needs beside the workers, which take longer. Raises TextError."""
        with _uncollected():
            import coordinator.server  # noqa: F401
            from coordinator.text import Text

        self._text = Text.load(tokenizer_folder)

    def start(self, config: dict[str, Any]) -> str:
        """Connect to the workers and serve the public API; returns its address. Comes after `prepare`.

        `config` has the fields of CoordinatorConfig. Raises RuntimeError when a worker cannot be reached or
        the workers do not fit.
        """
        from coordinator.server import CoordinatorConfig, CoordinatorServer

        try:
            return self._life.serve(lambda: CoordinatorServer(CoordinatorConfig(**config), self._text))
        except TaskError as error:  # has details that do not survive the way through Ray
            raise RuntimeError(error.message) from None


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Within the block Python's garbage collector rests, and afterwards leaves alone what has come by then.

    It would look through torch's modules again and again while they load, and once more in each full
    collection of a process that serves.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
