"""Between two TCP ends: bytes come late, not at all, other than they were sent, or not to their end.

Knows connections and bytes; not what they say.
"""

import asyncio
import contextlib
import time
from collections import Counter, deque
from typing import Literal

Direction = Literal["task", "reply"]  # to the worker, and back

PIECE_BYTES = 1 << 16
LATE_SECONDS = 0.03  # that each piece is late while pieces are
SHORTEST_HIT = 32  # bytes of a piece that is damaged: settings and pings are shorter


class FaultProxy:
    """Listens on a port of its own and connects each caller to another one."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self._port = 0
        self._armed: dict[Direction, deque[tuple[str, int]]] = {"task": deque(), "reply": deque()}
        self._late_until = 0.0
        self._passing = asyncio.Event()
        self._passing.set()
        self._holes = 0
        self._cuts: set[asyncio.Future[None]] = set()  # of each connection, to be set when it shall break

    async def start(self, port: int) -> str:
        """Carry bytes to this port of the machine; returns the address to connect to."""
        self._port = port
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Listen no more, and break what stands."""
        self._server.close()
        self._passing.set()
        while self._cuts:
            self._break_all()
            await asyncio.sleep(0.01)

    def cut(self) -> None:
        """Break every connection that stands."""
        self.done["cut"] += bool(self._cuts)
        self._break_all()

    def delay(self, seconds: float) -> None:
        """For so long each piece comes late."""
        self.done["delay"] += 1
        self._late_until = time.monotonic() + seconds

    async def blackhole(self, seconds: float) -> None:
        """For so long nothing comes through, in silence; then what was sent does."""
        self.done["blackhole"] += 1
        self._holes += 1
        self._passing.clear()
        await asyncio.sleep(seconds)
        self._holes -= 1
        if not self._holes:
            self._passing.set()

    def corrupt(self, direction: Direction, bit: int) -> None:
        """Flip a bit of the next piece."""
        self._armed[direction].append(("corrupt", bit))

    def truncate(self, direction: Direction, length: int) -> None:
        """Let so many bytes of the next piece through, or fewer, and then break its connection."""
        self._armed[direction].append(("truncate", length))

    def _break_all(self) -> None:
        for cut in self._cuts:
            if not cut.done():
                cut.set_result(None)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:  # nobody is there
            writer.transport.abort()
            return
        cut: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._cuts.add(cut)
        pumps = [
            asyncio.create_task(self._pump(reader, far_writer, "task")),
            asyncio.create_task(self._pump(far_reader, writer, "reply")),
        ]
        try:
            await asyncio.wait({cut, *pumps}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for end in (writer, far_writer):
                end.transport.abort()
            self._cuts.discard(cut)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        """Until an end closes or breaks, or the piece that breaks it has come."""
        with contextlib.suppress(OSError):
            while piece := await reader.read(PIECE_BYTES):
                if time.monotonic() < self._late_until:
                    await asyncio.sleep(LATE_SECONDS)
                await self._passing.wait()
                damaged = self._damaged(piece, direction)
                writer.write(damaged)
                await writer.drain()
                if len(damaged) < len(piece):
                    return

    def _damaged(self, piece: bytes, direction: Direction) -> bytes:
        if len(piece) < SHORTEST_HIT or not self._armed[direction]:
            return piece
        what, number = self._armed[direction].popleft()
        self.done[f"{what}-{direction}"] += 1
        if what == "truncate":
            return piece[: number % len(piece)]
        flipped = bytearray(piece)
        flipped[number // 8 % len(piece)] ^= 1 << number % 8
        return bytes(flipped)
