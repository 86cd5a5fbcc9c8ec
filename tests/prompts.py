"""Questions for tests that need real text: Spec-Bench's where a copy lies at hand, else the project's own.

OUTRIDER_SPEC_BENCH names a copy: a file of one JSON object a line, with `category` and `turns`.
"""

import json
import os
from itertools import chain, zip_longest
from pathlib import Path

import cluster

_OWN = Path(cluster.__file__).parent / "prompts.jsonl"  # what `outrider bench` asks, too


def first_questions(count: int) -> list[str]:
    """The first turns of at most `count` questions, from every category in turn, its short ones first."""
    file = Path(os.environ.get("OUTRIDER_SPEC_BENCH", ""))
    if not file.is_file():
        file = _OWN
    by_category: dict[str, list[str]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        by_category.setdefault(question["category"], []).append(question["turns"][0])
    for questions in by_category.values():
        questions.sort(key=len)
    in_turn = chain.from_iterable(zip_longest(*by_category.values()))
    return [question for question in in_turn if question is not None][:count]
