"""Fixtures that more than one test file needs: the demo pair, from the real user's cache."""

import os
from pathlib import Path

import pytest

# Tests run in as many processes as there are cores; more threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from workers.checkpoints import ModelUnreachable, Role
from workers.model_names import resolve


@pytest.fixture(scope="session", autouse=True)
def _no_users_deployments(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No command that a test runs finds a deployment of the user who runs the tests."""
    os.environ["OUTRIDER_STATE"] = str(tmp_path_factory.mktemp("state"))


def _demo(role: Role) -> Path:
    try:
        return resolve("demo", role=role, progress=print)
    except ModelUnreachable as refusal:
        pytest.skip(str(refusal))


@pytest.fixture(scope="session")
def demo_target() -> Path:
    """The folder of the demo target; tests that use it are marked `demo`."""
    return _demo("target")


@pytest.fixture(scope="session")
def demo_draft() -> Path:
    """The folder of the demo draft; tests that use it are marked `demo`."""
    return _demo("draft")
