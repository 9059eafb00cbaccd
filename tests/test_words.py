"""Words of docstrings and comments: a docstring begins with a verb or a noun phrase; some pronouns do not occur."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OPENING = re.compile(r"(What|Whether|How|Where|Of|As|Who|That)\b")
PRONOUN = re.compile(r"\b(no|some|any)body\b|\b(who|what)ever\b|\bsomeone\b", re.IGNORECASE)


@pytest.mark.parametrize("room", ["tests"])
def test_docstrings_and_words(room: str) -> None:
    found = []
    for file in sorted((ROOT / room).rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
        docstrings = [ast.get_docstring(node) or "" for node in nodes]
        found += [f"{file}: {docstring}" for docstring in docstrings if OPENING.match(docstring)]
        if file != Path(__file__):
            found += [f"{file}: {line}" for line in text.splitlines() if PRONOUN.search(line)]
    assert not found, "\n".join(found)
