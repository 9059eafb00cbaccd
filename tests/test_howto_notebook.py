"""The notebook about world models runs from its first cell to its last, with what it shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "howto" / "inside_a_world_model.ipynb"


@pytest.fixture(scope="module")
def cells() -> list[dict]:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def printed(cell: dict) -> str:
    return "".join("".join(out["text"]) for out in cell["outputs"] if out["output_type"] == "stream")


def test_it_was_run_from_top_to_bottom_and_shows_what_came_out(cells: list[dict]) -> None:
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    assert not any(out["output_type"] == "error" for cell in code for out in cell["outputs"])
    pictures = [out for cell in code for out in cell["outputs"] if "image/png" in out.get("data", {})]
    assert len(pictures) >= 7
    assert NOTEBOOK.stat().st_size < 2**20


@pytest.mark.slow
def test_it_finds_today_what_it_shows(cells: list[dict], monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Every cell, one after the other; its numbers within what other versions and threads may change."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    space: dict = {"__name__": "__main__"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), str(NOTEBOOK), "exec"), space)
            numbers = [float(x) for x in re.findall(r"-?\d+\.\d+", capsys.readouterr().out)]
            shown = [float(x) for x in re.findall(r"-?\d+\.\d+", printed(cell))]
            assert numbers == pytest.approx(shown, rel=0.3, abs=0.3)
