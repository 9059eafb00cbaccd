"""Evaluate the agent of a run: return and success with their intervals, and videos.

``python -m sheeplike eval run=<run_dir> [key=value …]``; the run may also be an export, ``demo:<name>`` or
``hf://<owner>/<name>``.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from pydantic import Field

from sheeplike import envs
from sheeplike.commands import Request
from sheeplike.config.compose import load_options
from sheeplike.config.errors import as_command_errors
from sheeplike.config.schema import Config
from sheeplike.files import write_atomically
from sheeplike.options import InvalidOption, explain_keys, keys_of
from sheeplike.run.layout import EVALUATIONS
from sheeplike.terminal import echo, first_sentence, info, warn
from sheeplike.trained import card, exported
from sheeplike.trained.playing import TrainedOptions, finite, name_results, open_trained, rebuild, results_of

if TYPE_CHECKING:
    import torch

    from sheeplike.agents.policy import PolicyNetworks

SCENE_SIZE = 360, 480  # pixels, of the camera that only people look through
FILM_SIZE = 96  # pixels a side, of the video of an agent that learns without frames


class EvalOptions(TrainedOptions):
    """Keys of this command."""

    episodes: int = Field(100, ge=1, le=2**16, description="episodes to play")
    sample: bool | None = Field(None, description="sample the policy's actions or take its mode; null: as the run does")
    randomize: bool = Field(True, description="true: with the run's randomization; false: without it")
    video: bool = Field(True, description="film the first worlds, or one world of an agent without frames")
    video_size: int | None = Field(
        None,
        ge=96,
        le=1024,
        description="longer side, in pixels, of videos of the first world rendered for people; null: 480 for a task's "
        "own camera, and the agent's images of up to nine worlds, enlarged",
    )


def main(request: Request) -> None:
    """Evaluate, print the result and save it in ``<run_dir>/eval/``."""
    if request.help:
        echo("python -m sheeplike eval run=<run_dir> [key=value ...]", "", explain_keys(keys_of(EvalOptions)), "")
        echo("The result is printed, and saved as JSON and GIF below <run_dir>/eval/, or below logs/demo/ for a demo,")
        echo("logs/hub/ for one of the hub; with a card that tells them to people, card.md.")
        echo(f"Agents of the program: {', '.join(f'run={exported.DEMO}{name}' for name in exported.demos())}")
        return
    asked = load_options(EvalOptions, request.about_run())
    run_dir, config, asked = open_trained(asked, "eval", EVALUATIONS)
    if not asked.randomize and not envs.simulated(config.env.name):
        raise InvalidOption("randomize", False, f"true: {config.env.name} is not simulated here", True)
    if asked.video_size and not envs.simulated(config.env.name):
        raise InvalidOption("video_size", asked.video_size, f"null: {config.env.name} renders its images itself")
    info("loading torch and JAX")
    evaluate_run(run_dir, config, asked)


def play_filmed(
    networks: PolicyNetworks, config: Config, asked: EvalOptions, device: torch.device
) -> dict[str, torch.Tensor]:
    """Play one episode more in a world with frames, which the policy does not see; return the frames."""
    from sheeplike.monitor.progress import phase
    from sheeplike.run.build import build_envs
    from sheeplike.run.evaluation import play

    env = config.env
    shown = {"renderer": "warp"} if env.renderer == "none" else {"options": env.options | {"frames": "render"}}
    try:
        filmed = config.replace(env=env.replace(image_size=FILM_SIZE, **shown))
        with closing(build_envs(filmed, 1, device, randomize=asked.randomize)) as made, phase("filming"):
            if envs.simulated(env.name):
                made.film_size, made.film_pixels = SCENE_SIZE, asked.video_size
            return play(networks, made, episodes=1, sample=asked.sample, seed=asked.seed).frames
    except Exception as error:  # a renderer may raise anything
        warn(f"no video: {first_sentence(error)}")
        return {}


def evaluate_run(run_dir: Path, config: Config, asked: EvalOptions) -> None:
    from sheeplike.monitor.progress import banner, phase
    from sheeplike.monitor.video import encode_gif
    from sheeplike.run.evaluation import play, summarize, videos

    asked = asked if asked.sample is not None else asked.replace(sample=config.eval.sample)
    step, networks, made = rebuild(run_dir, config, asked, randomize=asked.randomize)
    if envs.simulated(config.env.name):
        made.film_size, made.film_pixels = SCENE_SIZE, asked.video_size
    with phase("playing"), as_command_errors(envs.Unusable):  # raised only now if they cannot render
        result = play(networks, made, episodes=asked.episodes, sample=asked.sample, video=asked.video, seed=asked.seed)
    settings = asked.model_dump(exclude={"run", "checkpoint", "video", "video_size"})
    metrics, fps, device = summarize(result), made.metadata["render_fps"], made.device
    made.close()
    banner(f"policy step {step:,} of {asked.run}", card.describe(metrics, settings))

    marks = "" if asked.sample else "_mode", "" if asked.randomize else "_not_randomized"
    weights = networks.state_dict().values()
    terms = {term: values.tolist() for term, values in result.reward_terms.items()}
    numbers = {"return": result.returns, "length": result.lengths, "success": result.success}
    record = {
        "run": {"env": config.env.name, "id": config.env.id, "agent": config.agent.name}
        | {"exp": config.exp, "seed": config.seed},
        "step": step,
        "parameters": sum(value.numel() for value in weights),
        "bytes": sum(value.nbytes for value in weights),
        "command": card.command_of(config),
        "settings": settings,
        "metrics": metrics,
        "episodes": {key: values.tolist() for key, values in numbers.items()} | {"reward_terms": terms},
    }
    place = results_of(run_dir, EVALUATIONS) / name_results(step, asked, config, *marks)
    with as_command_errors(OSError):
        place.mkdir(parents=True, exist_ok=True)
        write_atomically(place / "result.json", json.dumps(finite(record), indent=1) + "\n")
        if asked.video and not result.frames and "none" in (config.env.renderer, config.env.options.get("frames")):
            result = result._replace(frames=play_filmed(networks, config, asked, device))
        for camera, video in videos(result).items():
            # Environments of other packages name cameras as they like.
            write_atomically(place / f"{quote(camera, safe='', errors='surrogatepass')}.gif", encode_gif(video, fps))
        agent = [f"run={asked.run}", *([] if exported.is_export(run_dir) else [f"checkpoint={step}"])]
        film = card.choose_film(place)
        text = card.render(record, agent, commit=card.commit_of(run_dir), film=film, license=None)
        write_atomically(place / card.CARD, text)
    echo(f"saved: {place}")
