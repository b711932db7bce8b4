"""`nanovllm view --gif story.gif`: write the page's story, or some of its steps, as an animated GIF.

A headless browser opens the page. Each frame of the GIF is a screenshot of the page's story and pool.
"""

import io
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image
    from playwright.sync_api import FloatRect, Page

WIDTH = 920  # CSS pixels
LOOK_MS = 3500  # how long a moment is shown
STEP_MS = 900  # how long a step is shown
MOVING_MS = 1800  # a little longer than the animation (`Motion` of viewer/story.js)
MOVING_PICTURES = 6
NUM_COLORS = 64


def make_gif(page_text: str, steps: list[int] | None = None) -> bytes:
    """Return a GIF of `steps`, or of the first recording's story. Raises ValueError without the extra `browser`."""
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


def colors_of(drawn: "list[Image]") -> "Image":
    """Return one palette for all pictures, so that the file stores only what changes from one to the next."""
    small = [one.reduce(4) for one in drawn]
    together = small[0].resize((small[0].width, small[0].height * len(small)))
    for i, one in enumerate(small):
        together.paste(one, (0, i * one.height))
    return together.quantize(NUM_COLORS)


def shots_of_moments(page: "Page") -> Iterator[tuple[bytes, int]]:
    """Yield (PNG, milliseconds to show it) for each moment: the animation's frames, then the state after it."""
    moments = page.locator(".story .moments button:not(.turn)")
    if not moments.count():
        raise ValueError("--gif: this recording has no notable event; choose steps with --steps")
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


def shots_of_steps(page: "Page", steps: list[int]) -> Iterator[tuple[bytes, int]]:
    for step in steps:
        page.evaluate(f"location.hash = 'step={step}'")
        page.wait_for_timeout(100)
        yield shot(page), STEP_MS


def shot(page: "Page") -> bytes:
    """Take a screenshot from the top of the story to the end of the pool, as PNG."""
    story, pool = page.locator(".story").bounding_box(), page.locator(".first").bounding_box()
    assert story is not None
    assert pool is not None
    height = pool["y"] + pool["height"] - story["y"]
    clip: FloatRect = {"x": 0, "y": story["y"] - 6, "width": WIDTH, "height": height + 12}
    return page.screenshot(clip=clip, animations="allow")
