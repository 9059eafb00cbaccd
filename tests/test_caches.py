"""Compiled code is kept in one place, is found again, and is right where it is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

VARIABLES = ("WARP_CACHE_PATH", "JAX_COMPILATION_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
THRESHOLD = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
NAMES = f"import json, os, sheeplike; print(json.dumps([os.environ.get(name) for name in {VARIABLES!r}]))"


def run(code: str, *arguments: str, **settings: str) -> str:
    unset = ("SHEEPLIKE_CACHE_DIR", "XDG_CACHE_HOME", THRESHOLD, *VARIABLES)
    environment = {name: value for name, value in os.environ.items() if name not in unset} | settings
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


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
    assert list(tmp_path.iterdir()) == [], "importing makes no directories"


@pytest.mark.parametrize("name", VARIABLES)
def test_a_place_that_the_user_gave_stands(tmp_path: Path, name: str) -> None:
    places = dict(zip(VARIABLES, json.loads(run(NAMES, HOME=str(tmp_path), **{name: "/elsewhere"})), strict=True))
    assert places.pop(name) == "/elsewhere"
    assert all(place.startswith(str(tmp_path)) for place in places.values())


def test_libraries_have_their_own_way_where_nothing_can_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert json.loads(run(NAMES, SHEEPLIKE_CACHE_DIR=str(file / "below"))) == [None] * 3


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
import jax, numpy, torch
from sheeplike.envs.mjx import renderer
from sheeplike.envs.mjx.tasks.cartpole import Cartpole
from sheeplike.envs.mjx.vector_env import MjxVectorEnv

events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name.rpartition("/")[2]))

context = renderer.mjx.create_render_context
groups = json.loads(sys.argv[1])
renderer.mjx.create_render_context = lambda **options: context(**options | {"enabled_geom_groups": groups})

def draw():
    env = MjxVectorEnv(Cartpole(swing_up=True), num_envs=2, image_size=8)
    env.reset(seed=0)
    for _ in range(5):
        obs, *_ = env.step(torch.ones(2, 1))
    return env, [obs["state"].tolist(), obs["pixels/fixed"].tolist()]

env, cached = draw()
hits, misses = events.count("cache_hits"), events.count("cache_misses")
jax.config.update("jax_enable_compilation_cache", False)
fresh = draw()[1] if hits else None
env.simulator.step(env._variation, env._state, jax.device_put(numpy.zeros(2, numpy.float32), jax.devices()[0]))
print(json.dumps([hits, misses, cached, fresh]))  # and leave with a step under way
"""


def test_a_cached_step_calls_the_kernels_of_its_own_process(tmp_path: Path) -> None:
    """What is drawn is known to Warp's context of the process alone: both processes have the same executable."""
    place = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), THRESHOLD: "0"}
    hits, misses, (state, drawn), _ = json.loads(run(DRAW, "[3]", **place))
    assert (hits, misses > 0) == (0, True)
    hits, misses, cached, fresh = json.loads(run(DRAW, "[0]", **place))
    assert (hits > 0, misses) == (True, 0)
    assert cached == fresh
    assert cached[0] == state
    assert cached[1] != drawn, "other geoms are drawn"
