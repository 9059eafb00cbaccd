"""The page in a real browser, beside real worlds; skipped where there is no Chromium or Playwright."""

from __future__ import annotations

import asyncio
import re
import runpy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

import sheeplike
from sheeplike.data.reading import read
from sheeplike.data.writing import NpzWriter
from sheeplike.inspection.dream.server import TAKEN, Server, bind, make_runner
from sheeplike.inspection.dream.session import Moment, Session

TEACH = Path(__file__).parents[2] / "benchmarks" / "teach_page.py"
playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = Path("/usr/bin/chromium")
if not CHROMIUM.exists():
    pytest.skip(f"there is no {CHROMIUM}", allow_module_level=True)

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
SEEN = "canvas => Array.from(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data)"


@contextmanager
def serving(session: Session, place: Path, rate: float = 30.0) -> Iterator[str]:
    """Serves a session from a thread of its own; the address of its page."""
    server = Server(session, {"env": session.envs.name}, place, rate=rate)
    ready, stop, loop = threading.Event(), asyncio.Event(), asyncio.new_event_loop()

    async def run(listening: object) -> None:
        runner = make_runner(server)
        await runner.setup()
        await web.SockSite(runner, listening).start()
        ready.set()
        await stop.wait()
        await runner.cleanup()

    with bind(0) as listening:
        thread = threading.Thread(target=loop.run_until_complete, args=(run(listening),))
        thread.start()
        assert ready.wait(10)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/{server.token}/"
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: playwright.Browser) -> Iterator[Callable[..., playwright.Page]]:
    """Opens a page, which must have no error when the test is over."""
    pages, errors = [], []

    def call(url: str, **options: object) -> playwright.Page:
        # What a test asks of the page is a program in a text, which the page's own policy refuses.
        page = browser.new_page(**{"bypass_csp": True} | options)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(url)
        pages.append(page)
        return page

    yield call
    for page in pages:
        page.close()
    assert errors == []


def drawn(page: playwright.Page, least: int = 1) -> int:
    """Waits until the page has drawn so many pictures more; how many there were then."""
    before = page.evaluate("play.drawn")
    page.wait_for_function(f"play.drawn >= {before + least}", timeout=60_000)
    return page.evaluate("play.drawn")


def until(page: playwright.Page, condition: str) -> None:
    page.wait_for_function(condition, timeout=60_000)


def pixels(page: playwright.Page, panel: int = 0) -> list[int]:
    return page.locator(".panel").nth(panel).locator("canvas").first.evaluate(SEEN)


def pause(page: playwright.Page) -> None:
    page.keyboard.press("Space")
    until(page, "play.now.paused")


def click_class(page: playwright.Page, group: int, one: int) -> None:
    box = page.locator("#grid").bounding_box()
    groups, classes = page.evaluate("[play.hello.groups, play.hello.classes]")
    page.mouse.click(box["x"] + (group + 0.5) * box["width"] / groups, box["y"] + (one + 0.5) * box["height"] / classes)


def test_episodes_played_by_hand_are_recorded(dots, recordings, tmp_path, visit):
    session = dots(demos=lambda: NpzWriter(tmp_path / "demos", {"fps": 20}))
    with serving(session, recordings) as url:
        page = visit(url)
        until(page, "window.play && play.drawn > 1")
        page.keyboard.press("t")
        until(page, "play.now.teaching")
        page.keyboard.down("ArrowRight")
        until(page, "play.now.taught[0] >= 2")
        page.keyboard.up("ArrowRight")
        assert page.locator("#teach").get_attribute("class") == "on"
        page.click("#teach")
        until(page, "!play.now.teaching")
    first, second, *_ = read(tmp_path / "demos")
    assert (second.action[1:-1, 0] == 1).all(), "the arrow was down in all of it"
    assert len(first) == len(second) == 13


def test_a_visit(dots, recordings, visit):
    """Everything once, in a minute's play: keys, pause, a step back, a branch, a forced class, a second page."""
    session = dots()
    with serving(session, recordings) as url:
        page = visit(url)
        until(page, "window.play && play.drawn > 3")
        # Keys move both sides.
        before = pixels(page, 0), pixels(page, 1)
        page.keyboard.down("ArrowRight")
        until(page, "play.now.source === 'keys' && play.now.action[0] === 1")
        assert pixels(page, 0) != before[0]
        assert pixels(page, 1) != before[1]
        page.keyboard.up("ArrowRight")
        until(page, "play.now.action[0] === 0")
        # A pause holds.
        pause(page)
        step, shown = page.evaluate("play.now.step"), pixels(page, 1)
        time.sleep(0.3)
        assert page.evaluate("play.now.step") == step
        assert page.text_content("#pause") == "Play"
        page.keyboard.press("e")
        until(page, f"play.now.step === {step + 1}")
        # A class that is forced changes the picture; a second click releases it.
        shown = pixels(page, 1)
        one = (page.evaluate("play.now.drawn[0]") + 1) % 4
        click_class(page, 0, one)
        until(page, "play.now.forced.length === 1")
        assert session.here.settings.forced == {0: one}
        assert pixels(page, 1) != shown
        click_class(page, 0, one)
        until(page, "play.now.forced.length === 0")
        assert pixels(page, 1) == shown
        # A branch shows two futures.
        page.keyboard.press("b")
        until(page, "document.querySelectorAll('.panel').length === 3")
        page.locator(".panel").nth(2).locator("select").select_option("random")
        until(page, "play.now.panels[2].driver === 'random'")
        page.keyboard.press("Space")
        until(page, f"play.now.step > {step + 5}")
        pause(page)
        if page.evaluate("play.now.blind") == 0:  # both have just seen the same
            page.keyboard.press("e")
            until(page, "play.now.blind === 1")
        assert pixels(page, 1) != pixels(page, 2)
        # A click on the strip goes back.
        strip = page.locator(".strip canvas").first.bounding_box()
        page.mouse.click(strip["x"] + 1, strip["y"] + 5)
        until(page, "play.now.step === 0")
        assert "cannot be saved" in page.text_content("#line")
        # A second page is told, and the first goes on.
        other = visit(url)
        until(other, "document.getElementById('line').textContent !== ''")
        assert other.text_content("#line").startswith(TAKEN)
        page.keyboard.press("Space")
        drawn(page, 3)
        page.close()
        other.click("#line button")
        until(other, "window.play && play.drawn > 3")


def test_actions_that_are_choices(dots, recordings, visit):
    for kind, keys, action in (("discrete", ["2"], 2), ("multi", ["ArrowUp", "2", "ArrowRight"], [1, 1])):
        session = dots(kind)
        with serving(session, recordings) as url:
            page = visit(url)
            until(page, "window.play && play.drawn > 3")
            for key in keys:
                page.keyboard.press(key)
            until(page, f"JSON.stringify(play.now.action) === '{action}'.replaceAll(' ', '')")
            assert page.locator("#actions .options button.on").count() == len(keys[:2])
            # Each choice is a step where the play waits.
            pause(page)
            step = page.evaluate("play.now.step")
            page.locator("#actions .options button").first.click()
            until(page, f"play.now.step === {step + 1}")
            page.close()


def test_whoever_takes_over_begins_with_no_action(dots, recordings, visit):
    with serving(dots(), recordings) as url:
        page = visit(url)
        until(page, "window.play && play.drawn > 3")
        for total in (0.25, 0.5, 0.75):
            page.keyboard.press("Shift+ArrowRight")
            until(page, f"play.now.source === 'keys' && play.now.action[0] === {total}")
        page.keyboard.press("m")
        until(page, "play.now.source === 'policy'")
        page.keyboard.press("Shift+ArrowRight")
        until(page, "play.now.source === 'keys' && play.now.action[0] === 0.25")
        page.close()
    with serving(dots("discrete"), recordings) as url:
        page = visit(url)
        until(page, "window.play && play.drawn > 3")
        page.keyboard.press("2")
        until(page, "play.now.source === 'keys' && play.now.action === 2")
        page.keyboard.press("m")
        until(page, "play.now.source === 'policy'")
        page.keyboard.press("ArrowUp")
        until(page, "play.now.source === 'keys' && play.now.action === 1")


def test_a_drag_ends_although_a_branch_has_replaced_the_pictures(dots, recordings, visit):
    with serving(dots(), recordings) as url:
        page = visit(url)
        until(page, "window.play && play.drawn > 3")
        box = page.locator(".frame").first.bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x + 90, y)
        until(page, "play.now.source === 'keys' && play.now.action[0] === 1")
        page.keyboard.press("b")
        until(page, "document.querySelectorAll('.panel').length === 3")
        page.mouse.up()
        until(page, "play.now.action[0] === 0")


def test_a_number_that_is_none_does_not_freeze_the_page(dots, recordings, visit, monkeypatch):
    session = dots()
    with serving(session, recordings) as url:
        page = visit(url)
        until(page, "window.play && play.drawn > 3")
        decode = session._decode

        def spoil(moment: Moment) -> Moment:
            decode(moment).numbers["error"] = [float("nan")]
            return moment

        monkeypatch.setattr(session, "_decode", spoil)
        until(page, "play.now.psnr[0] === null")
        drawn(page, 5)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_wider_than_the_screen(dots, recordings, visit, width, scheme):
    session = dots()
    session.branch()
    with serving(session, recordings) as url:
        page = visit(url, viewport={"width": width, "height": 800}, color_scheme=scheme)
        until(page, "window.play && play.drawn > 3")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        ground, ink = page.evaluate(
            "['background-color', 'color'].map(name => getComputedStyle(document.documentElement)[name])"
        )
        assert sum(map(int, ground[4:-1].split(", "))) < 200 if scheme == "dark" else ground == "rgb(247, 247, 244)"
        assert ground != ink
        if width == 1280:  # pictures and numbers at one glance
            assert page.evaluate("document.getElementById('strips').getBoundingClientRect().bottom") <= 800


def test_the_page_lives_with_its_own_policy(dots, recordings, visit):
    with serving(dots(), recordings) as url:
        page = visit(url, bypass_csp=False)
        page.locator("#pace", has_text="steps/s").wait_for()
        page.keyboard.press("b")
        page.locator(".panel").nth(2).wait_for()
        page.keyboard.press("Space")
        page.locator("#pace", has_text="paused").wait_for()
        page.keyboard.press("s")
        page.locator("#line", has_text="saved: ").wait_for()


def test_counters_the_scene_and_handles(demo, places, recordings, visit):
    session = Session(*demo, seed=1, places=places)
    with serving(session, recordings, rate=20) as url:
        page = visit(url)
        until(page, "window.play && play.now && play.now.blind > 3")
        pause(page)
        # How long the dream has been blind, and where the episode is.
        blind, age = page.evaluate("[play.now.blind, play.now.age]")
        assert blind == age
        told = re.search(r"(\d+) steps \(([\d.]+) s\)", page.text_content('.panel[data-name="dream"] .foot'))
        assert (int(told[1]), float(told[2])) == (blind, pytest.approx(blind / 20, abs=0.06))
        assert f"step {age}" in page.text_content('.panel[data-name="real"] .what')
        # The scene is beside what the agent sees, and larger.
        boxes = [page.locator('.panel[data-name="real"] .frame').nth(n).bounding_box() for n in range(2)]
        assert boxes[0]["width"] >= 240
        assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
        page.keyboard.press("v")
        until(page, "document.querySelectorAll('.frame.scene').length === 0")
        page.keyboard.press("v")
        until(page, "document.querySelectorAll('.frame.scene').length === 1")
        # The box is dragged in the simulator; the dream does not see it before a look.
        _, x, y = page.evaluate("play.now.handles['pixels/front'][0]")
        pull(page, 0, (x, y), (x + 4, y), wait=False)  # many movements of the mouse, one step
        until(page, f"play.now.age === {age + 1} && play.now.handles['pixels/front'][0][1] > {x + 3}")
        until(page, f"Math.abs(play.now.panels[1].points['pixels/front'][1][1] - {x}) < 1.5")
        page.keyboard.press("c")
        until(page, f"play.now.blind === 0 && play.now.looks === {age + 2}")
        # The box is dragged in the dream; the simulator stays as it is.
        believed, real = page.evaluate("play.now.panels[1].points['pixels/front'][1]"), pixels(page, 0)
        pull(page, 1, believed[1:], (believed[1] - 3, believed[2]))
        until(page, f"play.now.panels[1].points['pixels/front'][1][1] < {believed[1] - 1.5}")
        assert pixels(page, 0) == real
        # A drag that ends at once, here where the model has not seen the box, goes as far as it may.
        believed, tip = page.evaluate("play.now.panels[1].points['pixels/front'].map(([, x]) => x).reverse()")
        y = page.evaluate("play.now.panels[1].points['pixels/front'][1][2]")
        pull(page, 1, (believed, y), (believed + 20, y), wait=False)
        until(page, f"grabbed === null && play.now.panels[1].points['pixels/front'][1][1] > {believed + 3}")
        until(page, "document.getElementById('line').textContent.includes('box')")
        assert page.evaluate("play.now.panels[1].points['pixels/front'][0][1]") == pytest.approx(tip, abs=0.3)
        # So does one in the simulator.
        _, x, y = page.evaluate("play.now.handles['pixels/front'][0]")
        pull(page, 0, (x, y), (x - 5, y), wait=False)
        until(page, f"Math.abs(play.now.handles['pixels/front'][0][1] - {x - 5}) < 0.5")
        # Eight dreams with other noise, and the dream over the real picture.
        dream = pixels(page, 1)
        page.keyboard.press("o")
        until(page, "play.onion")
        assert pixels(page, 1) != dream
        page.keyboard.press("o")
        assert pixels(page, 1) == dream
        page.keyboard.press("u")
        until(page, "document.querySelectorAll('#thumbs canvas').length === 8")
        assert page.locator("#crowd").is_visible()
        # The end of an episode is told, and the next one begins.
        page.keyboard.press("Space")
        until(page, "document.querySelector('.panel[data-name=\"real\"] .frame.over')")
        end = page.evaluate("document.querySelector('.panel[data-name=\"real\"] .frame').dataset.end")
        assert end in page.evaluate("[...strips.ends.values()]")
        until(page, "play.now.episode === 2 && play.now.blind === play.now.age")


def pull(
    page: playwright.Page, panel: int, start: tuple[float, float], end: tuple[float, float], *, wait: bool = True
) -> None:
    """Drags between two places of the agent's picture in a panel; lets go when all was sent, or at once."""
    frame = page.locator(f'.frame[data-panel="{panel}"][data-camera="pixels/front"]').bounding_box()
    at = [(frame["x"] + x / 48 * frame["width"], frame["y"] + y / 48 * frame["height"]) for x, y in (start, end)]
    page.mouse.move(*at[0])
    page.mouse.down()
    page.mouse.move(*at[1], steps=1 if wait else 4)
    if wait:
        page.wait_for_function("!grabbed.moved && !grabbed.waiting")
    page.mouse.up()


def test_the_start_is_explained_once(dots, recordings, visit):
    with serving(dots(), recordings) as url:
        page = visit(url)
        until(page, "window.play && play.drawn > 3")
        assert page.locator("#guide li").count() == 3
        page.keyboard.press("c")
        assert "done" in page.locator("#guide-check").get_attribute("class")
        page.click("#guide-done")
        assert page.locator("#guide").is_hidden()
        page.reload()
        until(page, "window.play && play.drawn > 3")
        assert page.locator("#guide").is_hidden()


def test_the_page_tells_the_task_the_past_and_what_was_changed(demo, places, recordings, visit):
    session = Session(*demo, seed=1, places=places)
    with serving(session, recordings) as url:
        page = visit(url)
        until(page, "window.play && play.now && play.now.step > 6")
        pause(page)
        assert "lift the red box to the green rod" in page.text_content("#about")
        real, dream = page.locator(".panel .foot").first, page.locator(".panel .foot").nth(1)
        assert page.locator(".foot b").count() == 0
        _, x, y = page.evaluate("play.now.panels[1].points['pixels/front'][1]")
        told = dream.text_content()
        pull(page, 1, (x, y), (x, y - 4))
        until(page, "play.now.panels[1].by_hand[0] === 'box'")
        assert "box" not in told
        assert "box" in dream.text_content()
        # A remark ends at the next command.
        shown = "document.getElementById('line').classList.contains('on')"
        until(page, shown)
        page.keyboard.press("c")
        until(page, "play.now.blind === 0 && !play.now.panels[1].by_hand.length")
        assert not page.evaluate(shown)
        # Save in the past writes the later steps too; one step deletes them.
        last = page.evaluate("play.now.last")
        for step in range(last - 1, last - 4, -1):
            page.keyboard.press(",")
            until(page, f"play.now.step === {step}")
        assert real.locator("b").is_visible()
        page.keyboard.press("s")
        until(page, "play.hello.recordings.length === 1")
        with np.load(next(recordings.glob("*.npz"))) as saved:
            assert len(saved["action"]) == last
            assert len(saved["reward"]) == last + 1
        page.keyboard.press("e")
        until(page, f"play.now.last === {last - 2}")
        assert page.locator(".foot b").count() == 0
        # A branch beside the scene fits on a phone.
        page.set_viewport_size({"width": 400, "height": 800})
        page.keyboard.press("b")
        until(page, "document.querySelectorAll('.panel').length === 3")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_the_overlay_and_the_choices_are_named(dots, recordings, visit):
    with serving(dots(), recordings) as url:
        page = visit(url)
        until(page, "window.play && play.drawn > 3")
        label = page.locator(".frame small").last
        before = label.text_content()
        page.keyboard.press("o")
        assert label.text_content() != before
        page.keyboard.press("o")
        assert label.text_content() == before
        for button in page.locator("#sources button").all():
            assert button.evaluate("one => one.scrollWidth <= one.clientWidth && one.scrollHeight <= one.clientHeight")


def test_where_the_world_cannot_be_saved_no_step_is_deleted_and_none_is_said_to_be(dots, recordings, visit):
    with serving(dots(), recordings) as url:
        page = visit(url)
        until(page, "window.play && play.now && play.now.step > 3")
        pause(page)
        page.keyboard.press(",")
        until(page, "play.now.step < play.now.last")
        assert page.locator(".foot b").count() == 0


def test_the_list_of_keys_opens_and_closes_with_one_key(dots, recordings, visit):
    with serving(dots(), recordings) as url:
        page = visit(url)
        until(page, "window.play && play.now")
        for is_open in (True, False):
            page.keyboard.press("?")
            until(page, f"document.getElementById('help').open === {str(is_open).lower()}")


def test_commas_and_points_are_keys(dots, recordings, visit):
    with serving(dots(), recordings) as url:
        page = visit(url)
        until(page, "window.play && play.now && play.now.step > 3")
        pause(page)
        step = page.evaluate("play.now.step")
        page.keyboard.press(",")
        until(page, f"play.now.step === {step - 1}")
        page.keyboard.press(".")
        until(page, f"play.now.step === {step}")


def test_a_rate_that_cannot_be_reached_is_told(dots, recordings, visit, monkeypatch):
    session = dots()
    tick = session.tick
    monkeypatch.setattr(session, "tick", lambda **given: (time.sleep(0.1), tick(**given)))
    with serving(session, recordings, rate=60) as url:
        page = visit(url)
        until(page, "/^[0-9]+ of 60 /.test(document.getElementById('pace').textContent)")
        assert session.late


def test_what_is_chosen_is_not_cut(dots, recordings, visit):
    session = dots()
    session.branch()
    session.drive(1, "random")
    with serving(session, recordings) as url:
        page = visit(url, viewport={"width": 1280, "height": 800})
        until(page, "window.play && play.drawn > 3")
        select = page.locator(".panel select").nth(1)
        natural = "select => { const copy = select.cloneNode(true); copy.value = select.value; copy.style.cssText = "
        natural += "'position: fixed; width: max-content'; select.parentElement.append(copy); "
        natural += "const width = copy.offsetWidth; copy.remove(); return [select.offsetWidth, width]; }"
        shown, needed = select.evaluate(natural)
        assert shown >= needed
        panel = page.locator(".panel").nth(2).bounding_box()
        box = select.bounding_box()
        assert box["x"] + box["width"] <= panel["x"] + panel["width"] + 1


@pytest.mark.slow
def test_the_demo_goes_back_on_both_sides_and_is_recorded(demo, recordings, visit):
    session = Session(*demo)
    with serving(session, recordings) as url:
        page = visit(url)
        until(page, "window.play && play.now && play.now.step > 12")
        pause(page)
        step = page.evaluate("play.now.step")
        page.keyboard.press(",")
        until(page, f"play.now.step === {step - 1}")
        back = pixels(page, 0)
        page.keyboard.press("e")
        until(page, f"play.now.step === {step}")
        assert pixels(page, 0) != back
        assert page.evaluate("play.now.last") == step
        page.keyboard.press("c")
        until(page, "play.now.drawn.every((one, n) => one === play.now.believed[n])")
        page.keyboard.press("s")
        until(page, "document.getElementById('line').textContent.startsWith('saved: ')")
        assert len(list(recordings.glob("*.npz"))) == len(list(recordings.glob("*.gif"))) == 1
        page.click('[data-source="recorded"]')
        until(page, f"play.now.source === 'recorded' && play.now.step === {step} && play.now.paused")


@pytest.mark.slow
def test_picks_by_hand_are_recorded_as_they_were_shown_and_learned_from(demo, recordings, tmp_path, visit):
    demos, shown, rewards = tmp_path / "demos", [], []
    session = Session(*demo, seed=4, demos=lambda: NpzWriter(demos, {"fps": 20}))
    with serving(session, recordings, rate=20) as url:
        page = visit(url)
        until(page, "window.play && play.now")
        person = runpy.run_path(str(TEACH))["Person"](page)
        person.sit_down()
        for count in (1, 2):
            assert person.pick(), person.end()
            assert page.evaluate("play.now.taught") == [count, count]
            shown.append(np.stack(person.shown))
            rewards.append(page.evaluate("strips.numbers.map(({ reward }) => reward[0])"))
    episodes = list(read(demos))
    assert len(episodes) == 2
    for episode, frames, reward in zip(episodes, shown, rewards, strict=True):
        np.testing.assert_array_equal(episode.obs["pixels/front"], frames)
        np.testing.assert_allclose(episode.reward, reward, rtol=1e-6)
        assert episode.reward.sum() > 10  # most of the task's 14.75
        assert episode.terminal
        assert episode.info["success"]
        assert set(np.unique(episode.action)) <= {-1.0, -0.25, 0.0, 1.0}, "keys, and the gripper's slider"
    job = ("exp=dreamer_v3", "env=franka_pick", "profile=cpu", "dry_run=true", "compile=off", "eval.every=null")
    small = ("agent.size={deter:64,hidden:16,classes:4,depth:2,units:16}", "video_every=null")
    data = (f"data.path={demos}", "data.fraction=0.25", "env.action_repeat=1", f"run_dir={tmp_path / 'run'}")
    with sheeplike.init(*job, *small, *data) as experiment:
        experiment.iterate()
        assert experiment.finished
        learned = experiment.agent.recorded.storage["pixels/front"].flatten(0, -4)
        assert {frame.tobytes() for frame in np.concatenate(shown)} <= {frame.tobytes() for frame in learned.numpy()}
