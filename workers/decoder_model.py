"""A Llama-like decoder behind `LanguageModel`: read straight from safetensors, without transformers.

Knows folders of safetensors and how a pass is put together. A configuration that is not certain to mean what
`workers.decoder` computes is refused with NotADecoder, for the general engine to take.

C logit columns, V vocabulary.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from workers.checkpoints import ModelRefused, weight_files
from workers.decoder import Decoder
from workers.decoder_config import DecoderConfig, Json
from workers.device_draws import Rules, draw, read_draws
from workers.distributions import IntArray
from workers.feeds import HeldPositions, checked_output_ids, split_logits, wanted_rows
from workers.language_model import Drawn, Draws, Feed, Logits
from workers.products import Form
from workers.slot_cache import Places, SlotCache, in_call_order, sent
from workers.static_passes import StaticPasses


class DecoderModel:
    """`LanguageModel` over `Decoder`, with its attributes. Not for use by several threads at once."""

    def __init__(
        self,
        config: Json,
        tensors: dict[str, Tensor],
        *,
        num_slots: int,
        max_length: int,
        output_ids: Sequence[int] | NDArray[np.int64] | None = None,
        vocab_size: int | None = None,
        form: Form | None = None,
    ) -> None:
        """Take the weights out of `tensors`. Raises NotADecoder; ValueError for a bad size or output id.

        `config` is a config.json. `vocab_size` leaves out the ids from there on, with which a model pads
        its vocabulary. `form` is that of the products, by default the one that is fastest here.
        """
        shape = DecoderConfig.read(config)
        self.vocab_size = min(shape.vocab_size, vocab_size or shape.vocab_size)
        if max_length > shape.max_length:
            raise ValueError(f"max_length {max_length} exceeds the {shape.max_length} positions of the model")
        self._positions = HeldPositions(num_slots, max_length, self.vocab_size)
        self.num_slots, self.max_length = num_slots, max_length
        self.output_ids = None if output_ids is None else checked_output_ids(output_ids, self.vocab_size)
        columns = slice(self.vocab_size) if self.output_ids is None else torch.tensor(self.output_ids)
        self._decoder = Decoder(shape, tensors, rows=columns, max_length=max_length, form=form)
        self._cache = SlotCache(
            shape.num_layers,
            num_slots,
            shape.num_kv_heads,
            max_length,
            shape.head_dim,
            dtype=self._decoder.dtype,
            device=self._decoder.device,
        )
        self._column_ids = None if isinstance(columns, slice) else columns.to(self._decoder.device)
        self._broken_from: dict[int, int] = {}  # by slot, the first position that is not finite: see `_run`
        self._static: StaticPasses | None = None
        if self._decoder.device.type == "cuda":
            self._static = StaticPasses(self._decoder, self._cache, num_slots, max_length)

    @property
    def can_draw(self) -> bool:
        """Whether passes have fixed shapes, whose tokens may stay on the device."""
        return self._static is not None

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        num_slots: int,
        max_length: int,
        output_ids: Sequence[int] | None = None,
        vocab_size: int | None = None,
        form: Form | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> Self:
        """Load a folder of safetensors. Raises NotADecoder, and ModelRefused for damaged files."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        DecoderConfig.read(config)  # before any weight is read
        tensors: dict[str, Tensor] = {}
        for file in weight_files(folder):
            try:
                tensors |= {name: x.to(dtype) for name, x in load_file(file, device=device).items()}
            except (SafetensorError, OSError) as error:
                raise ModelRefused(f"folder {folder} does not load: {file.name}: {error}") from error
        return cls(
            config,
            tensors,
            num_slots=num_slots,
            max_length=max_length,
            output_ids=output_ids,
            vocab_size=vocab_size,
            form=form,
        )

    def forward(self, feeds: Sequence[Feed]) -> list[Logits]:
        """Run one pass over all feeds: see `LanguageModel.forward`. A refused pass changes nothing."""
        with self._positions.feeding(feeds):
            if not feeds:
                return []
            order = in_call_order(feeds)
            ordered = [feeds[i] for i in order]
            rows = split_logits(self._run(ordered), ordered)
        logits: list[Logits] = [rows[0]] * len(feeds)
        for i, row in zip(order, rows, strict=True):
            logits[i] = row
        return logits

    def draw(self, feeds: Sequence[Feed], draws: Sequence[Draws | None]) -> list[list[Drawn]] | None:
        """Feed, then draw and feed on: see `DrawingModel.draw`."""
        if self._broken_from:
            return None
        order = in_call_order(feeds)
        drawing = [i for i in order if draws[i] is not None]
        wanted = [draw for i in drawing if (draw := draws[i]) is not None]
        ends = [feeds[i].start + len(feeds[i].tokens) for i in drawing]
        slots = [feeds[i].slot for i in drawing]
        for slot, end, draw in zip(slots, ends, wanted, strict=True):
            if end + len(draw.coins) - 1 > self.max_length:
                raise ValueError(f"{len(draw.coins)} draws of slot {slot} pass max_length {self.max_length}")
        with self._positions.feeding(feeds):
            table = self._draw([feeds[i] for i in order], slots, ends, wanted)
        if table is None:
            return None
        drawn: list[list[Drawn]] = [[] for _ in feeds]
        for i, tokens in zip(drawing, read_draws(table, wanted, self.output_ids), strict=True):
            drawn[i] = tokens
        fed = zip(slots, ends, (drawn[i][:-1] for i in drawing), strict=True)
        with self._positions.feeding(
            [Feed(slot, end, [one.token for one in tokens], 0) for slot, end, tokens in fed if tokens]
        ):
            pass  # they were, on the device
        return drawn

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` positions of the slot; a slot that holds fewer is left alone."""
        self._positions.truncate(slot, length)
        self._forget_broken(slot, length)

    def copy(self, source: int, slot: int, length: int) -> None:
        """Let `slot` hold the first `length` positions of another slot: see `LanguageModel.copy`."""
        with self._positions.copying(source, slot, length):
            self._cache.copy(source, slot, length)
            self._forget_broken(slot, 0)
            if self._broken_from.get(source, length) < length:
                self._broken_from[slot] = self._broken_from[source]

    def _run(self, feeds: Sequence[Feed]) -> Logits:
        """Logits of all wanted rows of the pass, `[rows, C]`."""
        with torch.inference_mode():
            logits, finite = self._logits(feeds)
            for feed in feeds:
                self._forget_broken(feed.slot, feed.start)
            if self._broken_from or not finite:
                return self._run_guarded(feeds)
            return np.asarray(logits.float().cpu().numpy())

    def _logits(self, feeds: Sequence[Feed]) -> tuple[Tensor, Tensor]:
        """Logits of all wanted rows, still on their way, `[rows, C]`, and whether all are finite, `[]`."""
        decoder, wanted = self._decoder, wanted_rows(feeds)
        if self._static is not None and self._static.fits(feeds):
            return self._static.run(feeds, wanted)
        places = Places.of(feeds, decoder.heads_per_kv_head, decoder.dtype, decoder.device)
        rows = sent(torch.tensor(wanted, dtype=torch.long), decoder.device)
        return decoder.logits(places, rows, self._cache)

    def _draw(
        self, feeds: Sequence[Feed], slots: Sequence[int], ends: Sequence[int], draws: Sequence[Draws]
    ) -> IntArray | None:
        """The rows of `device_draws.draw`, `[K, B, 2 S + 2]`; None where something takes the host's eyes."""
        assert self._static is not None, "`can_draw` was asked"
        num_draws = max(len(draw.coins) for draw in draws)
        places = [
            [end + i if i + 1 < len(draw.coins) else None for end, draw in zip(ends, draws, strict=True)]
            for i in range(num_draws - 1)
        ]
        with torch.inference_mode():
            steps = self._static.steps(slots, places) if places else None
            if places and steps is None:
                return None
            rules = Rules.of(draws, self._decoder.num_columns, self._decoder.device)
            logits, finite = self._logits(feeds)
            all_finite, drawn = [finite.clone()], [draw(logits, rules, 0)]
            for i in range(num_draws - 1):
                assert steps is not None, "there are places"
                columns = drawn[-1][:, -2]
                tokens = columns if self._column_ids is None else self._column_ids[columns]
                logits, finite = steps.run(i, tokens)
                all_finite.append(finite)
                drawn.append(draw(logits, rules, i + 1))
            rows = torch.stack(drawn)
            rows[..., -1] &= torch.stack(all_finite).all()
            table = rows.cpu().numpy()  # the one time that the host waits
        return None if not table[..., -1].all() else np.asarray(table)

    def _run_guarded(self, feeds: Sequence[Feed]) -> Logits:
        """As `_run`, with NaN for every wanted row at or behind a position that is not finite."""
        decoder, wanted = self._decoder, wanted_rows(feeds)
        places = Places.of(feeds, decoder.heads_per_kv_head, decoder.dtype, decoder.device)
        rows = sent(torch.tensor(wanted, dtype=torch.long), decoder.device)
        logits, broken = decoder.guarded(places, rows, self._cache)
        result, flags = logits.float().cpu().numpy(), broken.cpu().numpy()
        first_row = first_wanted = 0
        for feed in feeds:
            at = np.flatnonzero(flags[first_row : first_row + len(feed.tokens)])
            if at.size:
                self._broken_from[feed.slot] = min(
                    self._broken_from.get(feed.slot, self.max_length), feed.start + int(at[0])
                )
            good = self._broken_from.get(feed.slot, self.max_length) - feed.start  # rows of the feed
            num_good_wanted = max(0, good - (len(feed.tokens) - feed.num_logits))
            result[first_wanted + num_good_wanted : first_wanted + feed.num_logits] = np.nan
            first_row, first_wanted = first_row + len(feed.tokens), first_wanted + feed.num_logits
        return np.asarray(result)

    def _forget_broken(self, slot: int, length: int) -> None:
        if length <= self._broken_from.get(slot, -1):
            del self._broken_from[slot]
