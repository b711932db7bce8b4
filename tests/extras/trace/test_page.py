"""The page in Chromium: its replay is the engine's state, each block has its place and owner, keys and links work, and
nothing is loaded or complained about.
"""

import base64
import gzip
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm_extras.trace.page import make_page
from nanovllm_extras.trace.recording import read_recording
from nanovllm_extras.trace.view import STORY
from tests.extras.trace_traffic import Lines, RecordedRun, explained_run, known_run, loaded_run, random_run

pytestmark = pytest.mark.browser

LIGHT = ["#0072b2", "#e69f00", "#009e73", "#d55e00"]  # of the first owners

STATES = """([segments]) => {
  const states = {};
  for (const [header, ...lines] of segments) {
    const replay = new nanovllm.Replay(header);
    for (const line of lines) for (const event of line.events) {
      replay.apply(event);
      if (event[0] !== "schedule") continue;
      const seqs = replay.living.map((seq) => [`${seq.request} ${seq.sample}`,
        [seq.status, seq.computed, seq.table.slice(), seq.host, seq.tokens.slice(0, seq.known)]]);
      const cached = [];
      replay.serial.forEach((serial, b) => serial && cached.push([b, replay.hashes.get(serial), serial]));
      const loaded = [...replay.loaded.keys()].filter((b) => replay.loaded[b]).map((b) => [b, replay.tierOf(b)]);
      states[replay.step] = { refs: [...replay.refs.slice(1)], free: replay.freeOrder, cached, loaded,
        seqs: Object.fromEntries(seqs), stored: replay.countStored(), broken: replay.broken };
    }
  }
  return states;
}"""


class Recorder(list):
    """The console's errors, and what the page has asked the network for."""

    def watch(self, page):
        page.on("console", lambda message: self.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.append(str(error)))
        page.on("request", lambda request: None if is_local(request.url) else self.append(request.url))


def is_local(url):
    return url.split(":")[0] in ("file", "data", "blob")


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def show(chromium, tmp_path):
    """Opens the page of some recordings (lists of lines); at the end nothing may have been complained about."""
    troubles, pages = Recorder(), []

    def open_page(*recordings, at="", width=1440):
        paths = []
        for i, lines in enumerate(recordings):
            paths.append(tmp_path / f"{'ab'[i]}.jsonl")
            paths[-1].write_text("".join(json.dumps(line) + "\n" for line in lines))
        (tmp_path / "run.html").write_text(make_page(paths), encoding="utf-8")
        page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme="light", locale="en-US")
        page.set_default_timeout(90_000)
        pages.append(page)
        troubles.watch(page)
        page.goto((tmp_path / "run.html").as_uri() + at)
        page.wait_for_selector("body[data-ready]")
        return page

    yield open_page
    for page in pages:
        page.close()
    assert troubles == []


@pytest.fixture(scope="module")
def known():
    return known_run()


def settle(page):
    """Wait until the page has drawn what it knows. Its own timers, of at most 100 ms, are over before this one."""
    page.evaluate(
        "new Promise((done) => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 120))"
    )


def step_of(page):
    return page.locator("#step").inner_text()


def cell_color(page, block, across=0.2, down=0.85):
    """The colour of a point of a block's cell; near the bottom it is filled first."""
    return page.evaluate(
        """([block, across, down]) => {
          const canvas = document.querySelector(".pool canvas"), size = Number(canvas.dataset.size);
          const ratio = devicePixelRatio, columns = Number(canvas.dataset.columns), i = block - 1;
          const x = ((i % columns) + across) * size * ratio, y = (Math.floor(i / columns) + down) * size * ratio;
          const [r, g, b] = canvas.getContext("2d").getImageData(x, y, 1, 1).data;
          return "#" + [r, g, b].map((one) => one.toString(16).padStart(2, "0")).join("");
        }""",
        [block, across, down],
    )


# ---- the replay


def test_pages_own_replay_is_the_state_of_the_engine_at_every_step(show, known):
    page = show(known[0])
    codes, num_steps = set(), 0
    for seed, window in enumerate([None, None, None, None, None, 2, 5, None, None]):
        run = random_run(seed, (10**9, 25)[seed // 2 % 2], window, has_drafts=seed > 6)
        segments = run.lines.segments
        codes |= {event[0] for segment in segments for line in segment[1:] for event in line["events"]}
        found = page.evaluate(STATES, [segments])
        assert len(found) == len(run.recorder.states)
        for step, state in run.recorder.states.items():
            mine = found[str(step)]
            assert mine["broken"] == []
            assert mine["refs"] == state["ref_counts"]
            assert mine["free"] == state["free"]
            assert {b: (block_hash, serial) for b, block_hash, serial in mine["cached"]} == state["cached"]
            assert dict(mine["loaded"]) == state["loaded"]
            names = {f"{request} {sample}": list(one) for (request, sample), one in state["seqs"].items()}
            assert mine["seqs"] == names
            num_steps += 1
    assert len(codes) > 15
    assert codes >= {"give_back", "draft", "verify", "load"}
    assert num_steps > 200


def test_page_shows_how_many_drafts_were_kept(show, known):
    run = random_run(7, has_drafts=True)
    stats = run.stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    page = show(run.lines.segments[0])
    page.keyboard.press("End")
    page.locator("#step", has_text="The end").wait_for()
    share = 100 * stats.num_accepted_tokens / stats.num_draft_tokens
    rate, *words = page.locator(".counts div", has_text="drafts kept").inner_text().split("\n")
    assert abs(int(rate.removesuffix(" %")) - share) <= 0.5
    assert words == ["drafts kept", f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} tokens"]
    assert page.locator(".legend span", has_text="drafts kept").locator("b").inner_text() == f"{share:.1f}"
    assert show(known[0]).locator("text=drafts kept").count() == 0, "nothing was guessed"


def test_scrubbing_to_any_step_from_anywhere_shows_the_same_state(show):
    run = random_run(3)
    page = show(run.lines.segments[0])
    same = page.evaluate(
        """() => {
          const [run] = nanovllm.runs, one = new nanovllm.Run("x", run.header);
          const look = (state) => JSON.stringify([state.refs, state.filled, state.freeOrder, state.living]);
          const straight = run.frames.map((_, i) => look(run.stateAt(i)));
          let seed = 7;
          for (let k = 0; k < 300; k++) {
            seed = (seed * 1103515245 + 12345) % 2147483648;
            const i = seed % run.frames.length;
            if (look(run.stateAt(i)) !== straight[i]) return i;
          }
          return run.keyframes.length > 2;
        }"""
    )
    assert same is True


def test_recording_that_contradicts_the_engine_is_shown_as_broken(show, known):
    lines = json.loads(json.dumps(known[0]))
    schedule = next(event for event in lines[3]["events"] if event[0] == "schedule")
    schedule[7] += 1  # blocks that the engine says are free
    page = show(lines)
    assert page.locator(".invariants .bad").count() == 1
    assert "the engine says" in page.locator(".invariants .bad").inner_text()
    assert show(known[0]).locator(".invariants .bad").count() == 0


# ---- why prompt tokens were computed

FOUND = "{} of {} prompt tokens came from the prefix cache; "
LAST = "the last {} are computed in any case: only full blocks are found, and the logits of the last token are needed"
WHY = [  # of each request of `explained_run`: tokens found, all tokens, and why the others were computed
    (0, 22, "no cached prefix has tokens 0 … 19"),
    (20, 22, LAST.format(2)),
    (8, 22, "from token 8 on the prompt differs: “table” in place of “block”"),
    (12, 23, "from token 14 on the prompt differs: “Par” in place of “Rome”, and only whole blocks are found"),
    (0, 22, "the request needs the hidden states of all prompt tokens, as for prompt log-probabilities"),
    (0, 20, "no cached prefix has tokens 0 … 15"),
    (4, 22, "tokens 4 … 19 were evicted, the first of them in step 22 for r5"),
    (8, 12, LAST.format(4)),
    (0, 13, "no cached prefix has tokens 0 … 11"),
    (12, 22, "tokens 12 … 19 were evicted in step 33 for r8"),
]


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    explained_run(path)
    return read_recording(path)


def test_each_request_has_a_sentence_that_says_why_its_prompt_was_computed(show, explained):
    page = show(explained, at="#step=1&lang=en")
    admitted_in, step = {}, 1
    for event in (event for line in explained[1:] for event in line["events"]):
        admitted_in |= {event[1]: step} if event[0] == "miss" else {}
        step = event[1] + 1 if event[0] == "schedule" else step
    for number, (*counts, reason) in enumerate(WHY, 1):
        sentence = FOUND.format(*counts) + reason
        page.evaluate(f"location.hash = 'step={admitted_in[number]}&seq={number}'")
        page.locator(".sequence .misses", has_text=sentence).wait_for()
        assert page.locator(".sequence .misses").inner_text() == sentence
        assert page.locator(".events .is-miss .text").inner_text() == f"r{number - 1}: {sentence}"
    page.keyboard.press("l")
    chinese = "提示词的 22 个 token 中有 12 个来自前缀缓存；第 12 … 19 个 token 的块在第 33 步被淘汰，让给了 r8"
    page.locator(".sequence .misses", has_text=chinese).wait_for()
    page.locator(".highlights").get_by_role("button", name="提示词为何").click()
    page.locator(".highlights [aria-pressed=true]").wait_for()
    assert page.locator(".highlights li").count() == len(WHY)
    assert page.locator(".invariants .bad").count() == 0


def test_other_causes_and_a_cache_that_is_off_have_sentences_too(show, explained):
    """A recording may have causes that this page does not know, and names of requests that it does not have."""
    lines = json.loads(json.dumps(explained))
    lines[0]["config"]["enable_prefix_caching"] = False
    misses = {event[1]: event[2] for line in lines[1:] for event in line["events"] if event[0] == "miss"}
    misses[1][0]["cause"] = "no_snapshot"
    misses[6][0]["cause"] = "unheard_of"
    evicted = {"start": 4, "end": 8, "cause": "evicted", "step": 3, "request": "a-long-name-of-before"}
    misses[7][0:3] = [evicted, {"start": 8, "end": 20, "cause": "never_seen"}]
    page = show(lines, at="#step=1&lang=en")
    for number, words in {
        1: "tokens 0 … 19 have cached blocks, but no snapshot of the recurrent state",
        6: "tokens 0 … 15: unheard_of",
        5: "0 of 22 prompt tokens came from the prefix cache; the cache is off",
        7: "tokens 4 … 7 were evicted in step 3 for #?; no cached prefix has tokens 8 … 19",
    }.items():
        page.evaluate(f"location.hash = 'step=40&seq={number}'")
        page.locator(".sequence .misses", has_text=words).wait_for()


# ---- what is seen


def test_blocks_have_the_colours_of_their_owners_at_every_step(show, known):
    lines, states = known
    page = show(lines)
    numbers = {("seq-0", 0): 1, ("seq-1", 0): 2, ("seq-2", 0): 3, ("seq-1", 1): 4}
    seen = set()
    for step, state in states.items():
        page.evaluate(f"location.hash = 'step={step}'")
        page.locator("#step", has_text=f"Step {step} ").wait_for()
        settle(page)
        owner = {}
        for name, (_, _, table, _, _) in state["seqs"].items():
            for block in table:
                owner[block] = min(owner.get(block, 9), numbers[name])
        for block in range(1, 9):
            color = cell_color(page, block)
            if block in owner:
                assert color == LIGHT[owner[block] - 1], (step, block)
                seen.add(owner[block])
            else:
                assert color not in LIGHT, (step, block)
    assert seen == {1, 2, 3, 4}


def test_step_says_who_waits_and_why_and_what_was_preempted(show, known):
    lines, states = known
    page = show(lines, at="#step=1")
    events = [event for line in lines[1:] for event in line["events"]]
    wait = next(event for event in events if event[0] == "wait" and event[2] == "blocks")
    step = next(e[1] for e in events[events.index(wait) :] if e[0] == "schedule")
    page.evaluate(f"location.hash = 'step={step}'")
    page.locator(".step", has_text=f"waits: needs {wait[3]} blocks, {wait[4]} free for it").wait_for()
    counts = page.locator(".counts").inner_text()
    used = sum(count > 0 for count in states[step]["ref_counts"])
    shared = sum(count > 1 for count in states[step]["ref_counts"])
    assert counts.split()[:2] == [str(used), "owned"]
    assert f"{shared}\nshared" in counts
    preempt = next(event for event in events if event[0] == "preempt")
    step = next(e[1] for e in events[events.index(preempt) :] if e[0] == "schedule")
    page.evaluate(f"location.hash = 'step={step}'")
    page.locator(".events .is-preempt", has_text="is preempted: ").wait_for()
    notes = page.locator(".highlights")
    assert "is preempted: " in notes.inner_text()
    num_preempted = sum(event[0] == "preempt" for event in events)
    notes.get_by_role("button", name=f"preemptions {num_preempted}", exact=True).click()
    notes.locator("[aria-pressed=true]").wait_for()
    assert ["is preempted: " in one for one in notes.locator("li").all_inner_texts()] == [True] * num_preempted


def test_abort_is_of_note_and_evictions_only_when_chosen(show):
    run = RecordedRun(Lines(), num_blocks=6, block_size=4, budget=12, max_num_seqs=4)
    run.add([1] * 9, max_tokens=16)
    run.step()
    run.abort(run.requests[0])
    for i in range(2, 5):
        run.add([i] * 9, max_tokens=6)
    run.finish()
    [lines] = run.lines.segments
    page = show(lines)
    notes = page.locator(".highlights")
    texts = notes.locator("li").all_inner_texts()
    assert [one for one in texts if "ends: aborted" in one] == ["2 seq-0 ends: aborted"]
    assert not any("evicted" in one for one in texts)
    notes.get_by_role("button", name="aborts 1", exact=True).click()
    notes.locator("[aria-pressed=true]").wait_for()
    assert notes.locator("li").count() == 1
    notes.locator("li button").click()
    text = "aborted; its blocks are freed. 10 tokens (9 of the prompt, 1 generated)"
    page.locator(".sequence", has_text=text).wait_for()
    assert "✕ aborted" in page.locator(".timeline .legend").inner_text()
    notes.get_by_role("button", name="steps that evict").click()
    notes.locator("li", has_text="evicted").first.wait_for()


def test_block_and_sequence_show_their_insides(show, known):
    lines, states = known
    page = show(lines, at="#step=3&seq=1")
    status, computed, table, _, tokens = states[3]["seqs"]["seq-0", 0]
    shown = page.locator(".sequence .table").first.locator("b").all_inner_texts()
    assert [int(one) for one in shown] == table
    slots = [int(one) for one in page.locator(".sequence .slots b").all_inner_texts()]
    assert slots == [table[(computed - 1) // 4] * 4 + (computed - 1) % 4]
    canvas = page.locator(".pool canvas").first
    size, columns = int(canvas.get_attribute("data-size")), int(canvas.get_attribute("data-columns"))
    at = table[0] - 1
    canvas.click(position={"x": (at % columns + 0.5) * size, "y": (at // columns + 0.5) * size})
    page.locator(".block h2", has_text=f"Block {table[0]}").wait_for()  # the page draws after the click has returned
    text = page.locator(".block").inner_text()
    assert states[3]["cached"][table[0]][0] in text, "its hash"
    assert "4 of 4 slots" in text
    page.wait_for_url(f"**block={table[0]}")
    page.get_by_label("Block number").fill(str(table[1]))
    page.get_by_label("Block number").press("Tab")
    page.locator(".block h2", has_text=f"Block {table[1]}").wait_for()


def test_event_leads_to_its_source(show, known):
    page = show(known[0], at="#step=1")
    page.locator(".events .source", has_text="take").first.click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("def take(self, seq").first.wait_for()
    assert "block_manager.py:" in dialog.inner_text()
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")


# ---- the K/V store


LOADED = "#7a1fa2"


def test_loaded_blocks_are_marked_and_their_tiers_named(show, tmp_path):
    lines = loaded_run(tmp_path)
    events = [event for line in lines[1:] for event in line["events"]]
    loads = [event for event in events if event[0] == "load"]
    steps = [next(one[1] for one in events[events.index(load) :] if one[0] == "schedule") for load in loads]
    (memory,), disk = loads[-1][3].values()
    page = show(lines, at=f"#step={steps[-1]}&seq={loads[-1][1]}")
    table = page.evaluate(f"nanovllm.runs[0].stateAt({steps[-1]} - 1).seqs.get({loads[-1][1]}).table")
    assert table[1:6] == [memory, *disk]
    marked = [block for block in range(1, 17) if cell_color(page, block, 0.93, 0.93) == LOADED]
    assert marked == sorted(table[:6]), "the last block is computed"
    assert "loaded from the K/V store" in page.locator(".pool .legend").inner_text()
    page.locator(".step").get_by_role("button", name="more").click()
    said = (
        f"r2 has blocks loaded from the K/V store: 1 from host memory ({memory}); "
        f"4 from disk ({', '.join(map(str, disk))}). Their 20 tokens are not computed"
    )
    assert page.locator(".events .is-load .text").inner_text() == said
    assert said in page.locator(".highlights").inner_text()
    said = "r2 is admitted; 4 tokens found in the prefix cache, 20 loaded from the K/V store"
    assert page.locator(".events .is-admit .text").inner_text() == said
    assert "4 of 39 tokens" in page.locator(".counts div", has_text="hit rate").inner_text()
    hover(page, disk[0])
    assert " · loaded from the K/V store (disk), not computed · " in page.locator(".tip").inner_text()
    hover(page, table[6])
    assert "loaded" not in page.locator(".tip").inner_text()
    page.evaluate(f"location.hash = 'step={steps[-1]}&block={memory}&lang=zh'")
    page.locator(".block dd", has_text="从 K/V 存储（主机内存）载入").wait_for()
    assert "从 K/V 存储载入" in page.locator(".pool .legend").inner_text()
    assert f"4 块来自磁盘（{', '.join(map(str, disk))}）" in page.locator(".events .is-load .text").inner_text()


def test_first_load_is_a_moment_of_the_story(show, tmp_path):
    lines = loaded_run(tmp_path)
    [load, *_] = [event for line in lines[1:] for event in line["events"] if event[0] == "load"]
    page = show(lines, at="#story=load")
    page.locator(".told", has_text=f"The K/V store has the K and V of {load[2]} tokens of r0").wait_for()
    assert [block for block in range(1, 17) if is_lit(page, block)] == load[3]["disk"]
    hits = page.evaluate(
        "momentsOf(nanovllm.runs[0]).filter((one) => one.kind === 'prefix-hit').map((one) => one.values)"
    )
    assert hits == [{"seq": 3, "count": 4}]


def hover(page, block):
    canvas = page.locator(".pool canvas").first
    size, columns = int(canvas.get_attribute("data-size")), int(canvas.get_attribute("data-columns"))
    canvas.hover(position={"x": ((block - 1) % columns + 0.5) * size, "y": ((block - 1) // columns + 0.5) * size})
    page.locator(".tip", has_text=f"Block {block} ").wait_for()


# ---- the story


KINDS = ["fork", "copy", "chunked-prefill", "preemption", "eviction", "prefix-hit", "admission"]
SWAPPING = 0  # a seed of `random_run`


def test_story_of_the_package_has_every_kind_of_moment_and_tells_each(show):
    page = show(read_recording(STORY), at="#lang=en")
    chips = page.locator(".story .moments button:not(.turn)")
    assert page.evaluate("momentsOf(nanovllm.runs[0]).map((one) => one.kind)") == KINDS
    told = set()
    for i in range(len(KINDS)):
        page.get_by_role("button", name="The next moment").click()
        chips.nth(i).and_(page.locator("[aria-pressed=true]")).wait_for()
        page.wait_for_url(f"**story={KINDS[i]}*")
        told.add(page.locator(".told").inner_text())
    assert len(told) == len(KINDS)
    assert page.get_by_role("button", name="The next moment").is_disabled()
    page.get_by_role("button", name="The moment before").click()
    page.wait_for_url(f"**story={KINDS[-2]}*")


def test_story_tells_of_a_swap(show):
    run = random_run(SWAPPING)
    events = [event for line in run.lines.segments[0][1:] for event in line["events"]]
    victim, _, _, hosts = next(event[1:] for event in events if event[0] == "preempt" and event[4])
    page = show(run.lines.segments[0], at="#story=swap&lang=en")
    page.locator(".told", has_text=f"to {len(hosts)} blocks of host memory").wait_for()
    assert page.evaluate(f"nanovllm.runs[0].label({victim})") in page.locator(".told").inner_text()


def test_story_of_a_known_run_is_what_the_engine_decided(show, known):
    lines, _ = known
    events = [event for line in lines[1:] for event in line["events"]]
    victim, needy = next(event for event in events if event[0] == "preempt")[1:3]
    source, copied = next(event for event in events if event[0] == "copy")[2:4]
    page = show(lines, at="#story=preemption")
    page.wait_for_url("**#step=*&story=preemption")
    labels = page.evaluate(f"[{needy}, {victim}].map((number) => nanovllm.runs[0].label(number))")
    assert (
        page.locator(".told").inner_text().startswith("The pool is full, and {} needs a block. So {}".format(*labels))
    )
    page.evaluate("location.hash = 'story=copy'")
    page.locator(".told", has_text=f"must write to block {source}, which others read too").wait_for()
    assert f"copy of its own first: block {copied}." in page.locator(".told").inner_text()
    red = [is_lit(page, block) for block in range(1, 9)]
    assert [block for block in range(1, 9) if red[block - 1]] == sorted([source, copied])
    page.keyboard.press("ArrowRight")
    page.locator(".told", has_text="What happened, in order").wait_for()
    assert not any(is_lit(page, block) for block in range(1, 9))


def is_lit(page, block):
    """Whether the left edge of a block's cell is red."""
    return page.evaluate(
        """(block) => {
          const canvas = document.querySelector(".pool canvas"), size = Number(canvas.dataset.size);
          const columns = Number(canvas.dataset.columns), i = block - 1;
          const x = (i % columns) * size + 1, y = (Math.floor(i / columns) + 0.5) * size;
          const [r, g, b] = canvas.getContext("2d").getImageData(x, y, 1, 1).data;
          return r === 176 && g === 42 && b === 0;
        }""",
        block,
    )


@pytest.mark.parametrize("width", [390, 1440])
def test_scrubbing_moves_nothing_but_what_changes(show, width):
    page = show(read_recording(STORY), width=width)
    places = set()
    for step in range(1, 36):
        page.evaluate(f"location.hash = 'step={step}'")
        page.locator("#step", has_text=re.compile(rf"^(Step {step} |The end)")).wait_for()
        places.add(
            page.evaluate(
                "['.timeline', '.times', '.counters'].map((one) => document.querySelector(one).offsetTop).join()"
            )
        )
    assert len(places) == 1


def test_mouse_over_a_block_says_whose_it_is_and_what_it_holds(show, known):
    lines, states = known
    page = show(lines, at="#step=3")
    block = states[3]["seqs"]["seq-0", 0][2][0]
    canvas = page.locator(".pool canvas").first
    size = int(canvas.get_attribute("data-size"))
    canvas.hover(position={"x": (block - 0.5) * size, "y": size / 2})
    text = page.locator(".tip").inner_text()
    assert text.startswith(f"Block {block} · seq-0, seq-1.0, seq-1.1 · 4 of 4 slots hold tokens: ")
    step, free = next((step, state["free"][0]) for step, state in states.items() if state["free"])
    page.evaluate(f"location.hash = 'step={step}'")
    page.locator("#step", has_text=f"Step {step} ").wait_for()
    canvas.hover(position={"x": (free - 0.5) * size, "y": size / 2})
    page.locator(".tip", has_text="free; handed out before it: 0").wait_for()
    page.mouse.move(5, 5)
    page.locator(".tip").wait_for(state="detached")


def test_block_that_would_be_evicted_next_is_the_first_free_one_that_is_cached(show, known):
    lines, states = known
    page = show(lines)
    for step, state in states.items():
        expected = next((block for block in state["free"] if block in state["cached"]), 0)
        assert page.evaluate(f"nanovllm.runs[0].stateAt({step - 1}).nextEvicted()") == expected


def test_each_sample_has_a_row_that_says_when_it_was_what(show, known):
    lines, states = known
    page = show(lines, at="#seq=2")
    rows = page.locator(".timeline .labels button")
    assert rows.locator("b").all_inner_texts() == ["seq-0", "seq-1.0", "seq-1.1", "seq-2"]
    assert rows.locator("small").count() == 3, "the latencies of a request stand once"
    assert page.evaluate("nanovllm.runs[0].rows.length") == 4
    told = {}
    for i in range(4):
        rows.nth(i).click()
        page.locator(".facts b", has_text=re.compile(rf"^{rows.nth(i).locator('b').inner_text()}$")).wait_for()
        for one in page.locator(".facts button").all_inner_texts():
            if one.startswith("length limit"):  # its end
                continue
            kind, first, last = re.fullmatch(r"(\w+)\D* (\d+)(?:–(\d+))?", one).groups()
            told.update({(i, step): kind for step in range(int(first), int(last or first) + 1)})
    numbers = {("seq-0", 0): 0, ("seq-1", 0): 1, ("seq-1", 1): 2, ("seq-2", 0): 3}
    computing = {"prefill", "decode", "runs"}
    for step, state in states.items():
        for name, (status, *_) in state["seqs"].items():
            assert (told[numbers[name], step] in computing) == (status == "running"), (step, name)


def test_waiting_is_cut_into_segments_by_reason(show):
    lines = read_recording(STORY)
    reasons, step = {}, 1
    for event in (event for line in lines[1:] for event in line["events"]):
        if event[0] == "wait" and event[1] == 5:
            reasons[step] = event[2]
        step += event[0] == "schedule"
    first = [step for step in sorted(reasons) if reasons[step] == "max_num_seqs"]
    assert first == list(range(first[0], first[-1] + 1))
    facts = show(lines, at="#seq=5").locator(".facts").inner_text()
    assert f"queued (for a place (max_num_seqs)) {first[0]}–{first[-1]}" in facts
    assert f"queued (a step with a preemption admits none) {first[-1] + 1}" in facts


@pytest.mark.parametrize("steps", [None, "2-4,13"])
def test_moving_picture_shows_the_story_or_the_steps(tmp_path, steps):
    from PIL import Image

    path = tmp_path / "story.gif"
    assert run_view("--gif", path, *(["--steps", steps] if steps else [])) == (0, f"{path}\n", "")
    picture = Image.open(path)
    durations = []
    for i in range(picture.n_frames):
        picture.seek(i)
        durations.append(picture.info["duration"])
    assert durations.count(3500) == (0 if steps else len(KINDS))
    assert durations.count(900) == (4 if steps else 0)
    assert (steps is None) == any(ms < 900 for ms in durations), "what moves"
    assert path.stat().st_size < 400_000


def run_view(*arguments):
    """As a process: this one has an event loop of Playwright."""
    command = [sys.executable, "-m", "nanovllm_extras", "view", *map(str, arguments)]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout, done.stderr


# ---- how it is used


def test_keys_scrub_play_and_choose(show, known):
    lines, states = known
    page, last = show(lines), len(states)
    press = page.keyboard.press
    assert step_of(page) == f"Step 1 of {last}"
    for key, step in [("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2), ("Shift+ArrowRight", 12), ("Home", 1)]:
        press(key)
        page.locator("#step", has_text=f"Step {step} of {last}").wait_for()
    press("End")
    page.locator("#step", has_text=f"The end, after step {last}").wait_for()
    press("Home")
    press(" ")
    page.locator("#step", has_text=re.compile("^Step ([2-9]|1[0-9]) ")).wait_for()
    press(" ")
    press("Home")  # on a busy machine it has played on, to where other sequences run
    press("ArrowRight")
    page.locator("#step", has_text=f"Step 2 of {last}").wait_for()
    press("ArrowDown")
    page.locator(".sequence h2", has_text="Sequence seq-0").wait_for()
    press("ArrowDown")
    page.locator(".sequence h2", has_text="Sequence seq-1").wait_for()
    press("Escape")
    page.locator(".sequence").wait_for(state="detached")
    page.locator(".pool canvas").first.focus()
    before = step_of(page)
    press("ArrowRight")
    press("ArrowRight")
    page.locator(".block h2", has_text="Block 2").wait_for()
    assert step_of(page) == before, "in the pool, arrows choose a block"


def test_escape_leaves_the_pool_and_a_field_so_that_arrows_step(show, known):
    page = show(known[0])
    page.locator(".pool canvas").first.click(position={"x": 5, "y": 5})
    page.locator(".block h2", has_text="Block 1").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowRight")
    page.locator("#step", has_text="Step 2 ").wait_for()
    assert "Block 1" in page.locator(".block h2").inner_text()
    page.get_by_label("Block number").fill("3")
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowRight")
    page.locator("#step", has_text="Step 3 ").wait_for()
    assert "Block 3" in page.locator(".block h2").inner_text()
    page.keyboard.press("Escape")
    page.locator(".block h2", has_text="Block 3").wait_for(state="detached")


def test_links_keep_step_choice_language_and_theme(show, known):
    page = show(known[0], at="#step=5&seq=2&block=3&lang=zh&theme=dark")
    assert step_of(page).startswith("第 5 步")
    assert "块 3" in page.locator(".block h2").inner_text()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("l")
    page.keyboard.press("d")
    page.keyboard.press("ArrowRight")
    page.locator("#step", has_text="Step 6 ").wait_for()
    page.wait_for_url("**#step=6&seq=2&block=3&lang=en&theme=light")
    page.evaluate("location.hash = 'step=9999'")
    page.locator("#step", has_text="The end").wait_for()


def test_two_recordings_are_scrubbed_together(show, known, tmp_path):
    run = RecordedRun(Lines(), num_blocks=8, block_size=4, budget=12, enable_prefix_caching=False)
    run.add([1] * 9, max_tokens=5)
    run.finish()
    [second] = run.lines.segments
    page = show(known[0], second, at="#step=3")
    assert page.locator(".recording").count() == 2
    assert [one.split(":")[1].strip() for one in page.locator(".step h2").all_inner_texts()] == ["3", "3"]
    page.keyboard.press("ArrowRight")
    page.locator(".step h2", has_text=": 4").nth(1).wait_for()
    assert [one.split(":")[1].strip() for one in page.locator(".step h2").all_inner_texts()] == ["4", "4"]
    assert step_of(page) == f"Step 4 of {len(known[1])} | {len(run.recorder.states)}"
    alone = show(known[0])
    text = "".join(json.dumps(line) + "\n" for line in second)
    alone.set_input_files("input[type=file]", {"name": "b.jsonl", "mimeType": "text/plain", "buffer": text.encode()})
    alone.locator(".recording").nth(1).wait_for()
    alone.get_by_text("Close the second").click()
    alone.set_input_files("input[type=file]", {"name": "c.jsonl", "mimeType": "text/plain", "buffer": b"not json"})
    alone.wait_for_selector("[role=alert]")
    assert "c.jsonl is not a recording, or cannot be replayed: line 1: " in alone.locator("[role=alert]").inner_text()


def test_embedded_data_is_what_was_recorded(show, known):
    page = show(known[0])
    data = page.evaluate("document.querySelector('script[data-name]').textContent")
    assert [json.loads(line) for line in gzip.decompress(base64.b64decode(data)).splitlines()] == known[0]
