"""Success of trained agents in simulators that differ from the one they were trained in.

    MUJOCO_GL=egl python tests/benchmarks/sim_to_sim.py TO.json NAME=RUN [NAME=RUN …] [episodes=100]
    python tests/benchmarks/sim_to_sim.py TO.json                               draws TO.png and prints the table

A run may be a directory, an export or ``demo:<name>``. Its own randomization is off: the first row is the scene as it
was compiled, for every agent. A row that cannot be simulated here is left out with its reason. What ``TO.json`` has
already is not played again.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import mujoco
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium.vector import VectorWrapper
from matplotlib.figure import Figure

from sheeplike.agents.spaces import ObservationKeys
from sheeplike.config.compose import load_saved
from sheeplike.options import CommandError
from sheeplike.run.build import make_envs
from sheeplike.run.evaluation import play, summarize
from sheeplike.trained import exported

WORLDS = 20


def line(field: Any, operation: str, distribution: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    return {"field": field, "operation": operation, "distribution": distribution, **others}


def within(size: float) -> dict[str, Any]:
    return {"uniform": [-size, size]}


EVERYWHERE = {"shared": ["elements", "components"]}
CONDITIONS: dict[str, dict[str, Any]] = {
    "as compiled": {},
    "MuJoCo's OpenGL renderer": {"opengl": True},
    **{
        f"actions {n} step{'s' * (n > 1)} late": {"lines": {"delay": line("action.delay", "set", {"choice": [n]})}}
        for n in (1, 2, 3)
    },
    **{f"noise of pixels, deviation {size:g} of 1": {"noise": size} for size in (0.02, 0.05, 0.1)},
    **{
        f"brightness x {by:g}": {"lines": {"brightness": line("pixels", "scale", {"choice": [by]}, **EVERYWHERE)}}
        for by in (0.7, 1.3)
    },
    "light moved up to 1 m": {"lines": {"light": line("light_pos", "add", within(1.0))}},
    "camera moved up to 2 cm": {"lines": {"camera": line("cam_pos", "add", within(0.02))}},
    "camera moved up to 5 cm": {"lines": {"camera": line("cam_pos", "add", within(0.05))}},
    "camera turned up to 5 degrees": {"lines": {"camera": line("cam_quat", "rotate", {"uniform": [0, 5]})}},
    "colours x 0.5 to 1.5": {"lines": {"c": line("geom_rgba", "scale", {"uniform": [0.5, 1.5]}, component=[0, 1, 2])}},
    "masses x 0.5 to 2": {
        "lines": {"mass": line(["body_mass", "body_inertia"], "scale", {"log_uniform": [0.5, 2.0]}, **EVERYWHERE)}
    },
    "friction x 0.5 to 2": {
        "lines": {"f": line("geom_friction", "scale", {"log_uniform": [0.5, 2]}, component=[0], shared=["elements"])}
    },
    "MJX-Warp's physics": {"physics": "warp"},  # the slowest on a CPU
}


class Changed(VectorWrapper):
    """Worlds whose observations pass through :meth:`change`."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.device, self.first_env = env.device, env.first_env

    def change(self, obs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def reset(self, **options: Any) -> Any:
        obs, info = self.env.reset(**options)
        return self.change(obs), info

    def step(self, actions: torch.Tensor) -> Any:
        obs, *rest = self.env.step(actions)
        return self.change(obs), *rest

    def film(self) -> dict[str, torch.Tensor]:
        return {}


class Known(Changed):
    """Worlds whose vectors have the lengths that the agent knows: draws of randomization stand at their ends.

    Draws that these worlds lack are zeros, which only a critic may see: nothing here uses its values.
    """

    def __init__(self, env: Any, networks: Any) -> None:
        super().__init__(env)
        known = networks.only_for_learning | networks.observations
        vectors = {key: space for key, space in known.items() if len(space.shape) == 1 and key != "variation"}
        self._lengths = {key: space.shape[0] for key, space in vectors.items()}
        here = env.single_observation_space
        for key in ObservationKeys(networks.space, networks.config.observations).vectors:
            if key == "variation" or self._lengths[key] > here[key].shape[0]:
                raise ValueError(f"{key}: it observes its own draws of randomization, which these worlds lack")

    def change(self, obs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        fitted = {key: F.pad(obs[key], (0, length - obs[key].shape[1])) for key, length in self._lengths.items()}
        return obs | fitted


class OpenGL(Changed):
    """Worlds whose frames MuJoCo's own renderer makes from their positions."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        simulator = env.unwrapped.simulator
        self._scene = simulator.task.model
        self._data = mujoco.MjData(self._scene)
        sizes = simulator.renderer.image_sizes
        self._renderers = {name: mujoco.Renderer(self._scene, *size) for name, size in sizes.items()}

    def change(self, obs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        frames: dict[str, list[np.ndarray]] = {name: [] for name in self._renderers}
        for qpos in self.env.unwrapped.state_dict()["[1].data.qpos"].numpy():
            self._data.qpos[:] = qpos
            mujoco.mj_forward(self._scene, self._data)
            for name, renderer in self._renderers.items():
                renderer.update_scene(self._data, camera=name)
                renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0  # as in training
                frames[name].append(renderer.render().copy())
        return obs | {f"pixels/{name}": torch.from_numpy(np.stack(images)) for name, images in frames.items()}


class Noise(Changed):
    """Worlds with Gaussian noise on every pixel."""

    def __init__(self, env: Any, size: float) -> None:
        super().__init__(env)
        self._size = 255 * size

    def change(self, obs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        images = {key: value.float() for key, value in obs.items() if key.startswith("pixels/")}
        noisy = {key: value + self._size * torch.randn_like(value) for key, value in images.items()}
        return obs | {key: value.round().clamp(0, 255).to(torch.uint8) for key, value in noisy.items()}


def score(run: str, condition: Mapping[str, Any], episodes: int) -> dict[str, float]:
    """Return the metrics of an evaluation of ``run``, such as ``eval/success_rate``, in one condition."""
    place = exported.find(run)
    config, networks = load_saved(exported.config_of(place)).config, exported.load_agent(run)
    env = config.env.replace(physics=condition.get("physics", config.env.physics), stagger=False)
    config = config.replace(env=env, randomization=condition.get("lines", {}))
    worlds = make_envs(config, min(WORLDS, episodes), torch.device("cpu"))
    asked: Any = Known(worlds, networks)
    asked = OpenGL(asked) if condition.get("opengl") else asked
    asked = Noise(asked, condition["noise"]) if "noise" in condition else asked
    result = play(networks, asked, episodes=episodes, sample=config.eval.sample, video=False)
    asked.close()
    return summarize(result)


def draw(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Figure:
    """Draw success rates, or mean returns where a task has no success, with 95 % intervals."""
    rows = list(dict.fromkeys(name for one in found.values() for name in one))
    figure = Figure(figsize=(9, 0.26 * len(rows) * max(len(found), 1) ** 0.5 + 1.2), layout="constrained")
    axis = figure.add_subplot()
    succeed = all("eval/success_rate" in cell for one in found.values() for cell in one.values())
    kind, middle = ("success", "eval/success_rate") if succeed else ("return", "eval/return_mean")
    for shift, (name, one) in enumerate(found.items()):
        places = [rows.index(row) + 0.8 * (shift - (len(found) - 1) / 2) / max(len(found), 1) for row in one]
        values = np.array([cell[middle] for cell in one.values()])
        ends = np.array([[cell[f"eval/{kind}_lo"], cell[f"eval/{kind}_hi"]] for cell in one.values()])
        axis.errorbar(values, places, xerr=np.abs(ends.T - values), fmt="o", capsize=3, label=name)
    axis.set_yticks(range(len(rows)), rows)
    axis.invert_yaxis()
    axis.set_xlabel("success rate" if kind == "success" else "mean return")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    return figure


def table(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Return the table as Markdown."""
    lines = [f"| simulator | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    for row in dict.fromkeys(name for one in found.values() for name in one):
        cells = []
        for one in found.values():
            cell = one.get(row)
            if cell is None:
                cells.append("")
            elif "eval/success_rate" in cell:
                text = "{eval/success_rate:.0%} ({eval/success_lo:.0%} to {eval/success_hi:.0%})"
                cells.append(text.format(**cell))
            else:
                cells.append("{eval/return_mean:.0f} ({eval/return_lo:.0f} to {eval/return_hi:.0f})".format(**cell))
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(to: str, *arguments: str) -> None:
    place, given = Path(to), dict(argument.split("=", 1) for argument in arguments)
    episodes = int(given.pop("episodes", 100))
    found: dict[str, dict[str, Any]] = json.loads(place.read_text()) if place.exists() else {}
    for name, run in given.items():
        for condition, options in CONDITIONS.items():
            if condition in found.setdefault(name, {}):
                continue
            try:
                if options.get("opengl") and not os.environ.get("MUJOCO_GL"):
                    raise ValueError("expected MUJOCO_GL=egl or osmesa")
                found[name][condition] = score(run, options, episodes)
            except (CommandError, ValueError) as error:
                print(f"{name}, {condition}: {error}", flush=True)
                continue
            print(name, condition, found[name][condition], flush=True)
            place.write_text(json.dumps(found, indent=1) + "\n")
    if not any(found.values()):
        sys.exit(f"{to}: no scores: expected NAME=RUN")
    with matplotlib.rc_context({"font.size": 10}):
        draw(found).savefig(place.with_suffix(".png"), dpi=110)
    print(table(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
