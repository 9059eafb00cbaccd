"""The notebooks run from their first cell to their last, with what they show."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

HOWTO = Path(__file__).parents[1] / "howto"
PICTURES = {"inside_a_world_model": 7, "first_look": 3}
EXECUTE = """
import sys, nbclient, nbformat
book = nbformat.read(sys.argv[1], 4)
place = {"metadata": {"path": sys.argv[2]}}
nbclient.NotebookClient(book, timeout=3600, kernel_name="python3", resources=place).execute()
nbformat.write(book, sys.argv[3])
"""


def code_of(file: Path) -> list[dict]:
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def printed(cell: dict) -> str:
    return "".join("".join(out["text"]) for out in cell["outputs"] if out["output_type"] == "stream")


def pictures(code: list[dict]) -> list[dict]:
    data = [out.get("data", {}) for cell in code for out in cell["outputs"]]
    return [shown for shown in data if {"image/png", "image/gif"} & shown.keys()]


@pytest.mark.parametrize("name", PICTURES)
def test_it_was_run_from_top_to_bottom_and_shows_what_came_out(name: str) -> None:
    code = code_of(HOWTO / f"{name}.ipynb")
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    assert not any(out["output_type"] == "error" for cell in code for out in cell["outputs"])
    assert len(pictures(code)) >= PICTURES[name]
    assert (HOWTO / f"{name}.ipynb").stat().st_size < 2**20


@pytest.mark.slow
def test_it_finds_today_what_it_shows(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Every cell, one after the other; its numbers within what other versions and threads may change."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    space: dict = {"__name__": "__main__"}
    notebook = HOWTO / "inside_a_world_model.ipynb"
    for cell in code_of(notebook):
        exec(compile("".join(cell["source"]), str(notebook), "exec"), space)
        numbers = [float(x) for x in re.findall(r"-?\d+\.\d+", capsys.readouterr().out)]
        shown = [float(x) for x in re.findall(r"-?\d+\.\d+", printed(cell))]
        assert numbers == pytest.approx(shown, rel=0.3, abs=0.3)


@pytest.mark.slow
def test_a_first_look_installs_what_it_needs(tmp_path: Path) -> None:
    """All cells in an environment that has Jupyter's kernel alone; the learning is short."""
    made, done = tmp_path / "made", tmp_path / "done.ipynb"
    made.mkdir()
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "python"], check=True)
    python = tmp_path / "python" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "nbclient", "ipykernel"], check=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MPLBACKEND")}
    environment |= {"FIRST_LOOK_STEPS": "640", "TMPDIR": str(made), "JUPYTER_PREFER_ENV_PATH": "1"}
    subprocess.run([python, "-c", EXECUTE, HOWTO / "first_look.ipynb", HOWTO, done], env=environment, check=True)
    code = code_of(done)
    assert all(cell["execution_count"] for cell in code)
    assert len(pictures(code)) >= PICTURES["first_look"]
    (curve,), (film,) = made.rglob("curve.png"), made.rglob("eval/**/*.gif")
    assert curve.stat().st_size
    assert film.stat().st_size
    text = "".join(map(printed, code))
    assert re.search(r"\b200$", text, re.MULTILINE), "of the page, at its local address with the token"
    page = re.search(r"http://127\.0\.0\.1:\d+/\S+/", text)
    with pytest.raises(URLError):
        urlopen(page[0], timeout=60)
