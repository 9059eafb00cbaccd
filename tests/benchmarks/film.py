"""Film a dream: ``python tests/benchmarks/film.py <export, or demo:…> <file>.gif [seeds …]``.

Whole episodes of DreamerV3, one after another and side by side: the task's film camera, if it has one, what the policy
sees, what the world model makes of the first picture and the actions alone, and the error of that.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import numpy as np
import torch
import yaml
from PIL import Image, ImageDraw, ImageFont

from sheeplike import envs
from sheeplike.agents.dreamer_v3.networks import DreamerNetworks
from sheeplike.agents.dreamer_v3.rssm import Latent
from sheeplike.trained import exported

HEIGHT, GAP, TITLE = 192, 8, 24
TITLES = ("simulation", "what the agent sees", "its dream of that", "error")


@torch.no_grad()
def episode(agent: DreamerNetworks, worlds: envs.contract.VectorEnv, seed: int) -> list[np.ndarray]:
    """Films ``(T, H, W, 3)`` uint8 of the episode that begins with ``seed``, as :data:`TITLES` names them."""
    player = agent.player(1)
    camera = agent.keys.images[0]
    observation, _ = worlds.reset(seed=seed)
    is_first = torch.tensor([True])
    scene, seen, actions = [*worlds.film().values()], [observation[camera]], []
    over = False
    while not over:
        actions.append(player.act(observation, is_first))
        observation, _, terminated, truncated, _ = worlds.step(actions[-1])
        is_first = torch.tensor([False])
        over = bool(terminated | truncated)
        scene += worlds.film().values()
        seen.append(observation[camera])
    world = agent.world_model
    first = {camera: seen[0].unsqueeze(1)}
    beginning, no_action = torch.tensor([[True]]), torch.zeros_like(actions[0]).unsqueeze(1)
    observed, *_ = world.observe(world.rssm.initial(1, agent.device), no_action, first, beginning)
    latents = [observed.map(lambda x: x[:, -1])]
    for action in actions:
        latents.append(world.rssm.imagine(latents[-1], action))
    dream = world.decoder(Latent(*(torch.cat(part) for part in zip(*latents, strict=True))))[camera]
    dream = (dream * 255).clamp(0, 255).to(torch.uint8)
    error = (dream.int() - torch.cat(seen).int() + 255) // 2  # grey where they agree
    return [torch.cat(film).numpy() for film in (scene, seen, [dream], [error.to(torch.uint8)]) if film]


def panel(images: list[np.ndarray], font: ImageFont.FreeTypeFont) -> Image.Image:
    widths = [HEIGHT * image.shape[1] // image.shape[0] for image in images]
    whole = Image.new("RGB", (sum(widths) + GAP * (len(widths) - 1), HEIGHT + TITLE), "white")
    left = 0
    for image, width, title in zip(images, widths, TITLES[-len(images) :], strict=True):
        how = Image.Resampling.NEAREST if image.shape[0] < HEIGHT // 2 else Image.Resampling.BICUBIC
        whole.paste(Image.fromarray(image).resize((width, HEIGHT), how), (left, TITLE))
        ImageDraw.Draw(whole).text((left + 2, 4), title, (30, 30, 30), font)
        left += width + GAP
    return whole


def main() -> None:
    source, file, *seeds = sys.argv[1:]
    place = exported.find(source)
    torch.manual_seed(0)
    agent = exported.load_agent(place)
    assert isinstance(agent, DreamerNetworks), "only a world model dreams"
    env = yaml.safe_load((place / "config.yaml").read_text(encoding="utf-8"))["env"]
    worlds = envs.make(env["name"], num_envs=1, image_size=env["image_size"])
    font = ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf"), 13)
    frames = []
    for seed in map(int, seeds or ("3", "4", "6")):
        films = episode(agent, worlds, seed)
        last = len(films[0]) - 1
        shown = [*range(0, last, 2), *[last] * 7]  # every second step, and a moment to look at the end
        frames += [panel([film[step] for film in films], font) for step in shown]
    colours = Image.new("RGB", (frames[0].width, frames[0].height * 12))
    for row, frame in enumerate(frames[:: max(len(frames) // 12, 1)][:12]):
        colours.paste(frame, (0, row * frame.height))
    palette = colours.quantize(255, dither=Image.Dither.NONE)
    first, *others = (frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames)
    first.save(file, save_all=True, append_images=others, duration=100, loop=0, optimize=True)


if __name__ == "__main__":
    main()
