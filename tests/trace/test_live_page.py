"""`nanovllm serve --ui` in Chromium: type, and watch the blocks fill; with a key and without."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trace.test_page import Recorder, chromium  # noqa: F401 (a fixture)

pytestmark = pytest.mark.browser


@pytest.fixture
def serve():
    """Starts a server with the bundled model, and returns its address."""
    processes = []

    def start(*options):
        command = [sys.executable, "-m", "nanovllm", "serve", "--ui", "--port", "0", "--num-kv-blocks", "256", *options]
        env = {**os.environ, "NANOVLLM_API_KEY": ""}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        processes.append(process)
        said = ""
        for line in process.stdout:
            said += line
            if found := re.search(r"watch it +(\S+)/ui", line):
                return found[1]
        raise AssertionError(said)

    yield start
    for process in processes:
        process.terminate()
        assert process.wait(timeout=30) == 0
        process.stdout.close()


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
    page.locator(".counts div", has_text=re.compile(r"^0\s*owned")).wait_for()
    last = int(re.search(r"(\d+)", page.locator("#step").inner_text())[1])
    assert last > 5
    assert counts(page)["owned"] == "0"
    page.get_by_label("Previous step").click()
    page.locator("#step", has_text=f"Step {last} of").wait_for()
    assert int(counts(page)["owned"]) > 0, "the blocks of the answer"
    answer = page.locator(".messages .assistant").first.inner_text()
    page.locator(".timeline .labels button").first.click()
    assert answer[:20] in page.locator(".sequence .tokens").inner_text().replace("\n", "")
    assert page.locator(".invariants .bad").count() == 0
    ask(page, "Who are you?")
    page.locator(".messages .assistant").nth(1).filter(has_text=re.compile("[a-z]")).wait_for()
    page.locator(".timeline .labels button").nth(1).wait_for()
    other = chromium.new_page(locale="en-US")  # comes late, and sees the same
    other.goto(f"{address}/ui#lang=en")
    other.locator(".timeline .labels button").nth(1).wait_for()
    for one in (page, other):
        one.close()
    assert troubles == []


def test_example_writes_and_opens_the_page_of_its_own_run(chromium, tmp_path):  # noqa: F811
    root = Path(__file__).parents[2]
    env = {**os.environ, "BROWSER": "true", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "example.py", "--view", "--max-tokens", "12"]
    said = subprocess.run(command, cwd=root, env=env, check=True, capture_output=True, text=True).stdout
    steps = re.search(r"(\d+) steps", said)[1]
    page = chromium.new_page(locale="en-US")
    page.goto(Path(re.search(r"(/\S+\.html)", said)[1]).as_uri())
    page.locator("#step", has_text=f"Step 1 of {steps}").wait_for()
    assert page.locator(".timeline .labels button").count() == 6
    assert page.locator(".invariants .bad").count() == 0
    page.close()


def test_page_asks_for_the_key(chromium, serve):  # noqa: F811
    address = serve("--api-key", "secret")
    page = chromium.new_page(locale="en-US")
    page.goto(f"{address}/ui#lang=en")
    page.locator(".chat", has_text="not connected: 401").wait_for()
    page.locator("#key").fill("secret")
    page.locator("#key").press("Tab")
    page.locator(".chat p", has_text=re.compile("^connected")).wait_for()
    ask(page, "What is a block table?")
    page.locator(".messages .assistant", has_text="block ids").wait_for()
    page.locator("#step").wait_for()
    page.close()
