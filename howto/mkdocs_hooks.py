"""What makes a site of README.md and the how-to pages as they are; see mkdocs.yml.

- README.md, the pages beside this file, their pictures and the documents at the top of the repository become pages.
- A link to a file of the program leads to a page that shows it.
- ``<!-- options: name -->`` becomes a table of those options, from the classes that define them.
- Sphinx roles in docstrings, such as ``:class:`~sheeplike.loop.Step```, become links.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from sheeplike.agents.dreamer_v3 import DreamerV3Config
from sheeplike.agents.ppo import PPOConfig
from sheeplike.config.schema import all_keys
from sheeplike.envs.registry import BUILT_IN
from sheeplike.options import Key, expectation, format_value, keys_of

ROOT = Path(__file__).parents[1]
AT_THE_TOP = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
AS_THEY_ARE = (".png", ".gif", ".svg", ".ipynb")
LINK = re.compile(r"(\]\()((?!https?:)[^)#\s]+)")
ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):<code>(~?)([\w.]+)</code>")
OPTIONS = re.compile(r"<!-- options: (\w+) -->")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".cff": "yaml", ".xml": "xml", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages, their pictures, and the files of the program that they link to."""
    pages = [ROOT / name for name in AT_THE_TOP] + sorted((ROOT / "howto").glob("*.md"))
    pictures = [path for path in sorted((ROOT / "howto").iterdir()) if path.suffix in AS_THEY_ARE]
    for path in pages + pictures:
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    for path in sorted({target for page in pages for target in _linked(page)}):
        files.append(File.generated(config, _page_of(path), content=_shown(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to the program to the pages that show it, and fills in tables of options."""
    place = (ROOT / page.file.src_uri).parent

    def lead(match: re.Match[str]) -> str:
        target = Path(posixpath.normpath(place / match[2]))
        if not _is_shown(target):
            return match[0]
        return match[1] + posixpath.relpath(_page_of(target), posixpath.dirname(page.file.src_uri) or ".")

    outside = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    markdown = "".join(part if part.startswith("```") else LINK.sub(lead, part) for part in outside)
    return OPTIONS.sub(lambda match: _table(match[1]), markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns what docstrings have of Sphinx into links, where the reference has the name."""

    def link(match: re.Match[str]) -> str:
        short = match[2].rpartition(".")[2] if match[1] else match[2]
        return f'<autoref optional identifier="{match[2]}"><code>{short}</code></autoref>'

    return ROLE.sub(link, content).replace("::</p>", ":</p>")


def _linked(page: Path) -> set[Path]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = {Path(posixpath.normpath(page.parent / target)) for _, target in LINK.findall(text)}
    return {target for target in targets if _is_shown(target)}


def _is_shown(path: Path) -> bool:
    """Whether a link leads to a file or a directory of the repository that is no page and no picture."""
    inside = path.is_relative_to(ROOT) and path.exists()
    return inside and (path.is_dir() or path.suffix in LANGUAGES)


def _page_of(path: Path) -> str:
    return f"source/{path.relative_to(ROOT).as_posix()}.md"


def _shown(path: Path) -> str:
    """A page that shows a file, or names what is in a directory."""
    title = f"---\ntitle: {path.relative_to(ROOT).as_posix()}\nsearch: {{exclude: true}}\n---\n"
    if path.is_dir():
        names = [name.relative_to(path).as_posix() for name in sorted(path.rglob("*"))]
        return title + "\n".join(f"- `{name}`" for name in names if "__pycache__" not in name) + "\n"
    text = path.read_text(encoding="utf-8")
    return f"{title}\n````{LANGUAGES[path.suffix]}\n{text}````\n"


def _table(name: str) -> str:
    """Keys, what they take, their defaults and their meanings; as ``train --help`` has them."""
    run = [key for key in all_keys() if not key.path.startswith(("agent.", "env.options"))]
    keys: Any = {"run": run, "dreamer_v3": keys_of(DreamerV3Config, "agent."), "ppo": keys_of(PPOConfig, "agent.")}
    found = keys[name] if name in keys else keys_of(BUILT_IN[name], "env.options.")
    lines = [_row(key) for key in found if not key.is_section and key.path != "env.options.id"]
    return "\n".join(["| key | default | takes | meaning |", "|---|---|---|---|", *lines])


def _row(key: Key) -> str:
    default = f"`{format_value(key.schema['default'])}`" if "default" in key.schema else ""
    words = (expectation(key.schema), key.schema.get("description", ""))
    cells = [f"`{key.path}`", default, *(re.sub(r"([\[\]*_|])", r"\\\1", html.escape(text)) for text in words)]
    return f"| {' | '.join(cells)} |"
