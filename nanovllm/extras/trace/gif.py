"""`nanovllm view --gif story.gif`: the page's story, or some of its steps, as a moving picture.

A browser without a window shows the page, and each picture is one of what it shows: the story, the pool and the step.
"""

import io
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WIDTH = 920  # CSS pixels
LOOK_MS = 3500  # at a moment
STEP_MS = 900  # at a step
MOVING_MS = 1800  # a little longer than what moves (`Motion` of viewer/story.js)
MOVING_PICTURES = 6
NUM_COLORS = 64


def make_gif(page_text: str, steps: list[int] | None = None) -> bytes:
    """The moments of the first recording's story, or the steps. Raises ValueError without the extra `browser`."""
    try:
        from PIL import Image
        from playwright.sync_api import Error, sync_playwright
    except ImportError as error:
        raise ValueError(f"--gif needs the package {error.name}: pip install 'nanovllm[browser]' brings it") from None
    with tempfile.TemporaryDirectory(prefix="nanovllm-") as folder, sync_playwright() as playwright:
        html = Path(folder) / "run.html"
        html.write_text(page_text, encoding="utf-8")
        try:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        except Error as error:
            raise ValueError(f"--gif needs the browser Chromium: {error.message.splitlines()[0]}") from None
        page = browser.new_page(viewport={"width": WIDTH, "height": 1200}, color_scheme="light", locale="en-US")
        page.goto(html.as_uri())
        page.wait_for_selector("body[data-ready]")
        shots = list(shots_of_steps(page, steps) if steps else shots_of_moments(page))
        browser.close()
    drawn = [Image.open(io.BytesIO(shot)).convert("RGB") for shot, _ in shots]
    palette = colors_of(drawn)
    pictures = [one.quantize(palette=palette, dither=Image.Dither.NONE) for one in drawn]
    durations, file = [ms for _, ms in shots], io.BytesIO()
    pictures[0].save(file, "GIF", save_all=True, append_images=pictures[1:], duration=durations, loop=0, optimize=True)
    return file.getvalue()


def colors_of(drawn: list[Any]) -> Any:
    """A palette for all pictures: then a file holds only what changes from one to the next."""
    small = [one.reduce(4) for one in drawn]
    together = small[0].resize((small[0].width, small[0].height * len(small)))
    for i, one in enumerate(small):
        together.paste(one, (0, i * one.height))
    return together.quantize(NUM_COLORS)


def shots_of_moments(page: Any) -> Iterator[tuple[bytes, int]]:
    """(PNG, ms that it stays) of each moment: what moves, and then what has changed."""
    moments = page.locator(".story .moments button:not(.turn)")
    if not moments.count():
        raise ValueError("--gif: nothing of note happens in this recording; choose steps by --steps")
    for i in range(moments.count()):
        moments.nth(i).click()
        moments.nth(i).and_(page.locator("[aria-pressed=true]")).wait_for()
        page.mouse.move(0, 0)
        moving = page.locator(".motion i").count()
        for animated in range(MOVING_PICTURES if moving else 0):
            at = MOVING_MS * animated // MOVING_PICTURES
            page.evaluate(f"document.getAnimations().forEach((one) => {{ one.pause(); one.currentTime = {at}; }})")
            yield shot(page), MOVING_MS // MOVING_PICTURES
        page.evaluate("document.getAnimations().forEach((one) => one.finish())")
        yield shot(page), LOOK_MS


def shots_of_steps(page: Any, steps: list[int]) -> Iterator[tuple[bytes, int]]:
    for step in steps:
        page.evaluate(f"location.hash = 'step={step}'")
        page.wait_for_timeout(100)
        yield shot(page), STEP_MS


def shot(page: Any) -> bytes:
    """From the story to the end of the pool."""
    story, pool = page.locator(".story").bounding_box(), page.locator(".first").bounding_box()
    height = pool["y"] + pool["height"] - story["y"]
    clip = {"x": 0, "y": story["y"] - 6, "width": WIDTH, "height": height + 12}
    picture: bytes = page.screenshot(clip=clip, animations="allow")
    return picture
