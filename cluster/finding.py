"""From the names of models to where they are, fetched if need be.

Knows what to say meanwhile. Whether the models fit is checked later, when Ray starts: that takes no patience.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.machine import available_memory
from workers.model_names import resolve

NO_DRAFT = "none"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Found:
    """Folders of safetensors, or GGUF files, and what there is to hold them."""

    target: Path
    draft: Path | None  # None: plain decoding
    available: int  # bytes of memory, before anything has been started


def find(target: str, draft: str | None, say: Say) -> Found:
    """Find a target, and a draft unless it is None or NO_DRAFT. Raises ModelRefused."""
    say(f"Finding the target {target}")
    target_at = resolve(target, role="target", progress=say)
    if draft is None or draft == NO_DRAFT:
        return Found(target_at, None, available_memory())
    say(f"Finding the draft {draft}")
    return Found(target_at, resolve(draft, role="draft", progress=say), available_memory())
