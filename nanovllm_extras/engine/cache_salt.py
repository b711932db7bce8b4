"""`cache_salt`: requests with different salts never share cached blocks, even if their prompts are equal.

A prefix hit makes the first token come earlier, so a user who measures time can learn whether another user has sent a
certain prompt. Users who share a secret salt share blocks with each other only.

A block is found only after its parent, and the first blocks of a sequence have its `root_serial` as their parent. So
sequences with a salt get a digest of the salt as their root: no other sequence has it. It has 256 bits, of which the
highest is 1, so it is not a serial number of a block either. In the K/V store, keys depend on the salt
(`kv_store/keys.py`).

A LoRA adapter changes K and V, so it is a part of the root as well, by the digest of its matrices: only sequences of
the same adapter and the same salt share blocks.
"""

from hashlib import blake2b

from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.records.loaded_adapter import LoadedAdapter


def salt(seq: Sequence, cache_salt: str | None, adapter: LoadedAdapter | None = None) -> None:
    """Let a new sequence share blocks only with those that have the same salt and adapter, or none of them if None."""
    seq.cache_salt, seq.adapter = cache_salt, adapter
    if cache_salt is None and adapter is None:
        return
    digest = blake2b(b"" if cache_salt is None else cache_salt.encode(), digest_size=32)  # a salt is not empty
    if adapter is not None:
        digest = blake2b(digest.digest(), key=bytes.fromhex(adapter.digest), digest_size=32)
    seq.root_serial = int.from_bytes(digest.digest(), "little") | 1 << 255
