"""Questions for a benchmark, out of a file in Spec-Bench's format or the project's own.

Knows that format: one JSON object a line with `category` and `turns`, of which the first is used.
"""

import json
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path

NUM_CATEGORIES = 13  # in Spec-Bench, and among our own
NUM_OF_EACH = 2  # questions of a category, unless a number is given
OWN_QUESTIONS = Path(__file__).parent / "prompts.jsonl"


class PromptsRefused(ValueError):
    """The sentence names the file and, where one is at fault, the line."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question."""

    category: str
    text: str
    line: int  # in its file, from 1

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.category}, line {self.line}"


def read_questions(file: Path, count: int | None) -> list[Question]:
    """`count` questions, one of each category after another, in the file's order; None: two of each.

    Raises PromptsRefused for a file that cannot be read, a line in another format, or too few questions.
    """
    try:
        # Not splitlines: JSON's strings may hold what else that takes for the end of a line, such as U+2028.
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptsRefused(f"prompts {file} cannot be read: {_reason(error)}") from None
    by_category: dict[str, list[Question]] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            question = _question(file, number, line)
            by_category.setdefault(question.category, []).append(question)
    if count is None:
        count = sum(min(NUM_OF_EACH, len(questions)) for questions in by_category.values())
    num_questions = sum(map(len, by_category.values()))
    if num_questions < max(1, count):
        raise PromptsRefused(
            f"prompts {file} has {num_questions} questions in {len(by_category)} categories;"
            f" num_prompts is {max(1, count)}"
        )
    in_turn = chain.from_iterable(zip_longest(*by_category.values()))
    return list(islice((question for question in in_turn if question is not None), count))


def _question(file: Path, number: int, line: str) -> Question:
    try:
        match json.loads(line):
            case {"category": str(category), "turns": [str(text), *_]} if text.strip():
                return Question(category, text, number)
            case {"category": str(), "turns": _}:
                problem = "has turns that do not begin with a text"
            case _:
                problem = "is not an object with a category and turns"
    except ValueError as error:
        problem = f"is not JSON: {error}"
    raise PromptsRefused(f"prompts {file}, line {number}, {problem}")


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return str(error.strerror) if isinstance(error, OSError) else f"not UTF-8 at byte {error.start}"
