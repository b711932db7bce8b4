"""The page in Chromium when something is wrong: a corrupt file, a part that cannot be drawn, a failed check."""

import copy
import json

import pytest

from tests.extras.trace.test_check import CORRUPT, LINES, set_field
from tests.extras.trace.test_page import chromium, settle, show  # noqa: F401 (fixtures)

pytestmark = pytest.mark.browser


def changed(change):
    lines = copy.deepcopy(LINES)
    change(lines)
    return lines


def alerts(page):
    return page.locator("[role=alert]").all_inner_texts()


def open_second(page, text, name="b.jsonl"):
    file = {"name": name, "mimeType": "text/plain", "buffer": text.encode()}
    page.set_input_files("input[type=file]", file)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("2e9 blocks", "cannot be replayed: line 1: num_blocks must be from 1 to 10000000, got 2000000000"),
        ("events null", "cannot be replayed: line 2: line.events is not iterable"),
        ("unknown sequence", "cannot be replayed: line 2: "),
        ("unknown event", "1 of 5 checks have failed. step 1: unknown event evict"),
        ("long chunk", "cannot be shown here: "),
    ],
)
def test_page_of_a_corrupt_recording_names_it_and_the_reason(show, name, message):  # noqa: F811
    """The page is made without the check of `nanovllm view`."""
    page = show(changed(CORRUPT[name][0]))
    assert any(one.startswith("a.jsonl") and message in one for one in alerts(page)), alerts(page)
    page.locator("#language").click()
    page.locator("header", has_text="English").wait_for()
    assert any("无法" in one or "未通过" in one for one in alerts(page)), "and in Chinese"


def test_step_that_cannot_be_drawn_says_so_and_the_others_are_drawn(show):  # noqa: F811
    page = show(changed(set_field("finish", 2, "sleepy")))
    page.keyboard.press("End")
    before = page.locator(".pool")
    failed = page.get_by_role("alert").filter(has_text="a.jsonl cannot be shown here: no words for reason.sleepy")
    steps = []
    for _ in range(page.evaluate("nanovllm.runs[0].frames.length")):
        steps.append((before.count(), failed.count()))
        page.keyboard.press("ArrowLeft")
        settle(page)
    assert set(steps) == {(1, 0), (0, 1)}
    assert steps.count((0, 1)) == 1, "the step in which the sequence ends"


def test_corrupt_recording_leaves_the_other_one(show):  # noqa: F811
    page = show(changed(CORRUPT["events null"][0]), LINES)
    assert [one.split(" ")[0] for one in alerts(page)] == ["a.jsonl"]
    assert page.locator("h1 small").inner_text() == "b.jsonl"
    assert page.locator(".pool").count() == 1
    open_second(page, "{}\n", "c.jsonl")
    page.get_by_role("alert").filter(has_text="c.jsonl is not a recording, or cannot be replayed: line 1: ").wait_for()
    assert len(alerts(page)) == 1
    open_second(page, "".join(json.dumps(line) + "\n" for line in LINES))
    page.get_by_role("heading", name="b.jsonl (2)", exact=True).wait_for()
    assert alerts(page) == []


def test_failed_check_is_a_banner_at_the_top_that_leads_to_the_checks(show):  # noqa: F811
    page = show(LINES)
    assert alerts(page) == []
    page = show(LINES, changed(set_field("schedule", 7, 7)))
    [banner] = page.get_by_role("alert").all()
    assert banner.inner_text().startswith("b.jsonl: 1 of 5 checks have failed.")
    assert "step 1: 3 blocks are free, the engine says 7 Show the checks" in banner.inner_text()
    header, box = page.locator("header").bounding_box(), banner.bounding_box()
    assert 0 <= box["y"] - header["y"] - header["height"] < 20, "below the header, above all else"
    banner.get_by_role("button").click()
    assert page.evaluate("document.activeElement.id") == "checks-b.jsonl"
    checks = page.locator(".invariants").nth(1).bounding_box()
    assert 0 < checks["y"] < 900


def test_recording_that_was_cut_opens_with_a_note(show):  # noqa: F811
    page = show(LINES)
    assert page.get_by_role("status").filter(has_text="cut").count() == 0
    open_second(page, "".join(json.dumps(line) + "\n" for line in LINES)[:-9])
    page.get_by_role("status").filter(has_text="The last line of b.jsonl was cut").wait_for()
    assert page.locator(".recording").count() == 2
