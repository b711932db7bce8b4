"""The page in Chromium asks "what if": both runs, the shell's figures, both languages, keys, and a narrow screen."""

import json
import re

import pytest

from nanovllm_extras.trace.view import STORY
from nanovllm_extras.what_if.answer import answer
from nanovllm_extras.what_if.command import main
from nanovllm_extras.what_if.recording_file import read
from nanovllm_extras.what_if.report import LINES
from tests.extras.trace.test_page import Recorder, chromium, is_local, show  # noqa: F401 (fixtures)
from tests.extras.trace.test_page_accessibility import ALL_SHOWN, SMALL
from tests.extras.what_if.test_what_if_server import RECORDING, serve

pytestmark = pytest.mark.browser

PREEMPTION = RECORDING.with_name("preemption.jsonl")  # the error of its clock is above 20 %


class OfServer(Recorder):
    """What the page complains about, and what it asks another server for."""

    def __init__(self, server):
        super().__init__()
        self.own = server.url

    def watch(self, page):
        page.on("console", lambda message: self.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.append(str(error)))
        page.on("request", lambda one: None if is_local(one.url) or one.url.startswith(self.own) else self.append(one))


@pytest.fixture
def visit(chromium):  # noqa: F811
    """Opens the page that the server of a recording shows."""
    servers, troubles = [], []

    def open_page(path, at="#lang=en&theme=light", width=1440, **options):
        server = serve(path, **options)
        servers.append(server)
        page = chromium.new_page(viewport={"width": width, "height": 900}, locale="en-US")
        page.set_default_timeout(90_000)
        troubles.append(OfServer(here := server.__enter__()))
        troubles[-1].watch(page)
        page.goto(here.url + at)
        page.wait_for_selector("body[data-ready]")
        return page

    yield open_page
    for server in servers:
        server.__exit__(None, None, None)
    assert [*map(list, troubles)] == [[] for _ in servers]


def field(page, name):
    return page.locator(f".what-if input[name={name}]")


def shown_figures(page):
    """Return {title: texts of the columns} of the table, once it is there."""
    page.locator(".what-if[aria-busy=false] table.figures").wait_for()
    rows = page.locator("table.figures tbody tr").all()
    return {row.locator("th").inner_text(): row.locator("td").all_inner_texts() for row in rows}


def names(page):
    return page.evaluate("nanovllm.runs && [...document.querySelectorAll('.recording')].map((one) => one.ariaLabel)")


def json_of(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_another_option_shows_the_shells_figures_and_both_runs(visit, capsys):
    page = visit(RECORDING)
    assert names(page) == ["fragmentation.jsonl"]
    field(page, "block_size").fill("32")
    page.keyboard.press("Enter")
    figures = shown_figures(page)
    found = json_of(capsys, RECORDING, "--block-size", "32")
    columns = [found["recorded"], *[one["figures"] for one in found["runs"]]]
    assert figures == {title: [write(column[name]) for column in columns] for name, (title, write) in LINES.items()}
    assert names(page) == ["fragmentation.jsonl", "block_size 32, num_blocks 16"]
    assert field(page, "num_blocks").input_value() == "16", "the pool keeps its memory"
    second = page.get_by_role("group", name="block_size 32, num_blocks 16")
    page.keyboard.press("Escape")
    page.keyboard.press("End")
    page.locator("#step", has_text="The end").wait_for()
    text = answer(*read(RECORDING), {"options": {"block_size": 32}})["recording"]
    steps = sum(event[0] == "schedule" for line in text.splitlines()[1:] for event in json.loads(line)["events"])
    assert second.locator(".step h2").inner_text() == f"This step: The end, after step {steps}"
    assert second.locator(".timeline .labels button").count() == 10
    assert page.locator(".invariants .bad").count() == 0
    for card in ("pool", "timeline", "counters"):
        assert page.locator(f".{card}").count() == 2
    field(page, "num_blocks").fill("12")  # on top of the other change
    page.keyboard.press("Enter")
    page.get_by_role("group", name="block_size 32, num_blocks 12").wait_for()
    page.get_by_role("button", name="The recorded options").click()
    page.locator("table.figures").wait_for(state="detached")
    assert names(page) == ["fragmentation.jsonl"]


def test_times_are_not_shown_if_the_clock_is_wrong(visit, capsys):
    page = visit(PREEMPTION)
    field(page, "num_blocks").fill("11")
    page.keyboard.press("Enter")
    figures = shown_figures(page)
    clock = json_of(capsys, PREEMPTION, "--num-blocks", "11")["clock"]
    said = f"not shown, because the clock's error is {100 * clock['mean_error']:.1f} % (more than 20 %)"
    assert figures["TTFT p50"][1:] == [said]
    assert [len(figures[name]) for name in ("TTFT p99", "TPOT p50", "TPOT p99", "time")] == [1] * 4
    second = page.get_by_role("group", name="num_blocks 11")
    assert second.locator(".timeline .labels small").all_inner_texts() == ["– · –"] * 3
    assert second.locator(".times").count() == 0


def test_keys_and_a_narrow_screen_in_chinese(visit):
    page = visit(STORY, at="#lang=zh&theme=dark&step=3", width=360)
    page.locator(".what-if summary").focus()
    page.keyboard.press("Enter")  # it is closed on a narrow screen
    page.keyboard.press("Tab")
    slider = page.get_by_role("slider", name="block_size：一块有多少个 token")
    assert slider.evaluate("(one) => one === document.activeElement")
    page.keyboard.press("ArrowRight")
    assert page.locator("#step").inner_text().startswith("第 3 步"), "arrows move the slider, and no step"
    page.get_by_role("group", name="block_size 8, num_blocks 10").wait_for()
    assert shown_figures(page).keys() >= {"步数", "块池的浪费", "前缀缓存命中率"}
    for _ in range(8):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.name") == "enable_prefix_caching":
            break
    page.keyboard.press(" ")
    page.get_by_role("group", name="block_size 8, enable_prefix_caching off, num_blocks 10").wait_for()
    assert shown_figures(page)["前缀缓存命中率"][-1] == "0.0 %"
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the recorded options
    page.locator("table.figures").wait_for(state="detached")
    assert not re.search("[A-Za-z]{4,}", page.locator(".what-if p").first.inner_text().replace("token", ""))


@pytest.mark.parametrize(("width", "lang"), [(360, "zh"), (1440, "en")])
def test_axe_finds_nothing_in_the_panel(visit, width, lang):
    from axe_playwright_python.sync_playwright import Axe

    page = visit(PREEMPTION, at=f"#lang={lang}&theme=light", width=width)
    if width < 700:
        page.locator(".what-if summary").click()
    field(page, "num_blocks").fill("11")
    page.keyboard.press("Enter")
    shown_figures(page)
    page.add_style_tag(content=ALL_SHOWN)
    for theme in ("light", "dark"):
        page.locator(f":root[data-theme={theme}]").wait_for()
        found = Axe().run(page, context=".what-if", options={"rules": {"target-size": {"enabled": True}}}).response
        assert len(found["passes"]) > 10
        assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found["violations"]] == []
        assert page.evaluate(SMALL) == []
        page.locator("#theme").click()


def test_a_bad_value_and_a_run_that_takes_too_long_give_the_reason(visit):
    page = visit(RECORDING)
    field(page, "block_size").fill("16")
    page.keyboard.press("Enter")
    shown_figures(page)
    for value, message in (
        ("0", "num_blocks must be an integer >= 1 and <= 10000000, got 0"),
        ("2.5", "num_blocks must be an integer >= 1 and <= 10000000, got 2.5"),
    ):
        field(page, "num_blocks").fill(value)
        page.keyboard.press("Enter")
        page.locator(".what-if [role=alert]", has_text=message).wait_for()
        assert names(page) == ["fragmentation.jsonl"], "no run of other options is shown"
    field(page, "num_blocks").fill("")  # as without a change
    page.keyboard.press("Enter")
    page.locator("table.figures").wait_for()
    assert page.locator(".what-if [role=alert]").count() == 0
    page = visit(RECORDING, max_seconds=0.0)
    field(page, "max_num_seqs").fill("3")
    page.keyboard.press("Enter")
    page.locator(".what-if [role=alert]", has_text="it took too long").wait_for()


def test_only_the_newest_question_is_shown_and_closing_the_second_run_ends_it(visit):
    page = visit(RECORDING)
    for value in (8, 16, 32):
        field(page, "block_size").fill(str(value))
        page.keyboard.press("Enter")
    page.get_by_role("group", name="block_size 32, num_blocks 16").wait_for()
    page.get_by_role("button", name="Close the second").click()
    page.locator("table.figures").wait_for(state="detached")
    assert field(page, "block_size").input_value() == "4"
    assert names(page) == ["fragmentation.jsonl"]


def test_a_page_of_one_file_has_no_panel_unless_a_script_answers(show, chromium, tmp_path):  # noqa: F811
    from nanovllm_extras.trace.page import make_page
    from nanovllm_extras.trace.recording import read_recording

    assert show(read_recording(STORY)).locator(".what-if").count() == 0
    asked = answer(*read(STORY), {"options": {"num_blocks": 28}})
    page = chromium.new_page(locale="en-US")
    page.set_default_timeout(90_000)
    page.add_init_script(
        "window.askWhatIf = async (request, run, { progress }) => {"
        " progress('half of it'); window.question = [request, run.name, run.recording.length];"
        f" await new Promise((done) => {{ window.go = done; }}); return {json.dumps(asked)}; }};"
    )
    (tmp_path / "story.html").write_text(make_page([STORY]), encoding="utf-8")
    page.goto((tmp_path / "story.html").as_uri() + "#lang=en")
    page.wait_for_selector("body[data-ready]")
    field(page, "num_blocks").fill("28")
    page.keyboard.press("Enter")
    page.locator(".what-if [role=status]", has_text="half of it").wait_for()
    text = STORY.read_text(encoding="utf-8")
    assert page.evaluate("question") == [{"options": {"num_blocks": 28}}, "story.jsonl", len(text)]
    page.evaluate("go()")
    assert shown_figures(page)["preemptions"][1:] == ["2", "0"]
    page.close()
