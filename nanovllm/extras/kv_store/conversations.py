"""Save and restore the blocks of a conversation by name: a small JSON file of keys and tokens beside the blocks.

The file does not hold K and V, and does not keep the blocks from being evicted: what is gone is computed again.

    {"version": 1, "blocks": [{"key": "3f9a…", "tokens": [9707, 11, …]}, …]}
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nanovllm.extras.kv_store.disk_tier import DiskTier, check_name
from nanovllm.extras.kv_store.tier import BlockName

VERSION = 1
KEY_BYTES = 32


def save_conversation(store: DiskTier, name: str, blocks: Sequence[BlockName]) -> int:
    """Save the names of a conversation's blocks, in order, and return how many of the first ones are in the store.

    A conversation with the same name is replaced. Raises ValueError if the name could leave the folder, and OSError if
    the file cannot be written.
    """
    path = path_of(store, name)
    listed = [{"key": block.key.hex(), "tokens": np.frombuffer(block.tokens, "<i4").tolist()} for block in blocks]
    path.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=".", dir=path.parent)  # with mode 0600
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            json.dump({"version": VERSION, "blocks": listed}, file)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return store.match(blocks)


def restore_conversation(store: DiskTier, name: str) -> tuple[list[BlockName], int]:
    """Return the names of a conversation's blocks, and how many of the first ones are still in the store.

    The tokens of the blocks are the conversation's. Raises ValueError if there is none of this name, or if its file is
    damaged.
    """
    path = path_of(store, name)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            content = json.load(file)
    except FileNotFoundError:
        raise ValueError(f"`name` must be that of a saved conversation, got {name!r}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"the conversation {name!r} cannot be read: {error}. Save it again.") from error
    try:
        blocks = parse_blocks(content)
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise ValueError(f"the conversation {name!r} is damaged or of another version: save it again") from error
    return blocks, store.match(blocks)


def delete_conversation(store: DiskTier, name: str) -> None:
    """Remove a saved conversation, if it is there. Its blocks stay until they are evicted."""
    path_of(store, name).unlink(missing_ok=True)


def path_of(store: DiskTier, name: str) -> Path:
    return store.folder / "conversations" / f"{check_name('name', name)}.json"


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
