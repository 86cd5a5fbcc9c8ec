"""Fixtures that more than one test file needs: the demo pair, from the real user's cache."""

import os
from pathlib import Path

import pytest

# Tests run in as many processes as there are cores; more threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from workers.checkpoints import ModelUnreachable, Role, resolve


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
