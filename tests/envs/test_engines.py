"""Physics engines and renderers of other packages: chosen by name, and refused in one line."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from sheeplike import envs
from sheeplike.__main__ import main
from sheeplike.config.sources import Sources
from sheeplike.envs.mjx.engines import PHYSICS, RENDERERS
from sheeplike.envs.mjx.options import SimulationOptions

ENGINES = """
from sheeplike.envs.mjx.physics.native import NativePhysics
from sheeplike.envs.mjx.rendering.warp import WarpRenderer

class Slow(NativePhysics):
    def step(self, model, data, substeps=1):
        return super().step(model, data, 1)

class Other(WarpRenderer): ...
number = 3
"""
ANNOUNCED = """
[sheeplike.physics]
slow = my_engines:Slow
number = my_engines:number
[sheeplike.renderers]
warp = my_engines:Other
number = my_engines:number
gone = my_engines:Gone
"""


def make(**options):
    return envs.make("cartpole_balance", num_envs=2, image_size=48, **options)


def test_names_are_listed_and_checked_without_an_import(site):
    assert (PHYSICS.names(), RENDERERS.names()) == (["auto", "warp", "native"], ["warp", "none"])
    site.announce("my-engines", ANNOUNCED, ENGINES)
    assert PHYSICS.names() == ["auto", "warp", "native", "number", "slow"]
    SimulationOptions(physics="slow", renderer="gone").check()
    for option, value, near in (("physics", "slwo", "slow"), ("renderer", "gon", "gone")):
        with pytest.raises(envs.InvalidOption) as error:
            SimulationOptions(**{option: value}).check()
        assert (error.value.key, error.value.nearest) == (option, near)
        assert near in error.value.expected
    listed = Sources().describe().splitlines()
    assert [line for line in listed if "env.physics=slow" in line and "my-engines" in line and "refused" not in line]
    assert [line for line in listed if "env.renderer=warp" in line and "my-engines" in line and "refused" in line]
    assert "my_engines" not in sys.modules


@pytest.mark.parametrize(
    "options", [{"renderer": "warp"}, {"renderer": "number"}, {"renderer": "gone"}, {"physics": "number"}]
)
def test_what_is_no_engine_is_refused_in_one_line(site, options):
    """Two of one name, no subclass, a name that the module lacks."""
    site.announce("my-engines", ANNOUNCED, ENGINES)
    with pytest.raises(ValueError, match="my-engines") as error:
        make(**({"renderer": "none"} | options))
    assert "\n" not in str(error.value)


def test_physics_of_another_package(site):
    """One physics step in place of eight: the pole moves an eighth as far."""
    site.announce("my-engines", ANNOUNCED, ENGINES)
    moved = []
    for physics in ("slow", "native"):
        made = make(physics=physics, renderer="none")
        before = made.reset(seed=0)[0]["state"].clone()
        after = made.step(torch.ones(2, 1))[0]["state"]
        moved.append((after - before)[:, 3])
    torch.testing.assert_close(moved[0] * 8, moved[1], rtol=0.1, atol=0)


def test_the_renderer_on_the_page(site, tmp_path, monkeypatch, refusal):
    site.install("choose_a_renderer.md")
    made = make(renderer="dots")
    frames = made.reset(seed=0)[0]["pixels/fixed"]
    cart = made.reset(seed=0)[0]["state"][:, 0]
    columns = frames[..., 0].amax(1).argmax(-1)
    assert set(frames.unique().tolist()) == {0, 255}
    assert (columns - ((cart / 4 + 0.5) * 47)).abs().max() <= 1
    with pytest.raises(ValueError, match="depth"):
        make(renderer="dots", depth=True)
    monkeypatch.chdir(tmp_path)
    job = ["exp=ppo", "env=cartpole_balance", "env.renderer=dots", "env.num_envs=2", "compile=off", "profile=cpu"]
    short = ["total_steps=40", "agent.rollout_length=10", "agent.minibatches=1", "log_every=20", "eval.every=null"]
    main([*job, *short, "checkpoint.every=null", "run_dir=it"])
    rows = [json.loads(line) for line in (tmp_path / "it" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 40
    line = refusal(*job[:2], "env.renderer=dot", "run_dir=other")
    assert line.names("warp", "none", "nearest: env.renderer=dots")
