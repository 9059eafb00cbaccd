"""Picks by hand through the page of ``dream``, by a stand-in for a person.

``python tests/benchmarks/teach_page.py <directory> [episodes] [file.gif] [key=value …]`` records until so many (10)
have succeeded, and films them if asked; it needs what ``film_page.py`` needs. It looks at the agent's picture on the
page and presses keys, step by step: above the box, down, close, up; what slipped away is tried again.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from playwright.sync_api import Page

SEEN = "canvas => Array.from(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data)"
CANVAS = '.panel[data-name="real"] .frame[data-camera="pixels/front"] canvas'
RED, BLUE, VIVID = 0, 2, 60  # channels of box and fingers; least difference to the weakest channel
LABELS = {"ArrowUp": "↑", "ArrowDown": "↓", "ArrowLeft": "←", "ArrowRight": "→"}
LABELS |= {"Shift+ArrowLeft": "Shift ←", "Shift+ArrowRight": "Shift →", "m": "M", "n": "N", "t": "T"}
STYLE = (
    "position: fixed; right: 20px; bottom: 20px; padding: 10px 18px; font-size: 30px; background: #d4541b; color: white"
)
CAPTION = f"""keys => {{
  document.getElementById("pressed")?.remove();
  const made = Object.assign(document.createElement("div"), {{ id: "pressed", textContent: keys, style: "{STYLE}" }});
  if (keys) document.body.append(made);
}}"""


class Person:
    """A player of the page; ``shown`` are the agent's pictures ``(H, W, 3)`` of the present episode."""

    def __init__(self, page: Page) -> None:
        self.page, self.closed = page, False
        self.shown: list[np.ndarray] = []
        self.held: tuple[str, ...] = ()

    def tap(self, key: str, then: str = "true") -> None:
        self.page.keyboard.press(key)
        self.page.wait_for_function(then)

    def hold(self, *keys: str) -> None:
        for key in set(self.held) - set(keys):
            self.page.keyboard.up(key)
        for key in set(keys) - set(self.held):
            self.page.keyboard.down(key)
        self.held = keys

    def sit_down(self) -> None:
        """Pause the play, take the keys, and have episodes recorded."""
        if not self.page.evaluate("play.now.paused"):
            self.tap("Space", "play.now.paused")
        while (source := self.page.evaluate("play.now.source")) != "keys":
            self.tap("m", f"play.now.source !== '{source}'")
        if not self.page.evaluate("play.now.teaching"):
            self.tap("t", "play.now.teaching")

    def look(self) -> None:
        rgba = np.array(self.page.locator(CANVAS).evaluate(SEEN), np.uint8).reshape(-1, 4)
        side = round(len(rgba) ** 0.5)
        self.shown.append(rgba[:, :3].reshape(side, side, 3))

    def find(self, channel: int) -> tuple[float, int]:
        """Return the middle column and the lowest row of what has a colour."""
        picture = self.shown[-1]
        rows, columns = np.nonzero((picture.argmax(-1) == channel) & (np.ptp(picture, -1) > VIVID))
        return (columns.min() + columns.max()) / 2, rows.max()

    def step(self, *keys: str) -> None:
        self.hold(*keys)
        self.page.keyboard.press("e")
        self.page.wait_for_function(f"play.now.step === {len(self.shown)}")
        self.look()

    def end(self) -> str:
        """Return how the episode ended; empty if it goes on."""
        return self.page.evaluate("play.now.panels[0].end")

    def grip(self, close: bool) -> None:
        """Move the gripper's slider, which stays: left of the middle it closes."""
        if close != self.closed:
            self.hold()
            for key in ("3", f"Shift+Arrow{'Left' if close else 'Right'}", "1"):
                self.tap(key)
            self.closed = close

    def around(self, rows: int) -> bool:
        """Return True if the fingers are on both sides of the box, at most so many rows above its foot."""
        (fingers, depth), (box, foot) = self.find(BLUE), self.find(RED)
        return abs(box - fingers) <= 1.5 and depth >= foot - rows

    def reach(self) -> None:
        """Go above the box, then down around it until the fingers go no deeper."""
        depths = []
        while not self.end() and (len(depths) < 5 or depths[-1] > depths[-5]):
            (fingers, depth), (box, _) = self.find(BLUE), self.find(RED)
            aside = box - fingers
            keys = [] if abs(aside) < 0.75 else ["ArrowRight" if aside > 0 else "ArrowLeft"]
            depths = [*depths, depth] if abs(aside) <= 1 else []
            self.step(*keys, *(["ArrowDown"] if depths else []))

    def pick(self) -> bool:
        """Play a new episode to its end; return True if it succeeded."""
        seed = self.page.evaluate("play.now.seed")
        self.tap("n", f"play.now.step === 0 && play.now.seed === {seed + 1}")
        self.shown.clear()
        self.look()
        while not self.end():
            if not self.around(1):  # an episode may begin with the box in the hand
                self.grip(False)
                self.reach()
            self.grip(True)
            for _ in range(5):
                if not self.end():
                    self.step()
            while not self.end() and self.around(4):
                self.step("ArrowUp")
        self.hold()
        return "success" in self.end()


def main(directory: str, episodes: str = "10", file: str = "", *arguments: str) -> None:
    from film_page import Film, opened, write  # it lies beside this file

    class Filmed(Person):
        """A person whose keys and every second step are filmed."""

        def tap(self, key: str, then: str = "true") -> None:
            super().tap(key, then)
            self.page.evaluate(CAPTION, LABELS.get(key, key))
            film.take(5)

        def step(self, *keys: str) -> None:
            super().step(*keys)
            self.page.evaluate(CAPTION, " ".join(LABELS[key] for key in keys))
            if len(self.shown) % 2 or self.end():
                film.take()

    with opened(f"to={directory}", *arguments) as page:
        person, start = (Filmed if file else Person)(page), time.monotonic()
        if file:
            Person(page).tap("t", "!play.now.teaching")  # with to= it is on from the start
            film = Film(page)
        person.sit_down()
        while page.evaluate("play.now.taught[1]") < int(episodes):
            person.pick()
            print(f"seed {page.evaluate('play.now.seed')}: {person.end()}", flush=True)
        tries, succeeded = page.evaluate("play.now.taught")
        print(f"{succeeded} of {tries} episodes succeeded, in {time.monotonic() - start:.0f} s")
        if file:
            film.take(15)
            write(film.frames, Path(file))


if __name__ == "__main__":
    main(*sys.argv[1:])
