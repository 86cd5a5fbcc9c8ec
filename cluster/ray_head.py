"""A Ray head of two processes: the server that knows nodes and actors, and the raylet that starts the actors.

Knows the insides of the installed Ray. Does not know actors or deployments.

Ray starts five more processes with a head: a dashboard, its agent, an agent for runtime environments, a
log monitor and an autoscaler. Nothing here uses them, they take several times the processor time of the two,
and the raylet starts no actor before its two agents listen. Ray can be told to leave out two of the five. The
dashboard is left out by a subclass, and in place of each agent the raylet gets a process that sleeps: it
insists on agents, ends when one of them ends, and waits for the files in which they write their ports.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray._raylet
from ray._private import services, utils
from ray._private.node import Node
from ray._private.parameter import RayParams

_raylet: Any = ray._raylet  # its stub leaves out what is used here
OBJECT_STORE_BYTES = 100_000_000  # nothing of size travels through it
_SLEEP = subprocess.list2cmdline([sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"])
_AGENTS = ("--dashboard_agent_command", "--runtime_env_agent_command")  # options of the raylet
_AGENTS_PORTS = (
    _raylet.RUNTIME_ENV_AGENT_PORT_NAME,
    _raylet.METRICS_AGENT_PORT_NAME,
    _raylet.METRICS_EXPORT_PORT_NAME,
    _raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME,
)


def start_head(folder: Path) -> str:
    """Start a head that listens on the loopback only and keeps its files in the new `folder`; returns its
    address, host:port. What is raised leaves processes behind.

    A Ray that `ray.init` makes ends with the process that made it. This one lives until its processes are
    ended, so that a deployment outlives its keeper. It is made the way `ray.cluster_utils.Cluster` makes
    one, which beyond that leaves a file for all users of the machine; `ray start` opens a port of a fixed
    number.
    """
    parameters: dict[str, Any] = {
        "node_ip_address": "127.0.0.1",
        "temp_dir": str(folder),
        "num_cpus": 0,  # the actors reserve none, and for each one Ray would start a process in advance
        "num_gpus": 0,
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_log_monitor": False,
        "no_monitor": True,  # the autoscaler
        "min_worker_port": 0,  # any free ones
        "max_worker_port": 0,
        "_system_config": {
            "enable_metrics_collection": False,  # there is no agent to send them to
            # Ray's own limit goes by the cores that it may give out, and is 1 then. A private deployment has
            # three actors.
            "worker_maximum_startup_concurrency": max(3, os.cpu_count() or 1),
            "worker_niceness": 0,  # Ray's 15 would let everything else on the machine go first
        },
    }
    return str(_Head(RayParams(**parameters), head=True, shutdown_at_exit=False, spawn_reaper=False).address)


class _Head(Node):
    """Ray's head without what a deployment does not need."""

    def start_api_server(self, **_settings: Any) -> None:
        """No dashboard."""
        self._webui_url = ""

    def start_raylet(self, *arguments: Any, **settings: Any) -> None:
        """Start the raylet with agents that do nothing."""
        for name in _AGENTS_PORTS:
            # Whoever asks there for metrics shows the token, so it must be somebody of ours who says no.
            _raylet.persist_port(self._session_dir, self._node_id, name, self._ray_params.gcs_server_port)
        with _agents_asleep():
            super().start_raylet(*arguments, **settings)


@contextlib.contextmanager
def _agents_asleep() -> Iterator[None]:
    """Within the block a process that Ray starts with commands for agents sleeps in their place."""
    start, find_error = services.start_ray_process, utils.get_dashboard_dependency_error

    def start_asleep(command: list[str], *arguments: Any, **settings: Any) -> Any:
        options = [(part, part.partition("=")[0]) for part in command]
        command = [f"{option}={_SLEEP}" if option in _AGENTS else part for part, option in options]
        return start(command, *arguments, **settings)

    services.start_ray_process = start_asleep
    utils.get_dashboard_dependency_error = lambda: None  # it imports the whole dashboard to find one
    try:
        yield
    finally:
        services.start_ray_process, utils.get_dashboard_dependency_error = start, find_error
