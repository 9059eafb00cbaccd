"""Arrays of the host as tensors of the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sheeplike.envs.gym.staging import ALIGNMENT, Staging

from sheeplike.envs.gym.vector_env import GymVectorEnv

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHAPES = {
    "frames": ((3, 5, 7, 3), np.uint8),
    "flags": ((3,), np.bool_),
    "vector": ((3, 2), np.float32),
    "count": ((3,), np.int32),
}


def needs_gpu(test):
    return pytest.mark.gpu(NO_GPU(test))


def arrays(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 200, shape).astype(dtype) for name, (shape, dtype) in SHAPES.items()}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
def test_what_is_sent_arrives_and_stays(device: str) -> None:
    """Many steps in flight, from memory that is written again at once: no tensor changes afterwards."""
    staging = Staging(SHAPES, torch.device(device))
    owner = arrays(0)
    sent = []
    for seed in range(50):
        for name, value in arrays(seed).items():
            owner[name][...] = value
        sent.append(staging.send(owner))
    for seed, tensors in enumerate(sent):
        for name, value in arrays(seed).items():
            assert tensors[name].device.type == device
            assert tensors[name].cpu().numpy().dtype == value.dtype
            assert np.array_equal(tensors[name].cpu().numpy(), value), name


@needs_gpu
def test_one_copy_carries_everything() -> None:
    tensors = Staging(SHAPES, torch.device("cuda")).send(arrays(0))
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == 1
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors.values())


@needs_gpu
def test_worlds_on_a_gpu_see_what_they_see_on_a_cpu() -> None:
    import sheeplike.envs

    def run(device: str) -> list[torch.Tensor]:
        env: GymVectorEnv = sheeplike.envs.make("minigrid", num_envs=3, device=device, episode_length=5)
        obs, info = env.reset(seed=2)
        out = [*obs.values()]
        for step in range(12):
            obs, reward, *_, info = env.step(torch.full((3,), step % 3, device=device))
            out += [*obs.values(), reward, info["episode"]["return"], info["episode"]["length"]]
        env.close()
        return [value.cpu() for value in out]

    assert all(torch.equal(a, b) for a, b in zip(run("cpu"), run("cuda"), strict=True))
