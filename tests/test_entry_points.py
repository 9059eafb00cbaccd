"""Environments of other packages: listed without being imported, imported when chosen, and refused in one line."""

from __future__ import annotations

import sys

import pytest

from sheeplike import entry_points, envs
from sheeplike.envs.registry import options_of

TASK = """
print("imported")
from sheeplike.envs.mjx.options import CartpoleBalanceOptions, CartpoleSwingupOptions
from sheeplike.envs.mjx.tasks.cartpole import Cartpole

def pole(*, episode_length: int = 30, swing_up: bool = False):
    options = CartpoleSwingupOptions if swing_up else CartpoleBalanceOptions
    return Cartpole(options(episode_length=episode_length))

def family(*, id, num_envs, device, image_size, action_repeat, seed, colour: str = "red"): ...

def positional(episode_length=3): ...
def no_default(*, gravity): ...
def everything(**options): ...
def half(*, num_envs, seed=0): ...
def number(*, num_envs, device, image_size, action_repeat, seed): return 3
def raises(*, episode_length: int = 3): raise RuntimeError("out of wool")
nothing = None
"""


def announced(*names: str, module: str = "my_worlds") -> str:
    return "\n".join(["[sheeplike.envs]", *(f"{name} = {module}:{name}" for name in names)])


def refusal(name: str, **options: object) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011, its text is what is asked for
        envs.make(name, num_envs=1, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_listed_and_not_imported(site, capsys):
    built_in = envs.list_envs()
    site.announce("my-worlds", announced("pole", "nothing"), TASK, version="1.2")
    assert envs.list_envs() == sorted([*built_in, "pole", "nothing"]), "nothing is kept of an older path"
    assert envs.origins("pole") == ["my-worlds 1.2"]
    assert envs.origins("franka_pick") == []
    assert capsys.readouterr().out == ""
    assert "my_worlds" not in sys.modules


def test_a_task_of_another_package(site):
    site.announce("my-worlds", announced("pole", "family"), TASK)
    assert envs.task_options("pole") == {"episode_length": 30, "swing_up": False}
    assert envs.simulated("pole")
    assert "id" not in options_of("pole").model_fields
    assert envs.task_options("family") == {"colour": "red"}
    assert "id" in options_of("family").model_fields
    assert not envs.simulated("family")
    made = envs.make("pole", num_envs=2, image_size=16, episode_length=7, swing_up=True)
    assert (made.num_envs, made.episode_length, made.name) == (2, 7, "cartpole_swingup")
    made.close()
    assert all(
        fact in refusal("pole", swing_down=True) for fact in ("options=swing_down", "pole", "episode_length, swing_up")
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("positional", "episode_length=3"),
        ("no_default", "gravity=<value>"),
        ("everything", "**options"),
        ("half", "image_size, action_repeat"),
        ("nothing", "my_worlds"),
        ("absent", "AttributeError"),
        ("number", "gymnasium.vector.VectorEnv"),
    ],
)
def test_a_broken_one_is_told_with_its_package_when_it_is_chosen(site, name, reason):
    site.announce("my-worlds", announced("pole", name), TASK)
    assert envs.task_options("pole")
    error = refusal(name)
    assert f"{name!r} of my-worlds 0.1" in error
    assert reason in error


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise OSError('line one\\nline two')", "OSError: line one line two"),
        ("def pole(:", "SyntaxError: "),
    ],
)
def test_one_that_cannot_be_imported(site, code, reason):
    site.announce("my-worlds", announced("pole"), code)
    assert "pole" in envs.list_envs()
    error = refusal("pole")
    assert all(fact in error for fact in ("'pole'", "my-worlds 0.1 (my_worlds:pole)"))
    assert reason in error


def test_two_of_one_name_are_refused_with_both_packages(site):
    site.announce("my-worlds", announced("pole", "franka_pick", "mine"), TASK)
    site.announce("other-worlds", announced("pole", module="other_worlds"), TASK, version="3")
    error = refusal("pole")
    assert all(fact in error for fact in ("my-worlds 0.1 (my_worlds:pole)", "other-worlds 3 (other_worlds:pole)"))
    error = refusal("franka_pick")
    assert "my-worlds 0.1 (my_worlds:franka_pick)" in error
    assert envs.task_options("cartpole_balance"), "all others can be chosen as before"
    assert not {"my_worlds", "other_worlds"} & set(sys.modules)


def test_a_package_that_is_on_the_path_twice_is_one(site, tmp_path, monkeypatch):
    site.announce("my-worlds", announced("pole"), TASK, version="2")
    older = type(site)(tmp_path / "older")
    older.announce("My.Worlds", announced("pole", "removed"), TASK, version="1")
    monkeypatch.setattr(sys, "path", [*sys.path, str(older.path)])
    assert envs.origins("pole") == ["my-worlds 2"]
    assert "removed" not in envs.list_envs()


@pytest.mark.parametrize("text", ["[sheeplike.envs]\nno equals sign", "[sheeplike.envs]\n../../x = os:system", "\x00"])
def test_metadata_that_is_broken_is_passed_over(site, text):
    before = envs.list_envs()
    site.announce("broken", text)
    (site.path / "empty-1.dist-info").mkdir()
    (site.path / "empty-1.dist-info" / "entry_points.txt").write_text(announced("nameless"))
    site.announce("my-worlds", announced("pole"), TASK)
    assert envs.list_envs() == sorted([*before, "pole"])


def test_groups_are_apart(site):
    site.announce("my-worlds", "[sheeplike.agents]\npole = my_worlds:pole", TASK)
    assert "pole" not in envs.list_envs()
    assert list(entry_points.plugins("sheeplike.agents")) == ["pole"]
