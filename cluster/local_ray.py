"""The keeper: the process that owns a deployment and its Ray, reports on its start, and ends all of it.

Knows two pipes, signals and the end of processes; what runs is `cluster.placement`'s business. Runs as
`python -m cluster.local_ray` in an operating-system session of its own, which Ray's processes inherit. Ray
starts at once; the plan comes as the first line of standard input, meanwhile or later. Reports go to standard
output as JSON lines. Unless it is told to keep the deployment, it ends everything when standard input says
stop or ends, which happens however its owner (`cluster.deployment`) ends. So the owner needs no Ray, Ctrl-C
does not reach Ray, and not even the owner's SIGKILL leaves anything behind. A deployment that is kept ends
with a SIGTERM to this process.
"""

import contextlib
import ctypes
import json
import os
import queue
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from cluster.placement import Placement, RayTooSlow, in_words
from cluster.plan import Plan
from cluster.processes import end_session

STOP, KEEP = "stop", "keep"
DRAINING_FILE = "draining"  # in the deployment's folder, from the first SIGTERM on
DRAIN_SECONDS = 5.0  # of a private deployment, whose one request is over
KEPT_DRAIN_SECONDS = 600.0  # whoever sends SIGTERM decides how long to wait, and sends another one
RAY_ATTEMPTS = 4
_LOOKING_SECONDS = 1.0  # between two looks at the dead


class _Owner:
    """The two pipes to the process that wants all this."""

    def __init__(self, commands: TextIO, reports: TextIO) -> None:
        self._commands = commands
        self._reports = reports

    def say(self, **report: Any) -> None:
        """Report, if anybody listens: the end of the owner shows in `next_line`."""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(report), file=self._reports, flush=True)

    def next_line(self) -> str:
        """A plan or a command; '' once the owner is gone."""
        return self._commands.readline().strip()


class _Keeper:
    """What ends the deployment, whoever asks for it: the owner, a signal, or an error."""

    def __init__(self, owner: _Owner, placement: Placement, folder: Path) -> None:
        self._owner = owner
        self._placement = placement
        self._folder = folder
        self._was_told = False
        self.plans: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Gets the plan when the owner has sent it."""

    def obey(self) -> None:
        """Do what the owner says, or what its end means."""
        while (command := self._owner.next_line()).startswith("{"):
            self.plans.put(command)
        if command == KEEP:
            self._owner.say(kept=True)
            return
        try:
            if command == STOP:
                self._placement.drain(DRAIN_SECONDS)
        finally:
            self._end()

    def on_sigterm(self, _signal: int, _frame: object) -> None:
        """Drain and end at the first one, end at the second."""
        if self._was_told:
            self._end()
        self._was_told = True
        (self._folder / DRAINING_FILE).touch()
        threading.Thread(target=self._drain_and_end, daemon=True).start()

    def _drain_and_end(self) -> None:
        try:
            self._placement.drain(KEPT_DRAIN_SECONDS)
        finally:
            self._end()

    def _end(self) -> None:
        """End every process of the session, this one last, and remove the folder."""
        end_session(os.getsid(0), spare=os.getpid())
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)


def main() -> None:
    """Run the plan on standard input until told to end it."""
    reports = os.fdopen(os.dup(1), "w")  # not inherited by Ray's processes
    os.dup2(2, 1)  # whatever else is printed goes to the log
    _adopt_orphans()
    owner, placement = _Owner(sys.stdin, reports), Placement()
    keeper = _Keeper(owner, placement, Path.cwd())
    threading.Thread(target=keeper.obey, daemon=True).start()
    try:
        owner.say(stage="Starting Ray")
        start_ray(placement, Path.cwd())
        signal.signal(signal.SIGTERM, keeper.on_sigterm)  # not before: Ray sets one that leaves its actors
        plan = Plan.model_validate_json(keeper.plans.get())
        owner.say(ready=placement.place(plan, lambda stage: owner.say(stage=stage)).model_dump())
    except Exception as error:
        owner.say(failed=in_words(error))  # and `obey` ends the process when the owner has read this
    while True:
        _collect_the_dead()
        time.sleep(_LOOKING_SECONDS)
        _revive(placement)


def start_ray(placement: Placement, folder: Path) -> None:
    """Start Ray, anew where it was too slow for itself. Raises RuntimeError in words when it always is."""
    for attempt in range(RAY_ATTEMPTS):
        try:
            # One below the deployment's own folder: Ray opens its folder to all users.
            placement.start_ray(folder / f"ray{attempt}")
            return
        except RayTooSlow:
            end_session(os.getsid(0), spare=os.getpid())
    raise RuntimeError(
        f"Ray did not start within its half minute, {RAY_ATTEMPTS} times: the machine is too busy. Try again"
        " when it has less to do; what was fetched stays in the cache."
    )


def _revive(placement: Placement) -> None:
    """Whatever Ray makes of it, the keeper lives: it is what ends the deployment."""
    try:
        placement.revive()
    except Exception as error:
        print(f"nobody can be brought back at the moment: {in_words(error)}", file=sys.stderr, flush=True)


def _adopt_orphans() -> None:
    """Become the parent of Ray's processes whose own parent is gone, so as to collect them when they end.

    The first process of a container often does not, and every run would leave some dead ones in its table.
    """
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def _collect_the_dead() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    main()
