"""How much memory a deployment takes, and whether that is there. Arithmetic only: nothing is measured here.

Counted are the weights of both models in the precision they are computed in, their slot caches, and what the
processes need beside that. The caches are reserved page by page as positions fill, so a short run stays below
the estimate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from workers.checkpoints import CheckpointInfo

BYTES_PER_NUMBER = 4  # float32
GB = 1e9

# Measured on Linux with torch 2.13 for processors, Ray 2.60.
WORKER_BYTES = 450_000_000  # one process with torch and transformers loaded and no model in it
RAY_BYTES = 350_000_000  # the keeper, Ray's own processes, its object store untouched, and the coordinator
ACTIVATION_SHARE = 0.1  # of the weights: what a pass holds at its largest


class DoesNotFit(MemoryError):
    """The sentence says how much is needed, how much there is, and what to change."""


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes that each worker of a role takes."""

    role: str
    weights: int
    cache: int
    room: int
    count: int = 1  # such workers

    @property
    def total(self) -> int:
        """All of it, of all of them."""
        return self.count * (self.weights + self.cache + self.room)

    @property
    def label(self) -> str:
        """The role, with the number of its workers where there are several."""
        return self.role if self.count == 1 else f"{self.count} {self.role}s"


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes that a run takes."""

    models: tuple[ModelMemory, ...]
    ray: int = RAY_BYTES

    @property
    def total(self) -> int:
        """All of it."""
        return sum(model.total for model in self.models) + self.ray

    def sentence(self, available: int) -> str:
        """The estimate in words, in GB."""
        parts = [f"{model.label} {_gb(model.total)}" for model in self.models] + [f"Ray {_gb(self.ray)}"]
        return f"Memory: about {_gb(self.total)} GB of {_gb(available)} GB available ({', '.join(parts)})"

    def require(self, available: int, lower: str = "--max-tokens") -> None:
        """Raise DoesNotFit when the run would take more than there is; `lower` are the options that help."""
        if self.total <= available:
            return
        details = "; ".join(
            f"{'the' if model.count == 1 else 'each'} {model.role} takes {_gb(model.weights)} GB of weights,"
            f" {_gb(model.cache)} GB of cache and {_gb(model.room)} GB of working room"
            for model in self.models
        )
        remedy = (
            "a smaller target" if len(self.models) == 1 else "a smaller target, or no draft (--draft none)"
        )
        raise DoesNotFit(
            f"This run needs about {_gb(self.total)} GB of memory and {_gb(available)} GB are available:"
            f" {details}; Ray takes {_gb(self.ray)} GB. Choose {remedy}, lower {lower}, or free memory."
        )


def model_memory(
    role: str, info: CheckpointInfo, *, num_slots: int, max_length: int, count: int = 1
) -> ModelMemory:
    """What `count` workers take, each with `num_slots` sequences of up to `max_length` positions."""
    # llama.cpp computes with a GGUF file's weights as they are stored.
    weights = info.weight_bytes
    if info.gguf is None:
        weights = (info.num_parameters + info.num_tied) * BYTES_PER_NUMBER
    numbers_per_position = (
        2 * info.num_layers * info.num_kv_heads * info.head_dim
    )  # a key and a value a layer
    cache = numbers_per_position * num_slots * max_length * BYTES_PER_NUMBER
    return ModelMemory(role, weights, cache, WORKER_BYTES + int(weights * ACTIVATION_SHARE), count)


def estimate(models: Sequence[ModelMemory]) -> Estimate:
    """What a run of these workers takes."""
    return Estimate(tuple(models))


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GB:.1f}"
