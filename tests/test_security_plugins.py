"""Names in a run or an export are looked up among installed packages: they can choose, and never point to code."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml

from sheeplike import checkpoint, entry_points
from sheeplike.__main__ import main
from sheeplike.config.compose import load
from sheeplike.config.saved import to_yaml
from sheeplike.config.schema import to_data
from sheeplike.config.sources import Sources
from sheeplike.options import CommandError
from sheeplike.run.run_dir import claim
from sheeplike.trained.exported import load_agent

PARTS = ("agent", "envs", "loop")
USES = (
    "eval run=mine checkpoint=64",
    "export run=mine checkpoint=64",
    "train resume=mine",
    "train resume=mine show=config",
)
BOMB = "import pathlib; pathlib.Path('fired').touch()\ndef build(*, episode_length: int = 9): ...\n"
# Names that would mean something to an import, a path or a composition.
NAMES = (
    "bomb",
    "bomb:build",
    "mine.bomb:build",
    "os:system",
    "sheeplike.envs:make",
    "../bomb",
    "pkg://bomb",
    "franka_pick extra",
    "",
)

pytestmark = pytest.mark.usefixtures("workplace")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("prepared") / "mine"
    config = load(["exp=ppo", "env=cartpole_balance", "profile=cpu", "dry_run=true", "run_dir=mine"], Sources()).config
    with claim(place, config):
        pass
    parts = {part: {"x": torch.zeros(3)} for part in PARTS}
    with checkpoint.Writer(place / "checkpoints", keep_last=9, config=to_data(config)) as writer:
        writer.save(64, parts, {}, finite=(), wait=True)
    info = place / "bomb-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bomb\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[sheeplike.envs]\nbomb = bomb:build\n[sheeplike.agents]\nbomb = bomb:build\n"
    )
    for name in ("bomb.py", "env.py", "agent.py"):
        (place / name).write_text(BOMB)
    return place


@pytest.fixture
def run_dir(prepared: Path, workplace: Path) -> Path:
    """A run with one checkpoint, beside code that must not run: in the run, and announced by metadata within it."""
    return shutil.copytree(prepared, workplace / "mine")


def rename(run_dir: Path, section: str, name: str) -> None:
    data = yaml.safe_load((run_dir / "config.yaml").read_text())
    data[section]["name"] = name
    (run_dir / "config.yaml").write_text(yaml.safe_dump(data))


@pytest.mark.parametrize("section", ["env", "agent"])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_cannot_name_a_module(run_dir, refusal, section, name):
    rename(run_dir, section, name)
    before = set(sys.modules)
    for command in USES:
        error = refusal(command)
        assert f"{section}.name={name}" in error
        assert "mine/config.yaml" in error
    assert not list(run_dir.parent.rglob("fired"))
    assert not {"bomb", "mine", "mine.bomb"} & (set(sys.modules) - before)


@pytest.mark.parametrize("group", ["env", "agent", "exp"])
@pytest.mark.parametrize("name", [name for name in NAMES if name.strip() and " " not in name])
def test_nor_can_the_command_line(run_dir, refusal, group, name):
    others = {"exp": "ppo", "env": "cartpole_balance", "agent": "ppo"} | {group: f"'{name}'"}
    assert f"{group} {name!r}" in refusal(*(f"{key}={value}" for key, value in others.items()))
    assert not list(run_dir.parent.rglob("fired"))


@pytest.mark.parametrize("name", NAMES)
def test_nor_can_an_export(tmp_path, name):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"format": 1, "agent": {"name": name}}))
    with pytest.raises(CommandError, match=r"agent\.name="):
        load_agent(tmp_path)


def test_a_registered_name_is_all_that_a_run_can_choose(run_dir, site, refusal):
    """Installed, the same name runs its package's code: that of the entry point, no matter what the run says."""
    code = "import pathlib; pathlib.Path('chosen').touch()\ndef build(*, episode_length: int = 9): ...\n"
    site.announce("a-bomb", "[sheeplike.envs]\nbomb = a_bomb:build", code)
    assert "'bom'" in refusal("exp=ppo env=bom")
    assert not Path("chosen").exists()
    rename(run_dir, "env", "bomb")
    main(["resume=mine", "show=config"])
    assert Path("chosen").exists()
    assert not list(run_dir.parent.rglob("fired"))


@pytest.mark.parametrize(
    "line",
    [
        "${oc.env:SECRET} = bomb:build",
        "../../x = bomb:build",
        "a/b = bomb:build",
        "= bomb:build",
        "@x = bomb:build",
        "-x = bomb:build",
    ],
)
def test_names_that_are_no_names_are_not_announced(site, line):
    site.announce("a-bomb", f"[sheeplike.envs]\n{line}\nfine = a_bomb:build", BOMB)
    assert list(entry_points.plugins("sheeplike.envs")) == ["fine"]


def test_composing_imports_nothing_that_is_not_chosen(site):
    points = "[sheeplike.envs]\nfield = a_bomb:build\n[sheeplike.agents]\nwolf = a_bomb:build"
    site.announce("a-bomb", points, BOMB)
    for agent in ("dreamer_v3", "ppo"):
        assert "wolf" not in to_yaml(load([f"exp={agent}", "env=franka_pick"], Sources()).config)
    assert not Path("fired").exists()
    assert "a_bomb" not in sys.modules
    assert os.listdir() == []
