"""A trained policy that acts, from the one file that ``export format=onnx`` writes.

This file needs numpy and onnxruntime alone, and may be copied to a robot::

    player = Player("policy.onnx")
    player.reset()  # an episode begins
    action = player.act({"pixels/front": frame})  # at each control step

``python player.py policy.onnx`` prints what the policy sees and does, and the time of a step.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime

FORMAT = 1


class Player:
    """One policy in one world.

    Args:
        file: path of the ``.onnx`` file, or its content.
        seed: seed of the noise from which latents (DreamerV3) and sampled actions are drawn.
        threads: threads of a step; small networks are fastest with one.

    Attributes:
        facts: description of the policy by its export: ``rate`` in steps per second, ``action``, ``cameras``.
        observations: key to shape and dtype of the arrays that :meth:`act` takes.

    Raises:
        ValueError: the ONNX file is no policy of this format. Files that are no ONNX raise onnxruntime's errors.
    """

    def __init__(self, file: str | bytes, *, seed: int = 0, threads: int = 1) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        self._random = np.random.default_rng(seed)
        try:
            self.facts: dict[str, Any] = json.loads(self._session.get_modelmeta().custom_metadata_map["sheeplike"])
            if self.facts["format"] != FORMAT:
                raise ValueError(self.facts["format"])
            described = self.facts["observations"].items()
            self.observations = {key: (tuple(one["shape"]), np.dtype(one["dtype"])) for key, one in described}
            self.reset()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"expected a policy of format {FORMAT}, written by export format=onnx") from error

    def reset(self) -> None:
        """Begin an episode: the next step forgets all earlier ones."""
        self._state = {name: np.zeros(one["shape"], one["dtype"]) for name, one in self.facts["state"].items()}
        self._is_first = np.array([True])

    def act(self, observations: Mapping[str, Any]) -> np.ndarray:
        """Choose an action after seeing ``observations``.

        Args:
            observations: key to array: images uint8 ``(H, W, 3)``, depth float32 ``(H, W, 1)`` in metres, vectors
                float32 ``(D,)``; other keys are ignored.

        Returns:
            The action in the units, shape and dtype of ``facts["action"]``.

        Raises:
            ValueError: an observation is missing, or has another shape or dtype.
        """
        inputs: dict[str, np.ndarray] = {"is_first": self._is_first}
        for key, (shape, dtype) in self.observations.items():
            if key not in observations:
                raise ValueError(f"no observation {key!r}: expected {', '.join(self.observations)}")
            seen = np.asarray(observations[key])
            if seen.shape != shape or seen.dtype != dtype:
                raise ValueError(f"{key!r} is {seen.dtype} {seen.shape}: expected {dtype} {shape}")
            inputs[f"observations/{key}"] = seen[None]
        inputs |= {f"state/{name}": value for name, value in self._state.items()}
        for number, noise in enumerate(self.facts["noise"]):
            draw = self._random.random if noise["kind"] == "uniform" else self._random.standard_normal
            inputs[f"noise/{number}"] = draw(noise["shape"], np.float32)
        action, *state = self._session.run(None, inputs)
        self._state, self._is_first = dict(zip(self._state, state, strict=True)), np.array([False])
        return np.asarray(action[0])


def measure(player: Player, steps: int = 1000) -> np.ndarray:
    """Return the durations of ``steps`` steps with random frames, in milliseconds."""
    random, taken = np.random.default_rng(0), np.empty(steps)
    for step in range(steps):
        seen = {
            key: random.integers(256, size=shape, dtype=dtype) if dtype == np.uint8 else np.ones(shape, dtype)
            for key, (shape, dtype) in player.observations.items()
        }
        start = time.perf_counter()
        player.act(seen)
        taken[step] = 1e3 * (time.perf_counter() - start)
    return taken


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("expected one file: python player.py policy.onnx")
    try:
        loaded = Player(sys.argv[1])
    except Exception as problem:  # onnxruntime's have no common class
        sys.exit(f"{sys.argv[1]}: {problem}")
    print(json.dumps(loaded.facts, indent=1))
    median, most, longest = np.quantile(measure(loaded), [0.5, 0.99, 1.0])
    print(f"a step takes {median:.2f} ms in the median, 99 % at most {most:.2f} ms, the longest {longest:.2f} ms")
