"""Rollback through the whole pipeline, with real models: slots hold what a fresh prefill would give.

Guards against a cache that is trimmed one token too many or too few: the text stays right and acceptance
decays with its length, or the text drifts from the law.
"""

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest

from protos.inference_pb2 import ORIGIN_ACCEPTED
from tests.pipelines import generate, pipeline
from tests.tiny_gguf import save_tiny_gguf
from tests.tiny_models import save_tiny, tiny_llama
from workers.engine import load_model
from workers.language_model import Feed
from workers.transformers_model import TransformersModel

SAME = 1e-4  # between logits of one prefix computed in other pieces; those of other prefixes differ by 1e-1


async def test_a_drafter_that_is_the_target_is_accepted_from_the_first_token_to_the_500th() -> None:
    """At temperature 0, every draft of every round."""
    models = [
        TransformersModel(tiny_llama(max_position_embeddings=640), num_slots=1, max_length=640)
        for _ in range(2)
    ]
    async with pipeline(models[0], models[1], num_draft_tokens=4) as running:
        generated = await generate(running.stub, [7, 8, 9], max_tokens=500, temperature=0.0)
    usage = generated.usage
    assert usage.num_completion_tokens == 500
    assert usage.num_drafts >= 95
    assert usage.num_accepted_tokens == usage.num_draft_tokens
    assert [token.origin for token in generated.choices[0][-4:]].count(ORIGIN_ACCEPTED) >= 2


def save(folder: Path, family: str, seed: int) -> Path:
    """A folder of safetensors, or the GGUF file of a Llama."""
    if family != "gguf":
        return save_tiny(folder, family, seed=seed)
    pytest.importorskip("llama_cpp", reason="the extra 'llama' is not installed")
    return save_tiny_gguf(folder, seed=seed)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gguf"])
async def test_after_any_rounds_both_caches_equal_a_fresh_prefill(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several sessions of other lengths and settings; then each slot's next logits are its tokens' own."""
    sources = [save(tmp_path / str(seed), family, seed) for seed in (0, 1)]
    target, draft = (load_model(source, num_slots=4, max_length=96, num_threads=1) for source in sources)
    fresh = [load_model(source, num_slots=1, max_length=96, num_threads=1) for source in sources]
    rng = random.Random(family)
    async with pipeline(target, draft, num_draft_tokens=3) as running:
        assert running.draft is not None
        kept: list[str] = []
        for worker in (running.target, running.draft):  # keep the slots when their sessions end
            monkeypatch.setattr(worker._slots, "release", kept.append)
        await asyncio.gather(
            *(
                generate(
                    running.stub,
                    [rng.randrange(256) for _ in range(rng.randrange(1, 20))],
                    max_tokens=rng.randrange(20, 60),
                    temperature=rng.choice([0.0, 0.8, 1.5]),
                    ignore_end_tokens=True,
                )
                for _ in range(4)
            )
        )
        for worker, model, alone in zip((running.target, running.draft), (target, draft), fresh, strict=True):
            slots = list(worker._slots._by_session.values())
            assert len(slots) == 4
            for slot in slots:
                tokens = slot.tokens.since(0)
                assert len(tokens) > 20
                alone.truncate(0, 0)
                (expected,) = alone.forward([Feed(0, 0, [*tokens, 5], 1)])
                (actual,) = model.forward([Feed(slot.index, len(tokens), [5], 1)])
                assert np.abs(actual - expected).max() < SAME * np.abs(expected).max()
        assert kept, "the sessions ended"
