"""Importing the package is light, and keeps XLA from reserving the GPU before jax is ever imported."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SETTINGS = (
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)


def run(code: str, **settings: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in SETTINGS} | settings
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_sheeplike_loads_nothing_heavy():
    heavy = "{'torch', 'jax', 'numpy', 'mujoco', 'warp', 'lightning', 'hydra', 'gymnasium'}"
    assert run(f"import sys, sheeplike; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_names_are_completed_and_typed():
    assert run("import sheeplike; print(sorted(dir(sheeplike)))") == "['__version__', 'init', 'load']"
    code = "import sheeplike; print(sheeplike.load.__module__, sheeplike.init.__module__)"
    modules = run(code).split()
    stub = (ROOT / "sheeplike/__init__.pyi").read_text()
    assert all(f"from {module} import " in stub for module in modules)


def test_preallocation_is_off():
    code = "import os, sheeplike as s; print(os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'], s.xla_started_before_import)"
    assert run(code) == "false False"


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_users_memory_setting_stands(setting):
    code = f"import os, sheeplike; print([os.environ.get(s) for s in {SETTINGS!r}])"
    assert run(code, **{setting: "0.3"}) == str(["0.3" if s == setting else None for s in SETTINGS])


def test_a_backend_that_started_first_is_noticed_and_importing_jax_alone_is_no_matter():
    code = (
        "import importlib, os, jax, sheeplike; print(sheeplike.xla_started_before_import)\n"
        "del os.environ['XLA_PYTHON_CLIENT_PREALLOCATE']; jax.devices(); importlib.reload(sheeplike)\n"
        "print(sheeplike.xla_started_before_import)"
    )
    assert run(code, JAX_PLATFORMS="cpu").split() == ["False", "True"]


OPTIONAL = (
    *("minigrid", "ale_py", "dm_control", "envpool", "mujoco_playground", "brax", "flax", "wandb", "mlflow"),
    *("minari", "lerobot", "pyarrow", "av", "s3fs", "a_plugin"),
)
BLOCKED = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL!r}:
            raise SystemExit(f"{{name}} was imported")

sys.meta_path.insert(0, Blocker())
from sheeplike.__main__ import list_commands, main
"""
COMMANDS = """
import sheeplike.envs
for command in ([], *([name] for name in list_commands())):
    main([*command, "--help"])
for agent in ("dreamer_v3", "ppo"):
    main([f"exp={agent}", "env=franka_pick", "profile=cpu", "show=config"])
sheeplike.envs.list_envs(); sheeplike.envs.task_options("franka_pick")
print(*sorted({"torch", "jax", "mujoco", "numpy", "gymnasium"} & set(sys.modules)), "is all")
"""


def test_nothing_optional_is_needed_before_it_is_chosen(site):
    """Neither what only some environments need, nor what other packages add; and no torch and no JAX."""
    points = "[sheeplike.envs]\nfield = a_plugin:field\n[sheeplike.agents]\nwolf = a_plugin:WOLF"
    site.announce("a-plugin", points, "raise SystemExit('imported')")
    path = os.pathsep.join([str(site.path), os.environ.get("PYTHONPATH", "")])
    output = run(f"{BLOCKED}\n{COMMANDS}", PYTHONPATH=path)
    assert output.splitlines()[-1] == "is all"
    assert {"env=field", "agent=wolf"} <= set(output.split())


def test_nor_by_what_trains():
    assert run(f"{BLOCKED}\nimport sheeplike.run.experiment; print('trained')").endswith("trained")


def test_what_functions_import_is_there() -> None:
    """Commands import late, so that help is fast: a name that has gone would be noticed by users first."""
    for file in sorted((ROOT / "sheeplike").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sheeplike"):
                tree = ROOT / node.module.replace(".", "/")
                source = tree / "__init__.py" if tree.is_dir() else tree.with_suffix(".py")
                text = source.read_text(encoding="utf-8")
                for name in (alias.name for alias in node.names):
                    is_module = (tree / f"{name}.py").exists() or (tree / name).is_dir()
                    assert is_module or re.search(rf"\b{name}\b", text), f"{file.name}: {node.module} has no {name}"
