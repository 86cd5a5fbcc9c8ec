"""Ending a family of processes for certain: every member of one operating-system session.

Knows process ids only. A program that is started in a session of its own passes the session on to whatever it
starts, and Ray's processes stay in it whoever becomes their parent. So the session is the exact list of what
to end, where a name or a parent's id is not.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil

_COLLECTING_SECONDS = 2.0  # the dead are their parents' to collect, and some parents are slow


def session_members(leader: int) -> list[int]:
    """Ids of the processes in the session that `leader` began, the dead included until collected."""
    members = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == leader:
                members.append(pid)
    return members


def started_at(pid: int) -> float | None:
    """When the living process of this id began, in seconds since 1970; None without one.

    An id is used again after its process has ended; the two together are unique.
    """
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:  # gone, or another user's
        return None


def works_in(folder: Path, pid: int) -> bool:
    """Whether the process has its current directory in the folder."""
    try:
        return Path(psutil.Process(pid).cwd()).is_relative_to(folder.resolve())
    except psutil.Error:
        return False


def end_session(leader: int, *, spare: int | None = None, timeout_seconds: float = 10.0) -> list[int]:
    """Kill the session's processes, all but `spare`, until none is left; returns any that outlived the limit.

    Collects the dead that are our children, all but `leader`: its id must stay taken until this is over.
    """
    begun = time.monotonic()
    while True:
        members = [pid for pid in session_members(leader) if pid != spare]
        living = [pid for pid in members if not _is_dead(pid)]
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        dead = [pid for pid in members if pid not in (*living, leader)]
        for pid in dead:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        seconds = time.monotonic() - begun
        if not living and (not dead or seconds > _COLLECTING_SECONDS):
            return []
        if living and seconds > timeout_seconds:
            return living
        time.sleep(0.01)


def _is_dead(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
