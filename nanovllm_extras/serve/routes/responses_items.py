"""Convert the deltas of a chat to the items of a response, and to the events of its stream.

`Answer` returns the deltas. A delta of another kind than the previous one starts a new item:

    reasoning               {"type": "reasoning", "content": [{"type": "reasoning_text", …}]}
    content                 {"type": "message", "content": [{"type": "output_text", …}]}
    tool_calls              {"type": "function_call", …}, one for each call
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from nanovllm_extras.serve.answer import CallPart, Delta
from nanovllm_extras.serve.streaming import Written

Event = dict[str, Any]  # an event or an item

ADDED, DONE = "response.output_item.added", "response.output_item.done"


class OutputItems:
    """The output of one response. `items` are the items of the events so far.

    names: the name of each function in the chat -> its fields `name` and, if it has one, `namespace`.
    new_id: returns a random id with a prefix.
    """

    def __init__(self, names: Mapping[str, dict[str, str]], new_id: Callable[[str], str]) -> None:
        self._names = names
        self._new_id = new_id
        self.items: list[Event] = []
        self.reasoning = ""
        self._is_open = False
        self._call_index = -1  # index of the chat's call that is the open item
        self._logprobs: list[Written] = []  # log-probabilities of tokens that are in no event yet

    def feed(self, deltas: list[Delta], logprobs: list[Written]) -> list[Event]:
        """Return the events for new deltas of an answer. logprobs: those of the new tokens.

        Only messages have log-probabilities: those of the tokens since the last reasoning or call.
        """
        self._logprobs += logprobs
        events: list[Event] = []
        for delta in deltas:
            if "reasoning" in delta:
                events += self._grow("reasoning", delta["reasoning"])
                self._logprobs = []
            elif delta.get("content"):
                events += self._grow("message", delta["content"])
            for call in delta.get("tool_calls", []):
                events += self._grow_call(call)
                self._logprobs = []
        return events

    def finish(self, status: str) -> list[Event]:
        """Close the last item, with the status of the response: `completed` or `incomplete`."""
        if not self._is_open:
            return []
        rest = []
        if self._logprobs and self.items[-1]["type"] == "message":
            rest = self._grow("message", "")  # tokens without text, such as the end token
        return rest + self._close(status)

    def _grow(self, kind: str, text: str) -> list[Event]:
        events = []
        if not self._is_open or self.items[-1]["type"] != kind:
            events += self._close("completed") if self._is_open else []
            events += self._begin({"type": kind, "id": self._new_id({"reasoning": "rs", "message": "msg"}[kind])})
        part = self.items[-1]["content"][0]
        part["text"] += text
        if kind == "reasoning":
            self.reasoning += text
            return [*events, self._event("response.reasoning_text.delta", content_index=0, delta=text)]
        told, self._logprobs = self._logprobs, []
        part["logprobs"] += told
        return [*events, self._event("response.output_text.delta", content_index=0, delta=text, logprobs=told)]

    def _grow_call(self, call: CallPart) -> list[Event]:
        events, function = [], call["function"]
        if call["index"] != self._call_index:
            self._call_index = call["index"]
            events += self._close("completed") if self._is_open else []
            item = {"type": "function_call", "id": self._new_id("fc"), "call_id": call["id"]}
            names = self._names.get(function["name"], {"name": function["name"]})
            events += self._begin(item | names | {"arguments": ""})
        if text := function["arguments"]:
            self.items[-1]["arguments"] += text
            events.append(self._event("response.function_call_arguments.delta", delta=text))
        return events

    def _begin(self, item: Event) -> list[Event]:
        """Start an item, and return the events of its start. They contain copies, because the item grows."""
        self._is_open = True
        item["status"] = "in_progress"
        if item["type"] != "function_call":
            item["content"] = []
            if item["type"] == "message":
                item["role"] = "assistant"
            else:
                item["summary"] = []
        self.items.append(item)
        events = [{"type": ADDED, "output_index": len(self.items) - 1, "item": copy.deepcopy(item)}]
        if item["type"] != "function_call":
            is_message = item["type"] == "message"
            extra: dict[str, object] = {"annotations": [], "logprobs": []} if is_message else {}
            item["content"].append({"type": "output_text" if is_message else "reasoning_text", "text": "", **extra})
            part = copy.deepcopy(item["content"][0])
            events.append(self._event("response.content_part.added", content_index=0, part=part))
        return events

    def _close(self, status: str) -> list[Event]:
        item, events = self.items[-1], []
        self._is_open = False
        item["status"] = status
        if item["type"] == "function_call":
            name = "response.function_call_arguments.done"
            events.append(self._event(name, arguments=item["arguments"], name=item["name"]))
        else:
            (part,) = item["content"]
            told = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            name = "response.output_text.done" if item["type"] == "message" else "response.reasoning_text.done"
            events.append(self._event(name, content_index=0, text=part["text"], **told))
            events.append(self._event("response.content_part.done", content_index=0, part=part))
        return [*events, {"type": DONE, "output_index": len(self.items) - 1, "item": item}]

    def _event(self, kind: str, **fields: object) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}
