"""Checks of lines of randomization that need no model."""

import subprocess
import sys

import pytest
import yaml

from sheeplike.envs.mjx.randomization.spec import parse
from sheeplike.options import InvalidOption

LINE = {"field": "geom_rgba", "of": "box", "operation": "set", "distribution": {"uniform": [0, 1]}}


def line(**changes):
    return {"colour": {key: value for key, value in {**LINE, **changes}.items() if value is not ...}}


def test_reading_needs_neither_jax_nor_mujoco():
    code = (
        "import sys, sheeplike.envs.mjx.randomization.spec as spec; spec.parse({});"
        "print([m for m in sys.modules if m in ('jax', 'mujoco', 'numpy', 'torch', 'warp')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_line_in_full_and_its_defaults():
    (short,) = parse(line(of=...))
    assert (short.name, short.field, short.of, short.component) == ("colour", ("geom_rgba",), ("*",), None)
    assert (short.kind, short.parameters, short.shares("elements")) == ("uniform", (0.0, 1.0), False)
    (full,) = parse(line(field=["body_mass", "body_inertia"], component=[0, 2], shared=["elements", "components"]))
    assert (full.field, full.component) == (("body_mass", "body_inertia"), (0, 2))
    assert full.shares("elements")
    assert full.shares("components")


def test_order_of_lines_is_kept():
    names = [found.name for found in parse({"b": LINE, "a": LINE, "c": LINE})]
    assert names == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feild": "x"}, r"randomization.colour.feild=x.*field, of.*nearest: .*field"),
        ({"field": ...}, r"randomization.colour.field"),
        ({"field": 0.5}, r"randomization.colour.field=0.5"),
        ({"of": []}, r"randomization.colour.of=\[\]"),
        ({"operation": "scael"}, r"operation=scael.*set, add, scale, rotate, aim.*nearest: .*scale"),
        ({"operation": ...}, "set"),
        ({"distribution": "uniform"}, "distribution=uniform"),
        ({"distribution": {"unifrom": [0, 1]}}, r"distribution=unifrom: .*nearest: .*uniform"),
        ({"distribution": {"uniform": [0, 1], "normal": [0, 1]}}, r"distribution"),
        ({"distribution": {"uniform": [1, 0]}}, r"distribution.uniform=\[1,0\]: .*ascending"),
        ({"distribution": {"uniform": [0]}}, r"distribution.uniform=\[0\].*\[low, high\]"),
        ({"distribution": {"uniform": [0, float("nan")]}}, r"distribution.uniform=nan"),
        ({"distribution": {"normal": [-1, 1e39]}}, r"distribution.normal"),
        ({"distribution": {"uniform": [0, True]}}, r"distribution.uniform=true"),
        ({"distribution": {"uniform": [0, "1"]}}, r"distribution.uniform=1"),
        ({"distribution": {"uniform": [[0, 0], [1, 1, 1]]}}, r"length"),
        ({"distribution": {"uniform": [[0, 2], 1]}}, r"ascending"),
        ({"distribution": {"log_uniform": [0, 1]}}, r"log_uniform=\[0,1\]: .*above 0"),
        ({"distribution": {"normal": [0, -1]}}, r"normal=\[0,-1\].*\[mean, deviation\]"),
        ({"distribution": {"bernoulli": 1.5}}, r"bernoulli=1.5.*\[0, 1\]"),
        ({"distribution": {"choice": []}}, r"choice=\[\]"),
        ({"distribution": {"choice": [1, [1, 2]]}}, r"length"),
        ({"component": -1}, r"component=-1"),
        ({"component": [0, 0]}, r"each index once"),
        ({"shared": "element"}, r"shared=element.*elements, components"),
        ({"field": "action.delay"}, r"distribution=.*whole policy steps"),
        ({"field": "action.delay", "distribution": {"choice": [0, 1.5]}}, r"whole policy steps"),
        ({"field": "action.delay", "distribution": {"choice": [0, -1]}}, r"whole policy steps"),
        ({"field": "pixels"}, "operation=set"),
    ],
)
def test_a_line_that_cannot_be_says_what_could(changes, message):
    with pytest.raises(InvalidOption, match=message):
        parse(line(**changes))


@pytest.mark.parametrize("lines", [[LINE], "colour", {"colour": "red"}, {"a.b": LINE}, {"": LINE}])
def test_lines_are_named_sections(lines):
    with pytest.raises(InvalidOption, match="randomization"):
        parse(lines)


def test_a_line_that_the_recipe_has_not():
    lines = {"box_mass": LINE, "gravity": LINE, "box_mas": {"distribution": {"uniform": [0, 1]}}}
    with pytest.raises(InvalidOption, match=r"randomization=box_mas.*box_mass, gravity"):
        parse(lines)


def test_shipped_recipes_are_read():
    from sheeplike.config.sources import CONFIGS

    recipes = sorted((CONFIGS / "randomization").glob("*.yaml"))
    assert {path.stem for path in recipes} >= {"none", "franka_vision", "franka_physics", "cartpole_vision"}
    for path in recipes:
        parse(yaml.safe_load(path.read_text(encoding="utf-8")))
