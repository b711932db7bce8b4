"""The names of blocks: a chained hash over a fingerprint of everything that shapes K and V.

    root key     fingerprint: digest of the weights and config.json, dtypes, backend, layout of a block, ranks
    key of block 0     hash(root key, tokens of block 0); with a `cache_salt` or a LoRA adapter, the root key is hashed
                       with these before
    key of block 1     hash(key of block 0, tokens of block 1)

The key of a block so identifies all tokens up to its end. Blocks may come from other processes and other users, who
could construct collisions of the prefix cache's fast hash of 64 bits. So a cryptographic hash is used here: BLAKE2b of
Python's hashlib, 256 bits, about a microsecond per block.
"""

import json
from collections.abc import Mapping
from hashlib import blake2b
from os.path import relpath
from pathlib import Path

import numpy as np
import xxhash

from nanovllm.loader import INDEX_FILE, checkpoint_files
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.records.loaded_adapter import LoadedAdapter
from nanovllm_extras.records.tier import BlockName

KEY_BYTES = 32
CHUNK_BYTES = 1 << 24
LAYOUT_VERSION = 1
"""Raise this number when the meaning of a block's bytes changes, so that older blocks are not found."""


def names_of(seq: Sequence, start: int, stop: int, root_key: bytes, block_size: int) -> list[BlockName]:
    """Return the names of the blocks [start, stop) of `seq`, whose tokens are known. Keys are computed only once."""
    keys: list[bytes] = seq.block_keys  # of its first full blocks
    first = min(start, len(keys))
    size = 4 * block_size  # bytes
    data = np.array(seq.token_ids[first * block_size : stop * block_size], dtype="<i4").tobytes()
    tokens = [data[i : i + size] for i in range(0, len(data), size)]  # of the blocks [first, stop)
    for i in range(len(keys), stop):
        parent = keys[-1] if keys else salt_key(adapter_key(root_key, seq.adapter), seq.cache_salt)
        keys.append(blake2b(tokens[i - first], key=parent, digest_size=KEY_BYTES).digest())
    return [BlockName(keys[i], tokens[i - first]) for i in range(start, stop)]


def adapter_key(root_key: bytes, adapter: LoadedAdapter | None) -> bytes:
    """Return the key before the first block of a sequence with this LoRA adapter, or with none.

    It depends on the contents of the adapter's files, so blocks are found after a restart, whatever its name is then.
    """
    if adapter is None:
        return root_key
    return blake2b(adapter.digest.encode(), key=root_key, digest_size=KEY_BYTES, person=b"adapter").digest()


def salt_key(root_key: bytes, cache_salt: str | None) -> bytes:
    """Return the key before the first block of a sequence with this salt, or with none.

    `person` makes it another hash function than that of the blocks: a salt cannot be mistaken for tokens.
    """
    if cache_salt is None:
        return root_key
    return blake2b(cache_salt.encode(), key=root_key, digest_size=KEY_BYTES, person=b"cache_salt").digest()


def make_root_key(facts: Mapping[str, object]) -> bytes:
    """Return the key before the first block: a hash of the facts that shape K and V, which JSON can hold."""
    text = json.dumps({"version": LAYOUT_VERSION, **facts}, sort_keys=True)
    return blake2b(text.encode(), digest_size=KEY_BYTES).digest()


def digest_model(folder: Path, load_format: str) -> str:
    """Return a digest of what a model is loaded from: the names, sizes and contents of config.json and the weights."""
    digest = xxhash.xxh3_128()
    for path in [folder / "config.json", *files_of_weights(folder, load_format)]:
        digest.update(f"{relpath(path, folder)} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def files_of_weights(folder: Path, load_format: str) -> list[Path]:
    """Return the files that the weights are read from, and the index, which says which tensor is read from which."""
    if load_format == "dummy":
        return []
    if load_format == "gguf":
        return sorted(folder.glob("*.gguf"))
    files = checkpoint_files(folder)
    return [*files, *([] if None in files.values() else [folder / INDEX_FILE])]
