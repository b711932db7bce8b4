"""Server-sent events, in pieces that are cut anywhere.

Oracle: a reader that has the whole text at once and follows the standard's grammar line by line.
Seen to fail when broken: a "\\r\\n" cut in two taken for two ends of lines; data lines joined without a newline; an
event without its blank line given out; the space behind the colon kept; a byte order mark taken for text.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm_extras.machine.event_stream import EventReader
from tests.conftest import examples

LINES = st.sampled_from(["data: one", "data:two", "data:  three", "data", "data:", ": comment", "event: x",
                         "dataset: y", "data: ünï ∞", "id", "", "", ""])  # fmt: skip
ENDS = st.sampled_from(["\n", "\r\n", "\r"])


def read_whole(text):
    events, data = [], None
    for line in text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n")[:-1]:
        name, _, value = line.partition(":")
        if line == "":
            events += [] if data is None else [data]
            data = None
        elif name == "data":
            value = value[1:] if value.startswith(" ") else value
            data = value if data is None else data + "\n" + value
    return events


@pytest.mark.examples
@settings(max_examples=examples(300), deadline=None, derandomize=True, database=None)
@given(lines=st.lists(st.tuples(LINES, ENDS)), rest=st.sampled_from(["", "data: no end"]), data=st.data())
def test_events_do_not_depend_on_the_cuts(lines, rest, data):
    text = ("\ufeff" if data.draw(st.booleans()) else "") + "".join(line + end for line, end in lines) + rest
    content = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=8)))
    pieces = [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]
    reader = EventReader()
    events = [event for piece in pieces for event in reader.feed(piece)]
    assert events == read_whole(text)


def test_an_event_is_given_out_with_the_piece_that_ends_it():
    reader = EventReader()
    assert [reader.feed(piece) for piece in (b"data: a\r\n\r", b"\nda", b"ta: b\n", b"\n", b"")] == [
        ["a"],
        [],
        [],
        ["b"],
        [],
    ]
