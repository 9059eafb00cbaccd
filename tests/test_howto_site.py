"""The pages as a site: every page is in it, every link leads somewhere, and nothing is loaded from elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SETTINGS = yaml.safe_load((ROOT / "howto" / "mkdocs.yml").read_text(encoding="utf-8"))
AT_THE_TOP = ["README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"]


def entries(nav: list) -> Iterator[str]:
    for entry in nav:
        for value in entry.values():
            if isinstance(value, str):
                yield value
            else:
                yield from entries(value)


class Links(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        if "id" in given:
            self.places.add(given["id"])
        if tag == "a" and "href" in given:
            self.targets.append(given["href"])
        elif tag == "link" and "href" in given:
            self.loaded.append(given["href"])
        elif "src" in given:
            self.loaded.append(given["src"])


def test_every_page_has_its_place_in_the_navigation() -> None:
    pages = [f"howto/{path.name}" for path in (ROOT / "howto").glob("*.md")]
    reference = [path.name for path in (ROOT / "howto" / "reference").glob("*.md")]
    assert sorted(entries(SETTINGS["nav"])) == sorted(AT_THE_TOP + pages + reference)


@pytest.mark.slow
def test_the_site(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "howto" / "mkdocs.yml")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run([*build, "-d", str(tmp_path)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout + done.stderr

    pages = {path: Links(path.read_text(encoding="utf-8")) for path in tmp_path.rglob("*.html")}
    home = pages[tmp_path / "index.html"]
    assert {"howto/run_an_experiment.html", "options.html", "CONTRIBUTING.html"} <= set(home.targets)
    for path, links in pages.items():
        if path.name == "404.html":
            continue  # its links begin at the top of a server
        for target in links.targets + links.loaded:
            parts = urlsplit(target)
            if parts.scheme == "data" or (parts.scheme and target in links.targets):
                continue
            assert not parts.scheme, f"{path.name} loads {target}"
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = there / "index.html" if there.is_dir() else there
            assert there.is_file(), f"{path.name} leads to {target}"
            if parts.fragment and there.suffix == ".html":
                assert unquote(parts.fragment) in pages[there].places, f"{path.name} leads to {target}"
    for path in tmp_path.rglob("*.css"):
        assert "url(http" not in path.read_text(encoding="utf-8"), path.name

    reference = (tmp_path / "programs.html").read_text(encoding="utf-8")
    assert "Return the posterior states" in reference
    assert ":class:" not in reference
    options = (tmp_path / "options.html").read_text(encoding="utf-8")
    assert "<code>agent.replay_ratio</code>" in options
    assert "<code>env.options.box_range</code>" in options
    index = (tmp_path / "search" / "search_index.json").read_text(encoding="utf-8")
    assert "howto/tasks.html#franka_pick" in index
    assert "source/" not in index
    assert "replay_ratio" in re.split(json.loads(index)["config"]["separator"], "agent.replay_ratio=0.5")
