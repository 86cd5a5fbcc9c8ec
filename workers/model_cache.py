"""Where converted models are kept on this machine, their names, and whether others may be fetched.

Knows folders and the environment; not what is in a model.
"""

import os
from pathlib import Path

import platformdirs

TARGET_NAME = "smollm2-135m-instruct"  # of the demo pair
DRAFT_NAME = "smollm2-135m-demo-draft"


def cache_folder() -> Path:
    """Where converted models live: OUTRIDER_CACHE, or else the user's cache directory."""
    override = os.environ.get("OUTRIDER_CACHE")
    return (
        Path(override).expanduser() if override else platformdirs.user_cache_path("outrider", appauthor=False)
    )


def is_offline() -> bool:
    """Whether nothing may be fetched: OUTRIDER_OFFLINE is set, and to something else than 0."""
    return os.environ.get("OUTRIDER_OFFLINE", "0") not in ("", "0")
