"""Configs and scenes are found from a clone, an installed wheel and the console script alike."""

import importlib
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PRINT = ["exp=dreamer_v3", "env=franka_pick", "show=config"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_carries_configs_scenes_and_models(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (REPOSITORY / "configs").rglob("*.yaml"):
        assert f"sheeplike/configs/{path.relative_to(REPOSITORY / 'configs')}" in names
    scenes = list((REPOSITORY / "sheeplike").rglob("*.xml"))
    assert scenes
    models = [path for path in (REPOSITORY / "sheeplike/models").rglob("*") if path.is_file()]
    assert models
    pages = [REPOSITORY / f"sheeplike/analysis/dream/page.{kind}" for kind in ("html", "js", "css")]
    for path in [*scenes, *models, *pages, REPOSITORY / "sheeplike/py.typed"]:
        assert str(path.relative_to(REPOSITORY)) in names
    assert not [name for name in names if name.startswith(("tests/", "configs/", "logs/"))]


def test_an_unpacked_wheel_runs_from_anywhere(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    code = "import sheeplike, sys; print(sheeplike.__file__); from sheeplike.__main__ import main; main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, *PRINT], cwd="/", env=environment, check=True, capture_output=True, text=True
    )
    place, _, config = done.stdout.partition("\n")
    assert Path(place) == tmp_path / "site/sheeplike/__init__.py"
    assert "env.cameras: [front]  # env/franka_pick.yaml" in config.splitlines()


def test_a_clone_runs_uninstalled(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-m", "sheeplike", *PRINT],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "exp: dreamer_v3" in done.stdout.splitlines()


def test_the_console_script():
    module, _, function = PROJECT["project"]["scripts"]["sheeplike"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    script = Path(sys.executable).with_name("sheeplike")
    if script.exists():  # only where the package is installed
        done = subprocess.run([script, "--help"], check=True, capture_output=True, text=True)
        assert "franka_pick" in done.stdout


def test_the_driver_is_asked_without_torch_or_jax():
    code = (
        "import sys; from sheeplike import host; print(host.gpu_count(), host.gpu_problem())\n"
        "print({'torch', 'jax'} & set(sys.modules) or 'light')"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    count, weight = done.stdout.splitlines()
    assert weight == "light"
    assert count.split(maxsplit=1)[1] == "this machine shows no NVIDIA GPU" or int(count.split()[0]) > 0
