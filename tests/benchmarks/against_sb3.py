"""PPO's updates beside those of Stable-Baselines3: ``python tests/benchmarks/against_sb3.py [threads] [rounds]``.

Both learn from one rollout of 2,048 frames of 64x64x3, in 4 epochs of 8 minibatches, in float32, with the same network:
the convolutions of Mnih et al. (2015), padded, then a layer of 512 for the policy and one for the value. Each has a
process of its own, and they take turns, so that what else the machine does meets both alike.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import gymnasium
import numpy as np
import torch
from torch import nn

from sheeplike.agents.ppo import PPO, PPOConfig, Vision

WORLDS, LENGTH, MINIBATCHES, EPOCHS = 16, 128, 8, 4
FRAME = gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)
ACTION = gymnasium.spaces.Box(-1, 1, (6,), np.float32)
PASSES = WORLDS * LENGTH * EPOCHS  # frames that are seen in one rollout's updates
WARM_UP = 2
NAMES = ("compile=auto", "compile=off", "stable-baselines3")


def ours(mode: str) -> tuple[Callable[[], object], int]:
    """All updates on a full rollout, as a function, and the number of parameters."""
    config = PPOConfig(
        vision=Vision(layout="nature", activation="relu"),
        activation="relu",
        policy_layers=(512,),
        value_layers=(512,),
        shared_trunk=True,
        distribution="clipped_normal",
        rollout_length=LENGTH,
        minibatches=MINIBATCHES,
        epochs=EPOCHS,
        learning_rate=3e-4,
        max_grad_norm=0.5,
    )
    agent = PPO(gymnasium.spaces.Dict({"pixels/front": FRAME}), ACTION, config, num_envs=WORLDS, compile=mode)
    for ring in agent.rollout.storage.values():
        # Flags are true now and then.
        ring.copy_(torch.randint(0, 256, ring.shape) if ring.dtype == torch.uint8 else torch.randn(ring.shape) > 2)
    agent.rollout.storage["raw_action"].normal_()
    agent.rollout.storage["reward"].normal_()

    def updates() -> None:
        agent.rollout.steps = LENGTH + 1  # full again; the last updates began a new one
        for _ in range(agent.updates_due(0)):
            agent.update()

    return updates, sum(p.numel() for p in agent.networks.parameters())


def theirs() -> tuple[Callable[[], object], int]:
    """The same of Stable-Baselines3."""
    import stable_baselines3
    from stable_baselines3.common.logger import configure
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
    from stable_baselines3.common.vec_env import DummyVecEnv

    class Convolutions(BaseFeaturesExtractor):
        def __init__(self, space: gymnasium.spaces.Box) -> None:
            super().__init__(space, 4096)
            layers: list[nn.Module] = []
            for inputs, outputs, kernel, stride in ((3, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)):
                layers += [nn.Conv2d(inputs, outputs, kernel, stride, (kernel - stride + 1) // 2), nn.ReLU()]
            self.layers = nn.Sequential(*layers, nn.Flatten())

        def forward(self, frames: torch.Tensor) -> torch.Tensor:
            return self.layers(frames)

    class Noise(gymnasium.Env):
        observation_space, action_space = FRAME, ACTION
        generator = np.random.default_rng(0)

        def reset(self, **_: object) -> tuple[np.ndarray, dict]:
            return self.generator.integers(0, 256, FRAME.shape, np.uint8), {}

        def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
            return self.reset()[0], self.generator.normal(), self.generator.random() < 0.02, False, {}

    model = stable_baselines3.PPO(
        "CnnPolicy",
        DummyVecEnv([Noise] * WORLDS),
        n_steps=LENGTH,
        batch_size=WORLDS * LENGTH // MINIBATCHES,
        n_epochs=EPOCHS,
        policy_kwargs={
            "features_extractor_class": Convolutions,
            "net_arch": {"pi": [512], "vf": [512]},
            "activation_fn": nn.ReLU,
        },
        device="cpu",
    )
    model.set_logger(configure(None, []))
    model.learn(WORLDS * LENGTH)
    return model.train, sum(p.numel() for p in model.policy.parameters())


def serve(name: str, threads: int, pipe: Connection) -> None:
    """Tell the number of parameters; then, for each message, the seconds that the updates take and those of CPU."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    updates, parameters = theirs() if name == "stable-baselines3" else ours(name.removeprefix("compile="))
    for _ in range(WARM_UP):
        updates()
    pipe.send(parameters)
    while pipe.recv():
        start, spent = time.perf_counter(), time.process_time()
        updates()
        pipe.send((time.perf_counter() - start, time.process_time() - spent))


def main() -> None:
    threads, rounds = map(int, [*sys.argv[1:], *("2", "20")[len(sys.argv) - 1 :]])
    try:
        import stable_baselines3
    except ImportError:
        raise SystemExit("this compares with stable-baselines3: pip install stable-baselines3") from None
    context = multiprocessing.get_context("spawn")
    pipes, parameters = {}, set()
    for name in NAMES:
        pipes[name], end = context.Pipe()
        context.Process(target=serve, args=(name, threads, end), daemon=True).start()
        end.close()  # the process holds its own: if it dies, recv fails instead of waiting
        parameters.add(pipes[name].recv())
    assert len(parameters) == 1, f"the networks differ: {parameters} parameters"
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
    for count in range(rounds):
        for name in NAMES if count % 2 else reversed(NAMES):
            pipes[name].send(True)
            spent[name].append(pipes[name].recv())
    for pipe in pipes.values():
        pipe.send(False)
    print(
        f"stable-baselines3 {stable_baselines3.__version__}, torch {torch.__version__}, {threads} threads, "
        f"{parameters.pop():,} parameters, {rounds} rounds in turns: median [quartiles]"
    )
    for name in NAMES:
        pairs = list(zip(spent[name], spent[NAMES[-1]], strict=True))
        rate = quartiles([PASSES / wall for wall, _ in spent[name]], ",.0f")
        times, work = (quartiles([their[i] / our[i] for our, their in pairs], ".2f") for i in range(2))
        print(f"{name:18} {rate} frame passes/s; {times} times as fast; {work} times by seconds of CPU")


def quartiles(numbers: list[float], form: str) -> str:
    """Median, first and third quartile."""
    first, median, third = statistics.quantiles(numbers, n=4)
    return f"{median:{form}} [{first:{form}}, {third:{form}}]"


if __name__ == "__main__":
    main()
