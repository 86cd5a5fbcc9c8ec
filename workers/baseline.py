"""transformers' own `generate` in a process of its own: what the benchmark compares with.

Knows transformers only, and nothing of this project's engine. Runs as `python -m workers.baseline`: its
models come as the first line of standard input, a task each as the further ones, and every line is answered
by one on standard output (`workers.baseline_tasks`). It lives until standard input ends, so never longer than
its owner.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from protos.settings import Settings
from workers.baseline_tasks import (
    BaselineBatch,
    BaselineModels,
    BaselineReady,
    BaselineRequest,
    BaselineTask,
    BaselineText,
    BaselineTexts,
    Gap,
    GapTask,
)


class Baseline:
    """A target, and perhaps its assistant, behind `generate`."""

    def __init__(self, models: BaselineModels) -> None:
        """Load them. The assistant is an ordinary model here: a reduced vocabulary is not looked at."""
        torch.set_num_threads(models.num_threads)
        self._target = _load(models.target)
        self._assistant = None if models.assistant is None else _load(models.assistant)
        self._num_rounds = self._num_drafts = self._num_draft_tokens = 0
        self._drafted = False  # since the target's last pass
        self._target.register_forward_hook(self._on_target_pass)
        if self._assistant is not None:
            self._assistant.register_forward_hook(self._on_assistant_pass)

    def ready(self) -> BaselineReady:
        """How assisted tasks will be drafted."""
        if self._assistant is None:
            return BaselineReady(
                num_assistant_tokens=None,
                num_assistant_tokens_schedule=None,
                assistant_confidence_threshold=None,
            )
        config = self._assistant.generation_config
        defaults = config._get_default_generation_params() | {
            name: value for name, value in config.to_dict().items() if value is not None
        }
        return BaselineReady(**{name: defaults[name] for name in BaselineReady.model_fields})

    def write(self, task: BaselineTask) -> BaselineText:
        """Run one `generate`, timed from its call to its return."""
        self._num_rounds = self._num_drafts = self._num_draft_tokens = 0
        self._drafted = False
        assistant = {"assistant_model": self._assistant} if task.kind == "assisted" else {}
        prompt = torch.tensor([task.prompt])
        torch.manual_seed(task.seed)
        begun = time.perf_counter()
        output = self._target.generate(
            prompt, attention_mask=torch.ones_like(prompt), generation_config=_generation(task), **assistant
        )
        return BaselineText(
            tokens=output[0, len(task.prompt) :].tolist(),
            seconds=time.perf_counter() - begun,
            num_rounds=self._num_rounds,
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
        )

    def write_batch(self, task: BaselineBatch) -> BaselineTexts:
        """Run one `generate` of all prompts, timed alike."""
        longest = max(map(len, task.prompts))
        paddings = [longest - len(prompt) for prompt in task.prompts]
        prompts = torch.tensor([[0] * n + list(p) for n, p in zip(paddings, task.prompts, strict=True)])
        mask = torch.tensor([[0] * n + [1] * (longest - n) for n in paddings])
        torch.manual_seed(task.seed)
        begun = time.perf_counter()
        output = self._target.generate(prompts, attention_mask=mask, generation_config=_generation(task))
        return BaselineTexts(texts=output[:, longest:].tolist(), seconds=time.perf_counter() - begun)

    def answer(self, task: BaselineTask | BaselineBatch | GapTask) -> BaselineText | BaselineTexts | Gap:
        """Do what is asked."""
        match task:
            case BaselineTask():
                return self.write(task)
            case BaselineBatch():
                return self.write_batch(task)
            case GapTask():
                return self.gap(task)

    def gap(self, task: GapTask) -> Gap:
        """The gap between the two best logits behind the prompt."""
        with torch.inference_mode():
            logits = self._target(torch.tensor([task.prompt]), logits_to_keep=1).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        return Gap(gap=best - second)

    def _on_target_pass(self, *_: Any) -> None:
        self._num_rounds += 1
        self._num_drafts += self._drafted
        self._drafted = False

    def _on_assistant_pass(self, *_: Any) -> None:
        self._num_draft_tokens += 1
        self._drafted = True


def _load(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False, local_files_only=True
    )
    model.eval()
    # `generate` takes from here what a task leaves out. Penalties, cut-offs and end tokens that come with the
    # model would be another law than the one compared with; how many tokens to draft changes no law.
    own = model.generation_config
    model.generation_config = GenerationConfig(
        **{name: getattr(own, name) for name in BaselineReady.model_fields}
    )
    return model


def _generation(task: BaselineTask | BaselineBatch) -> GenerationConfig:
    length = {"max_new_tokens": task.num_tokens, "eos_token_id": None, "pad_token_id": 0}
    if task.temperature == 0:
        return GenerationConfig(do_sample=False, **length)
    # top_k is 50 unless said otherwise: that would be another law than the one compared with.
    return GenerationConfig(do_sample=True, temperature=task.temperature, top_k=0, top_p=1.0, **length)


def serve(tasks: TextIO, answers: TextIO) -> None:
    """Answer each line of `tasks` by one of `answers`."""

    def say(answer: Settings) -> None:
        print(answer.model_dump_json(), file=answers, flush=True)

    baseline = Baseline(BaselineModels.model_validate_json(tasks.readline()))
    say(baseline.ready())
    for line in tasks:
        say(baseline.answer(BaselineRequest.model_validate_json(line).task))


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to the log
    serve(sys.stdin, answers)
