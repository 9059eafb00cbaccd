"""Picks by hand through the page of ``dream``, by a stand-in for a person.

``python tests/benchmarks/teach_page.py <directory> [episodes] [file.gif]`` records until so many (10) have succeeded,
or films one pick; needs what ``film_page.py`` needs. It looks at the agent's picture on the page, and presses keys.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from playwright.sync_api import Page

SEEN = "canvas => Array.from(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data)"
CAMERA = '.panel[data-name="real"] .frame[data-camera="pixels/front"] canvas'
DOWN, UP, LEFT, RIGHT = "ArrowDown", "ArrowUp", "ArrowLeft", "ArrowRight"


class Person:
    """Plays step by step; ``watch`` is called after each.

    Attributes:
        shown: pictures ``(H, W, 3)`` of the present episode.
    """

    def __init__(self, page: Page, watch: Callable[[], None] = lambda: None) -> None:
        self.page, self.keys, self.watch = page, page.keyboard, watch
        self.shown: list[np.ndarray] = []
        self.closed = False

    def sit_down(self) -> None:
        """Pause the play, take the keys, and let episodes be recorded."""
        if not self.page.evaluate("play.now.paused"):
            self.press("Space", "play.now.paused")
        while self.page.evaluate("play.now.source") != "keys":
            before = self.page.evaluate("play.now.source")
            self.press("m", f"play.now.source !== '{before}'")
        if not self.page.evaluate("play.now.teaching"):
            self.press("t", "play.now.teaching")

    def press(self, key: str, then: str) -> None:
        self.keys.press(key)
        self.page.wait_for_function(then)

    def look(self) -> None:
        flat = np.array(self.page.locator(CAMERA).evaluate(SEEN), np.uint8)
        side = round((len(flat) / 4) ** 0.5)
        self.shown.append(flat.reshape(side, side, 4)[..., :3])
        self.watch()

    def find(self, channel: int) -> tuple[float, int] | None:
        """Return the middle column and the lowest row of what is red (0) or blue (2); None if it is not in sight."""
        picture = self.shown[-1].astype(int)
        rows, columns = np.nonzero((picture[..., channel] > 90) & (picture.argmax(-1) == channel) & (np.ptp(picture, -1) > 60))
        return ((columns.min() + columns.max()) / 2, rows.max()) if len(rows) else None

    def step(self, *held: str) -> None:
        for key in held:
            self.keys.down(key)
        self.press("e", f"play.now.step === {self.page.evaluate('play.now.step')} + 1")
        for key in held:
            self.keys.up(key)
        self.look()

    def over(self) -> str:
        return self.page.evaluate("play.now.panels[0].end")

    def grip(self, close: bool) -> None:
        """Move the gripper's slider, which stays: below its middle the gripper closes, else it opens."""
        if close != self.closed:
            for key in ("3", f"Shift+{LEFT if close else RIGHT}", "1"):
                self.keys.press(key)
            self.closed = close

    def around(self, rows: int = 1) -> bool:
        """True if the fingers are beside the box, at most so many rows above its foot."""
        (fingers, depth), (box, foot) = self.find(2), self.find(0)
        return abs(box - fingers) <= 1.5 and depth >= foot - rows

    def reach(self) -> None:
        """Go above the box, then down around it, until the fingers go no deeper."""
        depths = []
        while not self.over() and (len(depths) < 5 or depths[-1] > depths[-5]):
            (fingers, depth), (box, _) = self.find(2), self.find(0)
            aside = box - fingers
            sideways = [] if abs(aside) < 0.75 else [RIGHT if aside > 0 else LEFT]
            depths = [*depths, depth] if abs(aside) <= 1 else []
            self.step(*sideways, *([DOWN] if depths else []))

    def pick(self) -> bool:
        """Play an episode to its end."""
        seed = self.page.evaluate("play.now.seed")
        self.press("n", f"play.now.step === 0 && play.now.seed === {seed} + 1")
        self.shown.clear()
        self.look()
        while not self.over():
            if not self.around():  # an episode may begin with the box in the hand
                self.grip(False)
                self.reach()
            self.grip(True)
            for _ in range(5):
                if not self.over():
                    self.step()
            while not self.over() and self.around(4):
                self.step(UP)
        return "success" in self.over()


def main(directory: str, episodes: str = "10") -> None:
    with opened(f"to={directory}") as page:
        person, start = Person(page), time.monotonic()
        person.sit_down()
        while page.evaluate("play.now.taught[1]") < int(episodes):
            before = page.evaluate("play.now.taught[0]")
            person.pick()
            tries, succeeded = page.evaluate("play.now.taught")
            print(f"{person.over()}; seed {page.evaluate('play.now.seed')}")
            assert tries == before + 1, "the page recorded it"
        print(f"{succeeded} of {tries} episodes succeeded, in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    from film_page import opened  # it lies beside this file

    main(*sys.argv[1:])
