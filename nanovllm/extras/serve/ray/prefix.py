"""A request's key for Serve's prefix-aware router (`router.py`): requests with a common prefix go to one replica.

Ray's `PrefixCacheAffinityRouter` keeps a tree of the prompts that each replica has seen, as characters, in an actor. It
compares characters in a loop of Python, some milliseconds for 64 Ki of them. So it gets a key with one character for
each piece of `PIECE` characters: the same prefixes in a tree that is 64 times smaller, and no prompt in the actor.

    prompt   |piece 0|piece 1|piece 2|rest        key   "a" "b" "c"
    another  |piece 0|piece 1|other  |                  "a" "b" "x"      two thirds match
"""

import json
from dataclasses import dataclass

import xxhash
from pydantic_core import from_json

PIECE = 64  # characters of a prompt that become one of its key
HEAD = 1 << 16  # bytes of a body that are read for its key
NUM_CHARACTERS = 0xD800  # below the surrogates
FIRST = ("tools", "instructions")  # what a chat template writes before the conversation
PROMPTS = ("messages", "prompt", "input")


@dataclass(frozen=True)
class Prefix:
    """The argument that the router looks at."""

    prompt: str


def prefix_of(body: bytes) -> Prefix | None:
    """Of a request's JSON, of which a cut end is enough; None if it has no prompt."""
    try:
        values = from_json(body[:HEAD], allow_partial="trailing-strings")
    except ValueError:
        return None
    if not isinstance(values, dict) or not any(values.get(name) for name in PROMPTS):
        return None
    parts = [values[name] for name in (*FIRST, *PROMPTS) if values.get(name)]
    text = json.dumps(parts, ensure_ascii=False, separators=(",", ":"))
    whole = max(1, len(text) // PIECE)
    return Prefix("".join(character_of(text[i * PIECE : (i + 1) * PIECE]) for i in range(whole)))


def character_of(piece: str) -> str:
    return chr(xxhash.xxh32_intdigest(piece.encode("utf-8", "surrogatepass")) % NUM_CHARACTERS)
