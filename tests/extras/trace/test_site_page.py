"""The site's page in Chromium: its figures are the shell's, for edited schedulers and one's own requests as well."""

import json
import re

import pytest

from nanovllm_extras.what_if import command
from nanovllm_extras.what_if.comparison import compare
from nanovllm_extras.what_if.recorded_run import read_run
from tests.extras.trace.axe_themes import check_both_themes
from tests.extras.trace.site_page import PATHS, serve_site
from tests.extras.trace.test_page import chromium  # noqa: F401 (a fixture)

pytestmark = pytest.mark.browser

OPTIONS = [
    {"block_size": 1},
    {"block_size": 8},
    {"block_size": 16, "num_blocks": 40},
    {"num_blocks": 30},
    {"num_blocks": 4000},
    {"max_num_batched_tokens": 8},
    {"max_num_seqs": 1},
    {"max_num_seqs": 2, "max_num_batched_tokens": 20},
    {"enable_prefix_caching": False},
    {"enable_prefix_caching": True, "block_size": 2},
]
LAST_FIRST = """def schedule(self):
    self.waiting.sort(key=lambda seq: seq.num_tokens)
    return super().schedule()
"""
ASK = """async (requests) => {
  const client = nanovllm.client, context = { t: (word, values) => `${word} ${JSON.stringify(values)}`, progress() {} };
  const answers = [];
  for (const [i, request] of requests) answers.push(await client.ask(request, nanovllm.choices[i], context));
  return answers;
}"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with serve_site(tmp_path_factory.mktemp("site")) as url:
        yield url


@pytest.fixture(scope="module")
def opened(chromium, address):  # noqa: F811
    """A page whose Pyodide stays loaded. The tests that need another state open a page of their own."""
    page = chromium.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light", locale="en-US")
    page.set_default_timeout(90_000)
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    yield page
    page.close()


@pytest.fixture
def page(opened):
    opened.set_viewport_size({"width": 1280, "height": 900})
    for name in ("Three requests", "Ten requests"):  # another recording forgets what was asked about the last one
        opened.get_by_role("button", name=name).click()
    opened.locator("h1", has_text="fragmentation.jsonl").wait_for()
    return opened


def shell(capsys, path, options):
    """What `nanovllm what-if --json` prints."""
    given = {**options}
    if "enable_prefix_caching" in given:
        given["prefix_caching"] = "on" if given.pop("enable_prefix_caching") else "off"
    arguments = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert command.main([str(path), *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_pyodide_is_loaded_with_the_first_question_only(chromium, address):  # noqa: F811
    page = chromium.new_page(locale="en-US")
    page.set_default_timeout(90_000)
    asked = []
    page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    page.get_by_role("button", name="32 requests").click()
    page.get_by_role("button", name="Play").click()
    page.locator("#step", has_text=re.compile("Step ([3-9]|[1-5][0-9]) of")).wait_for()
    assert asked == ["what_if.html"], "recordings play without it"
    page.evaluate("""() => {
      window.words = [];
      const note = () => words.push(document.querySelector(".what-if [role=status]")?.innerText ?? "");
      new MutationObserver(note).observe(document, { subtree: true, childList: true, characterData: true });
    }""")
    page.locator("input[type=number][name=block_size]").fill("8")
    page.keyboard.press("Tab")
    page.locator(".figures").wait_for()
    words = set(page.evaluate("words"))
    shares = [int(share) for word in words for share in re.findall(r"loaded: (\d+) % of 12 MB", word)]
    assert len(set(shares)) > 1, words
    assert {"pyodide.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "what_if_files.json"} <= set(asked)
    assert not [name for name in asked if name.endswith(".whl")]
    page.close()


def test_interpreter_that_cannot_be_loaded_gives_the_reason_and_can_be_loaded_later(chromium, address):  # noqa: F811
    """Pyodide waits for its wasm file for ever. Without it, the page must not."""
    page = chromium.new_page(locale="en-US")
    page.set_default_timeout(15_000)
    page.goto(address)
    page.context.route("**/*.wasm", lambda route: route.fulfill(status=503, body="busy"))
    page.locator("input[type=number][name=block_size]").fill("8")
    page.keyboard.press("Tab")
    page.get_by_role("alert").filter(has_text="pyodide.asm.wasm: 503").wait_for()
    page.context.unroute("**/*.wasm")
    page.locator("input[type=number][name=block_size]").fill("16")
    page.keyboard.press("Tab")
    page.locator(".figures").wait_for()
    page.close()


def test_figures_are_the_shells_for_each_recording_and_ten_sets_of_options(opened, capsys):
    pairs = [(i, options) for i in range(len(PATHS)) for options in OPTIONS]
    answers = opened.evaluate(ASK, [[i, {"options": options}] for i, options in pairs])
    for (i, options), answer in zip(pairs, answers, strict=True):
        assert answer.get("figures") == shell(capsys, PATHS[i], options), (PATHS[i].name, options, answer)


def test_simulated_recording_is_that_of_the_shell_byte_by_byte(opened, tmp_path):
    """Hashes of blocks included: the plain XXH3 and the library's are the same."""
    [answer] = opened.evaluate(ASK, [[2, {"options": {"block_size": 8}}]])
    path = tmp_path / "simulated.jsonl"
    assert command.main([str(PATHS[2]), "--block-size", "8", "-o", str(path)]) == 0
    assert answer["recording"] == path.read_text(encoding="utf-8")
    assert '"register"' in answer["recording"]


def test_edited_schedule_gives_the_figures_of_the_same_class_here(opened, tmp_path, capsys):
    [answer] = opened.evaluate(ASK, [[2, {"options": {"max_num_seqs": 2}, "schedule": LAST_FIRST}]])
    (tmp_path / "own.py").write_text(
        "from nanovllm.scheduler import Scheduler\n\n\nclass EditedScheduler(Scheduler):\n"
        + "".join(f"    {line}\n" for line in LAST_FIRST.splitlines())
        + "\n\nscheduler_cls = EditedScheduler\n"
    )
    assert command.main([str(PATHS[2]), "--max-num-seqs", "2", "--extension", str(tmp_path / "own.py"), "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    assert answer["figures"]["runs"] == expected["runs"]
    own, edited = (run["figures"] for run in expected["runs"])
    assert own != edited, "the order matters here"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("budget -= num_new_tokens", "budget -= nothing", "Line 20: NameError: name 'nothing' is not defined"),
        ("if step.chunks:", "if step.chunks", "Line 29: SyntaxError: expected ':'"),
        ("    return step", "    exit(3)", "Line 31: SystemExit: 3"),
        ("    return step", "    return None", "schedule must return a Step, got None"),
        ("def schedule", "def schedules", "the text must define the method schedule(self), which returns a Step"),
    ],
)
def test_error_of_an_edited_schedule_is_shown_with_its_line(page, old, new, message):
    editor = page.locator("textarea[name=schedule]")
    if not editor.is_visible():
        page.get_by_text("Edit the scheduler").click()
    editor.fill(editor.input_value().replace(old, new))
    page.get_by_role("button", name="Run this scheduler").click()
    page.get_by_role("alert").filter(has_text=message).wait_for()
    if message.startswith("Line"):
        selected = editor.evaluate("(field) => field.value.slice(field.selectionStart, field.selectionEnd)")
        assert new in selected


def test_endless_schedule_can_be_stopped_and_another_one_runs(page):
    if not page.locator("textarea[name=schedule]").is_visible():
        page.get_by_text("Edit the scheduler").click()
    page.locator("textarea[name=schedule]").fill("def schedule(self):\n    while True:\n        pass\n")
    page.get_by_role("button", name="Run this scheduler").click()
    page.wait_for_timeout(700)
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("alert").filter(has_text="Stopped.").wait_for()
    page.locator("textarea[name=schedule]").fill(LAST_FIRST)
    page.get_by_role("button", name="Run this scheduler").click()
    page.locator(".figures th", has_text="edited schedule").wait_for()


def test_own_requests_are_recorded_and_asked_about(page):
    """By keyboard only. The figures of the page's two columns follow from the recording by another program."""
    page.get_by_text("Your own requests").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.type("300")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.type("0.25")
    page.locator("[name=n]").nth(2).fill("3")
    page.keyboard.press("Enter")
    page.locator("h1", has_text="Your own requests 1").wait_for()
    run = page.evaluate("nanovllm.runs[0].recording")
    lines = [json.loads(line) for line in run.splitlines()]
    added = [event for line in lines for event in line.get("events", []) if event[0] == "add"]
    assert [event[3]["num_prompt_tokens"] for event in added] == [100, 40, 200, 300]
    assert added[-1][2] == 250_000
    assert sum(event[0] == "fork" for line in lines for event in line.get("events", [])) == 2
    page.locator("input[type=number][name=block_size]").fill("4")
    page.keyboard.press("Tab")
    page.locator(".figures").wait_for()
    [recorded, _, simulated] = page.locator(".figures tr", has_text="waste").locator("td").all_inner_texts()
    expected = compare(read_run(lines), [{"block_size": 4}])
    assert recorded == f"{100 * expected['recorded']['waste']:.1f} %"
    assert simulated == f"{100 * expected['runs'][1]['figures']['waste']:.1f} %"
    page.locator("[name=prompt]").first.fill("60000")
    page.get_by_role("button", name="Run these requests").click()
    page.get_by_role("alert").filter(has_text="request 1: prompt must be").wait_for()
    page.locator("[name=prompt]").first.fill("300")


def test_link_leads_to_the_chosen_recording(chromium, address):  # noqa: F811
    page = chromium.new_page(locale="en-US")
    page.goto(address)
    page.get_by_role("button", name="32 requests").click()
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**#step=2&recording=beyond.jsonl")
    page.reload()
    page.locator("h1", has_text="beyond.jsonl").wait_for()
    page.locator("#step", has_text="Step 2 of").wait_for()
    page.close()


def test_page_fits_a_telephone_in_chinese(chromium, address):  # noqa: F811
    page = chromium.new_page(
        viewport={"width": 360, "height": 740}, has_touch=True, color_scheme="light", locale="zh-CN"
    )
    page.set_default_timeout(90_000)
    page.goto(address)
    page.get_by_text("如果换一组选项").tap()
    for words in ("自己的请求", "修改调度器"):
        page.get_by_text(words, exact=True).tap()
    page.locator("input[type=number][name=block_size]").fill("32")
    page.locator("input[type=number][name=num_blocks]").tap()
    page.locator(".figures").wait_for()
    texts = page.locator(".requests, .what-if > details > :is(summary, p), .schedule > p").all_inner_texts()
    words = re.sub(r"schedule|token|nanovllm/scheduler.py|TB/s|GPU", "", " ".join(texts))
    assert not re.search("[A-Za-z]{3,}", words), words
    page.locator("h1").tap()  # a letter typed in a field is text, not a key of the page
    check_both_themes(page, 360)
    page.close()
