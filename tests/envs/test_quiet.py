"""Environments that step at the same time."""

import mujoco

from sheeplike.envs.mjx.quiet import quiet


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
