"""``python -m sheeplike eval run=<run_dir> [key=value …]``: how good a run's agent is, from its directory alone."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from sheeplike.commands import cli, machine
from sheeplike.commands.errors import CommandError, InvalidValue, as_command_errors, nearest, show
from sheeplike.commands.kinds import kind_of
from sheeplike.commands.schema import Config, Rule, keys_of
from sheeplike.commands.validation import expectation
from sheeplike.envs import simulated

if TYPE_CHECKING:
    from sheeplike.loop import Evaluation

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys of this command, beside ``run``."""

    checkpoint: Annotated[
        str, Rule("last; best: of those kept, the one with the highest eval/return_mean; or its policy steps")
    ] = "last"
    episodes: Annotated[int, Rule("episodes to play", at_least=1, at_most=2**16)] = 100
    num_envs: Annotated[
        int | None, Rule("worlds side by side; null: one per episode, at most as many as the run has", at_least=1)
    ] = None
    sample: Annotated[bool, Rule("sample the policy's actions, or take its mode")] = True
    nominal: Annotated[bool, Rule("in the scene as it was compiled, without the run's randomization")] = False
    video: Annotated[bool, Rule("film the first worlds: one GIF per camera")] = True
    seed: Annotated[
        int, Rule("of worlds and actions; 0 is that of the evaluations in training", at_least=0, at_most=2**15 - 1)
    ] = 0
    accelerator: Annotated[
        str, Rule("auto: what the run was trained on, if it is here", choices=("auto", "cpu", "cuda", "gpu"))
    ] = "auto"


def main(arguments: list[str]) -> None:
    """Evaluate, print the result and save it in ``<run_dir>/eval/``.

    Raises:
        CommandError: there is nothing to evaluate, or not in this way; nothing was written.
    """
    request = cli.parse(f"run={word}" if "=" not in word and not word.startswith("-") else word for word in arguments)
    if request.help:
        print(usage())
        return
    run_dir, config, asked = named_run("eval", request, Settings)
    if request.print_config:
        from sheeplike.commands.config import to_yaml

        print(to_yaml(config), end="")
        return
    num_envs = _worlds(asked, config)
    path = choose_checkpoint(run_dir, asked.checkpoint)
    asked = replace(asked, num_envs=num_envs, accelerator=_accelerator(asked, config))
    print("loading torch and JAX", flush=True)
    evaluate_run(run_dir, path, config, asked)


def usage() -> str:
    """The text of ``python -m sheeplike eval --help``."""
    return describe_keys("eval", Settings, "The result is printed, and saved in <run_dir>/eval/ as JSON and GIF.")


def describe_keys(command: str, settings: type, outcome: str) -> str:
    """The help of a command that takes a run and ``settings``, a dataclass of keys."""
    defaults = {field.name: field.default for field in fields(settings)}
    lines = [f"python -m sheeplike {command} run=<run_dir> [key=value ...]: {cli.COMMANDS[command]}", "", "keys"]
    for item in keys_of(settings):
        lines.append(f"  {item.name:<12} {item.rule.doc} ({expectation(item)}; default {show(defaults[item.name])})")
    return "\n".join([*lines, "", outcome])


def named_run(command: str, request: cli.Request, settings: type[T]) -> tuple[Path, Config, T]:
    """The directory of the run that a command line names, its configuration, and the keys beside it.

    Raises:
        CommandError: a key is not valid, or there is no such run with a checkpoint.
    """
    from sheeplike.commands.config import load_saved, load_settings  # Hydra, which help does without
    from sheeplike.commands.run_directory import checkpoint_steps, config_file

    runs = [override for override in request.overrides if override.startswith("run=")]
    asked = load_settings(settings, [override for override in request.overrides if override not in runs])
    if request.config_dirs:
        raise CommandError("--config-dir: expected only run=<run_dir>, which holds the whole configuration")
    if not runs:
        raise CommandError(
            f"run= is missing: expected the directory of a run: python -m sheeplike {command} run=<run_dir>"
        )
    run_dir = Path(runs[-1].partition("=")[2].strip("'\"")).expanduser()
    config = load_saved(config_file(run_dir, "run"), [])
    if not request.print_config and not checkpoint_steps(run_dir):
        raise CommandError(f"run={run_dir}: expected a run with a checkpoint; this one has none")
    return run_dir, config, asked


def evaluate_run(run_dir: Path, path: Path | None, config: Config, asked: Settings) -> None:
    """Play, print and save.

    Args:
        path: the checkpoint; None: the newest that is whole.
        config: of the run.
        asked: ``num_envs`` and ``accelerator`` are filled in.

    Raises:
        CommandError: the checkpoint is damaged, or the worlds or the agent cannot be built.
    """
    import torch

    from sheeplike import checkpoint, envs
    from sheeplike.commands.agents import make_agent_as_trained
    from sheeplike.commands.building import build_worlds, launch
    from sheeplike.commands.evaluation import films, play, summarize
    from sheeplike.commands.run_directory import CHECKPOINTS
    from sheeplike.monitor.progress import banner, phase
    from sheeplike.monitor.video import encode_gif

    trained_on = config.fabric.accelerator
    config = acting(replace(config, fabric=replace(config.fabric, accelerator=asked.accelerator)))
    failures = (ValueError, TypeError, MemoryError, torch.OutOfMemoryError, checkpoint.Corrupt, FileNotFoundError)
    with as_command_errors(*failures):
        # Before anything that takes long: a run that is going on removes its old checkpoints.
        only = ("agent",)
        root = run_dir / CHECKPOINTS
        meta, parts = checkpoint.load(path, only=only) if path else checkpoint.load_latest(root, only=only)
        fabric = launch(config)
        worlds = build_worlds(config, asked.num_envs, fabric.device, nominal=asked.nominal)
        agent = make_agent_as_trained(config, worlds, fabric)
    try:
        # Older checkpoints hold there what the agent had seen as well, and may lack a counter.
        known = agent.state_dict(replay=False).keys()
        agent.load_state_dict({name: value for name, value in parts["agent"].items() if name in known})
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise CommandError(f"run={run_dir}: the checkpoint is not of the agent in its config.yaml: {error}") from error
    with phase("playing"), as_command_errors(envs.Unusable):  # which may show only now, when they render
        result = play(agent, worlds, episodes=asked.episodes, sample=asked.sample, video=asked.video, seed=asked.seed)
    metrics, videos, fps = summarize(result), films(result), worlds.metadata["render_fps"]
    worlds.close()
    banner({f"policy step {meta['step']:,} of {run_dir}": describe(metrics, asked)})

    name = f"step_{meta['step']:012d}_{asked.episodes}_episodes_{asked.num_envs}_worlds"
    name += f"_seed_{asked.seed}" * (asked.seed > 0) + "_mode" * (not asked.sample) + "_nominal" * asked.nominal
    name += f"_{asked.accelerator}" * (asked.accelerator != trained_on)
    settings = {key: value for key, value in asdict(asked).items() if key not in ("checkpoint", "video")}
    run = {"env": config.env.name, "id": config.env.id, "agent": config.agent.name}
    run |= {"exp": config.exp, "seed": config.seed}
    record = {"run": run, "step": meta["step"], "settings": settings, "metrics": metrics, "episodes": rows(result)}
    files = {f"{camera.replace('/', '_')}.gif": encode_gif(video, fps) for camera, video in videos.items()}
    files["result.json"] = (json.dumps(_finite(record), indent=1) + "\n").encode()
    with as_command_errors(OSError):
        _save(run_dir / "eval" / name, files)
    print(f"saved: {run_dir / 'eval' / name}")


def acting(config: Config) -> Config:
    """The configuration of an agent that only acts: what it remembers is as small as can be."""
    # Compiling takes longer than playing.
    agent = kind_of(config.agent).acting(config.agent, config.env.num_envs)
    return replace(config, compile="off", agent=agent)


def describe(metrics: dict[str, float], asked: Settings) -> dict[str, str]:
    """The result for people to read, name to text."""
    m = {name.removeprefix("eval/"): value for name, value in metrics.items()}
    terms = [f"{name.partition('/')[2]} {value:#.4g}" for name, value in m.items() if name.startswith("reward_terms/")]
    how = "sampled actions" if asked.sample else "the mode of the policy"
    return {
        "episodes": f"{asked.episodes} in {asked.num_envs} worlds; seed {asked.seed}; {how}",
        "return": f"{m['return_mean']:#.4g}, 95 % interval {m['return_lo']:#.4g} to {m['return_hi']:#.4g}",
        "success": f"{m['success_rate']:.1%}, 95 % interval {m['success_lo']:.1%} to {m['success_hi']:.1%}",
        "length": f"{m['length_mean']:.4g} steps",
        "reward terms": "\n".join(terms) or "none",
    }


def rows(result: Evaluation) -> dict[str, Any]:
    """Every episode's numbers, as JSON has them."""
    terms = {name: values.tolist() for name, values in result.reward_terms.items()}
    numbers = {"return": result.returns, "length": result.lengths, "success": result.success}
    return {name: values.tolist() for name, values in numbers.items()} | {"reward_terms": terms}


def _worlds(asked: Settings, config: Config) -> int:
    if asked.nominal and not simulated(config.env.name):
        raise InvalidValue("nominal", True, f"false: {config.env.name} is not simulated here", False)
    if asked.num_envs is not None and asked.num_envs > asked.episodes:
        raise InvalidValue("num_envs", asked.num_envs, f"at most episodes={asked.episodes}", asked.episodes)
    return asked.num_envs or min(asked.episodes, config.env.num_envs)


def _accelerator(asked: Settings, config: Config) -> str:
    """``cpu`` or ``cuda``."""
    wanted = config.fabric.accelerator if asked.accelerator == "auto" else asked.accelerator
    problem = None if wanted == "cpu" else machine.gpu_problem()
    if problem and asked.accelerator != "auto":
        raise InvalidValue("accelerator", asked.accelerator, f"a GPU, but {problem}", "cpu")
    if problem:
        print(f"sheeplike: on the CPU although the run was trained on a GPU: {problem}", file=sys.stderr)
    return "cpu" if wanted == "cpu" or problem else "cuda"


def choose_checkpoint(run_dir: Path, name: str) -> Path | None:
    """The directory that ``checkpoint=`` means; None: the newest that is whole."""
    if name == "last":
        return None
    from sheeplike.checkpoint import best, list_checkpoints  # torch
    from sheeplike.commands.run_directory import CHECKPOINTS, checkpoint_steps

    steps = checkpoint_steps(run_dir)
    found = list_checkpoints(run_dir / CHECKPOINTS)
    if name == "best":
        path = best(run_dir / CHECKPOINTS)
        if path is None:
            raise InvalidValue("checkpoint", name, "one that was saved after an evaluation; here is none", "last")
        return path
    expected = f"best, last, or one of {', '.join(map(str, steps))}"
    step = name.removeprefix("step_")
    if not step.isdecimal():
        raise InvalidValue("checkpoint", name, expected, nearest(name, ("best", "last")) or "last")
    if int(step) not in steps:
        raise InvalidValue("checkpoint", name, expected, min(steps, key=lambda other: abs(other - int(step))))
    return next(path for path in found if int(path.name.rpartition("_")[2]) == int(step))


def _finite(value: Any) -> Any:
    """``value`` with null in place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _save(place: Path, files: dict[str, bytes]) -> None:
    """Each file is whole or absent; an evaluation of the same name had the same settings and is replaced."""
    place.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        fresh = place / f".{name}.{os.getpid()}"
        fresh.write_bytes(content)
        fresh.replace(place / name)
