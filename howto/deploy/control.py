"""Drive a robot with a policy: ``python control.py policy.onnx [address] [--rate 20]``.

Needs numpy, onnxruntime and ``player.py`` beside it. The robot's frames set the pace, which should be the control rate
of training. A late or lost frame does not stop the loop: the policy acts on the last one that arrived. ``robot.py`` is
a robot for trials.
"""

import argparse
from multiprocessing.connection import Client

import numpy as np

try:
    from player import Player  # the copied file
except ImportError:
    from sheeplike.player import Player


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policy")
    parser.add_argument("address", nargs="?", default="localhost:8123")
    parser.add_argument("--rate", type=float, help="steps per second, as trained by default; 0: wait for each frame")
    asked = parser.parse_args()
    player = Player(asked.policy)
    rate = player.facts["rate"] if asked.rate is None else asked.rate
    if rate is None:
        parser.error("the file does not tell the rate: expected --rate")
    patience = 1.2 / rate if rate else None
    (key, (shape, dtype)), bounds = next(iter(player.observations.items())), player.facts["action"]
    host, port = asked.address.split(":")
    robot, frame, blind, steps = Client((host, int(port))), None, 0, 0
    try:
        while True:
            arrived = robot.poll(None if frame is None else patience)
            while arrived:  # the newest of those that wait
                message = robot.recv_bytes()  # 1 at the first frame of an episode, else 0; then the frame
                frame = np.frombuffer(message, dtype, offset=1).reshape(shape)
                if message[0]:
                    player.reset()
                if not robot.poll(0):
                    break
            steps, blind = steps + 1, blind + (not arrived)
            action = np.clip(player.act({key: frame}), bounds["low"], bounds["high"])
            robot.send_bytes(action.astype("<f4").tobytes())
    except (EOFError, ConnectionError):
        print(f"{steps} steps, {blind} of them without a new frame")


if __name__ == "__main__":
    main()
