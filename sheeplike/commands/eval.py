"""Evaluate the agent of a run: return and success with their intervals, and videos.

``python -m sheeplike eval run=<run_dir> [key=value …]``: how good a run's agent is, from its directory alone, or from
the directory that ``export`` wrote. ``run=demo:<name>`` is one that comes with the program.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from pydantic import Field

from sheeplike import envs
from sheeplike.commands import Request
from sheeplike.config.compose import load_options
from sheeplike.config.errors import as_command_errors, require_writable
from sheeplike.config.schema import Config
from sheeplike.files import write_atomically
from sheeplike.options import InvalidOption, Options, explain_keys, keys_of
from sheeplike.run import exported
from sheeplike.run.exported import is_export
from sheeplike.run.layout import EVALUATIONS, choose_checkpoint
from sheeplike.run.trained import choose_accelerator, finite, open_trained, read_weights, results_of
from sheeplike.terminal import echo, info


class EvalOptions(Options):
    """Keys of this command."""

    run: str | None = Field(None, description="the directory of the run, or of an export; or demo:<name>")
    checkpoint: str = Field(
        "last", description="last; best: of those kept, the one with the highest eval/return_mean; or its policy steps"
    )
    episodes: int = Field(100, ge=1, le=2**16, description="episodes to play")
    num_envs: int | None = Field(
        None, ge=1, le=2**16, description="worlds side by side; null: one per episode, at most as many as the run has"
    )
    sample: bool = Field(True, description="sample the policy's actions, or take its mode")
    randomize: bool = Field(True, description="with the run's randomization, or in the scene as it was compiled")
    video: bool = Field(True, description="film the first worlds: one GIF per camera")
    video_size: int | None = Field(
        None,
        ge=96,
        le=1024,
        description="pixels of the longer side of videos that are rendered for people, of the first world alone; null: "
        "what the agent sees, in up to nine worlds, enlarged",
    )
    seed: int = Field(
        0, ge=0, le=2**15 - 1, description="of worlds and actions; 0 is that of the evaluations in training"
    )
    accelerator: Literal["auto", "cpu", "cuda", "gpu"] = Field(
        "auto", description="auto: what the run was trained on, if it is here"
    )


def main(request: Request) -> None:
    """Evaluate, print the result and save it in ``<run_dir>/eval/``.

    Raises:
        CommandError: there is nothing to evaluate, or not in this way; nothing was written.
    """
    if request.help:
        echo("python -m sheeplike eval run=<run_dir> [key=value ...]", "", explain_keys(keys_of(EvalOptions)), "")
        echo("The result is printed, and saved in <run_dir>/eval/ as JSON and GIF; of a demo below logs/demo/.")
        echo(f"Trained agents that come along: {', '.join(f'run={exported.DEMO}{name}' for name in exported.demos())}")
        return
    asked = load_options(EvalOptions, request.about_run())
    run_dir, config = open_trained(asked.run, asked.checkpoint, "eval", EVALUATIONS)
    if not asked.randomize and not envs.simulated(config.env.name):
        raise InvalidOption("randomize", False, f"true: {config.env.name} is not simulated here", True)
    if asked.video_size and not envs.simulated(config.env.name):
        raise InvalidOption("video_size", asked.video_size, f"null: {config.env.name} renders its images itself")
    if asked.num_envs is not None and asked.num_envs > asked.episodes:
        raise InvalidOption("num_envs", asked.num_envs, f"at most episodes={asked.episodes}", asked.episodes)
    num_envs = asked.num_envs or min(asked.episodes, config.env.num_envs)
    path = None if is_export(run_dir) else choose_checkpoint(run_dir, asked.checkpoint)
    asked = asked.replace(num_envs=num_envs, accelerator=choose_accelerator(asked.accelerator, config))
    require_writable("run", results_of(run_dir, EVALUATIONS))
    info("loading torch and JAX")
    evaluate_run(run_dir, path, config, asked)


def evaluate_run(run_dir: Path, path: Path | None, config: Config, asked: EvalOptions) -> None:
    """Play, print and save.

    Args:
        path: the checkpoint; None: the newest that is whole, or an export.
        config: of the run.
        asked: ``num_envs`` and ``accelerator`` are filled in.

    Raises:
        CommandError: the checkpoint is damaged, or the environments or the agent cannot be built.
    """
    import torch

    from sheeplike import checkpoint
    from sheeplike.monitor.progress import banner, phase
    from sheeplike.monitor.video import encode_gif
    from sheeplike.run.build import build_envs, launch, make_agent, of_this_agent
    from sheeplike.run.evaluation import play, summarize, videos

    saved, trained_on = config, config.fabric.accelerator
    config = config.replace(
        fabric=config.fabric.replace(accelerator=asked.accelerator),
        compile="off",  # compiling takes longer than playing
        agent=config.agent.acting_only(config.env.num_envs),
    )
    failures = (ValueError, TypeError, MemoryError, torch.OutOfMemoryError, checkpoint.Corrupt, FileNotFoundError)
    with as_command_errors(*failures):
        # Before anything that takes long: a run that is going on removes its old checkpoints.
        step, give_weights = read_weights(run_dir, path, saved)
        fabric = launch(config)
        made = build_envs(config, asked.num_envs, fabric.device, randomize=asked.randomize)
        agent = make_agent(config, made, fabric)
    if asked.video_size:
        made.film_pixels = asked.video_size
    with of_this_agent(run_dir):
        give_weights(agent)
    with phase("playing"), as_command_errors(envs.Unusable):  # which may show only now, when they render
        result = play(agent, made, episodes=asked.episodes, sample=asked.sample, video=asked.video, seed=asked.seed)
    metrics, frames, fps = summarize(result), videos(result), made.metadata["render_fps"]
    made.close()
    banner(f"policy step {step:,} of {run_dir}", describe(metrics, asked))

    name = f"step_{step:012d}_{asked.episodes}_episodes_{asked.num_envs}_worlds"
    name += f"_seed_{asked.seed}" * (asked.seed > 0) + "_mode" * (not asked.sample)
    name += "_not_randomized" * (not asked.randomize) + f"_{asked.accelerator}" * (asked.accelerator != trained_on)
    terms = {term: values.tolist() for term, values in result.reward_terms.items()}
    numbers = {"return": result.returns, "length": result.lengths, "success": result.success}
    record = {
        "run": {
            "env": config.env.name,
            "id": config.env.id,
            "agent": config.agent.name,
            "exp": config.exp,
            "seed": config.seed,
        },
        "step": step,
        "settings": asked.model_dump(exclude={"run", "checkpoint", "video", "video_size"}),
        "metrics": metrics,
        "episodes": {key: values.tolist() for key, values in numbers.items()} | {"reward_terms": terms},
    }
    place = (
        results_of(run_dir, EVALUATIONS) / name
    )  # an evaluation of the same name had the same options and is replaced
    with as_command_errors(OSError):
        place.mkdir(parents=True, exist_ok=True)
        write_atomically(place / "result.json", json.dumps(finite(record), indent=1) + "\n")
        for camera, video in frames.items():
            # Others may have named their cameras as they like.
            write_atomically(place / f"{quote(camera, safe='', errors='surrogatepass')}.gif", encode_gif(video, fps))
    echo(f"saved: {place}")


def describe(metrics: dict[str, float], asked: EvalOptions) -> dict[str, str]:
    """The result for people to read, name to text."""
    m = {name.removeprefix("eval/"): value for name, value in metrics.items()}
    terms = [f"{name.partition('/')[2]} {value:#.4g}" for name, value in m.items() if name.startswith("reward_terms/")]
    how = "sampled actions" if asked.sample else "the mode of the policy"
    success = "{success_rate:.1%}, 95 % interval {success_lo:.1%} to {success_hi:.1%}"
    return {
        "episodes": f"{asked.episodes} in {asked.num_envs} worlds; seed {asked.seed}; {how}",
        "return": f"{m['return_mean']:#.4g}, 95 % interval {m['return_lo']:#.4g} to {m['return_hi']:#.4g}",
        **({"success": success.format(**m)} if "success_rate" in m else {}),
        "length": f"{m['length_mean']:.4g} steps",
        "reward terms": "\n".join(terms) or "none",
    }
