"""Output of libraries, and environments that step at the same time."""

import subprocess
import sys

import mujoco
import pytest

from sheeplike.envs.mjx.patches import quiet


def test_the_last_to_leave_restores_what_was_there_before():
    before = mujoco.get_mju_user_warning()
    first, second = quiet(), quiet()
    first.__enter__()
    second.__enter__()
    silent = mujoco.get_mju_user_warning()
    first.__exit__(None, None, None)
    assert mujoco.get_mju_user_warning() == silent != before
    second.__exit__(None, None, None)
    assert mujoco.get_mju_user_warning() == before


@pytest.mark.parametrize("closed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_warp_says_nothing_on_a_machine_without_a_gpu(closed: bool):
    code = "import os, sys; from sheeplike.envs.mjx import patches; "
    code += "os.close(2); patches.start_warp()" if closed else "patches.start_warp(); print('heard', file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "" if closed else "heard\n")
