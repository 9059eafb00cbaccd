"""Be the robot: ``python robot.py [--rate 20 --drop 0.1 --delay 1 --episodes 20]``, a simulator that does not wait.

At each tick it sends a frame, unless that is dropped, and moves by the newest action that has arrived, ``--delay``
ticks late. With ``--rate 0`` it waits for each action, as a simulator in training does.
"""

import argparse
import time
from collections import deque
from multiprocessing.connection import Listener

import numpy as np
import torch

from sheeplike.envs import make
from sheeplike.run.evaluation import wilson_interval


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="franka_pick")
    parser.add_argument("--camera", default="front")
    parser.add_argument("--image-size", type=int, default=48)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--drop", type=float, default=0.0, help="share of frames that are lost")
    parser.add_argument("--delay", type=int, default=0, help="ticks until an action takes effect")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.drop and not asked.rate:
        parser.error("--drop needs --rate: with --rate 0 the robot waits for an answer to each frame")
    worlds = make(asked.task, num_envs=1, cameras=[asked.camera], image_size=asked.image_size, seed=asked.seed)
    chance, still = np.random.default_rng(asked.seed), torch.zeros(worlds.action_space.shape)
    with Listener(("localhost", asked.port)) as listener:
        print(f"listening on localhost:{asked.port}", flush=True)
        control = listener.accept()
    worlds.reset(seed=asked.seed)
    worlds.step(still)  # builds what the first step needs
    obs, _ = worlds.reset(seed=asked.seed)
    began, outcomes, due = True, [], time.monotonic()
    newest, waiting = still, deque([still] * asked.delay)
    while len(outcomes) < asked.episodes:
        if began or chance.random() >= asked.drop:
            # One message: TCP would hold a second one back until the first is acknowledged, for 40 ms.
            control.send_bytes(bytes([began]) + obs[f"pixels/{asked.camera}"][0].numpy().tobytes())
        if asked.rate:
            due = max(due + 1 / asked.rate, time.monotonic())
            time.sleep(max(due - time.monotonic(), 0))
        while control.poll(0 if asked.rate else None):
            newest = torch.from_numpy(np.frombuffer(control.recv_bytes(), "<f4").copy())[None]
            if not asked.rate:
                break
        waiting.append(newest)
        obs, _, terminated, truncated, info = worlds.step(waiting.popleft())
        began = bool(terminated | truncated)
        if began:
            outcomes.append(bool(info["success"] == 1))
            obs, *_ = worlds.step(still)  # the step after an episode's last one begins the next, whatever the action
            newest, waiting = still, deque([still] * asked.delay)
    low, high = wilson_interval(sum(outcomes), len(outcomes))
    print(f"{sum(outcomes)} of {len(outcomes)} episodes succeeded, 95 % interval {low:.0%} to {high:.0%}")
    control.close()


if __name__ == "__main__":
    main()
