"""The client's side of server-sent events, for `nanovllm chat` and `nanovllm bench serve`.

An event is some lines and a blank line; its data follow `data:` on these lines. Follows the HTML Living Standard,
section "Parsing an event stream". The fields `event`, `id` and `retry` are skipped: no OpenAI server uses them.

By hand, because the load generator reads recorded bytes afterwards, and `httpx-sse` takes only a response of `httpx`.
"""

import re

LINE_END = re.compile(rb"\r\n|\n|\r")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
DONE = "[DONE]"
"""Data of the last event of an OpenAI stream."""


class EventReader:
    """Takes bytes as they arrive, cut anywhere; returns the data of the events that are complete.

    >>> reader = EventReader()
    >>> reader.feed(b"data: on"), reader.feed(b"e\\n\\ndata: two\\n\\n")
    ([], ['one', 'two'])
    """

    def __init__(self) -> None:
        self._is_start = True
        self._after_return = False  # a "\n" that comes next belongs to a "\r" that was read before
        self._line = b""  # the line that has no end yet
        self._data: list[bytes] = []  # the data lines of the event that has no end yet

    def feed(self, data: bytes) -> list[str]:
        if not data:
            return []
        if self._after_return and data.startswith(b"\n"):
            data = data[1:]
        self._after_return = data.endswith(b"\r")
        *lines, self._line = LINE_END.split(self._line + data)
        if self._is_start and lines:
            lines[0] = lines[0].removeprefix(BYTE_ORDER_MARK)
            self._is_start = False
        return [event for line in lines if (event := self._read_line(line)) is not None]

    def _read_line(self, line: bytes) -> str | None:
        """The data of the event that this line ends, or None."""
        if not line:
            event = b"\n".join(self._data).decode(errors="replace") if self._data else None
            self._data = []
            return event
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
        return None
