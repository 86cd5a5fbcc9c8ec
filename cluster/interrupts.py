"""Signals that end a program, as one exception at a moment when it can be raised.

Knows signal handlers only. Python's own KeyboardInterrupt comes with every Ctrl-C, hence also in the middle
of cleaning up after the first.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal asked for the end of the program."""

    def __init__(self, signal_number: int) -> None:
        """`signal_number` is that of SIGINT, SIGTERM or SIGHUP."""
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


class Interrupts:
    """Raises Interrupted at the first signal, and never again."""

    def __init__(self) -> None:
        """Nothing is installed yet; see `interrupts`."""
        self._held = False
        self._pending: int | None = None
        self._raised = False

    def hold(self) -> None:
        """Raise nothing from now on."""
        self._held = True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Put off a signal that comes within the block to its end."""
        self._held = True
        yield
        self._held = False
        if self._pending is not None:
            self._raise(self._pending)

    def receive(self, signal_number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        if self._held:
            self._pending = signal_number
        elif not self._raised:
            self._raise(signal_number)

    def _raise(self, signal_number: int) -> None:
        self._raised = True
        raise Interrupted(signal_number)


@contextlib.contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Turn SIGINT, SIGTERM and SIGHUP within the block into one Interrupted.

    A signal that was ignored before (as under nohup) stays ignored. Off the main thread no signal arrives,
    and nothing is installed.
    """
    received = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    taken = [number for number in _SIGNALS if before[number] is not signal.SIG_IGN]
    try:
        for number in taken:
            signal.signal(number, received.receive)
        yield received
    finally:
        for number in taken:
            signal.signal(number, before[number])
