"""Python inside a compiled step."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sheeplike.envs.mjx.host_call import call_for_all


class Doubler:
    def __init__(self):
        self.calls, self.failure = 0, None

    def double(self, factor, number, flag, out, mirrored):
        self.calls += 1
        if self.failure:
            raise self.failure
        out[...] = factor * number
        mirrored[...] = ~flag


SHAPES = (jax.ShapeDtypeStruct((3,), jnp.float32), jax.ShapeDtypeStruct((), bool))
NUMBER, FLAG = jnp.arange(12, dtype=jnp.float32).reshape(4, 3), jnp.array([True, False, True, True])


def compiled(owner):
    def step(number, flag):
        return call_for_all(owner.double, 2, (number + 1, flag), SHAPES, num_envs=4)

    return jax.jit(jax.vmap(step)).lower(NUMBER, FLAG).compile()


def test_it_fills_the_outputs_each_time_that_the_computation_gets_there():
    owner = Doubler()
    step = compiled(owner)
    for number in (NUMBER, -NUMBER):
        out, mirrored = step(number, FLAG)
        np.testing.assert_array_equal(out, 2 * (number + 1))
        np.testing.assert_array_equal(mirrored, ~FLAG)
    assert owner.calls == 2


def test_what_is_raised_inside_is_an_error_of_the_step_and_the_next_goes_on():
    owner = Doubler()
    step = compiled(owner)
    owner.failure = RuntimeError("the arm broke off")
    with pytest.raises(Exception, match="off"):
        jax.block_until_ready(step(NUMBER, FLAG))
    owner.failure = None
    np.testing.assert_array_equal(step(NUMBER, FLAG)[0], 2 * (NUMBER + 1))


def test_it_keeps_nobody_alive_and_says_who_is_gone():
    owner = Doubler()
    step = compiled(owner)
    jax.block_until_ready(step(NUMBER, FLAG))
    del owner
    gc.collect()
    with pytest.raises(Exception, match=r"double\(\)"):
        jax.block_until_ready(step(NUMBER, FLAG))
