"""Importing the package is light, and keeps XLA from reserving the GPU before jax is ever imported."""

import os
import subprocess
import sys

import pytest

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


def test_preallocation_is_off():
    code = "import os, sheeplike as s; print(os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'], s.xla_started_before_import)"
    assert run(code) == "false False"


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_users_memory_setting_stands(setting):
    code = f"import os, sheeplike; print([os.environ.get(s) for s in {SETTINGS!r}])"
    assert run(code, **{setting: "0.3"}) == str(["0.3" if s == setting else None for s in SETTINGS])


def test_a_backend_that_started_first_is_noticed():
    code = "import jax; jax.devices(); import sheeplike; print(sheeplike.xla_started_before_import)"
    assert run(code, JAX_PLATFORMS="cpu") == "True"


def test_importing_jax_first_is_no_matter_while_no_backend_has_started():
    code = "import jax, sheeplike; print(sheeplike.xla_started_before_import)"
    assert run(code, JAX_PLATFORMS="cpu") == "False"
