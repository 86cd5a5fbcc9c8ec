"""The proxy does to bytes what it says, and nothing otherwise: without faults a harness proves nothing."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from tests.fault_proxy import FaultProxy

SOON = 5.0
SENT = bytes(range(100))


@contextlib.asynccontextmanager
async def echoed() -> AsyncIterator[tuple[FaultProxy, int]]:
    """A proxy, and the port at which it leads to an echo."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.transport.abort()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = FaultProxy()
    address = await proxy.start(server.sockets[0].getsockname()[1])
    try:
        yield proxy, int(address.rpartition(":")[2])
    finally:
        await proxy.stop()
        server.close()


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(SOON):
            yield reader, writer
    finally:
        writer.transport.abort()


async def test_without_faults_bytes_come_as_they_were_sent() -> None:
    async with echoed() as (proxy, port), connected(port) as (reader, writer):
        writer.write(SENT)
        assert await reader.readexactly(len(SENT)) == SENT
        assert not proxy.done


@pytest.mark.parametrize("direction", ["task", "reply"])
async def test_one_bit_of_one_piece_is_another(direction: str) -> None:
    async with echoed() as (proxy, port), connected(port) as (reader, writer):
        proxy.corrupt("task" if direction == "task" else "reply", 8 * 42 + 3)
        for changed in ({42: 42 ^ 8}, {}):
            writer.write(SENT)
            came = await reader.readexactly(len(SENT))
            assert {i: byte for i, byte in enumerate(came) if byte != SENT[i]} == changed
        assert proxy.done == {f"corrupt-{direction}": 1}


async def test_a_piece_that_is_cut_short_is_the_last_of_its_connection() -> None:
    async with echoed() as (proxy, port), connected(port) as (reader, writer):
        proxy.truncate("reply", 7)
        writer.write(SENT)
        with contextlib.suppress(ConnectionResetError):  # which may overtake what came before it
            assert await reader.read() in (SENT[:7], b"")
        assert proxy.done == {"truncate-reply": 1}


async def test_a_cut_ends_what_stands_and_the_next_connection_works() -> None:
    async with echoed() as (proxy, port):
        async with connected(port) as (reader, writer):
            writer.write(SENT)
            await reader.readexactly(len(SENT))
            proxy.cut()
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        async with connected(port) as (reader, writer):
            writer.write(SENT)
            assert await reader.readexactly(len(SENT)) == SENT
        assert proxy.done == {"cut": 1}


async def test_nothing_comes_through_a_hole_and_everything_behind_it() -> None:
    async with echoed() as (proxy, port), connected(port) as (reader, writer):
        hole = asyncio.create_task(proxy.blackhole(0.2))
        await asyncio.sleep(0)
        begun = time.monotonic()
        writer.write(SENT)
        assert await reader.readexactly(len(SENT)) == SENT
        assert time.monotonic() - begun > 0.15
        await hole


async def test_late_pieces_come_late_and_whole() -> None:
    async with echoed() as (proxy, port), connected(port) as (reader, writer):
        proxy.delay(SOON)
        begun = time.monotonic()
        writer.write(SENT)
        assert await reader.readexactly(len(SENT)) == SENT
        assert time.monotonic() - begun > 0.05
