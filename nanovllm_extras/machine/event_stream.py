"""Parse server-sent events, for `nanovllm chat` and `nanovllm bench serve`.

An event is one or more lines, then a blank line. Its data follows `data:` on these lines. The parser follows the HTML
Living Standard, section "Parsing an event stream", but skips the fields `event`, `id` and `retry`, which no OpenAI
server uses. The package `httpx-sse` accepts only a response of `httpx`, and the load generator parses recorded bytes.
"""

import re
from typing import TypedDict

LINE_END = re.compile(rb"\r\n|\n|\r")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
DONE = "[DONE]"
"""The data of the last event of an OpenAI stream."""


class Delta(TypedDict, total=False):
    """What a chunk adds to an answer."""

    role: str
    text: str
    content: str | None
    reasoning: str | None
    reasoning_content: str | None
    """The older name of `reasoning`."""
    tool_calls: list[object]


class Choice(Delta, total=False):
    """Completions have the text in the choice itself, chats have it in `delta`."""

    delta: Delta
    finish_reason: str | None


class TokensDetails(TypedDict, total=False):
    cached_tokens: int | None


class Usage(TypedDict, total=False):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: TokensDetails | None


class Chunk(TypedDict, total=False):
    choices: list[Choice]
    usage: Usage | None
    error: dict[str, object]


class EventReader:
    """Parses events from chunks of bytes, which may begin and end anywhere.

    >>> reader = EventReader()
    >>> reader.feed(b"data: on"), reader.feed(b"e\\n\\ndata: two\\n\\n")
    ([], ['one', 'two'])
    """

    def __init__(self) -> None:
        self._is_start = True
        self._after_return = False  # if the next byte is "\n", it belongs to the previous "\r"
        self._line = b""  # the incomplete line
        self._data: list[bytes] = []  # the data lines of the incomplete event

    def feed(self, data: bytes) -> list[str]:
        """Read a chunk, and return the data of the events that it completes."""
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
        """Read a complete line. Return the data of the event if the line ends an event with data, else None."""
        if not line:
            event = b"\n".join(self._data).decode(errors="replace") if self._data else None
            self._data = []
            return event
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
        return None
