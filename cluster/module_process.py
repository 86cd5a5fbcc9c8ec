"""One of the distribution's own modules as a child process: started apart, its words kept in a file.

Knows how it is started. What it is asked, and when it must end, is its owner's.
"""

import os
import subprocess
import sys
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
