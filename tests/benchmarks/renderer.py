"""Cost of what is rendered: ``OMP_NUM_THREADS=1 python tests/benchmarks/renderer.py WORLDS``.

Prints quartiles for each configuration: milliseconds of processor time per step of all worlds, the same relative to
colours alone, and policy steps per second.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch

from sheeplike.envs import make

ROUNDS = 16
KINDS: dict[str, dict[str, Any]] = {
    "colours": {},
    "none": {"renderer": "none"},
    "all": {"depth": True, "segmentation": True, "shadows": True, "textures": True},
    "depth": {"depth": True},
    "segmentation": {"segmentation": True},
    "shadows": {"shadows": True},
    "textures": {"textures": True},
    "two cameras": {"cameras": ["front", "wrist"]},
}


def main(worlds: int) -> None:
    envs = {}
    for kind, options in KINDS.items():
        envs[kind] = make("franka_pick", num_envs=worlds, image_size=64, **{"cameras": ["front"], **options})
        envs[kind].reset(seed=0)
        envs[kind].step(torch.zeros(worlds, 3))[1].sum().item()
    wall, processor = ({kind: [] for kind in KINDS} for _ in range(2))
    steps = max(8, 1024 // worlds)
    for number in range(ROUNDS):
        for kind in list(KINDS)[:: 1 - 2 * (number % 2)]:
            begun = time.perf_counter(), time.process_time()
            for _ in range(steps):
                reward = envs[kind].step(torch.rand(worlds, 3) * 2 - 1)[1]
            reward.sum().item()
            wall[kind].append(steps * worlds / (time.perf_counter() - begun[0]))
            processor[kind].append(1e3 * (time.process_time() - begun[1]) / steps)
    for kind in KINDS:
        relative = [mine / usual for mine, usual in zip(processor[kind], processor["colours"], strict=True)]
        print(kind, *(statistics.quantiles(values) for values in (processor[kind], relative, wall[kind])))


if __name__ == "__main__":
    main(int(sys.argv[1]))
