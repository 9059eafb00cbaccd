"""Commands and programs of the README and the how-to pages work."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import yaml
from mujoco import mjx
from PIL import Image

from sheeplike.__main__ import main, parse
from sheeplike.commands import doctor
from sheeplike.commands.analyze import AnalyzeOptions
from sheeplike.commands.dream import DreamOptions
from sheeplike.commands.eval import EvalOptions
from sheeplike.commands.export import ExportOptions
from sheeplike.commands.publish import PublishOptions
from sheeplike.commands.record import RecordOptions
from sheeplike.config.compose import load, load_options
from sheeplike.config.saved import to_yaml
from sheeplike.config.sources import Sources
from sheeplike.envs.gym.vector_env import GymVectorEnv
from sheeplike.envs.mjx.randomization.draw import Randomization
from sheeplike.envs.mjx.tasks.franka_pick import FrankaPick
from sheeplike.monitor.logger import RunLogger
from sheeplike.trained import hub
from sheeplike.trained.exported import demos

ROOT = Path(__file__).parents[1]
OPTIONS = {
    "analyze": AnalyzeOptions,
    "dream": DreamOptions,
    "eval": EvalOptions,
    "export": ExportOptions,
    "publish": PublishOptions,
    "record": RecordOptions,
}
TOP = [ROOT / f"{name}.md" for name in ("README", "SECURITY", "CONTRIBUTING", "CHANGELOG")]
PAGES = [*TOP, *sorted((ROOT / "howto").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [block for name, block in found if name == language]


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in blocks(page, ""):
            found += [
                (page.name, line)
                for line in block.splitlines()
                if "python -m sheeplike " in line and "[command]" not in line
            ]
    return found


def record(run_dir: Path, agent: str, env: str) -> None:
    """A run's files as the command leaves them: its configuration, and two evaluations."""
    logger = RunLogger(run_dir)
    for step in (1000, 2000):
        metrics = {"eval/return_mean": step / 20, "eval/success_rate": 0.5, "eval/episodes": 16.0}
        logger.log(metrics, step=step, gradient_steps=step // 8, seconds=step / 10)
    logger.close()
    (run_dir / "config.yaml").write_text(to_yaml(load([f"exp={agent}", f"env={env}"], Sources()).config))


@pytest.mark.parametrize(("page", "command"), commands())
def test_every_command_asks_for_something_that_exists(
    page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Composed and checked, not trained; ``resume=`` needs a run, and the tasks of a page need that page's file."""
    arguments = shlex.split(command.partition("python -m sheeplike ")[2])
    # Composed in test_howto_packages.py and test_howto_dreamer.py.
    made = {"reach", "catch", "linear", "dots", "inverse", "patches", "plain_adam"}
    keys = ("exp", "env", "agent", "env.renderer")
    made &= {value for key, _, value in (word.partition("=") for word in arguments) if key in keys}
    if any(argument.startswith("resume=") for argument in arguments) or made:
        pytest.skip("needs what the reader has made before")
    if arguments == ["--help"]:
        main(arguments)
        assert "env " in capsys.readouterr().out
        return
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "compare" and arguments[1].startswith("howto/runs"):
        monkeypatch.chdir(ROOT)
        main([*(word for word in arguments if not word.startswith("out=")), f"out={tmp_path}"])
        assert "| dreamer_v3" in capsys.readouterr().out
        return
    if arguments[0] == "compare":
        for agent in ("dreamer_v3", "ppo"):
            record(tmp_path / arguments[1] / agent / agent / "seed_0", agent, Path(arguments[1]).name)
        Path("published.csv").write_text("step,value,seed\n0,1,0\n10000,50,0\n0,2,1\n10000,60,1\n")
        main(arguments)
        assert "| dreamer_v3 | 1 |" in " ".join(capsys.readouterr().out.split())
        return
    # Played in the tests of these commands.
    if arguments[0] in OPTIONS and arguments[1].startswith(("run=demo:", "run=hf://")):
        kind, _, name = arguments[1].removeprefix("run=").partition(":")
        assert name in demos() if kind == "demo" else hub.parse("run", f"{kind}:{name}")
        load_options(OPTIONS[arguments[0]], parse(arguments[1:]).about_run())
        return
    if arguments[0] == "doctor":  # examined in commands/test_doctor.py
        assert doctor.parse(parse(arguments[1:])).checks
        return
    if arguments[0] in ("analyze", "dream", "eval", "export", "publish"):
        with pytest.raises(SystemExit):
            main(arguments)
        # Its keys are checked before it looks for the run, which is all that is missing.
        assert "run=" in capsys.readouterr().err
        return
    main([*arguments, "show=config"])
    assert "run_dir:" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["add_a_task.md", "choose_a_renderer.md", "the_training_loop.md"])
def test_the_programs_on_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page}
    for program in blocks(ROOT / "howto" / page, "python"):
        exec(compile(program, page, "exec"), names)
    assert "envs" in names


def test_the_program_that_reads_a_world_model(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for program in blocks(ROOT / "howto" / "inside_a_world_model.md", "python"):
        exec(compile(program, "inside_a_world_model.md", "exec"), names)
    *_, scores, least, usual = capsys.readouterr().out.splitlines()
    assert min(json.loads(scores)) > 0.8
    assert least == usual == "torch.Size([5, 48, 48, 3])"


def test_the_readmes_program_dreams_from_the_middle_of_an_episode() -> None:
    names: dict = {}
    for program in blocks(ROOT / "README.md", "python"):
        exec(compile(program, "README.md", "exec"), names)
    pictures = names["pictures"]["pixels/front"]
    assert pictures.shape == (50, 48, 48, 3)
    assert names["cont"][:20].min() > 0.9, "the episode goes on there"
    # What came is what it dreamt of, rather than a picture that stands still.
    came = names["episode"].obs["pixels/front"][0, 11:41].float()
    error, still = ((guess - came).square().mean() for guess in (pictures[:30].float(), came[:1]))
    assert error < 0.5 * still


@pytest.mark.slow
def test_the_programs_with_randomized_worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """And the picture on the page is the one that its program draws."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "randomize_worlds.md"}
    with_options, picture = blocks(ROOT / "howto" / "randomize_worlds.md", "python")
    exec(compile(with_options, "randomize_worlds.md", "exec"), names)
    assert capsys.readouterr().out.startswith("tensor([0.5000, 2.0000, ")
    exec(compile(picture, "randomize_worlds.md", "exec"), names)
    drawn, shown = (
        np.asarray(Image.open(place / "randomized_worlds.png"), float) for place in (Path(), ROOT / "howto")
    )
    assert drawn.shape == (512, 512, 3)
    assert np.abs(drawn - shown).mean() < 1


@pytest.mark.parametrize("agent", ["dreamer_v3", "ppo"])
def test_the_program_that_looks_at_what_a_halted_run_left(
    agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = blocks(ROOT / "howto" / "resume.md", "python")
    step = GymVectorEnv.step

    def poisoned(self: GymVectorEnv, actions: torch.Tensor) -> tuple:
        obs, reward, *rest = step(self, actions)
        return obs, reward * float("nan"), *rest

    monkeypatch.setattr(GymVectorEnv, "step", poisoned)
    job = [f"exp={agent}", "env=gym", "env.id=CartPole-v1", "env.options.frames=none", "agent.observations=[state]"]
    with pytest.raises(SystemExit, match="70"):
        main([*job, "dry_run=true", "max_skipped=1", "logger=[]", f"run_dir={tmp_path}"])
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(compile(program, "resume.md", "exec"), {})
    assert re.search(r"^(reward|target) +[1-9]\d* numbers are not finite$", capsys.readouterr().out, re.MULTILINE)


def test_lines_on_a_page_are_lines() -> None:
    (block,) = blocks(ROOT / "howto" / "randomize_worlds.md", "yaml")
    lines = yaml.safe_load(block)
    scene = FrankaPick().model
    bound = Randomization(lines, scene, mjx.put_model(scene, impl="warp"), cameras=("front",))
    assert tuple(bound.draw(jax.random.key(0))) == tuple(lines)


def test_the_readme_has_one_command_that_trains_and_one_that_tests() -> None:
    setup = [block.strip() for block in blocks(ROOT / "README.md", "") if "pip install" in block]
    assert setup == [
        "pip install -e . --extra-index-url https://download.pytorch.org/whl/cpu"
        " && python -m sheeplike exp=dreamer_v3 env=franka_pick",
        "pip install -e '.[test]' && pytest",
    ]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"test", "cuda13"} <= extras.keys()


def test_nothing_is_left_to_be_filled_in() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert re.findall(r"@[A-Z]*@", text) == [], page.name
        assert re.findall(r"^[A-Z]{3,}$|TODO|TBD", text, re.MULTILINE) == [], page.name


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(((?!https?:)[^)#]+)\)", text):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
