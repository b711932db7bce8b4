"""`cache_salt`: requests with different salts never share cached blocks, even if their prompts are equal.

A prefix hit makes the first token come earlier, so a user who measures time can learn whether another user has sent a
certain prompt. Users who share a secret salt share blocks with each other only.

The salt changes the hash of a sequence's first full block, and so, by the chain of hashes, those of all later blocks:

    low 64 bits      hash of the tokens, seeded with the salt. xxhash uses these bits as the seed of the next block
    other 192 bits   of a digest of the salt: a hit of the first block proves that the salts are equal

A sequence without a salt has a hash of 64 bits. The K/V store has the salt in its keys (`kv_store/keys.py`).
"""

from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import Any

from nanovllm.prefix_cache import hash_block


def salt_request(request: Any, cache_salt: str, cache: Any) -> None:
    """Give the sequences of a new request their salt, and let `cache`, a `PrefixCache`, tell salts apart."""
    for seq in request.seqs:
        seq.cache_salt = cache_salt
    if "_key" not in vars(cache):
        cache._key = partial(salted_key, cache._key)


def salted_key(key: Callable[[Any, int], tuple[int, bytes]], seq: Any, i: int) -> tuple[int, bytes]:
    """Return hash and tokens of full block `i` of `seq`. key: the cache's own method"""
    is_first = not seq.block_hashes
    block_hash, tokens = key(seq, i)
    if is_first and seq.cache_salt is not None:
        block_hash = seq.block_hashes[0] = hash_first_block(seq.cache_salt, tokens)
    return block_hash, tokens


def hash_first_block(cache_salt: str, tokens: bytes) -> int:
    """Return the hash of a first block: 256 bits."""
    digest = int.from_bytes(blake2b(cache_salt.encode(), digest_size=32).digest(), "little")
    return digest >> 64 << 64 | hash_block(digest % 2**64, tokens)
