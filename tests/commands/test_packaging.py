"""Configs and scenes are found from a clone, an installed wheel and the console script alike."""

import importlib
import os
import re
import stat
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import sheeplike

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PRINT = ["exp=dreamer_v3", "env=franka_pick", "show=config"]


LIMIT = 15 * 10**6  # bytes of what is downloaded
DATE = {"SOURCE_DATE_EPOCH": "1700000000"}


def build(place: Path, folder: Path) -> tuple[Path, Path]:
    """The source distribution of ``place``, and its wheel."""
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(command, cwd=place, env={**os.environ, **DATE}, check=True, capture_output=True)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    return build(REPOSITORY, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    return built[1]


def test_another_build_has_the_same_bytes(built, tmp_path):
    """Build from what the source distribution holds, in another place, at another time, with other permissions."""
    with tarfile.open(built[0]) as archive:
        archive.extractall(tmp_path / "source")  # our own: the first versions of 3.11 know no filters
    (place,) = (tmp_path / "source").iterdir()
    (place / "PKG-INFO").unlink()  # a clone has none
    for path in place.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(path.stat().st_mode & stat.S_IRWXU)
    for one, other in zip(built, build(place, tmp_path / "dist"), strict=True):
        assert one.name == other.name
        assert one.read_bytes() == other.read_bytes(), one.name


def test_the_distributions_are_small_and_hold_what_they_should(built):
    assert all(path.stat().st_size < LIMIT for path in built)
    with tarfile.open(built[0]) as archive:
        names = {Path(name).parts[1] for name in archive.getnames() if len(Path(name).parts) > 1}
    folders = {"sheeplike", "configs", "howto", "tests", ".ci"}
    documents = {f"{name}.md" for name in ("README", "SECURITY", "CONTRIBUTING", "CHANGELOG")}
    others = {"LICENSE", "CITATION.cff", "pyproject.toml", "PKG-INFO", ".gitignore", "Dockerfile", ".dockerignore"}
    assert names == folders | documents | others


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["version"] == sheeplike.__version__
    assert citation["license"] == PROJECT["project"]["license"]


def test_the_wheel_carries_configs_scenes_and_models(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (REPOSITORY / "configs").rglob("*.yaml"):
        assert f"sheeplike/configs/{path.relative_to(REPOSITORY / 'configs')}" in names
    scenes = list((REPOSITORY / "sheeplike").rglob("*.xml"))
    assert scenes
    models = [path for path in (REPOSITORY / "sheeplike/models").rglob("*") if path.is_file() and path.suffix != ".gif"]
    assert models
    pages = [REPOSITORY / f"sheeplike/inspection/dream/page.{kind}" for kind in ("html", "js", "css")]
    for path in [*scenes, *models, *pages, REPOSITORY / "sheeplike/py.typed"]:
        assert str(path.relative_to(REPOSITORY)) in names
    assert not [name for name in names if name.startswith(("tests/", "configs/", "logs/")) or name.endswith(".gif")]


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
    assert count.split(maxsplit=1)[1] != "None" or int(count.split()[0]) > 0


def test_the_page_installs_the_torch_that_is_asked_for():
    page = (REPOSITORY / "howto" / "install.md").read_text(encoding="utf-8")
    (torch,) = [line for line in PROJECT["project"]["dependencies"] if line.startswith("torch")]
    assert page.count(f"pip install '{torch}' --index-url https://download.pytorch.org/whl/cpu") == 2
    rows = re.findall(r"^\| (`\w+`.*?) \|", page, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == PROJECT["project"]["optional-dependencies"].keys()
    python = re.search(r"Python (\S+) or newer", page)[1]
    assert PROJECT["project"]["requires-python"] == f">={python}"
