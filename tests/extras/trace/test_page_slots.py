"""The page in Chromium for models with recurrent states: owners of slots, what slots hold, what a step copies."""

import pytest

from tests.extras.trace.axe_themes import check_both_themes
from tests.extras.trace.slot_traffic import known_slots, prompts_in_turn, random_slots
from tests.extras.trace.test_page import cell_color, chromium, is_lit, show  # noqa: F401 (fixtures)

pytestmark = pytest.mark.browser

SLOTS = """([segments]) => {
  const states = {};
  for (const [header, ...lines] of segments) {
    const replay = new nanovllm.Replay(header);
    for (const line of lines) for (const event of line.events) {
      replay.apply(event);
      if (event[0] !== "schedule") continue;
      const wrong = brokenInvariants(replay), broken = replay.broken.slice();
      states[replay.step] = { slots: [...replay.slots], copied: replay.copied, broken, wrong };
    }
  }
  return states;
}"""
# of each step: what the slots 1 … 4 show, and the copies
KNOWN = [
    (["A", "–", "–", "–"], None),
    (["A", "(8)", "–", "–"], "slot 1 to 2: a snapshot after 8 tokens"),
    (["A", "(8)", "B.0", "B.1"], "slot 2 to 3: B.0 has found this prefix"),
    (["A", "(8)", "B.0", "B.1"], "slot 3 to 4: B.1 is a fork"),
    (["A", "(8)", "B.0", "B.1"], None),
    (["A", "(8)", "B.0", "B.1"], None),
    (["A", "(8)", "B.0", "–"], None),
    (["B.1", "(8)", "B.0", "–"], "slot 2 to 1: B.1 has found this prefix"),
    (["B.1", "(8)", "–", "–"], None),
]


@pytest.fixture(scope="module")
def known():
    return known_slots()


@pytest.mark.parametrize("kind", ["plain", "swap", "drafts", "drafts and swap"])
def test_pages_own_replay_has_the_slots_of_the_engine_at_every_step(show, known, kind):  # noqa: F811
    page, num_steps = show(known), 0
    for seed in range(6):
        segments, truth = random_slots(seed, (10**9, 9)[seed % 2], kind)
        found = page.evaluate(SLOTS, [segments])
        assert len(found) == len(truth)
        for step, true in truth.items():
            mine = found[str(step)]
            assert mine["broken"] == mine["wrong"] == []
            assert {slot: use["seq"] for slot, use in mine["slots"] if "seq" in use} == true["owners"]
            assert {slot: use["block"] for slot, use in mine["slots"] if "block" in use} == true["snapshots"]
            assert [(one["source"], one["to"]) for one in mine["copied"]] == true["copies"]
            num_steps += 1
    assert num_steps > 200


def test_slots_and_copies_of_a_known_run_are_shown_at_each_step(show, known):  # noqa: F811
    page = show(known, at="#step=1")
    slots = page.locator(".states .table > *")
    for step, (names, copied) in enumerate(KNOWN, 1):
        page.locator("#step", has_text=f"Step {step} of 9").wait_for()
        assert [one.strip() for one in slots.locator("b").all_inner_texts()] == names, step
        said = page.locator(".states .moves").inner_text()
        assert said.endswith(copied or "This step copies no state and drops no snapshot."), step
        arrows = [one for one in slots.locator("small:last-child").all_inner_texts() if one]
        assert arrows == ([f"← {copied.split()[1]}"] if copied else []), step
        page.keyboard.press("ArrowRight")
    assert page.locator(".invariants .bad").count() == 0


def test_swapped_states_are_shown_in_both_languages(show):  # noqa: F811
    page = show(known_slots(has_swap=True), at="#step=7&seq=3")
    moves, events = page.locator(".states .moves"), page.locator(".events .is-move")
    assert moves.inner_text().endswith("slot 4 to host slot -1: B.1 is swapped out")
    assert "Its state, after 12 tokens, is in host slot -1." in page.locator(".sequence").inner_text()
    assert page.locator(".states h3").inner_text().endswith("sequences 2, snapshots 1, free 1")
    assert events.locator(".text").inner_text() == "the state of B.1 is swapped out to host slot -1"
    check_source(page, events, "def copy_out(self, seq")
    page.keyboard.press("l")
    page.locator(".states .moves", has_text="槽位 4 到主机槽位 -1：B.1 被换出").wait_for()
    page.evaluate("location.hash = 'step=9&lang=en'")
    page.locator("#step", has_text="Step 9 ").wait_for()
    assert "host slot -1 to slot 3: B.1 is swapped in" in moves.inner_text()
    assert page.locator(".states .table button", has_text="B.1").inner_text().split() == ["3", "B.1", "←", "-1"]
    events = page.locator(".events .is-slot")
    assert events.locator(".text").inner_text() == "B.1 gets slot 3; its state is swapped in from host slot -1"
    check_source(page, events, "def copy_in(self, seq")
    assert page.locator(".invariants .bad").count() == 0


def test_slot_of_an_accepted_draft_is_shown(show):  # noqa: F811
    [lines], _ = random_slots(1, kind="drafts")
    number, slot, step = first_move(lines)
    page = show(lines, at=f"#step={step}&lang=en")
    event = page.locator(".events .is-move").first
    said = event.locator(".text").inner_text()
    assert said.endswith(f"now owns slot {slot}, which has the state after its last accepted draft")
    check_source(page, event, "def rewind(self, seq")
    event.locator(".text").click()
    page.locator(".sequence", has_text=f"is in slot {slot}.").wait_for()
    assert page.evaluate("nanovllm.runs[0].replay.broken") == []


def first_move(lines):
    """Return sequence, slot, and the step with whose events the page shows them: the next one."""
    events = [event for line in lines[1:] for event in line["events"]]
    place = next(i for i, event in enumerate(events) if event[0] == "move")
    return *events[place][1:], next(event[1] for event in events[place:] if event[0] == "schedule")


def check_source(page, event, line):
    """The button of an event shows the code with this line."""
    event.locator(".source").click()
    page.get_by_role("dialog").get_by_text(line).first.wait_for()
    page.keyboard.press("Escape")


def test_events_of_slots_say_what_happens_and_lead_to_their_source(show, known):  # noqa: F811
    page = show(known, at="#step=2")
    said = "a snapshot of the state of A after 8 tokens, at the end of block 2, goes to slot 2"
    assert page.locator(".events .is-snapshot .text").inner_text() == said
    page.locator(".events .is-snapshot .source").click()
    page.get_by_role("dialog").get_by_text("def take_snapshot(self, seq").first.wait_for()
    page.keyboard.press("Escape")
    page.evaluate("location.hash = 'step=3'")
    page.locator("#step", has_text="Step 3 ").wait_for()
    page.locator(".step").get_by_role("button", name="more").click()
    assert page.locator(".events .is-slot .text").all_inner_texts() == [
        "B.0 gets slot 3; the state in slot 2 is copied to it",
        "B.1 gets slot 4; the state in slot 3 is copied to it",
    ]


A, B, C = range(10), range(9), [0, 1, 2, 3, 50, 51]  # B finds A's first 8 tokens; C has a cached block, but no snapshot
TOLD = {
    "snapshot": (
        "A has computed 8 tokens, the last ones in block 2. Its next token overwrites its recurrent state. "
        "So the state is copied to slot 2 first.",
        "A 已算完 8 个 token，最后几个在块 2 中。",
    ),
    "snapshot-hit": (
        "B begins with 8 tokens whose K and V are in the cache, and the snapshot in slot 2 is the recurrent state "
        "after them. It takes the blocks, and the snapshot is copied to its slot {slot}.",
        "B 开头的 8 个 token 的 K、V 在缓存中，槽位 2 的快照是它们之后的循环状态。"
        "它直接取用这些块，快照复制到它的槽位 {slot}。",
    ),
    "no-snapshot": (
        "4 tokens of C have K and V in the cache, but no slot holds a snapshot of the recurrent state after them, "
        "so they are computed again.",
        "C 有 4 个 token 的 K、V 在缓存中，但没有它们之后的循环状态的快照，所以要重算。",
    ),
}


def test_story_tells_of_snapshots(show):  # noqa: F811
    lines = prompts_in_turn({"A": A}, {"B": B}, {"C": C}, num_slots=4)
    events = [event for line in lines[1:] for event in line["events"]]
    [slot] = [event[2] for event in events if event[0] == "slot" and event[3] == 2]
    [first, *_] = [event[2] for event in events if event[0] == "take" and event[1] == 3]  # C's own block
    page = show(lines, at="#lang=en")
    assert page.evaluate("momentsOf(nanovllm.runs[0]).map((one) => one.kind)") == list(TOLD)
    lit = {"snapshot": ([2], [2]), "snapshot-hit": ([1, 2], [2, slot]), "no-snapshot": ([first], [])}
    for kind, (english, chinese) in TOLD.items():
        page.evaluate(f"location.hash = 'story={kind}'")
        page.locator(".told", has_text=english.format(slot=slot)).wait_for()
        blocks, slots = lit[kind]
        assert [block for block in range(1, 13) if is_lit(page, block)] == blocks, kind
        shown = page.locator(".states .lit > small:first-child").all_inner_texts()
        assert sorted(map(int, shown)) == sorted(slots), kind
        page.keyboard.press("l")
        page.locator(".told", has_text=chinese.format(slot=slot)).wait_for()
        page.keyboard.press("l")


def test_story_tells_if_a_sequence_takes_the_slot_of_its_snapshot(show):  # noqa: F811
    """B takes the slot that A has left, and C finds A's snapshot in the only other one."""
    page = show(prompts_in_turn({"A": A}, {"B": [70, 71], "C": A}, num_slots=2), at="#story=snapshot-hit&lang=en")
    page.locator(".told", has_text="No other slot is free, so C takes this slot, and the snapshot is lost.").wait_for()
    assert page.locator(".states .lit > b").all_inner_texts() == [" C"]
    page.keyboard.press("l")
    page.locator(".told", has_text="没有其他空闲槽位，所以 C 直接占用这个槽位，快照不再保留。").wait_for()


def test_a_slot_leads_to_its_sequence_and_a_snapshot_to_its_block(show, known):  # noqa: F811
    page = show(known, at="#step=4")
    page.locator(".states button", has_text="B.0").click()
    page.locator(".sequence", has_text="Its state, after 10 tokens, is in slot 3.").wait_for()
    page.locator(".states .kept").click()
    page.locator(".block h2", has_text="Block 2").wait_for()
    assert "of the state after 8 tokens, in slot 2" in page.locator(".block").inner_text()
    page.keyboard.press("Escape")
    marked = [block for block in range(1, 7) if is_marked(page, block)]
    assert marked == [2]
    page.evaluate("location.hash = 'step=1'")
    page.locator("#step", has_text="Step 1 ").wait_for()
    assert not is_marked(page, 2)


def is_marked(page, block):
    """Whether the disc of a snapshot is in the lower left corner of a block's cell."""
    return cell_color(page, block, 0.18, 0.8) == "#1b1e23"


@pytest.mark.parametrize(("width", "lang"), [(390, "zh"), (1440, "en")])
def test_axe_finds_nothing_and_nothing_runs_over_the_side(show, known, width, lang):  # noqa: F811
    page = show(known, at=f"#step=3&seq=2&block=2&lang={lang}&theme=light", width=width)
    check_both_themes(page, width)
