"""The page in Chromium for readers who touch it, or hear it: axe-core finds nothing, targets are large enough."""

import copy
import json

import pytest

from tests.extras.trace.test_check import LINES, set_field
from tests.extras.trace.test_live_page import ask, stage  # noqa: F401 (a fixture)
from tests.extras.trace.test_page import chromium, settle, show  # noqa: F401 (fixtures)

pytestmark = pytest.mark.browser

ALL_SHOWN = ".card, .scroll { content-visibility: visible !important; }"  # axe passes over what is not drawn yet
SMALL = """() => [...document.querySelectorAll("button, input, label.button, [tabindex='0']")]
  .filter((one) => !one.matches(".hidden"))
  .map((one) => [one.outerHTML.slice(0, 90), one.getBoundingClientRect()])
  .filter(([, box]) => box.width && (box.width < 24 || box.height < 24))
  .map(([html, box]) => `${html} ${box.width} x ${box.height}`)"""


def contradicted():
    lines = copy.deepcopy(LINES)
    set_field("schedule", 7, 7)(lines)
    return lines


@pytest.mark.parametrize(("width", "lang"), [(390, "zh"), (1440, "en")])
def test_axe_finds_nothing(show, width, lang):  # noqa: F811
    from axe_playwright_python.sync_playwright import Axe

    page = show(LINES, contradicted(), at=f"#step=4&seq=2&block=1&lang={lang}&theme=light", width=width)
    page.add_style_tag(content=ALL_SHOWN)
    settle(page)  # what follows the scrubbing
    options = {"rules": {"target-size": {"enabled": True}}}
    for theme in ("light", "dark", "light"):
        page.locator(f":root[data-theme={theme}]").wait_for()
        found = Axe().run(page, options=options).response
        assert len(found["passes"]) > 30
        wrong = found["violations"] + [one for one in found["incomplete"] if one["id"] != "color-contrast"]
        assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in wrong] == []
        page.keyboard.press("d")
        if theme == "dark":
            page.locator(".events .source").first.click()
            page.get_by_role("dialog").wait_for()


@pytest.mark.parametrize("width", [390, 1440])
def test_axe_finds_nothing_on_the_live_page(stage, width):  # noqa: F811
    from axe_playwright_python.sync_playwright import Axe

    stage, page = stage
    page.set_viewport_size({"width": width, "height": 900})
    ask(page, "Hello?")
    page.locator(".messages .assistant", has_text="Yes.").wait_for()
    stage.answer = (400, json.dumps({"error": {"message": "too long"}}))
    ask(page, "And now?")
    page.locator(".chat [role=alert]", has_text="too long").wait_for()
    page.add_style_tag(content=ALL_SHOWN)
    for theme in ("light", "dark"):
        page.locator(f":root[data-theme={theme}]").wait_for()
        found = Axe().run(page, options={"rules": {"target-size": {"enabled": True}}}).response
        wrong = found["violations"] + [one for one in found["incomplete"] if one["id"] != "color-contrast"]
        assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in wrong] == []
        page.locator("#theme").click()


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_on_a_phone_targets_are_large_and_the_header_leaves_room(show, lang):  # noqa: F811
    page = show(LINES, contradicted(), at=f"#step=4&seq=2&block=1&lang={lang}", width=390)
    page.add_style_tag(content=ALL_SHOWN)
    settle(page)
    assert page.evaluate(SMALL) == []
    page.evaluate(
        "document.querySelector('h1 small').textContent = 'a_very_long_name_of_a_recording.jsonl | '.repeat(4)"
    )
    assert page.locator("header").bounding_box()["height"] <= 844 / 4
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_screen_readers_hear_the_step_and_the_chosen_block(show):  # noqa: F811
    page = show(LINES, at="#step=4")
    last = page.evaluate("nanovllm.runs[0].lastFrame")
    slider = page.get_by_role("slider")
    assert slider.get_attribute("aria-valuetext") == f"Step 4 of {last}"
    page.keyboard.press("End")
    page.locator(f"[aria-valuetext='The end, after step {last}']").wait_for()
    page.keyboard.press("Home")
    page.locator(f"[aria-valuetext='Step 1 of {last}']").wait_for()
    page.locator(".pool canvas").first.focus()
    heard = page.locator(".pool [aria-live]")
    assert heard.inner_text() == ""
    page.keyboard.press("ArrowRight")
    heard.filter(has_text="Block 1. seq-0, seq-1.0, seq-1.1. 4 of 4 slots hold tokens").wait_for()
    for block in range(2, 9):
        page.keyboard.press("ArrowRight")
        heard.filter(has_text=f"Block {block}. ").wait_for()
    heard.filter(has_text="Block 8. free; handed out before it: 2. holds nothing").wait_for()
    page.locator("#language").click()
    heard.filter(has_text="块 8. 空闲").wait_for()
