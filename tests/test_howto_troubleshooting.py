"""Every message that the page on troubleshooting quotes is one that the program has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sheeplike.__main__ import parse
from sheeplike.agents import registry
from sheeplike.commands import doctor
from sheeplike.config.schema import all_keys
from sheeplike.envs.registry import BUILT_IN

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "howto" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = [
    line for block in re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) for line in block.splitlines()
]


def texts() -> list[str]:
    """All texts of the program, but for docstrings, as it would print them, with ``…`` for what differs."""
    found = []
    for file in sorted((ROOT / "sheeplike").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if node in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


TEXTS = texts()


@pytest.mark.parametrize("line", QUOTED)
def test_every_quoted_message_is_the_programs_own(line: str) -> None:
    pieces = [re.escape(piece) for piece in line.split("…") if piece.strip()]
    assert sum(map(len, pieces)) >= 8, "too short to be found by"
    assert any(re.search(".*".join(pieces), text) for text in TEXTS), line


def test_the_quotes_are_found() -> None:
    assert len(QUOTED) > 25


def test_the_program_shows_a_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(program, "troubleshooting.md", "exec"), {})
    assert np.asarray(Image.open("front.png")).std() > 10


def test_keys_and_checks_on_the_page_exist() -> None:
    known = {key.path for key in all_keys(*registry.built_in())}
    known |= {f"env.options.{option}" for options in BUILT_IN.values() for option in options.model_fields}
    for key in set(re.findall(r"`((?:agent|env|eval|fabric|logger|checkpoint)\.[a-z_.]+)", PAGE)):
        assert key in known, key
    for line in re.findall(r"^python -m sheeplike doctor(.*)$", PAGE, re.MULTILINE):
        assert doctor.parse(parse(line.split())).checks
