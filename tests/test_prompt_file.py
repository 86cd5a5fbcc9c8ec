"""Questions come in turn from every category, and a file at fault is refused by its line."""

import json
from pathlib import Path

import pytest

from cluster.prompt_file import OWN_QUESTIONS, PromptsRefused, read_questions


def _write(file: Path, *questions: tuple[str, str]) -> Path:
    lines = [
        json.dumps({"question_id": i, "category": category, "turns": [text, "a second turn"]})
        for i, (category, text) in enumerate(questions)
    ]
    file.write_text("\n".join(lines))
    return file


def test_categories_take_turns_in_the_order_of_the_file(tmp_path: Path) -> None:
    questions = [("math", "m1"), ("math", "m2"), ("math", "m3"), ("qa", "q1"), ("rag", "r1")]
    file = _write(tmp_path / "p.jsonl", *questions)
    found = read_questions(file, 4)
    assert [(q.text, q.line) for q in found] == [("m1", 1), ("q1", 4), ("r1", 5), ("m2", 2)]


def test_without_a_number_two_of_each_category_are_asked(tmp_path: Path) -> None:
    questions = [("math", "m1"), ("math", "m2"), ("math", "m3"), ("qa", "q1")]
    found = read_questions(_write(tmp_path / "p.jsonl", *questions), None)
    assert [q.text for q in found] == ["m1", "q1", "m2"]
    assert len(read_questions(OWN_QUESTIONS, None)) == 13
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(PromptsRefused, match="has 0 questions"):
        read_questions(tmp_path / "empty.jsonl", None)


def test_the_projects_own_questions_are_one_of_each_category() -> None:
    assert len({question.category for question in read_questions(OWN_QUESTIONS, 13)}) == 13


def test_a_line_ends_at_a_line_feed_alone(tmp_path: Path) -> None:
    """JSON's strings may hold other ends of lines as they are, and Spec-Bench's do."""
    text = "one\u2028two\u2029three\x85four\x7f"
    lines = [json.dumps({"category": c, "turns": [text]}, ensure_ascii=False) for c in ("math", "qa")]
    (tmp_path / "p.jsonl").write_text("\r\n".join(lines) + "\n", encoding="utf-8")
    assert [(q.text, q.line) for q in read_questions(tmp_path / "p.jsonl", 2)] == [(text, 1), (text, 2)]


def test_too_few_questions_are_refused_with_both_counts(tmp_path: Path) -> None:
    file = _write(tmp_path / "p.jsonl", ("math", "m1"), ("math", "m2"))
    with pytest.raises(PromptsRefused, match=r"has 2 questions in 1 categories; num_prompts is 3"):
        read_questions(file, 3)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2, is not JSON"),
        ('["math"]', "line 2, is not an object with a category and turns"),
        ('{"turns": ["x"]}', "line 2, is not an object with a category and turns"),
        ('{"category": "math", "turns": []}', "line 2, has turns that do not begin with a text"),
        ('{"category": "math", "turns": [" "]}', "line 2, has turns that do not begin with a text"),
        ('{"category": "math", "turns": "x"}', "line 2, has turns that do not begin with a text"),
    ],
)
def test_a_line_in_another_format_is_refused_by_its_number(tmp_path: Path, line: str, problem: str) -> None:
    file = _write(tmp_path / "p.jsonl", ("math", "m1"))
    file.write_text(file.read_text() + "\n" + line)
    with pytest.raises(PromptsRefused, match=problem):
        read_questions(file, 1)


def test_a_file_that_cannot_be_read_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(PromptsRefused, match="No such file"):
        read_questions(tmp_path / "none.jsonl", 1)
    (tmp_path / "latin.jsonl").write_bytes(b'{"category": "\xe9"}')
    with pytest.raises(PromptsRefused, match="not UTF-8 at byte 14"):
        read_questions(tmp_path / "latin.jsonl", 1)
