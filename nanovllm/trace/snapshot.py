"""What is the state of the pool at this moment? A recording that begins in the middle of a run begins with it.

Reads the private fields of the block manager and of its prefix cache: no other file needs them.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from nanovllm.scheduling.sequence import Sequence


def take_snapshot(blocks: Any, seqs: Mapping[Sequence, int]) -> dict[str, Any]:
    """The state of a `BlockManager` and of `seqs`, each with its number.

    free      the free blocks, in the order in which they will be handed out
    cached    [block id, hash, serial number, token ids] of each block that the prefix cache can find
    seqs      of each unfinished sequence: what `replay.py` keeps of it
    """
    cached = [
        [one.block_id, f"{one.block_hash:016x}", one.serial, np.frombuffer(one.tokens, dtype=np.int32).tolist()]
        for one in blocks.prefix_cache._by_id.values()
    ]
    return {
        "free": list(blocks._free),
        "cached": cached,
        "seqs": [describe(seq, number) for seq, number in seqs.items()],
    }


def describe(seq: Sequence, number: int) -> dict[str, Any]:
    return {
        "number": number,
        "request": seq.request_id,
        "sample": seq.sample_index,
        "status": seq.status.name.lower(),
        "beam": int(seq.is_beam),
        "tokens": seq.token_ids.view().tolist(),
        "num_prompt_tokens": seq.num_prompt_tokens,
        "max_num_tokens": seq.max_num_tokens,
        "num_computed_tokens": seq.num_computed_tokens,
        "block_table": seq.block_table.view().tolist(),
        "host_block_ids": seq.host_block_ids.copy(),
    }
