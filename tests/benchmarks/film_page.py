"""The film of ``howto/play_in_the_dream.md``: the page of ``dream`` at work with the demo, from screenshots.

``python tests/benchmarks/film_page.py <file.gif>``; needs Playwright and Debian's Chromium. The play is stepped: the
film shows every second step, however fast the machine is.
"""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image
from playwright.sync_api import Page, sync_playwright

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
VIEW, WIDTH, LASTS = {"width": 1280, "height": 740}, 780, 100  # ms a frame


class Film:
    def __init__(self, page: Page) -> None:
        self.page, self.frames = page, []

    def take(self, count: int = 1) -> None:
        shot = Image.open(io.BytesIO(self.page.screenshot(type="png"))).convert("RGB")
        small = shot.resize((WIDTH, round(WIDTH * shot.height / shot.width)), Image.Resampling.LANCZOS)
        self.frames += count * [np.asarray(small)]

    def step(self, frames: int) -> None:
        for _ in range(frames):
            for _ in range(2):
                step = self.page.evaluate("play.now.step")
                self.page.keyboard.press("e")
                self.page.wait_for_function(f"play.now.step === {step + 1}")
            self.take()

    def drag(self, panel: int, start: tuple[float, float], pixels: int) -> None:
        """Drag a thing sideways by pixels of the agent's picture."""
        frame = self.page.locator(f'.frame[data-panel="{panel}"][data-camera="pixels/front"]').bounding_box()
        scale = frame["width"] / 48
        x, y = frame["x"] + start[0] * scale, frame["y"] + start[1] * scale
        self.page.mouse.move(x, y)
        self.page.mouse.down()
        for part in range(1, 6):
            self.page.mouse.move(x + part / 5 * pixels * scale, y)
            self.until("!grabbed.waiting && !(grabbed.moved && grabbed.panel)")
            self.take()
        step = self.page.evaluate("play.now.step")
        self.page.mouse.up()
        if not panel:  # the simulator waits for the release
            self.until(f"play.now.step === {step + 1}")

    def until(self, condition: str) -> None:
        self.page.wait_for_function(condition)


def shoot(page: Page) -> list[np.ndarray]:
    """The policy picks the box, the dream with it; another future by chance; the box dragged on both sides."""
    film = Film(page)
    page.keyboard.press("Space")
    film.until("play.now.paused")
    page.keyboard.press("n")
    film.until("play.now.step === 0 && play.now.seed === 1")
    film.step(20)
    page.keyboard.press("b")
    film.until("play.now.panels.length === 3")
    page.locator(".panel select").nth(1).select_option("random")
    film.step(14)
    page.keyboard.press("b")
    page.keyboard.press("c")
    film.until("play.now.panels.length === 2")
    film.take(6)
    # The box is dragged in the simulator, and the dream notices it after a look; then in the dream.
    film.drag(0, page.evaluate("play.now.handles['pixels/front'][0]")[1:], 5)
    film.step(4)
    page.keyboard.press("c")
    film.until("play.now.blind === 0")
    film.take(6)
    film.drag(1, page.evaluate("play.now.panels[1].points['pixels/front'][1]")[1:], -5)
    film.step(12)
    page.keyboard.press("u")
    film.until("document.querySelectorAll('#thumbs canvas').length === 8")
    film.step(6)
    return film.frames


@contextmanager
def opened(*arguments: str) -> Iterator[Page]:
    """Open the page of the demo, which ends afterwards; ``arguments`` are the command's."""
    command = [sys.executable, "-m", "sheeplike", "dream", "run=demo:franka_pick", "port=0", *arguments]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = next(found[0] for line in program.stdout if (found := re.search(r"http://127\S+/", line)))
        with sync_playwright() as started:
            browser = started.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
            page = browser.new_page(viewport=VIEW, bypass_csp=True, color_scheme="light")
            page.goto(url)
            page.wait_for_function("window.play && play.now")
            page.click("#guide-done")
            yield page
            browser.close()
    finally:
        program.send_signal(signal.SIGINT)
        program.wait()


def write(frames: list[np.ndarray], file: Path) -> None:
    # The page's flat colours stay exact; of the others each counts once, since those of thin lines are rare.
    pixels = np.stack(frames)[:, ::2, ::2].astype(np.int64) @ (1 << 16, 1 << 8, 1)
    packed, counts = np.unique(pixels, return_counts=True)
    colours = np.stack([packed >> 16, packed >> 8 & 255, packed & 255], -1)
    others = np.unique(colours >> 3 << 3, axis=0).astype(np.uint8)
    flat, palette = colours[counts.argsort()[-16:]].ravel().tolist(), Image.new("P", (1, 1))
    palette.putpalette(flat + Image.fromarray(others[None]).quantize(240).getpalette()[:720])
    images = [Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    images[0].save(file, save_all=True, append_images=images[1:], duration=LASTS, loop=0, optimize=True)
    print(f"{file}: {len(frames)} frames, {file.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    with opened() as page:
        frames = shoot(page)
    write(frames, Path(sys.argv[1]))
