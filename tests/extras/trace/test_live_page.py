"""`nanovllm serve --ui` in Chromium: type, and watch the blocks fill; with a key and without.

Where a test needs a certain step or refusal, a `Stage` plays the server: the test steps its run, and says what a chat
gets.
"""

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nanovllm_extras.trace.recording import read_recording
from nanovllm_extras.trace.view import STORY
from tests.extras.trace.test_page import Recorder, chromium, known, show, step_of  # noqa: F401 (fixtures)
from tests.extras.trace_traffic import RecordedRun

pytestmark = pytest.mark.browser


@pytest.fixture
def serve():
    """Starts a server with the bundled model, and returns its address."""
    processes = []

    def start(*options):
        command = [
            sys.executable,
            "-m",
            "nanovllm_extras",
            "serve",
            "--ui",
            "--port",
            "0",
            "--num-kv-blocks",
            "256",
            *options,
        ]
        env = {name: value for name, value in os.environ.items() if name != "NANOVLLM_API_KEY"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        processes.append(process)
        said = ""
        for line in process.stdout:
            said += line
            if found := re.search(r"watch it +(\S+)/ui", line):
                return found[1]
        raise AssertionError(said)

    start.processes = processes
    yield start
    for process in processes:
        process.terminate()
        assert process.wait(timeout=90) == 0
        process.stdout.close()


class Stage:
    """The page over a run that goes on when the test says so. `answer` is what the next chats get: (status, body)."""

    def __init__(self, **options):
        import uvicorn
        from fastapi import FastAPI, Request, Response

        from nanovllm_extras.serve.routes.ui import LiveLines, make_router
        from nanovllm_extras.serve.state import get_ready_server

        self.live = LiveLines()
        self.run = RecordedRun(self.live, **options)
        self.answer, self.asked = (200, says("Yes.")), []
        app = FastAPI()
        app.dependency_overrides[get_ready_server] = lambda: None
        app.include_router(make_router(self.live))

        @app.post("/v1/chat/completions")
        async def chat(request: Request):
            self.asked.append([(one["role"], one["content"]) for one in (await request.json())["messages"]])
            status, body = self.answer
            return Response(body, status)

        self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.address = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def steps(self, count):
        for _ in range(count):
            self.run.step()

    def end(self):
        self.live.close()
        self._server.should_exit = True
        self._thread.join()


def says(text):
    """The events of an answer."""
    chunk = json.dumps({"choices": [{"delta": {"content": text}}]})
    return f"data: {chunk}\n\ndata: [DONE]\n\n"


@pytest.fixture
def stage(chromium):  # noqa: F811
    """(stage, page): two of its four requests run, two wait; the page follows."""
    stage = Stage(num_blocks=64, block_size=4, budget=16, max_num_seqs=2)
    for i in range(4):
        stage.run.add([i + 1] * 6, max_tokens=24)
    stage.steps(3)
    page = chromium.new_page(locale="en-US")
    page.set_default_timeout(90_000)
    page.goto(f"{stage.address}/ui#lang=en")
    page.locator("#step").wait_for()
    yield stage, page
    page.close()
    stage.end()


def counts(page):
    """{name: number} of the pool."""
    texts = page.locator(".counts div").evaluate_all("(all) => all.map((one) => one.innerText.split('\\n'))")
    return {name: value for value, name, *_ in texts}


def ask(page, text):
    page.locator("#message").fill(text)
    page.locator("#message").press("Enter")


def test_page_follows_a_chat(chromium, serve):  # noqa: F811
    address, troubles = serve(), Recorder()
    page = chromium.new_page(locale="en-US")
    page.set_default_timeout(90_000)
    page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda one: None if one.url.startswith((address, "data:")) else troubles.append(one.url))
    page.goto(f"{address}/ui#lang=en")
    page.locator(".chat", has_text="connected").wait_for()
    ask(page, "What is a block table?")
    page.locator(".messages .assistant", has_text="block ids").wait_for()
    page.locator(".scrub output").wait_for()
    page.locator(".timeline .labels button").first.wait_for()
    page.get_by_text("Send").wait_for()  # the answer is whole
    page.keyboard.press("Escape")
    page.keyboard.press("End")
    page.locator(".counts div", has_text=re.compile(r"^0\s*owned")).wait_for()
    last = int(re.search(r"The end, after step (\d+)", step_of(page))[1])
    assert last > 5
    assert counts(page)["owned"] == "0"
    page.get_by_label("Previous step").click()
    page.locator("#step", has_text=f"Step {last} of").wait_for()
    assert int(counts(page)["owned"]) > 0, "the blocks of the answer"
    answer = page.locator(".messages .assistant").first.inner_text()
    page.locator(".timeline .labels button").first.click()
    text = "document.querySelector('.sequence .tokens')?.innerText.replaceAll('\\n', '')"
    page.wait_for_function(f"(start) => {text}?.includes(start)", arg=answer[:20])  # the page draws after the click
    assert page.locator(".invariants .bad").count() == 0
    ask(page, "Who are you?")
    page.locator(".messages .assistant").nth(1).filter(has_text=re.compile("[a-z]")).wait_for()
    page.locator(".timeline .labels button").nth(1).wait_for()
    other = chromium.new_page(locale="en-US")  # comes late, and sees the same
    other.set_default_timeout(90_000)
    other.goto(f"{address}/ui#lang=en")
    other.locator(".timeline .labels button").nth(1).wait_for()
    for one in (page, other):
        one.close()
    assert troubles == []


def test_page_that_follows_shows_the_newest_step_and_who_waits(stage):
    stage, page = stage
    for last in (3, 4, 5):
        page.locator("#step", has_text=f"Step {last} of {last}").wait_for()
        page.locator(".step p", has_text="Budget: 2 of 16 tokens").wait_for()
        assert page.locator(".step .rows tr").count() == 2
        assert page.locator(".step .plain li").all_inner_texts() == [
            "seq-2 waits: needs 1 of the places (max_num_seqs), fewer are free", "seq-3 waits behind seq-2"
        ]  # fmt: skip
        assert counts(page)["waiting"] == "2"
        stage.steps(1)
    page.locator("#step", has_text="Step 6 of 6").wait_for()
    stage.run.add([9] * 6, max_tokens=4)
    page.keyboard.press("End")
    page.locator("#step", has_text="The end, after step 6").wait_for()
    assert counts(page)["waiting"] == "2", "an arrival is told with the step after it"
    stage.run.recorder.flush()
    page.locator(".counts div", has_text=re.compile(r"^3\s*waiting")).wait_for()
    assert page.locator(".step .plain li").all_inner_texts() == [
        "seq-2 waits: needs 1 of the places (max_num_seqs), fewer are free",
        *(f"{name} waits behind seq-2" for name in ("seq-3", "seq-4")),
    ]
    stage.run.abort(stage.run.requests[2])
    page.locator(".counts div", has_text=re.compile(r"^2\s*waiting")).wait_for()
    assert page.locator(".step .plain li").all_inner_texts() == [
        "seq-3 waits for the next step", "seq-4 waits for the next step"
    ]  # fmt: skip


def test_whatever_goes_to_a_step_stops_following(stage):
    stage, page = stage
    follow = page.get_by_label("Follow the newest step")
    stage.steps(9)

    def press(key):
        return lambda: page.keyboard.press(key)

    def click_span():
        page.keyboard.press("ArrowDown")
        page.locator(".facts button", has_text="decode").click()

    ways = {
        "left": (press("ArrowLeft"), -1),
        "page back": (press("Shift+ArrowLeft"), -10),
        "home": (press("Home"), "1"),
        "previous of note": (press("p"), "1"),
        "space": (press(" "), 0),
        "slider": (lambda: page.get_by_label("step", exact=True).fill("4"), "5"),
        "button": (lambda: page.get_by_label("Previous step").click(), -1),
        "timeline": (lambda: page.locator(".timeline .plot canvas").click(position={"x": 2, "y": 5}), "1"),
        "span": (click_span, "2"),
        "chart": (lambda: page.locator(".u-over").first.click(position={"x": 5, "y": 20}), "1"),
        "event": (lambda: page.locator(".events button.text").first.click(), 0),
        "highlight": (lambda: page.locator(".highlights li button").first.click(), "1"),
        "address": (lambda: page.evaluate("location.hash = 'step=7'"), "7"),
    }
    for name, (go, place) in ways.items():
        last = stage.run.recorder._num_steps
        page.locator("#step", has_text=f"Step {last} of {last}").wait_for()
        assert follow.is_checked(), name
        go()
        step = int(place) if isinstance(place, str) else last + place
        page.locator("#step", has_text=f"Step {step} of").wait_for()
        stage.steps(1)
        page.locator("#step", has_text=f"Step {step} of {last + 1}").wait_for()
        assert not follow.is_checked(), name
        follow.check()
        page.keyboard.press("Escape")


def test_address_keeps_the_step_only_where_the_page_does_not_follow(stage):
    stage, page = stage
    page.wait_for_url("**/ui#lang=en")
    page.reload()
    stage.steps(1)
    page.locator("#step", has_text="Step 4 of 4").wait_for()
    page.keyboard.press("ArrowLeft")
    page.wait_for_url("**/ui#step=3&lang=en")
    page.reload()
    stage.steps(1)
    page.locator("#step", has_text="Step 3 of 5").wait_for()


def talk(page):
    return page.locator(".messages p").all_inner_texts()


def test_refused_message_is_taken_back_and_the_next_is_answered(stage):
    stage, page = stage
    page.set_viewport_size({"width": 900, "height": 400})
    ask(page, "First?")
    page.locator(".assistant", has_text="Yes.").wait_for()
    for status, said in [(400, "at most 8 tokens fit"), (429, "wait 3 s")]:
        stage.answer = (status, json.dumps({"error": {"message": said}}))
        page.locator("#message").fill("Too long?")
        page.evaluate("document.querySelector('form:has(#message)').requestSubmit(); scrollTo(0, 1e6)")
        alert = page.locator(".chat [role=alert]", has_text=f"Not answered: {status} {said}.")
        alert.wait_for()
        page.wait_for_function("document.querySelector('[role=alert]').getBoundingClientRect().top > 0")
        assert page.locator("#message").input_value() == "Too long?"
        assert talk(page) == ["First?", "Yes."]
    stage.answer = (200, says("No."))
    ask(page, "Second?")
    page.locator(".assistant", has_text="No.").wait_for()
    assert alert.count() == 0
    assert stage.asked[-1] == [("user", "First?"), ("assistant", "Yes."), ("user", "Second?")]
    page.get_by_role("button", name="New chat").click()
    page.locator(".messages p").first.wait_for(state="detached")
    ask(page, "Third?")
    page.locator(".assistant", has_text="No.").wait_for()
    assert stage.asked[-1] == [("user", "Third?")]


def test_reload_keeps_the_conversation(stage):
    stage, page = stage
    ask(page, "First?")
    page.locator(".assistant", has_text="Yes.").wait_for()
    page.locator("#message").fill("Half a")
    page.reload()
    page.locator(".assistant", has_text="Yes.").wait_for()
    assert talk(page) == ["First?", "Yes."]
    page.locator("#message").press("End")
    page.locator("#message").press_sequentially(" question")
    page.locator("#message").press("Enter")
    page.locator(".assistant", has_text="Yes.").nth(1).wait_for()
    assert stage.asked[-1][2:] == [("user", "Half a question")]


def test_server_that_has_ended_is_named_and_the_message_stays(stage):
    stage, page = stage
    page.locator(".chat", has_text="connected. Submits").wait_for()
    assert page.locator("#key").count() == 0, "nobody has asked for it"
    stage.end()
    page.locator(".chat", has_text="not connected: ").wait_for()
    ask(page, "Still there?")
    page.locator(".chat [role=alert]", has_text="Not answered: the server cannot be reached").wait_for()
    assert "Failed to fetch" not in page.locator(".chat").inner_text()
    assert page.locator("#message").input_value() == "Still there?"
    page.locator("#language").click()
    page.locator(".chat [role=alert]", has_text="无法连接服务器").wait_for()


def test_long_ids_have_short_names_and_stand_in_titles(show, known):  # noqa: F811
    lines = json.dumps(known[0])
    ids = [f"chatcmpl-{'0123456789abcdef' * 2}", "cmpl-" + "f" * 32 + "-0", "a" * 128]
    for i, request_id in enumerate(ids):
        lines = lines.replace(f'"seq-{i}"', f'"{request_id}"')
    page = show(json.loads(lines), at="#step=3", width=390)
    page.locator(".timeline .labels b").nth(3).wait_for()
    assert page.locator(".timeline .labels b").all_inner_texts() == ["#1", "#2.0", "#2.1", "#3"]
    titles = [one.get_attribute("title") for one in page.locator(".timeline .labels button").all()]
    assert titles == [ids[0], ids[1], ids[1], ids[2]]
    seen = set()
    for _ in known[1]:
        assert not re.search("[0-9a-f]{20}", page.locator("main").inner_text().replace("\n", " "))
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        for chip in page.locator(".step .seq").all():
            seen.add((chip.inner_text(), chip.get_attribute("title")))
        page.keyboard.press("ArrowRight")
    assert seen == {("#1", ids[0]), ("#2.0", ids[1]), ("#2.1", ids[1]), ("#3", ids[2])}
    event = page.locator(".highlights button", has_text="#2.0").first
    assert event.get_attribute("title") == ids[1]
    page.keyboard.press("ArrowDown")
    page.locator(".sequence h2", has_text="Sequence #1").wait_for()
    assert page.locator(".sequence h2").get_attribute("title") == ids[0]


@pytest.mark.parametrize("trace", [True, False])
def test_example_opens_the_page_of_its_own_run_or_of_an_instructive_one(chromium, tmp_path, trace):  # noqa: F811
    root = Path(__file__).parents[3]
    env = {**os.environ, "BROWSER": "true", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "example.py", "--view", "--max-tokens", "12"]
    command += ["--trace", str(tmp_path / "run.jsonl")] if trace else []
    said = subprocess.run(command, cwd=root, env=env, check=True, capture_output=True, text=True).stdout
    steps = re.search(r"(\d+) steps", said)[1] if trace else len(read_recording(STORY)) - 1
    page = chromium.new_page(locale="en-US")
    page.set_default_timeout(90_000)
    page.goto(Path(re.search(r"(/\S+\.html)", said)[1]).as_uri())
    page.locator("#step", has_text=f"Step 1 of {steps}").wait_for()
    assert page.locator(".timeline .labels button").count() == (6 if trace else 7)
    assert page.locator(".invariants .bad").count() == 0
    page.close()


def test_page_asks_for_the_key(chromium, serve):  # noqa: F811
    address = serve("--api-key", "secret")
    page = chromium.new_page(locale="en-US")
    page.set_default_timeout(90_000)
    page.goto(f"{address}/ui#lang=en")
    page.locator(".chat", has_text="not connected: 401").wait_for()
    page.locator("#key").fill("secret")
    page.locator("#key").press("Tab")
    page.locator(".chat p", has_text=re.compile("^connected")).wait_for()
    assert page.locator("#key").count() == 0
    ask(page, "What is a block table?")
    page.locator(".messages .assistant", has_text="block ids").wait_for()
    page.locator("#step").wait_for()
    page.close()


def test_three_pages_chat_reload_and_are_played_with_until_the_server_ends(chromium, serve):  # noqa: F811
    """Whatever is pressed and clicked at any time, nothing is complained about."""
    rng, troubles, is_over = random.Random(5), Recorder(), False
    address = serve("--num-kv-blocks", "24")
    pages = [chromium.new_page(locale="en-US") for _ in range(3)]
    for page in pages:
        page.set_default_timeout(90_000)
        # Chromium itself notes every request that fails, and no page can keep it from that.
        page.on(
            "console",
            lambda one: (
                troubles.append(one.text)
                if one.type == "error" and not (is_over and one.text.startswith("Failed to load resource"))
                else None
            ),
        )
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.goto(f"{address}/ui#lang=en")
        page.locator(".chat", has_text="connected. Submits").wait_for()
    places = ["#play", "#theme", "#language", ".scrub button", ".timeline button", ".timeline .plot canvas", ".u-over"]
    places += [".events button.text", ".highlights button", ".pool canvas", ".sequence .table button", ".facts button"]
    places += [".filters button", ".seq", "[type=checkbox]", ".scrub input"]
    keys = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End", "n", "p", "l", "d", " ", "Escape"]
    click = """([place, at]) => {
      const found = document.querySelectorAll(place), one = found[Math.floor(at * found.length)];
      if (!one) return;
      const box = one.getBoundingClientRect(), where = { clientX: box.left + at * box.width, clientY: box.top + 5 };
      for (const type of ["mousemove", "mousedown", "mouseup", "click"])
        one.dispatchEvent(new MouseEvent(type, { ...where, bubbles: true }));
    }"""
    stop = time.monotonic() + 3
    while time.monotonic() < stop:
        page = rng.choice(pages)
        what = rng.random()
        if what < 0.1 and page.get_by_text(re.compile("^(Send|发送)$")).count():
            fresh = page.get_by_text(re.compile("^(New chat|新对话)$"))  # else the conversation outgrows the model
            if fresh.count() and rng.random() < 0.5:
                fresh.click()
            ask(page, rng.choice(["What is a block table?", "Who are you?", "Why is the KV cache cut into blocks?"]))
            page.keyboard.press("Escape")
        elif what < 0.13:
            page.reload()
        elif what < 0.6:
            page.keyboard.press(rng.choice(keys))
        else:
            page.evaluate(click, [rng.choice(places), rng.random()])
    ask(pages[0], "What is a block table?")
    is_over = True
    server = serve.processes.pop()
    server.terminate()
    for page in pages:
        page.locator(".chat p", has_text=re.compile("^(not connected|未连接)")).wait_for()
        for key in keys:
            page.keyboard.press(key)
        assert page.locator(".invariants .bad").count() == 0
    for page in pages:
        page.close()
    with server:
        assert server.wait(timeout=90) == 0
    assert troubles == []
