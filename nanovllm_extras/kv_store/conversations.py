"""Save and restore the blocks of a conversation by name: a small JSON file of keys and tokens beside the blocks.

The file does not hold K and V, and does not keep the blocks from being evicted: what is gone is computed again. It has
the messages, if the conversation has any, because the blocks are only found by a prompt that begins with the same text.

    {"version": 1, "blocks": [{"key": "3f9a…", "tokens": [9707, 11, …]}, …], "messages": [{"role": …, "content": …}, …]}
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanovllm_extras.kv_store.disk_tier import DiskTier, check_name, make_private_folder
from nanovllm_extras.records.tier import BlockName

VERSION = 1
KEY_BYTES = 32
FOLDER, ENDING = "conversations", ".json"


class UnknownNameError(ValueError):
    """Raised for the name of a conversation that was never saved, or was deleted."""


class SavedConversation(NamedTuple):
    blocks: list[BlockName]
    """In order; their tokens are those of the conversation."""
    num_found: int
    """How many of the first blocks are still in the store."""
    messages: list[dict[str, str]]


def save_conversation(
    store: DiskTier, name: str, blocks: Sequence[BlockName], messages: Sequence[Mapping[str, str]] = ()
) -> int:
    """Save the names of a conversation's blocks, in order, and return how many of the first ones are in the store.

    A conversation with the same name is replaced. Raises ValueError if the name could leave the folder or others may
    read the folder, and OSError if the file cannot be written.
    """
    path = path_of(store, name)
    listed = [{"key": block.key.hex(), "tokens": np.frombuffer(block.tokens, "<i4").tolist()} for block in blocks]
    content = {"version": VERSION, "blocks": listed, "messages": [dict(message) for message in messages]}
    make_private_folder(store.folder)  # again, if it has been deleted
    path.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=".", dir=path.parent)  # with mode 0600
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            json.dump(content, file)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return store.match(blocks)


def restore_conversation(store: DiskTier, name: str) -> SavedConversation:
    """Return a saved conversation.

    Raises UnknownNameError if it was never saved, and ValueError if its file is damaged.
    """
    path = path_of(store, name)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            content = json.load(file)
    except FileNotFoundError:
        raise unknown(name) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"the conversation {name!r} cannot be read: {error}. Save it again.") from error
    try:
        blocks, messages = parse_blocks(content), parse_messages(content)
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise ValueError(f"the conversation {name!r} is damaged or of another version: save it again") from error
    return SavedConversation(blocks, store.match(blocks), messages)


def delete_conversation(store: DiskTier, name: str) -> None:
    """Remove a saved conversation. Its blocks stay until they are evicted. Raises UnknownNameError."""
    try:
        path_of(store, name).unlink()
    except FileNotFoundError:
        raise unknown(name) from None


def list_conversations(store: DiskTier) -> list[str]:
    """Return the names of all saved conversations, sorted."""
    return sorted(path.name.removesuffix(ENDING) for path in (store.folder / FOLDER).glob(f"*{ENDING}"))


def path_of(store: DiskTier, name: str) -> Path:
    return store.folder / FOLDER / f"{check_name('name', name)}{ENDING}"


def unknown(name: str) -> UnknownNameError:
    return UnknownNameError(f"`name` must be that of a saved conversation, got {name!r}")


def parse_blocks(content: Any) -> list[BlockName]:
    """Return the blocks of a conversation's file. Raises an error of some kind if it is not what was written."""
    if content["version"] != VERSION:
        raise ValueError(content["version"])
    blocks = []
    for listed in content["blocks"]:
        key = bytes.fromhex(listed["key"])
        tokens = listed["tokens"]
        if len(key) != KEY_BYTES or not tokens or not all(type(token) is int and token >= 0 for token in tokens):
            raise ValueError(listed)
        blocks.append(BlockName(key, np.array(tokens, dtype="<i4").tobytes()))
    return blocks


def parse_messages(content: Any) -> list[dict[str, str]]:
    """Return the messages of a conversation's file, which have a role and a content. Raises as `parse_blocks` does."""
    messages = content["messages"]
    for message in messages:
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise ValueError(message)
        if not all(isinstance(text, str) for text in message.values()):
            raise TypeError(message)
    return list(messages)
