"""Published curves behind a comparison."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from sheeplike.analysis.figure import read_reference
from sheeplike.commands.compare import _parse
from sheeplike.options import CommandError

RUNS = [
    {"task": "walker", "method": "dreamerv3", "seed": str(seed), "xs": [100, 200, 300], "ys": [seed, 10 + seed, 20]}
    for seed in (0, 2)
] + [{"task": "cheetah", "method": "dreamerv3", "seed": "0", "xs": [100], "ys": [1.0]}]


@pytest.fixture
def scores(tmp_path: Path) -> Path:
    place = tmp_path / "scores.json.gz"
    place.write_bytes(gzip.compress(json.dumps(RUNS).encode()))
    return place


def test_scores_as_their_authors_publish_them(scores):
    found = read_reference(f"{scores}#walker", None, 2)
    np.testing.assert_array_equal(found.step, [50, 100, 150])
    np.testing.assert_array_equal(found.mean, [1, 11, 20])
    np.testing.assert_array_equal(found.spread, [1, 1, 0])
    assert "2 seeds" in found.label
    assert read_reference(f"{scores}#walker", "size 12m", 2).label == "size 12m"


def test_its_steps_by_the_command(scores):
    asked = _parse(["runs", f"reference={scores}#walker", "reference_frames=4"])[1]
    assert (asked.reference, asked.reference_frames) == (f"{scores}#walker", 4)


def test_columns(tmp_path):
    place = tmp_path / "curve.csv"
    place.write_text("step, value, seed\n10, 1, a\n20,2,a\n10,3,b\n30,5,b\n", encoding="utf-8-sig")
    found = read_reference(str(place), None, 1)
    np.testing.assert_array_equal(found.step, [10, 20])
    np.testing.assert_array_equal(found.mean, [2, 3])


@pytest.mark.parametrize(
    ("name", "content", "fact"),
    [
        ("a.json", b"[]", "a.json"),
        ("a.json", b"{", "a.json"),
        ("a.json.gz", b"no gzip", "a.json.gz"),
        ("a.csv", b"x,y\n1,2\n", "step"),
        ("a.csv", b"step,value\n1,two\n", "two"),
        ("a.json", json.dumps([RUNS[0] | {"ys": [1]}]).encode(), "a.json"),
        ("a.json", json.dumps(RUNS).encode(), "cheetah, walker"),
    ],
)
def test_what_cannot_be_read(tmp_path, name, content, fact):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CommandError, match=fact):
        read_reference(str(tmp_path / name), None, 1)


def test_no_file(tmp_path):
    with pytest.raises(CommandError, match="nowhere"):
        read_reference(str(tmp_path / "nowhere.json"), None, 1)
