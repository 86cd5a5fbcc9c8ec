"""A GGUF file behind `LanguageModel`, computed by llama.cpp on CPUs: each slot is a sequence of its cache.

Knows what llama.cpp must be seen to do before it serves. Does not know its interface
(`workers.llama_cpp_context`), nor which tokens the slots stand for (`workers.slots`).

T tokens of a feed, C logit columns, V vocabulary.
"""

import os
from collections.abc import Iterable, Sequence
from itertools import pairwise, zip_longest
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from workers.checkpoints import ModelRefused, Role
from workers.feeds import HeldPositions, split_logits, wanted_rows
from workers.gguf_header import read_header
from workers.language_model import Feed, Logits
from workers.llama_cpp_context import MAX_SEQUENCES, LlamaCppContext

# What the check at load allows a target between one pass and another, as a share of the largest logit, by the
# coarsest numbers among its weights. llama.cpp rounds a row to the like of them before each product, block by
# block and every row for itself (and GELU's argument to float16 in any case): sums in another order move a
# number by a step of that rounding here and there, and what follows by as much. In 8 bits and less that comes
# to several percent, so nothing is allowed there but the last product's order: the K-quants, whose sums some
# processors run in another order from 8 rows on, do not pass. A token that is lost, or another's, makes 0.2.
TARGET_TOLERANCE: dict[int, float] = {
    GGMLQuantizationType.F32: 1e-3,
    GGMLQuantizationType.F16: 1e-2,
    GGMLQuantizationType.BF16: 5e-2,
}
QUANTISED_TOLERANCE = 1e-3
DRAFT_TOLERANCE = 0.15  # a drafter's q may depend on the rows beside it, but not on their tokens
CHECK_LENGTH = 9
CHECK_MAX_WINDOW = 64  # longer windows are not crossed by the check


class LlamaCppModel:
    """`LanguageModel` over a GGUF file. Not for use by several threads at once."""

    def __init__(
        self,
        file: Path,
        *,
        role: Role = "target",
        num_slots: int,
        max_length: int,
        num_threads: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Load the file and check it. Raises ModelRefused; ValueError for a bad size.

        The logits of a target may not depend on the number of rows of a pass, but for rounding. `vocab_size`
        leaves out the ids from there on, with which a model pads its vocabulary. Without `num_threads` every
        core works that this process may use.
        """
        header = read_header(file)
        num_tokens = len(header.metadata.get("tokenizer.ggml.tokens", ()))
        self._name, self.vocab_size = file.name, min(num_tokens, vocab_size or num_tokens)
        self.num_slots, self.max_length = num_slots, max_length
        self.output_ids: NDArray[np.int64] | None = None  # the logits are those of all V ids
        self._held = HeldPositions(num_slots, max_length, self.vocab_size)
        if num_slots > MAX_SEQUENCES:
            raise ValueError(f"num_slots {num_slots} exceeds the {MAX_SEQUENCES} sequences of llama.cpp")
        kinds = {tensor.kind for tensor in header.tensors}
        self._context = LlamaCppContext(
            file,
            num_sequences=num_slots,
            length=max_length,
            num_threads=num_threads or len(os.sched_getaffinity(0)),
            in_order=not kinds <= TARGET_TOLERANCE.keys(),
        )
        if max_length > (limit := self._context.max_positions):
            raise ValueError(f"max_length {max_length} exceeds the {limit} positions of {self._name}")
        of_target = max(TARGET_TOLERANCE.get(kind, QUANTISED_TOLERANCE) for kind in kinds)
        self._check(of_target if role == "target" else DRAFT_TOLERANCE)

    def forward(self, feeds: Sequence[Feed]) -> list[Logits]:
        """Run one pass over all feeds: see `LanguageModel.forward`. A refused pass changes nothing."""
        with self._held.feeding(feeds):
            if not feeds:
                return []
            logits = dict(self._run(sorted(feeds, key=lambda feed: feed.slot)))
        return [logits[feed.slot] for feed in feeds]

    def _run(self, feeds: Sequence[Feed]) -> Iterable[tuple[int, Logits]]:
        """Each feed's slot and logits. By ascending slots llama.cpp computes the most of them at once."""
        for feed in feeds:
            self._cut(feed.slot, feed.start)
        rows = [(token, feed.start + i, feed.slot) for feed in feeds for i, token in enumerate(feed.tokens)]
        tokens, positions, slots = zip(*rows, strict=True)
        logits = self._context.decode(tokens, positions, slots, wanted_rows(feeds))
        split = split_logits(logits[:, : self.vocab_size], feeds)
        return zip((feed.slot for feed in feeds), split, strict=True)

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` positions of the slot; a slot that holds fewer is left alone."""
        self._held.truncate(slot, length)
        self._cut(slot, length)

    def copy(self, source: int, slot: int, length: int) -> None:
        """Let `slot` hold the first `length` positions of another slot: see `LanguageModel.copy`."""
        with self._held.copying(source, slot, length):
            self._cut(slot, 0)
            if length:
                self._context.copy(source, slot)
                self._cut(slot, length)

    def _cut(self, slot: int, length: int) -> None:
        if self._context.length(slot) > length and not self._context.cut(slot, length):
            raise ModelRefused(
                f"{self._name} does not fit: its cache cannot be cut back to {length} positions"
            )

    def _check(self, tolerance: float) -> None:
        """Compare two sequences, each alone and in one piece, with both at once in pieces over other tokens,
        and with a row alone. More than `tolerance` of the largest logit between them is refused.
        """
        window = self._context.window
        length = max(CHECK_LENGTH, window + 4 if window <= CHECK_MAX_WINDOW else 0)
        shape = (min(2, self.num_slots), min(length, self.max_length))
        sequences = np.random.default_rng(0).integers(self.vocab_size, size=shape).tolist()
        pieces = [_pieces(slot, tokens) for slot, tokens in enumerate(sequences)]
        passes = [[feed for feed in feeds if feed is not None] for feeds in zip_longest(*pieces)]
        passes.append([Feed(0, shape[1] - 1, sequences[0][-1:], 1)])
        difference = np.float32(0)
        try:
            expected = np.stack([self._alone(tokens) for tokens in sequences])
            self.forward([Feed(slot, 0, tokens[::-1], 0) for slot, tokens in enumerate(sequences)])
            for feeds in passes:
                for feed, logits in zip(feeds, self.forward(feeds), strict=True):
                    wanted = expected[feed.slot, feed.start : feed.start + len(logits)]
                    difference = np.maximum(difference, np.abs(logits - wanted).max())
        except RuntimeError as error:
            raise ModelRefused(f"{self._name} does not fit: a pass fails, {error}") from error
        limit = tolerance * float(np.abs(expected).max())
        if not difference <= limit:  # nor NaN
            raise ModelRefused(
                f"{self._name} cannot be a target: its logits depend on how many rows a pass has, by"
                f" {difference:.3g}, at most {limit:.3g} is allowed; use it as a draft, or take a file in"
                " F32, F16, Q8_0, Q5_0, Q4_1 or Q4_0"
            )
        for slot in range(shape[0]):
            self.truncate(slot, 0)

    def _alone(self, tokens: list[int]) -> Logits:
        self.truncate(0, 0)
        (logits,) = self.forward([Feed(0, 0, tokens, len(tokens))])
        return logits


def _pieces(slot: int, tokens: list[int]) -> list[Feed]:
    """The sequence in up to four feeds, cut elsewhere in the next slot."""
    length = len(tokens)
    cuts = sorted({0, length // 3, 2 * length // 3, length, 1 if slot else length - 1})
    return [Feed(slot, begin, tokens[begin:end], end - begin) for begin, end in pairwise(cuts)]
