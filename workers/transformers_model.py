"""A causal model of transformers behind `LanguageModel`: packed ragged passes over a preallocated slot cache.

Knows transformers and torch: how to load a model, take over its attention, and refuse one that does not fit.
Does not know which tokens the slots stand for (`workers.slots`), nor sampling, verification or the network.

All feeds of a pass lie in one sequence `[1, N]`, each row with its own position id; nothing is padded. The
model's attention is replaced by `workers.slot_attention`, which writes a row's keys and values to its slot
and reads that slot only. transformers builds no mask for an attention without a registered mask function.

T tokens of a feed, C logit columns, V vocabulary.
"""

import inspect
import weakref
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from workers.checkpoints import ModelRefused
from workers.feeds import HeldPositions, checked_output_ids, split_logits
from workers.language_model import Feed, Logits
from workers.slot_attention import Pass, SlotAttention

# The check at load allows this times the largest logit. In float32 other orders of the same sums differ by
# 1e-6; a wrong position, window or neighbour shows at 1e-3 and above even in freshly initialised models.
CHECK_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
CHECK_LENGTH = 9
CHECK_MAX_WINDOW = 64  # longer windows are not crossed by the check: they are compared with the configuration

_INSTANCES = count()


class TransformersModel:
    """`LanguageModel` over a transformers model, which belongs to this object from then on.

    Not for use by several threads at once.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_slots: int,
        max_length: int,
        output_ids: Sequence[int] | NDArray[np.int64] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Take over `model` and check it. Raises ModelRefused; ValueError for a bad size or output id.

        `vocab_size` leaves out the ids from there on, with which a model pads its vocabulary.
        """
        self._model, self._name = model.eval(), type(model).__name__
        self._config = model.config.get_text_config()
        self.vocab_size = min(int(self._config.vocab_size), vocab_size or int(self._config.vocab_size))
        limit = getattr(self._config, "max_position_embeddings", None)
        if limit is not None and max_length > limit:
            raise ValueError(f"max_length {max_length} exceeds the {limit} positions of {self._name}")
        self.num_slots, self.max_length = num_slots, max_length
        self.output_ids = None if output_ids is None else checked_output_ids(output_ids, self.vocab_size)
        self._positions = HeldPositions(num_slots, max_length, self.vocab_size)
        self._attention = SlotAttention(self._name, num_slots, max_length)

        _refuse_by_declaration(model)
        tokens, expected = self._expected_logits()
        self._take_over_attention()
        self._take_over_head()
        self._check(tokens, expected)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        num_slots: int,
        max_length: int,
        output_ids: Sequence[int] | None = None,
        vocab_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> Self:
        """Load a folder of safetensors; ModelRefused says why one does not fit."""
        if not (folder / "config.json").is_file():
            raise ModelRefused(f"folder {folder} holds no config.json")
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
        except (OSError, ValueError) as error:
            raise ModelRefused(f"folder {folder} does not load: {error}") from error
        model, report = loaded
        if missing := sorted(report["missing_keys"]):  # transformers would go on with random ones
            raise ModelRefused(f"folder {folder} lacks {len(missing)} weights, the first is {missing[0]}")
        return cls(
            model.to(device),
            num_slots=num_slots,
            max_length=max_length,
            output_ids=output_ids,
            vocab_size=vocab_size,
        )

    @property
    def _num_columns(self) -> int:
        return self.vocab_size if self.output_ids is None else len(self.output_ids)

    def forward(self, feeds: Sequence[Feed]) -> list[Logits]:
        """Run one pass over all feeds: see `LanguageModel.forward`. A refused pass changes nothing."""
        with self._positions.feeding(feeds):
            return split_logits(self._run(feeds), feeds) if feeds else []

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` positions of the slot; a slot that holds fewer is left alone."""
        self._positions.truncate(slot, length)

    def copy(self, source: int, slot: int, length: int) -> None:
        """Let `slot` hold the first `length` positions of another slot: see `LanguageModel.copy`."""
        with self._positions.copying(source, slot, length):
            self._attention.copy(source, slot, length)

    def _run(self, feeds: Sequence[Feed]) -> Logits:
        """Logits of all wanted rows of the pass, `[rows, C]`; the head runs on these rows only."""
        with torch.inference_mode():
            rows = self._attention.rows = Pass(feeds, self._model.device, self._model.dtype)
            try:
                output = self._model(
                    input_ids=rows.tokens[None],
                    position_ids=rows.positions[None],
                    use_cache=False,
                    logits_to_keep=rows.wanted(),
                )
            finally:
                self._attention.rows = None
            return np.asarray(output.logits[0, :, : self._num_columns].float().cpu().numpy())

    def _take_over_attention(self) -> None:
        """Make the model call `SlotAttention.attend`; the registry, which lasts, does not keep it alive."""
        attend, name = weakref.WeakMethod(self._attention.attend), f"outrider-slots-{next(_INSTANCES)}"
        AttentionInterface.register(name, lambda *args, **keywords: attend()(*args, **keywords))  # type: ignore[misc]
        self._model.set_attn_implementation(name)

    def _take_over_head(self) -> None:
        """Keep the rows of the head that `output_ids` names; what the model does after its head stays."""
        if self.output_ids is None:
            return
        head = self._model.get_output_embeddings()
        if type(head) is not torch.nn.Linear:
            kind = type(head).__name__
            raise ModelRefused(f"{self._name} does not fit output_ids: its head is {kind}, not Linear")
        rows = torch.tensor(self.output_ids, device=head.weight.device)
        reduced = torch.nn.Linear(head.in_features, len(rows), bias=head.bias is not None, device="meta")
        for name, parameter in list(head.named_parameters()):
            setattr(reduced, name, torch.nn.Parameter(parameter.detach()[rows], requires_grad=False))
        self._model.set_output_embeddings(reduced)

    def _expected_logits(self) -> tuple[list[list[int]], Logits]:
        """Two different sequences, and the logits `[2, last positions, C]` by the model's own attention."""
        window = getattr(self._config, "sliding_window", None) or 0
        length = max(CHECK_LENGTH, window + 4 if window <= CHECK_MAX_WINDOW else 0)
        shape = (min(2, self.num_slots), min(length, self.max_length))
        tokens = torch.randint(self.vocab_size, shape, generator=torch.Generator().manual_seed(0))
        kept, inputs = max(1, shape[1] // 3), tokens.to(self._model.device)
        with torch.inference_mode():
            logits = self._model(input_ids=inputs, use_cache=False, logits_to_keep=kept).logits.float().cpu()
        columns = slice(self.vocab_size) if self.output_ids is None else self.output_ids
        return tokens.tolist(), logits.numpy()[:, :, columns]

    def _check(self, tokens: list[list[int]], expected: Logits) -> None:
        """Run the sequences through the slots, together, each in two pieces; refuse a model that differs."""
        length, num_logits = len(tokens[0]), expected.shape[1]
        pieces = list(enumerate(zip(tokens, (length * 2 // 3, length // 3), strict=False)))
        try:
            self.forward([Feed(slot, 0, row[:cut], 0) for slot, (row, cut) in pieces if cut])
            actual = self.forward([Feed(slot, cut, row[cut:], num_logits) for slot, (row, cut) in pieces])
        except ModelRefused:
            raise
        except Exception as error:
            raise ModelRefused(f"{self._name} does not fit: a packed pass fails, {error}") from error
        self._check_layers()
        difference = float(np.abs(np.stack(actual) - expected).max())
        limit = CHECK_TOLERANCE.get(self._model.dtype, 5e-2) * float(np.abs(expected).max())
        if not difference <= limit:  # nor NaN
            words = f"packed into slots its logits differ by {difference:.3g}, at most {limit:.3g} is allowed"
            raise ModelRefused(f"{self._name} does not fit: {words}")
        for slot, _ in pieces:
            self.truncate(slot, 0)

    def _check_layers(self) -> None:
        """Every layer must keep its state in the slots and get the window that the configuration gives it."""
        if missing := sorted(set(range(self._config.num_hidden_layers)) - self._attention.layers):
            raise ModelRefused(
                f"{self._name} does not fit: layers {missing} keep no keys and values in slots"
            )
        kinds = getattr(self._config, "layer_types", None)
        for layer, window in self._attention.windows.items():
            slides = kinds is None or kinds[layer] == "sliding_attention"
            expected = getattr(self._config, "sliding_window", None) if slides else None
            if window != expected:
                words = f"layer {layer} attends with window {window}, configured is {expected}"
                raise ModelRefused(f"{self._name} does not fit: {words}")


def _refuse_by_declaration(model: PreTrainedModel) -> None:
    """Refuse what a short check would not show, and what the model's own words exclude."""
    name, config = type(model).__name__, model.config.get_text_config()
    for parameter in ("position_ids", "logits_to_keep"):
        if parameter not in inspect.signature(model.forward).parameters:
            raise ModelRefused(f"{name} does not fit: its forward takes no {parameter}")
    if not model._can_set_attn_implementation():
        raise ModelRefused(f"{name} does not fit: its attention cannot be replaced")
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelRefused(f"{name} does not fit: it has layers of type {kind}")
    rope = getattr(config, "rope_parameters", None) or {}
    for entry in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        rope_type = entry.get("rope_type", "default")
        if "dynamic" in rope_type or rope_type == "longrope":
            raise ModelRefused(f"{name} does not fit: with rope_type {rope_type} rows depend on neighbours")
