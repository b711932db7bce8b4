"""Convert the deltas of a chat to the blocks of a message, and to the events of its stream.

`Answer` returns the deltas. A delta of another kind than the previous one starts a new block:

    reasoning               {"type": "thinking", "thinking": …, "signature": …}
    content                 {"type": "text", "text": …}
    tool_calls              {"type": "tool_use", "id": …, "name": …, "input": …}, one for each call
"""

from typing import Any
from uuid import uuid4

from pydantic_core import from_json

from nanovllm_extras.serve.answer import CallPart, Delta

Event = dict[str, Any]  # an event or a block

SIGNATURE = "nanovllm"
"""The signature of every thinking block. Clients need one to send the block again, and this server checks none."""


class ContentBlocks:
    """The content of one message. `blocks` are the blocks of the events so far; the last one may be incomplete."""

    def __init__(self) -> None:
        self.blocks: list[Event] = []
        self._is_open = False
        self._call_index = -1  # index of the chat's call that is the open block
        self._arguments: list[str] = []  # of this call

    def feed(self, deltas: list[Delta]) -> list[Event]:
        """Return the events for new deltas of an answer."""
        events: list[Event] = []
        for delta in deltas:
            if delta.get("reasoning"):
                events += self._grow("thinking", delta["reasoning"])
            elif delta.get("content"):
                events += self._grow("text", delta["content"])
            for call in delta.get("tool_calls", []):
                events += self._grow_call(call)
        return events

    def finish(self) -> list[Event]:
        """Close the last block, and return the events of its end."""
        return self._close() if self._is_open else []

    def _grow(self, kind: str, text: str) -> list[Event]:
        events = []
        if not self._is_open or self.blocks[-1]["type"] != kind:
            block = {"type": kind, kind: ""}
            events += self._begin(block | ({"signature": ""} if kind == "thinking" else {}))
        self.blocks[-1][kind] += text
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _grow_call(self, call: CallPart) -> list[Event]:
        events, function = [], call["function"]
        if call["index"] != self._call_index:
            events += self._begin({"type": "tool_use", "id": new_id(), "name": function["name"], "input": {}})
            self._call_index = call["index"]
        if text := function["arguments"]:
            self._arguments.append(text)
            events.append(self._delta({"type": "input_json_delta", "partial_json": text}))
        return events

    def _begin(self, block: Event) -> list[Event]:
        """Start a block after the open one. The event has a copy, because the block grows."""
        events = self.finish()
        self._is_open = True
        self.blocks.append(block)
        return [*events, self._event("content_block_start", content_block=dict(block))]

    def _close(self) -> list[Event]:
        block, events = self.blocks[-1], []
        self._is_open = False
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            events.append(self._delta({"type": "signature_delta", "signature": SIGNATURE}))
        elif block["type"] == "tool_use":
            block["input"], self._arguments = read_arguments("".join(self._arguments)), []
        return [*events, self._event("content_block_stop")]

    def _delta(self, delta: Event) -> Event:
        return self._event("content_block_delta", delta=delta)

    def _event(self, kind: str, **fields: object) -> Event:
        return {"type": kind, "index": len(self.blocks) - 1, **fields}


def read_arguments(text: str) -> dict[str, object]:
    """Return the arguments of a call. Of a call that is cut off, return what is complete, as Anthropic's clients do."""
    try:
        arguments = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


def new_id() -> str:
    """Return the id of a call."""
    return f"toolu_{uuid4().hex[:24]}"
