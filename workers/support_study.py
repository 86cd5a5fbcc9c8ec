"""How much acceptance a sparse q costs: mean sum of min(p, q) by support, for any pair of models.

    python -m workers.support_study --target demo --draft demo --prompts questions.jsonl

Each question's answer is sampled from the target at temperature 1; at each of its positions p and q are
computed on the same prefix, and q once whole and once quantised to each support. Prompts are a file in
Spec-Bench's format: one JSON object a line with `category` and `turns`, of which the first is used.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoTokenizer

from workers.counts import CountRow, quantise, quantise_full
from workers.distributions import FloatArray
from workers.engine import load_model
from workers.language_model import Feed, LanguageModel
from workers.model_names import resolve
from workers.rows import write_rows
from workers.sampling import SamplingSettings, probabilities
from workers.verification import draw

SUPPORTS = (16, 32, 64, 128, 256)


def overlap(p: FloatArray, q: CountRow) -> float:
    """The chance that a token drawn from q is accepted: sum of min(p, q)."""
    return float(np.minimum(p[q.ids], q.q).sum())


def sample_answer(
    model: LanguageModel, prompt: Sequence[int], num_tokens: int, rng: np.random.Generator
) -> list[int]:
    """Tokens drawn from the model at temperature 1 behind a prompt, in slot 0."""
    model.truncate(0, 0)
    answer: list[int] = []
    pending = list(prompt)
    for start in chain([0], range(len(prompt), len(prompt) + num_tokens - 1)):
        logits = model.forward([Feed(0, start, pending, 1)])[0]
        answer.append(draw(probabilities(logits, SamplingSettings())[0], rng.random()))
        pending = answer[-1:]
    return answer


def distributions(model: LanguageModel, prompt: Sequence[int], answer: Sequence[int]) -> FloatArray:
    """The model's distribution `[T, C]` at each of the answer's T positions."""
    model.truncate(0, 0)
    fed = [*prompt, *answer[:-1]]
    return probabilities(model.forward([Feed(0, 0, fed, len(answer))])[0], SamplingSettings())


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=26, help="taken from every category in turn")
    parser.add_argument("--tokens", type=int, default=48, help="a question")
    parser.add_argument("--max-prompt", type=int, default=512, help="longer questions are left out")
    options = parser.parse_args()

    console = Console(stderr=True)
    folder = resolve(options.target, role="target", progress=console.print)
    length = options.max_prompt + options.tokens
    target = load_model(folder, num_slots=1, max_length=length)
    draft_folder = resolve(options.draft, role="draft", progress=console.print)
    draft = load_model(draft_folder, role="draft", num_slots=1, max_length=length)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    rng = np.random.default_rng(0)
    whole: list[float] = []
    by_support: dict[int, list[float]] = {support: [] for support in SUPPORTS}
    sizes: dict[int, list[int]] = {support: [] for support in SUPPORTS}
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in _in_turn(options.prompts)
    ]
    prompts = [prompt for prompt in prompts if len(prompt) <= options.max_prompt][: options.questions]
    for prompt in track(prompts, "sampling answers", console=console):
        answer = sample_answer(target, prompt, options.tokens, rng)
        all_p, all_q = distributions(target, prompt, answer), distributions(draft, prompt, answer)
        for p, q in zip(all_p, all_q, strict=True):
            whole.append(overlap(p, quantise_full(q, draft.output_ids)))
            for support in SUPPORTS:
                row = quantise(q, support, draft.output_ids)
                by_support[support].append(overlap(p, row))
                sizes[support].append(len(write_rows([row], target.vocab_size)))

    table = Table(title=f"{len(prompts)} questions, {len(whole)} positions, temperature 1")
    for name in ("support", "mean Σ min(p, q)", "lost", "bytes a row"):
        table.add_column(name, justify="right")
    full = float(np.mean(whole))
    table.add_row("whole q", f"{full:.4f}", "", f"{4 * target.vocab_size}")
    for support in SUPPORTS:
        mean = float(np.mean(by_support[support]))
        lost = f"{100 * (full - mean) / full:.1f} %"
        table.add_row(str(support), f"{mean:.4f}", lost, f"{np.mean(sizes[support]):.0f}")
    Console().print(table)


def _in_turn(file: Path) -> list[str]:
    """First turns, one of each category after another."""
    by_category: dict[str, list[str]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        by_category.setdefault(question["category"], []).append(question["turns"][0])
    return [text for text in chain.from_iterable(zip_longest(*by_category.values())) if text is not None]


if __name__ == "__main__":
    main()
