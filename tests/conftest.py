"""Fixtures that more than one test file needs: the demo pair, from the real user's cache."""

import os
from pathlib import Path

import pytest

# Threads that wait by spinning starve each other where cores are few and shared. Read when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

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
