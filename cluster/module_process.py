"""One of the distribution's own modules as a child process: started apart, its words kept in a file.

Knows how it is started. What it is asked, and when it must end, is its owner's.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import IO


def start_module(module: str, *arguments: str, log: IO[bytes], **environment: str) -> subprocess.Popen[bytes]:
    """Start `python -m module` with pipes to and from it; its standard error goes to `log`."""
    return subprocess.Popen(
        # -P: a file in the current folder must not stand in for a module.
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=os.environ | environment,
        start_new_session=True,  # Ctrl-C reaches its owner alone
    )


def last_words(log: IO[bytes]) -> str:
    """The last line that it left in its log."""
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it left no message"


@contextlib.contextmanager
def serving_module(module: str, *arguments: str) -> Iterator[str]:
    """The address of a module that prints it and then serves until its input closes: when the block ends."""
    with tempfile.TemporaryFile() as log:
        process = start_module(module, *arguments, log=log)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            address = process.stdout.readline().decode().strip()
            if not address:
                raise SystemExit(f"{module} {' '.join(arguments)} did not start: {last_words(log)}")
            yield address
        finally:
            process.stdin.close()
            process.wait(timeout=10)
            process.stdout.close()
