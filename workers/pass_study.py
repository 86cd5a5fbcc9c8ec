"""Where a pass of a decoder spends its time, beside the floor that this machine sets.

    python -m workers.pass_study --model demo --threads 2

Each part is run alone, over all layers, with the shapes and the memory that the pass has; "rest" is what the
whole pass takes beyond them: norms, rotations, gates and Python. Up to 8 rows are one session's; 16, 32 and
64 are 4 rows of each of 4, 8 and 16 sessions. The floor is reading every weight that the pass multiplies with
once, at the rate at which this machine reads memory, or the multiplications at the rate of its best product,
whichever takes longer. Medians over repeats; the parts of one line are interleaved.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from workers.counts import CountRow, quantise
from workers.decoder import Decoder
from workers.decoder_model import DecoderModel
from workers.distributions import Distribution, RowsOnDemand
from workers.engine import load_model, precision_of
from workers.language_model import Feed, Logits
from workers.model_names import resolve
from workers.sampling import SamplingSettings, distribution
from workers.slot_cache import Places
from workers.verification import Rule, Uniforms, verify

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)
CONTEXTS = (64, 512, 2048)
ROWS_OF_MANY = 4  # of each session, where a pass has more rows than one session's
PARTS = ("linear", "attention", "cache", "sampling", "rest", "pass")
REPEATS = 7

Part = Callable[[], object]


def feeds_of(num_rows: int, context: int) -> list[Feed]:
    """The feeds of a pass of so many rows behind so many positions."""
    num_sessions, rows = (1, num_rows) if num_rows <= 8 else (num_rows // ROWS_OF_MANY, ROWS_OF_MANY)
    return [Feed(slot, context, list(range(100, 100 + rows)), rows) for slot in range(num_sessions)]


class Study:
    """One decoder and its parts."""

    def __init__(self, model: DecoderModel) -> None:
        """Fill every slot with any keys and values: what a pass takes does not depend on them."""
        self.model, self.decoder, self.cache = model, model._decoder, model._cache
        self.cache.block.normal_()

    def measure(self, num_rows: int, context: int) -> dict[str, float]:
        """Milliseconds of each part of a pass, those of sampling being extra."""
        feeds = feeds_of(num_rows, context)
        self.model._positions._held = [context] * self.model.num_slots
        with torch.inference_mode():
            places = Places.of(feeds, self.decoder.heads_per_kv_head, self.decoder.dtype, self.decoder.device)
            logits = self.model.forward(feeds)
            parts = {
                "pass": lambda: self.model.forward(feeds),
                "linear": products(self.decoder, num_rows),
                "attention": self._attention(places, num_rows),
                "cache": self._writes(places, num_rows),
                "sampling": verdicts(logits),
            }
            times = medians(parts)
        times["rest"] = times["pass"] - sum(times[part] for part in ("linear", "attention", "cache"))
        return times

    def _attention(self, places: Places, num_rows: int) -> Part:
        config = self.decoder.config
        queries = torch.randn(num_rows, config.num_heads, config.head_dim)

        def attend() -> None:
            slots = self.cache.open(places)
            for layer, window in enumerate(config.windows):
                slots.attend(layer, queries, window)

        return attend

    def _writes(self, places: Places, num_rows: int) -> Part:
        config = self.decoder.config
        keys_values = torch.randn(num_rows, 2 * config.num_kv_heads, config.head_dim)
        slots = self.cache.open(places)  # once a pass: counted with attention

        def write() -> None:
            for layer in range(config.num_layers):
                slots.write(layer, keys_values)

        return write


def products(decoder: Decoder, num_rows: int) -> Part:
    """Every product of a pass."""
    config, layers = decoder.config, decoder._layers
    x = torch.randn(num_rows, config.hidden_size)
    attended = torch.randn(num_rows, config.num_heads * config.head_dim)
    gated = torch.randn(num_rows, config.intermediate_size)

    def multiply() -> None:
        for layer in layers:
            layer.queries_keys_values(x)
            layer.output(attended)
            layer.gate_up(x)
            layer.down(gated)
        decoder._head(x)

    return multiply


def verdicts(logits: Sequence[Logits]) -> Part:
    """A verdict on each session's rows at temperature 1; the drafts come from rows of 64 ids."""
    settings = SamplingSettings()
    proposals = [_proposal(rows, settings) for rows in logits]

    def judge() -> None:
        for rows, (q, tokens) in zip(logits, proposals, strict=True):

            def make_row(i: int, rows: Logits = rows) -> Distribution:
                return distribution(rows[i], settings)

            uniforms = Uniforms([0.3] * len(q), [0.6] * len(q), 0.6)
            verify(RowsOnDemand(make_row), q, tokens, uniforms, Rule.TOKEN)

    return judge


def _proposal(rows: Logits, settings: SamplingSettings) -> tuple[list[CountRow], list[int]]:
    q = [quantise(distribution(row, settings).probabilities, 64) for row in rows[:-1]]
    return q, [row.draw(0.4) for row in q]


def medians(parts: dict[str, Part]) -> dict[str, float]:
    """Milliseconds of each part, run in turn."""
    times: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(REPEATS):
        for name, part in parts.items():
            started = time.perf_counter()
            part()
            times[name].append((time.perf_counter() - started) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


class Machine:
    """What memory and arithmetic allow."""

    def __init__(self, num_weights: int, bytes_a_weight: int) -> None:
        """Measure a read of as many bytes as the weights have, and a float32 product of many rows."""
        weight_bytes = num_weights * bytes_a_weight
        block, a, b = torch.ones(weight_bytes // 4), torch.randn(512, 2048), torch.randn(2048, 2048)
        times = medians({"read": block.sum, "product": lambda: a @ b})
        self.bytes_a_ms = weight_bytes / times["read"]
        self.multiplications_a_ms = a.shape[0] * b.numel() / times["product"]
        self._weight_bytes, self._num_weights = weight_bytes, num_weights

    def floor(self, num_rows: int) -> float:
        """Milliseconds that no pass of so many rows can beat."""
        read = self._weight_bytes / self.bytes_a_ms
        return max(read, num_rows * self._num_weights / self.multiplications_a_ms)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--role", choices=["target", "draft"], default="target")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    console, role = Console(width=100), options.role  # wide enough for the table, piped or not
    folder = resolve(options.model, role=role, progress=Console(stderr=True).print)
    length = max(CONTEXTS) + ROWS_OF_MANY * 2
    model = load_model(
        folder, role=role, num_slots=max(ROWS) // ROWS_OF_MANY, max_length=length, num_threads=options.threads
    )
    if not isinstance(model, DecoderModel):
        raise SystemExit(f"{options.model} is not run by the decoder")
    precision = precision_of(folder, role, "auto", "cpu")
    machine = Machine(model._decoder.num_weights, 1 if precision == "int8" else 4)
    study = Study(model)
    table = Table(box=box.MARKDOWN)
    for column in ("rows", "context", "floor", *PARTS):
        table.add_column(column, justify="right", no_wrap=True)
    for num_rows in ROWS:
        for context in CONTEXTS:
            times = study.measure(num_rows, context)
            cells = (machine.floor(num_rows), *(times[part] for part in PARTS))
            table.add_row(str(num_rows), str(context), *(f"{ms:.1f}" for ms in cells))
    print(f"{folder.name}, {precision}, {options.threads} threads, milliseconds; this machine reads")
    print(
        f"{machine.bytes_a_ms / 1e6:.1f} GB/s and does {2 * machine.multiplications_a_ms / 1e6:.0f} GFLOP/s"
    )
    console.print(table)


if __name__ == "__main__":
    main()
