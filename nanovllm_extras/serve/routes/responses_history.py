"""Read the items of a response's conversation: those of earlier responses, those that are referenced, and the input.

`find_history` looks them up, in the event loop. `read_conversation` parses them, for a long body in a thread.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from pydantic_core import from_json, to_json

from nanovllm_extras.serve.bounds import Bounds, TooLong, count_values
from nanovllm_extras.serve.errors import APIError, refuse
from nanovllm_extras.serve.messages.responses_input import ID_PREFIXES, IGNORED_ITEMS, ITEMS, REFERENCE, Item
from nanovllm_extras.serve.messages.responses_protocol import ResponsesRequest
from nanovllm_extras.serve.response_store import ResponseStore, StoredItem, Turn

BYTES_OF_CHARACTER = 6  # of the JSON of a character, at most
RUNNING = "is still being generated; continue it when it has ended"
NOT_STORED = "Responses with store=false are not stored, and stored ones are deleted when they are old or rarely used"


class History(NamedTuple):
    """What a request needs of the store."""

    parent: Turn | None
    """The turn that the request continues."""
    items: list[StoredItem]
    """The items of this turn and of those before it, the oldest first."""
    references: Mapping[str, StoredItem]
    """Id of an item that the input references -> item."""

    @property
    def num_bytes(self) -> int:
        return sum(len(item.json) for item in (*self.items, *self.references.values()))


class Conversation(NamedTuple):
    """All items of a conversation."""

    items: list[Item]
    input: list[StoredItem]
    """The request's own items, to be stored."""


def find_history(store: ResponseStore, owner: str, body: ResponsesRequest, bounds: Bounds) -> History:
    """Return what `body` needs of the store.

    Raises APIError 400 if the earlier response is not stored, 404 if a referenced item is not.
    """
    items: list[StoredItem] = []
    parent = None
    if body.previous_response_id is not None:
        if store.running(owner, body.previous_response_id) is not None:
            message = f"The response with id '{body.previous_response_id}' {RUNNING}."
            raise APIError(400, message, "previous_response_id")
        previous = store.get(owner, body.previous_response_id)
        if previous is None:
            message = f"Previous response with id '{body.previous_response_id}' not found. {NOT_STORED}."
            raise APIError(400, message, "previous_response_id", "previous_response_not_found")
        parent, items = previous.turn, newest(previous.turn.items(), body, bounds)
    references: dict[str, StoredItem] = {}
    for given in body.input if isinstance(body.input, list) else []:
        if is_reference(given):
            name = str(given.get("id"))
            found = store.item(owner, name)
            if found is None:
                raise APIError(404, f"Item with id '{name[:100]}' not found. {NOT_STORED}.", "input")
            references[name] = found
    return History(parent, items, references)


def newest(items: list[StoredItem], body: ResponsesRequest, bounds: Bounds) -> list[StoredItem]:
    """Return the items of earlier responses, if they may fit in a prompt. Raises APIError 400 if they do not.

    With `truncation: "auto"`, the oldest ones that cannot fit are left out.
    """
    num_bytes, first = 0, len(items)
    while first and num_bytes <= BYTES_OF_CHARACTER * bounds.max_chars and len(items) - first < bounds.max_model_len:
        first -= 1
        num_bytes += len(items[first].json)
    if first and body.truncation != "auto":
        with refuse("input"):
            raise TooLong(bounds.max_model_len, f"the conversation has {len(items)} items")
    return items[first:]


def read_conversation(
    body: ResponsesRequest, history: History, bounds: Bounds, new_id: Callable[[str], str]
) -> Conversation:
    """Return the items of the conversation. Raises APIError 400 or RequestValidationError if the input is invalid.

    new_id: returns an id with a prefix, for an item that has none.
    """
    given: list[dict[str, object]] = body.input if isinstance(body.input, list) else []
    if isinstance(body.input, str):
        given = [{"role": "user", "content": body.input}]
    if body.truncation == "auto":
        given = given[-bounds.max_model_len :]
    with refuse("input"):
        bounds.check_turns([*history.items, *given] if body.truncation != "auto" else given, "input")
    old = b"[" + b",".join([item.json for item in (*history.items, *history.references.values())]) + b"]"
    if count_values(old, bounds.max_values) > bounds.max_values:
        message = f"the conversation has more than {bounds.max_values} values (--max-request-values)"
        raise APIError(400, message, "input" if body.previous_response_id is None else "previous_response_id")
    values = from_json(old)
    num_before = len(history.items)
    items = [read_item(i, value) for i, value in enumerate(values[:num_before])]
    referenced = dict(zip(history.references, values[num_before:], strict=True))
    own: list[Item] = []
    for i, one in enumerate(given):
        value = referenced[str(one.get("id"))] if is_reference(one) else one
        if str(value.get("type")) not in IGNORED_ITEMS:
            own.append(read_item(i, value))
    if not items and not own:
        raise APIError(400, "input must have at least one item that is not ignored", "input")
    return Conversation(items + own, [to_stored(item, new_id) for item in own])


def is_reference(given: Mapping[str, object]) -> bool:
    """Return whether an item of the input references a stored item. Its type may be absent."""
    if given.get("type") is None:
        return "role" not in given and "id" in given
    return given["type"] == REFERENCE


def read_item(index: int, given: Mapping[str, object]) -> Item:
    """Return the item number `index` of the input, checked. Raises APIError 400 or RequestValidationError."""
    kind = given.get("type") or "message"
    if not isinstance(kind, str) or kind not in ITEMS:
        raise APIError(400, f"input.{index}.type must be one of {', '.join(ITEMS)}, got {kind!r}", "input")
    try:
        return ITEMS[kind].model_validate({**given, "type": kind})
    except ValidationError as error:
        errors = [one | {"loc": ("body", "input", index, *one["loc"])} for one in error.errors()]
        raise RequestValidationError(errors) from error


def to_stored(item: Item, new_id: Callable[[str], str]) -> StoredItem:
    """Return an item of the input as it is stored."""
    value = item.stored(new_id(ID_PREFIXES[item.type]))
    return StoredItem(str(value["id"]), to_json(value))


def stored_output(item: Mapping[str, object]) -> StoredItem:
    """Return an item of the output as it is stored: without log-probabilities."""
    value = dict(item)
    content = item.get("content")
    if isinstance(content, list):
        value["content"] = [{name: one for name, one in part.items() if name != "logprobs"} for part in content]
    return StoredItem(str(item["id"]), to_json(value))
