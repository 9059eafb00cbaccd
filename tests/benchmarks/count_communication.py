"""Count what DreamerV3 sends in an update, and how long that takes: ``python tests/benchmarks/count_communication.py``.

Parameters are counted in networks without memory, for one camera of 64x64x3 and 7 continuous actions. Times are
arithmetic, not measured: a ring of N devices sends 2 (N - 1) / N of the buffer through its slowest link, in 2 (N - 1)
steps that have a latency each.
"""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces

from sheeplike.agents.dreamer_v3.config import SIZES, DreamerV3Config
from sheeplike.agents.dreamer_v3.networks import DreamerNetworks
from sheeplike.analysis.comparison import markdown_table

SPACE = spaces.Dict({"pixels/front": spaces.Box(0, 255, (64, 64, 3), np.uint8)})
ACTIONS = spaces.Box(-1, 1, (7,), np.float32)
DEVICES = 8, 64, 512
# Links by name: bytes per second of the slowest link of a ring, and assumed seconds of latency of one step.
LINKS = {
    "NVLink": (450e9, 3e-6),  # of an H100, in each direction
    "InfiniBand": (400e9 / 8, 5e-6),  # 400 Gb/s for each GPU
    "Ethernet": (25e9 / 8, 30e-6),  # 25 Gb/s for each node, which the ring enters and leaves once
}


def numbers(size: str) -> tuple[int, int]:
    """Return the trainable parameters of all networks, and those of the actor alone."""
    with torch.device("meta"):
        networks = DreamerNetworks(SPACE, ACTIONS, DreamerV3Config(size=size), device="meta")
    parts = networks, networks.actor_critic.policy
    return tuple(sum(p.numel() for p in part.parameters() if p.requires_grad) for part in parts)


def ring(sent: float, devices: int, bandwidth: float, latency: float) -> float:
    """Return the seconds of an all-reduce of ``sent`` bytes."""
    return 2 * (devices - 1) * (sent / devices / bandwidth + latency)


def main() -> None:
    rows = [["size", "parameters", "actor", "MB", *(f"{name}, ms" for name in LINKS)]]
    for size in SIZES:
        every, actor = numbers(size)
        sent = 4 * (every + actor)  # the actor's gradient has two parts
        cells = []
        for link in LINKS.values():
            times = [1e3 * ring(sent, devices, *link) for devices in DEVICES]
            cells.append(" / ".join(f"{time:,.{0 if time >= 10 else 1 if time >= 1 else 2}f}" for time in times))
        rows.append([size, f"{every:,}", f"{actor:,}", f"{sent / 1e6:,.1f}", *cells])
    print(f"milliseconds on {' / '.join(map(str, DEVICES))} devices")
    print(markdown_table(rows))


if __name__ == "__main__":
    main()
