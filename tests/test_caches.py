"""Compiled code is kept in one place, is found again, and is right where it is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

VARIABLES = ("WARP_CACHE_PATH", "JAX_COMPILATION_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
THRESHOLD = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
NAMES = f"import json, os, sheeplike; print(json.dumps([os.environ.get(name) for name in {VARIABLES!r}]))"


def process(code: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    unset = ("SHEEPLIKE_CACHE_DIR", "XDG_CACHE_HOME", THRESHOLD, *VARIABLES)
    environment = {name: value for name, value in os.environ.items() if name not in unset} | settings
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done


def run(code: str, *arguments: str, **settings: str) -> str:
    return process(code, *arguments, **settings).stdout.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("settings", "root"),
    [
        ({}, ".cache/sheeplike"),
        ({"XDG_CACHE_HOME": "{home}/xdg"}, "xdg/sheeplike"),
        ({"XDG_CACHE_HOME": "{home}/xdg", "SHEEPLIKE_CACHE_DIR": "{home}/mine"}, "mine"),
    ],
    ids=["home", "XDG", "moved"],
)
def test_all_caches_lie_in_one_place_that_can_be_moved(tmp_path: Path, settings: dict[str, str], root: str) -> None:
    settings = {name: value.format(home=tmp_path) for name, value in settings.items()}
    places = [Path(place) for place in json.loads(run(NAMES, HOME=str(tmp_path), **settings))]
    assert [place.relative_to(tmp_path / root).parts[0] for place in places] == ["warp", "jax", "inductor"]
    assert list((tmp_path / root).iterdir()) == [], "importing makes no more than the directory of all"


@pytest.mark.parametrize("name", VARIABLES)
def test_a_place_that_the_user_gave_stands(tmp_path: Path, name: str) -> None:
    places = dict(zip(VARIABLES, json.loads(run(NAMES, HOME=str(tmp_path), **{name: "/elsewhere"})), strict=True))
    assert places.pop(name) == "/elsewhere"
    assert all(place.startswith(str(tmp_path)) for place in places.values())


def test_libraries_have_their_own_way_where_nothing_can_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert json.loads(run(NAMES, SHEEPLIKE_CACHE_DIR=str(file / "below"))) == [None] * 3


def places(done: subprocess.CompletedProcess[str]) -> list[Path]:
    return [Path(place) for place in json.loads(done.stdout)]


def refusal(done: subprocess.CompletedProcess[str], root: Path) -> str:
    """Why the caches were not kept in ``root``, in one line; they were in a private place, which is gone."""
    assert len({place.parts[: len(Path(tempfile.gettempdir()).parts) + 1] for place in places(done)}) == 1
    for place in places(done):
        assert not place.is_relative_to(root)
        assert not place.parent.exists()
    (line,) = done.stderr.splitlines()
    assert line.startswith("sheeplike: ")
    assert "nearest: SHEEPLIKE_CACHE_DIR=" in line
    return line


@pytest.mark.parametrize("below", ["", "warp", "jax", "inductor"])
def test_where_others_can_write_no_code_is_loaded_from(tmp_path: Path, below: str) -> None:
    root = tmp_path / "cache"
    (root / below).mkdir(parents=True)
    assert places(process(NAMES, SHEEPLIKE_CACHE_DIR=str(root)))[0] == root / "warp"
    (root / below).chmod(0o777)
    # No link hides it, and a sticky bit does not help: others could make what is not there yet.
    (tmp_path / "link").symlink_to(root)
    for mode in (0o777, 0o1777):
        (root / below).chmod(mode)
        for name in ("cache", "link"):
            done = process(NAMES, SHEEPLIKE_CACHE_DIR=str(tmp_path / name))
            assert str(root / below) in refusal(done, root)
    (root / below).chmod(0o755)
    assert process(NAMES, SHEEPLIKE_CACHE_DIR=str(root)).stderr == ""


@pytest.mark.parametrize("name", ["SHEEPLIKE_CACHE_DIR", "XDG_CACHE_HOME"])
def test_nor_where_others_could_put_another_directory_in_its_place(tmp_path: Path, name: str) -> None:
    shared = tmp_path / "shared"
    (shared / "mine").mkdir(parents=True)
    shared.chmod(0o777)
    done = process(NAMES, **{name: str(shared / "mine")})
    assert str(shared) in refusal(done, shared)


def test_what_libraries_made_open_to_all_in_a_closed_directory_is_used(tmp_path: Path) -> None:
    """With a umask of 0 they make such directories, but no other user can come there."""
    root = tmp_path / "mine"
    for place in (root, root / "jax"):
        place.mkdir()
    (root / "jax").chmod(0o777)
    for mode, kept in ((0o700, True), (0o755, False)):
        root.chmod(mode)
        (place, *_) = json.loads(run(NAMES, SHEEPLIKE_CACHE_DIR=str(root)))
        assert place.startswith(str(root)) is kept
    if os.geteuid() == 0:  # only root can give a directory to another user
        root.chmod(0o700)
        os.chown(root / "jax", 12345, -1)
        (place, *_) = json.loads(run(NAMES, SHEEPLIKE_CACHE_DIR=str(root)))
        assert not place.startswith(str(root)), "another user's code"


def test_a_directory_such_as_tmp_will_do_if_ours_is_the_one_in_it(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    done = process(NAMES, SHEEPLIKE_CACHE_DIR=str(shared / "a/b"))
    assert (places(done)[0], done.stderr) == (shared / "a/b/warp", "")
    assert (shared / "a/b").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("taken", ["cache", "cache/jax", "."])
def test_what_belongs_to_another_user_is_not_used(tmp_path: Path, taken: str) -> None:
    root = tmp_path / "in/cache"
    (root / "jax").mkdir(parents=True)
    os.chown(tmp_path / "in" / taken, 12345, 12345)
    line = refusal(process(NAMES, SHEEPLIKE_CACHE_DIR=str(root)), root)
    assert f"{(tmp_path / 'in' / taken).resolve()}" in line


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_group_of_others_is_not_trusted(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    root.chmod(0o775)
    assert process(NAMES, SHEEPLIKE_CACHE_DIR=str(root)).stderr == ""  # root's own group
    os.chown(root, -1, 12345)
    assert "12345" in refusal(process(NAMES, SHEEPLIKE_CACHE_DIR=str(root)), root)


def test_one_process_says_it_for_those_that_it_starts(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    code = f"import subprocess, sys, sheeplike; subprocess.run([sys.executable, '-c', {NAMES!r}], check=True)"
    assert len(process(code, SHEEPLIKE_CACHE_DIR=str(tmp_path)).stderr.splitlines()) == 1


def test_jax_keeps_what_it_compiles_whichever_is_imported_first(tmp_path: Path) -> None:
    ask = "print(jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs)"
    found = [
        run(f"import {first}; import jax, sheeplike; {ask}", SHEEPLIKE_CACHE_DIR=str(tmp_path))
        for first in ("jax", "sheeplike")
    ]
    assert found[0] == found[1]
    assert found[0].startswith(f"{tmp_path}/jax/")
    assert found[0].endswith(" 0.1")


DRAW = """
import json, sys
import jax, mujoco
import jax.numpy as jnp
import sheeplike
from mujoco import mjx
from sheeplike.envs.mjx.options import SimulationOptions
from sheeplike.envs.mjx.rendering.warp import WarpRenderer

SCENE = '''<mujoco><worldbody>
  <camera name="above" pos="0 0 3"/><camera name="aside" pos="0 -3 0" xyaxes="1 0 0 0 0 1"/>
  <body><joint type="slide" axis="0 0 1"/><geom size="1 0.5 0.25" type="box" rgba="1 0 0 1"/></body>
</worldbody></mujoco>'''

events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name.rpartition("/")[2]))

def draw():
    scene = mujoco.MjModel.from_xml_string(SCENE)
    renderer = WarpRenderer(scene, SimulationOptions(cameras=(sys.argv[1],)), num_envs=2, image_size=8)
    renderer.open()
    model, data = mjx.put_model(scene, impl="warp"), mjx.make_data(scene, impl="warp", naconmax=2, njmax=2)

    @jax.jit
    @jax.vmap
    def frame(height):
        return list(renderer.render(model, mjx.kinematics(model, data.replace(qpos=height)))[0].values())

    return jax.device_get(frame(jnp.array([[0.0], [0.5]])))[0].tolist()

cached = draw()
hits, misses = events.count("cache_hits"), events.count("cache_misses")
jax.config.update("jax_enable_compilation_cache", False)
print(json.dumps([hits, misses, cached, draw() if hits else None]))
"""


@pytest.mark.slow
def test_cached_code_calls_the_kernels_of_its_own_process(tmp_path: Path) -> None:
    place = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), THRESHOLD: "0"}
    hits, misses, above, _ = json.loads(run(DRAW, "above", **place))
    assert (hits, misses > 0) == (0, True)
    hits, misses, aside, fresh = json.loads(run(DRAW, "aside", **place))
    assert (hits > 0, misses) == (True, 0)
    assert aside == fresh
    assert aside != above


@pytest.mark.slow
def test_nothing_that_is_compiled_lies_where_names_can_be_guessed(tmp_path: Path) -> None:
    """torch keeps precompiled headers in ``/tmp/torchinductor_<user>``, which another user could make first."""
    code = """
import torch
from sheeplike.nn.compilation import Compilation
double = Compilation("inductor", torch.device("cpu")).kernels(lambda x: (2 * x).tanh())
assert torch.equal(double(torch.ones(64)), (2 * torch.ones(64)).tanh())
"""
    (tmp_path / "tmp").mkdir()
    process(code, SHEEPLIKE_CACHE_DIR=str(tmp_path / "cache"), TMPDIR=str(tmp_path / "tmp"))
    assert len(list((tmp_path / "cache").glob("inductor/*/precompiled_headers/*.gch"))) == 1
    assert list((tmp_path / "tmp").rglob("*.gch")) == []
