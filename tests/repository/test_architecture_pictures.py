"""The pictures of the architecture are those of the code: names, order of calls, and the state of memory."""

import sys
from pathlib import Path

import pytest

from nanovllm import LLM, TINY_QWEN3, SamplingParams
from tools import architecture_pictures as pictures


@pytest.mark.parametrize("path", sorted(pictures.pictures()), ids=lambda path: path.name)
def test_a_picture_is_drawn_from_the_code(path):
    assert path.read_text(encoding="utf-8") == pictures.pictures()[path], "python -m tools.architecture_pictures"


def test_a_request_passes_through_the_functions_in_the_order_of_the_picture():
    """A profiler notes which functions run in `add_request` and the steps after it, and when each runs first."""
    drawn = [place for call in pictures.CALLS for place in (call.place, *call.side)]
    lines = {(pictures.ROOT / place.split()[0], pictures.find_in_code(place)[0]): place for place in drawn}
    first = []

    def note(frame, event, _):
        place = lines.get((Path(frame.f_code.co_filename), frame.f_code.co_firstlineno))
        if event == "call" and place is not None and place not in first:
            first.append(place)

    llm = LLM(TINY_QWEN3, attention_backend="torch", dtype="float32", num_kv_blocks=32, block_size=4)
    sys.setprofile(note)
    try:
        llm.engine.add_request("a", "Hello", SamplingParams(temperature=0, max_tokens=2))
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
    finally:
        sys.setprofile(None)
    assert first == drawn


def test_a_name_that_the_code_does_not_define_is_refused(monkeypatch):
    monkeypatch.setitem(pictures.ATTRIBUTES, "nanovllm/block_manager.py BlockManager", ("_free", "_pages"))
    with pytest.raises(LookupError, match="has no _pages"):
        pictures.check_names()
    with pytest.raises(LookupError):
        pictures.find_in_code("nanovllm/scheduler.py Scheduler.plan")


def test_the_drawn_memory_is_what_the_text_beside_it_says():
    """A and B share their first block, and the second block of C is free, but can still be found."""
    memory = pictures.fill_memory()
    a, b = (list(seq.block_table) for seq in memory.seqs.values())
    assert a[0] == b[0]
    assert not set(a[1:]) & set(b[1:])
    assert [memory.blocks.num_owners(block_id) for block_id in (a[0], a[1], b[1])] == [2, 1, 1]
    cached = [block_id for block_id in memory.blocks._free if block_id in memory.blocks.prefix_cache]
    assert len(cached) == 1
