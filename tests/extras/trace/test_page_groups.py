"""The page in Chromium for models whose layers form groups: the blocks of each group, gaps behind windows, the pool."""

import pytest

from tests.extras.trace.axe_themes import check_both_themes
from tests.extras.trace.test_page import LIGHT, STATES, cell_color, chromium, show  # noqa: F401 (fixtures)
from tests.extras.trace_traffic import known_groups, known_run, random_run

pytestmark = pytest.mark.browser

WINDOWS = """([segments]) => {
  const states = {};
  for (const [header, ...lines] of segments) {
    const replay = new nanovllm.Replay(header);
    for (const line of lines) for (const event of line.events) {
      replay.apply(event);
      if (event[0] !== "schedule") continue;
      const { living } = replay;
      const tables = living.map((seq) => [`${seq.request} ${seq.sample}`, seq.windows.map((table) => table.slice())]);
      const isOther = (w) => (b) => b && replay.group[b] !== w + 1;
      const others = living.flatMap((seq) => seq.windows.flatMap((table, w) => table.filter(isOther(w))));
      states[replay.step] = { tables: Object.fromEntries(tables), wrong: brokenInvariants(replay), others };
    }
  }
  return states;
}"""


@pytest.fixture(scope="module")
def known():
    return known_groups()


def test_pages_own_replay_has_the_blocks_of_all_groups_at_every_step(show, known):  # noqa: F811
    page, num_steps = show(known[0]), 0
    for seed in range(6):
        run = random_run(
            seed, (10**9, 25)[seed % 2], [1, 5, 9][seed % 3], has_drafts=seed == 4, num_groups=2 + seed % 2
        )
        segments = run.lines.segments
        found, windows = page.evaluate(STATES, [segments]), page.evaluate(WINDOWS, [segments])
        assert len(found) == len(run.recorder.states)
        for step, state in run.recorder.states.items():
            mine, others = found[str(step)], windows[str(step)]
            assert mine["broken"] == others["wrong"] == others["others"] == []
            assert mine["refs"] == state["ref_counts"]
            assert mine["free"] == state["free"]
            assert {b: (block_hash, serial) for b, block_hash, serial in mine["cached"]} == state["cached"]
            for (request, sample), (*one, table, host, tokens) in split(state["seqs"]):
                name = f"{request} {sample}"
                assert mine["seqs"][name] == [*one[:2], table, host, tokens]
                tables = [[*row, *[0] * (len(table) - len(row))] for row in others["tables"][name]]
                assert tables == one[2:]
            num_steps += 1
    assert num_steps > 200


def split(seqs):
    """Yield the name of each sequence, and (status, computed, *tables of windows, table, host, tokens)."""
    for name, (status, computed, table, host, tokens, *windows) in seqs.items():
        yield name, (status, computed, *windows, table, host, tokens)


def rows_of(page, selector=".of-groups"):
    """Return the rows of each table in a card, as texts."""
    tables = page.locator(f"{selector} table.groups")
    return [[row.split("\t") for row in one.split("\n")] for one in tables.all_inner_texts()]


def test_each_sequence_has_a_row_for_each_group_with_gaps_behind_the_window(show, known):  # noqa: F811
    lines, states = known
    page = show(lines)
    for step, state in states.items():
        page.evaluate(f"location.hash = 'step={step}'")
        page.locator("#step", has_text=f"Step {step} ").wait_for()
        owners = [one for one in state["seqs"].values() if one[2]]
        shown = rows_of(page)
        assert len(shown) == len(owners)
        tables = {tuple(tuple(row[1:]) for row in rows[1:]) for rows in shown}
        expected = {tuple(tuple(str(b) if b else "·" for b in table) for table in (one[2], *one[5:])) for one in owners}
        assert tables == expected, step
        names = [row[0] for row in shown[0]]
        assert names == ["entry of the table", "group 0: all tokens", "group 1: 6 tokens", "group 2: 6 tokens"]
    assert any("·" in table for tables in expected for table in tables), "the last step has gaps"
    assert "Layers of groups 1 … 2 see the newest 6 tokens" in page.locator(".of-groups").inner_text()
    assert page.locator(".invariants .bad").count() == 0


def test_pool_shows_owners_and_after_a_click_groups(show, known):  # noqa: F811
    lines, states = known
    page = show(lines, at="#step=4")
    group_of = {}
    for one in states[4]["seqs"].values():
        for group, table in enumerate([one[2], *one[5:]]):
            group_of |= {b: group for b in table if b}
    blocks = list(group_of)
    assert {cell_color(page, b, 0.07, 0.93) for b in blocks} <= set(LIGHT), "the frame is further inside"
    frames = {b for b in blocks if cell_color(page, b, 0.5, 0.895) == "#ffffff"}
    assert frames == {b for b in blocks if group_of[b]}
    page.get_by_role("button", name="groups", exact=True).click()
    page.locator(".of-colors", has_text="group 2: layers that see 6 tokens").wait_for()
    assert {b: cell_color(page, b, 0.07, 0.93) for b in blocks} == {b: LIGHT[group_of[b]] for b in blocks}
    page.get_by_role("button", name="sequences", exact=True).click()
    page.locator(".of-colors").wait_for(state="detached")


def test_a_block_of_a_row_and_the_events_say_their_group(show, known):  # noqa: F811
    lines, states = known
    page = show(lines, at="#step=3&seq=1")
    window = states[3]["seqs"]["seq-0", 0][5]
    page.locator(".sequence table.groups").get_by_role("button", name=f"group 1, 3 → block {window[3]}").click()
    page.locator(".block h2", has_text=f"Block {window[3]}").wait_for()
    assert "group 1: layers that see 6 tokens" in page.locator(".block").inner_text()
    slots = rows_of(page, ".sequence")[1]
    position = states[3]["seqs"]["seq-0", 0][1] - 1
    tables = [states[3]["seqs"]["seq-0", 0][2], *states[3]["seqs"]["seq-0", 0][5:]]
    expected = [table[position // 4] * 4 + position % 4 for table in tables]
    assert [row[1:] for row in slots] == [[str(position)], *[[str(slot)] for slot in expected]]
    said = page.locator(".events .is-copy .text").all_inner_texts()
    assert [one.rpartition("(")[2] for one in said] == ["group 0)", "group 1)", "group 2)"]
    check_source(page, ".events .is-copy >> nth=1", "destinations = self._take_in_groups(seq")
    check_source(page, ".events .is-give_back >> nth=0", "take_before(seq.window_tables, num_held)")


def check_source(page, selector, line):
    page.locator(selector).locator(".source").click()
    page.get_by_role("dialog").get_by_text(line).first.wait_for()
    page.keyboard.press("Escape")


def test_story_tells_of_blocks_behind_the_window(show, known):  # noqa: F811
    page = show(known[0], at="#story=window&lang=en")
    told = page.locator(".story .told", has_text="no longer sees the tokens in blocks 6, 5, 3, 2").inner_text()
    assert told.startswith("seq-0 has moved on")
    page.keyboard.press("l")
    page.locator(".story .told", has_text="归还这些块").wait_for()
    assert "(group 1)" not in page.locator("#app").inner_text()


@pytest.mark.parametrize(("width", "lang"), [(390, "zh"), (1440, "en")])
def test_axe_finds_nothing_and_nothing_runs_over_the_side(show, known, width, lang):  # noqa: F811
    page = show(known[0], at=f"#step=3&seq=2&block=8&lang={lang}&theme=light", width=width)
    check_both_themes(page, width)


def test_pages_of_models_with_one_group_show_none(show):  # noqa: F811
    page = show(known_run()[0], at="#step=3&seq=1&block=1")
    assert page.locator(".of-groups, table.groups, .of-colors").count() == 0
    assert "group" not in page.locator("#app").inner_text()
