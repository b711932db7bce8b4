"""`cache_salt`: requests with different salts never share cached blocks, even if their prompts are equal.

A prefix hit makes the first token come earlier, so a user who measures time can learn whether another user has sent a
certain prompt. Users who share a secret salt share blocks with each other only.

A block is found only after its parent, and the first blocks of a sequence have its `root_serial` as their parent. So
sequences with a salt get a digest of the salt as their root: no other sequence has it. It has 256 bits, of which the
highest is 1, so it is not a serial number of a block either. In the K/V store, keys depend on the salt
(`kv_store/keys.py`).
"""

from hashlib import blake2b

from nanovllm_extras.records.full_sequence import Sequence


def salt(seq: Sequence, cache_salt: str | None) -> None:
    """Let a new sequence share blocks only with those that have the same salt, or none if `cache_salt` is None."""
    seq.cache_salt = cache_salt
    if cache_salt is not None:
        digest = int.from_bytes(blake2b(cache_salt.encode(), digest_size=32).digest(), "little")
        seq.root_serial = digest | 1 << 255
