"""Every promise of GUARANTEES.md names tests, and these exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROMISES = [
    line
    for line in (ROOT / "GUARANTEES.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| promised")
]
NAME = re.compile(r"`(test_\w+)(?:::(test_\w+))?`")


def test_every_promise_names_its_tests_and_they_exist() -> None:
    assert len(PROMISES) > 20
    for promise in PROMISES:
        names = NAME.findall(promise)
        assert names, promise
        for file, test in names:
            tree = ast.parse((ROOT / "tests" / f"{file}.py").read_text())
            functions = {
                node.name
                for node in ast.walk(tree)
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            assert not test or test in functions, f"{file}::{test}"
