"""Draw the pictures of ``howto/tasks.md``: ``python tests/benchmarks/draw_tasks.py`` writes ``task_<task>.png``."""

from PIL import Image

from sheeplike.envs import make


def draw(task, cameras):
    """Draw each camera large, then as an agent on a CPU sees it: 48x48."""
    row = []
    for size in (192, 48):
        shown = [name for name in cameras if size == 192 or name != "scene"]
        envs = make(task, num_envs=1, image_size=size, cameras=shown)
        obs, _ = envs.reset(seed=0)
        row += [Image.fromarray(obs[f"pixels/{name}"][0].numpy()).resize((192, 192), 0) for name in shown]
    strip = Image.new("RGB", (192 * len(row), 192))
    for place, picture in enumerate(row):
        strip.paste(picture, (192 * place, 0))
    strip.save(f"task_{task}.png")


if __name__ == "__main__":
    draw("franka_pick", ["scene", "front", "wrist"])
    draw("cartpole_balance", ["fixed"])
    draw("cartpole_swingup", ["fixed"])
