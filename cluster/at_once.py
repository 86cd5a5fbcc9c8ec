"""Many answers at once: a bounded number in the making, handed on in order or as they finish.

Knows coroutines and two bounds; not what is asked. The input is read no faster than it can be answered.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from queue import SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

WINDOW = 4  # questions read and not handed on, for each that is in the making, while order holds answers up

Q = TypeVar("Q")
A = TypeVar("A")


class AtOnce(Generic[Q, A]):
    """Answers the questions of one input."""

    def __init__(
        self,
        answer: Callable[[Q], Awaitable[A]],
        hand_on: Callable[[A], None],
        *,
        concurrency: int,
        keep_order: bool,
    ) -> None:
        """`answer` must return, even when it is cancelled. What `hand_on` raises ends it all."""
        self._answer = answer
        self._hand_on = hand_on
        self._keep_order = keep_order
        self._places = asyncio.Semaphore(concurrency)
        self._window = asyncio.Semaphore(concurrency * WINDOW)
        self._tasks: set[asyncio.Task[A]] = set()  # whose answers have not been handed on
        self._next: asyncio.Queue[asyncio.Task[A] | None] = asyncio.Queue()  # in the order of handing on
        self._reader: asyncio.Task[None] | None = None

    async def run(self, questions: AsyncIterator[Q]) -> None:
        """Until every question is answered; raises what reading them raises."""
        self._reader = asyncio.create_task(self._read(questions))
        self._reader.add_done_callback(lambda _: self._next.put_nowait(None))
        try:
            while not self._reader.done() or self._tasks:
                task = await self._next.get()
                if task is not None:
                    self._hand_on(await task)
                    self._tasks.remove(task)
                    self._window.release()
        finally:
            self.stop()
            await asyncio.gather(self._reader, *self._tasks, return_exceptions=True)
        if not self._reader.cancelled():
            self._reader.result()

    def stop(self) -> None:
        """Read no more, and cancel what is in the making; `run` hands on what becomes of it."""
        if self._reader is not None:
            self._reader.cancel()
        loop = asyncio.get_running_loop()
        for task in self._tasks:
            loop.call_soon(task.cancel)  # not before it has begun, or it could not answer

    async def _read(self, questions: AsyncIterator[Q]) -> None:
        while True:
            await self._window.acquire()
            await self._places.acquire()
            question = await anext(questions, None)
            if question is None:
                return
            task = asyncio.create_task(self._in_place(question))
            self._tasks.add(task)
            if self._keep_order:
                self._next.put_nowait(task)
            else:
                task.add_done_callback(self._next.put_nowait)

    async def _in_place(self, question: Q) -> A:
        try:
            return await self._answer(question)
        finally:
            self._places.release()


async def from_thread(items: Iterator[Q]) -> AsyncGenerator[Q, None]:
    """The items of an iterator that blocks, each fetched when it is asked for.

    The thread is a daemon: when the program ends, it may be stuck in a read that nobody can interrupt.
    """
    loop = asyncio.get_running_loop()
    wanted: SimpleQueue[asyncio.Future[Q | None] | None] = SimpleQueue()
    Thread(target=_fetch, args=(items, wanted, loop), name="input", daemon=True).start()
    try:
        while True:
            future: asyncio.Future[Q | None] = loop.create_future()
            wanted.put(future)
            item = await future
            if item is None:
                return
            yield item
    finally:
        wanted.put(None)


def _fetch(
    items: Iterator[Q],
    wanted: "SimpleQueue[asyncio.Future[Q | None] | None]",
    loop: asyncio.AbstractEventLoop,
) -> None:
    def settle(future: "asyncio.Future[Q | None]", item: Q | None, error: Exception | None) -> None:
        if future.done():  # nobody waits any more
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(item)

    while (future := wanted.get()) is not None:
        item, error = None, None
        try:
            item = next(items, None)
        except Exception as caught:
            error = caught
        try:
            loop.call_soon_threadsafe(settle, future, item, error)
        except RuntimeError:  # the loop is closed: the program ends
            return
