"""At temperature 0 the pipeline writes what transformers' own `generate` writes, token for token."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.pipelines import generate, pipeline
from tests.prompts import first_questions
from workers.engine import load_model

NUM_TOKENS = 64
NEAR_TIE = 1e-3  # between the two best logits: kernels for other batch sizes may order them otherwise
END = 2
BATCH = 16


@pytest.mark.demo
@pytest.mark.timeout(600)
async def test_greedy_text_equals_generate_up_to_near_ties(demo_target: Path, demo_draft: Path) -> None:
    """40 questions over all categories, 64 tokens each, three drafts a round, sixteen sessions at once."""
    tokenizer: Any = AutoTokenizer.from_pretrained(demo_target)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in first_questions(40)
    ]
    prompts.sort(key=len)  # little padding in generate's batches
    ours = await _ours(demo_target, demo_draft, prompts)
    num_ties = 0
    for prompt, mine, (theirs, gaps) in zip(prompts, ours, _theirs(demo_target, prompts), strict=True):
        for i, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            if a != b:
                where = f"token {i} behind {tokenizer.decode(prompt)[-80:]!r}"
                assert gaps[i] < NEAR_TIE, f"{where} is {a}, generate's is {b}, {gaps[i]:.4f} apart"
                num_ties += 1
                break
        else:
            assert len(mine) == len(theirs)
    print(f"{len(prompts)} texts compared, {num_ties} up to a near tie")
    assert num_ties <= len(prompts) // 8, f"{num_ties} near ties are more than chance"


async def _ours(target: Path, draft: Path, prompts: Sequence[list[int]]) -> list[tuple[int, ...]]:
    length = max(map(len, prompts)) + NUM_TOKENS
    models = [
        load_model(target, role="target", num_slots=BATCH, max_length=length),
        load_model(draft, role="draft", num_slots=BATCH, max_length=length),
    ]
    async with pipeline(*models, end_token_ids=(END,), num_draft_tokens=3) as running:
        generated = await asyncio.gather(
            *(
                generate(running.stub, prompt, max_tokens=NUM_TOKENS, temperature=0.0, timeout_seconds=500)
                for prompt in prompts
            )
        )
    num_accepted = sum(g.usage.num_accepted_tokens for g in generated)
    assert num_accepted > 0, "nothing was speculated, so nothing was tried"
    return [g.ids() for g in generated]


def _theirs(folder: Path, prompts: Sequence[list[int]]) -> Iterator[tuple[list[int], list[float]]]:
    """generate's tokens, and the gap between the two best logits at each."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    for first in range(0, len(prompts), BATCH):
        batch = prompts[first : first + BATCH]
        width = max(map(len, batch))
        ids = torch.full((len(batch), width), END)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(batch):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            pad_token_id=END,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(out.logits, dim=1).topk(2, dim=-1).values
        gaps = best[..., 0] - best[..., 1]
        for row in range(len(batch)):
            tokens = out.sequences[row, width:].tolist()
            if END in tokens:
                tokens = tokens[: tokens.index(END) + 1]
            yield tokens, gaps[row].tolist()
