"""Compute a request's key for Serve's prefix-aware router, which sends requests with a common prefix to one replica.

Ray's `PrefixCacheAffinityRouter` keeps a tree of the prompts that each replica has seen, as characters, in an actor. It
compares characters in a Python loop, which takes several milliseconds for 64 Ki characters. So the router gets a key
with one character for each piece of `PIECE` characters. The key has the same prefixes in a tree that is 64 times
smaller, and the actor does not get the prompts.

    prompt   |piece 0|piece 1|piece 2|rest        key   "a" "b" "c"
    another  |piece 0|piece 1|other  |                  "a" "b" "x"      two thirds match
"""

import json
from dataclasses import dataclass

import xxhash
from pydantic_core import from_json

from nanovllm_extras.serve.billing_header import without_billing_header

PIECE = 64  # characters of a prompt that become one character of its key
HEAD = 1 << 16  # bytes of a body that are read for its key
NUM_CHARACTERS = 0xD800  # the code points below the surrogates
FIRST = ("tools", "instructions", "system")  # the fields that a chat template writes before the conversation
PROMPTS = ("messages", "prompt", "input")


@dataclass(frozen=True)
class Prefix:
    """The argument that the router reads."""

    prompt: str


@dataclass(frozen=True)
class Holder:
    """The argument that the router reads if a request needs the replica that stores a response."""

    replica: str


def prefix_of(body: bytes) -> Prefix | None:
    """Return the key of a request's JSON, computed from its first `HEAD` bytes; None if it has no prompt."""
    try:
        values = from_json(body[:HEAD], allow_partial="trailing-strings")
    except ValueError:
        return None
    if not isinstance(values, dict) or not any(values.get(name) for name in PROMPTS):
        return None
    if values.get("system"):
        values["system"] = without_header(values["system"])
    parts = [values[name] for name in (*FIRST, *PROMPTS) if values.get(name)]
    text = json.dumps(parts, ensure_ascii=False, separators=(",", ":"))
    whole = max(1, len(text) // PIECE)
    return Prefix("".join(character_of(text[i * PIECE : (i + 1) * PIECE]) for i in range(whole)))


def without_header(system: object) -> list[str]:
    """Return the texts of a system prompt without an agent's billing header, which differs in each request."""
    blocks = system if isinstance(system, list) else [system]
    texts = [block.get("text") if isinstance(block, dict) else block for block in blocks]
    return [kept for text in texts if isinstance(text, str) and (kept := without_billing_header(text))]


def character_of(piece: str) -> str:
    """Return a character that is a hash of `piece`."""
    return chr(xxhash.xxh32_intdigest(piece.encode("utf-8", "surrogatepass")) % NUM_CHARACTERS)
