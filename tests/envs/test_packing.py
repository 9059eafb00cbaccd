"""The results of a step cross the bridge in two arrays, and come out as they went in."""

from typing import NamedTuple

import jax
import numpy as np
import pytest
import torch

from sheeplike import bridge
from sheeplike.bridge import pack, to_torch
from sheeplike.envs.mjx import vector_env


class Tree(NamedTuple):
    done: np.ndarray
    reward: np.ndarray
    terms: dict[str, np.ndarray]
    length: np.ndarray
    success: np.ndarray


def make() -> Tree:
    """Quiet and signalling NaN with payloads, denormal numbers, both zeros and infinities; the ends of int32."""
    bits = np.array([0x7FC00000, 0xFFC12345, 0x7F800001, 1, 0x80000000, 0x7F800000, 0xFF800000], np.uint32)
    done = np.arange(7) % 2 == 0
    terms = {"b": np.flip(bits).copy().view(np.float32), "a": np.linspace(-1, 1, 7, dtype=np.float32)}
    length = np.array([-(2**31), 2**31 - 1, 0, -1, 1, 7, 8], np.int32)
    return Tree(done, bits.view(np.float32), terms, length, ~done)


def test_every_bit_name_and_dtype_comes_back() -> None:
    tree = make()
    unpacked = jax.jit(pack)(tree).unpack()
    assert (type(unpacked), sorted(unpacked.terms)) == (Tree, ["a", "b"])
    leaves, expected = jax.tree.leaves(unpacked), jax.tree.leaves(tree)
    for leaf, numbers in zip(leaves, expected, strict=True):
        assert (leaf.shape, leaf.dtype) == ((7,), torch.from_numpy(numbers).dtype)
        assert leaf.is_contiguous()
        assert leaf.numpy().tobytes() == numbers.tobytes()


def test_it_comes_back_in_two_arrays_that_nothing_else_writes_to() -> None:
    tree, packed = make(), jax.jit(pack)
    first = jax.tree.leaves(packed(tree).unpack())
    later = jax.tree.leaves(packed(jax.tree.map(np.zeros_like, tree)).unpack())
    places = [{leaf.untyped_storage().data_ptr() for leaf in leaves} for leaves in (first, later)]
    assert (len(places[0]), len(places[0] | places[1])) == (2, 4)
    assert first[0].numpy().tobytes() == tree.done.tobytes()


@pytest.mark.parametrize("physics", ["native"], scope="module")
def test_a_step_hands_over_what_is_observed_and_two_arrays(cartpole, monkeypatch: pytest.MonkeyPatch) -> None:
    handed = []

    def hand_over(array: jax.Array) -> torch.Tensor:
        handed.append(array)
        return to_torch(array)

    for module in (bridge, vector_env):
        monkeypatch.setattr(module, "to_torch", hand_over)
    cartpole.reset(seed=0)
    handed.clear()
    obs, *_ = cartpole.step(torch.zeros(3, 1))
    assert len(handed) == len(obs) + 2
