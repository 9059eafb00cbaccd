"""Words of docstrings and comments, and the size of the rooms, as CONTRIBUTING.md promises them."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OPENING = re.compile(r"(What|Whether|How|Where|Of|As|Who|That)\b")
PACKAGE = ROOT / "sheeplike"
OWN = ("analyze", "bench", "compare", "doctor", "dream", "eval", "export", "publish", "record")
COMMANDS = {f"commands/{name}.py" for name in OWN}
WINGS = {"analysis", "inspection", "tools", "trained"}
PRONOUN = re.compile(r"\b(no|some|any)body\b|\b(who|what)ever\b|\bsomeone\b", re.IGNORECASE)


@pytest.mark.parametrize("room", ["sheeplike", "tests"])
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


def test_what_trains_and_the_rest_have_their_ceilings() -> None:
    lines = {"trains": 0, "rest": 0}
    for file in PACKAGE.rglob("*.py"):
        name = file.relative_to(PACKAGE).as_posix()
        wing = "rest" if name in {*COMMANDS, "player.py"} or name.partition("/")[0] in WINGS else "trains"
        lines[wing] += len(file.read_text(encoding="utf-8").splitlines())
    assert lines["trains"] <= 19_275
    assert lines["rest"] <= 7_620
