"""The saved conversations of one engine. `nanovllm chat` and the server's `/slots` call `Slots`, in any thread.

A store finds blocks by their content, so a prompt needs no name to find them. A name adds three things: the messages
from which the prompt is made, the count of tokens that need not be computed, and blocks that are already in host memory
when the prompt comes. `conversations.py` has the files.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from nanovllm_extras.kv_store.conversations import (
    delete_conversation,
    list_conversations,
    restore_conversation,
    save_conversation,
)
from nanovllm_extras.kv_store.disk_tier import DiskTier
from nanovllm_extras.kv_store.store import KVStore
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.options.store_options import NEEDS_FOLDER
from nanovllm_extras.records import full_sequence
from nanovllm_extras.records.tier import BlockName, Chain

MAX_WAIT_S = 10.0  # until blocks are saved that the engine has computed before


class Slot(NamedTuple):
    """A saved conversation."""

    name: str
    num_tokens: int
    """Of its full blocks."""
    num_stored_tokens: int
    """Of the first of these blocks, which are in the store, so that this engine need not compute them.

    If the model has recurrent states, these blocks end at a snapshot.
    """
    messages: list[dict[str, str]]


class Slots:
    """`store` is an engine's `parts.kv_store`. Raises ValueError if it has no tier on disk.

    The methods raise ValueError for a name that could leave the folder, UnknownNameError, and OSError.
    """

    def __init__(self, store: KVStore | None) -> None:
        tiers = () if store is None else store.tiers.tiers
        on_disk = next((tier for tier in tiers if isinstance(tier, DiskTier)), None)
        if store is None or on_disk is None:
            raise ValueError(NEEDS_FOLDER)
        self._store, self._disk = store, on_disk
        self._tiers = Chain(tiers)  # of this rank: only the engine's own thread may ask the others

    def names(self) -> list[str]:
        """Return the names of all saved conversations."""
        return list_conversations(self._disk)

    def save(
        self,
        name: str,
        token_ids: Sequence[int],
        cache_salt: str | None = None,
        messages: Sequence[Mapping[str, str]] = (),
    ) -> Slot:
        """Save the names of the blocks that these tokens fill, and the messages. A saved conversation is replaced.

        This computes nothing: only blocks that an engine has saved to the folder are counted as stored.
        """
        names = self._names_of(token_ids, cache_salt)
        self._store.saver.wait(MAX_WAIT_S)
        num_found = save_conversation(self._disk, name, names, messages)
        return self._slot(name, names, self._store.num_usable(names[:num_found], self._disk), messages)

    def restore(self, name: str, cache_salt: str | None = None) -> Slot:
        """Load the blocks of a conversation, so that the tiers before the folder have them.

        No token counts as stored if the model, one of the engine's options or the salt is another one.
        """
        saved = restore_conversation(self._disk, name)
        token_ids = np.frombuffer(b"".join([block.tokens for block in saved.blocks]), "<i4").tolist()
        names = self._names_of(token_ids, cache_salt)
        num_found = saved.num_found if names == saved.blocks else 0
        num_loaded = self._store.load_ahead(names[:num_found], self._tiers)
        return self._slot(name, saved.blocks, num_loaded, saved.messages)

    def delete(self, name: str) -> None:
        """Remove a conversation. Its blocks stay until they are evicted."""
        delete_conversation(self._disk, name)

    def _names_of(self, token_ids: Sequence[int], cache_salt: str | None) -> list[BlockName]:
        seq = full_sequence.Sequence("", list(token_ids), SamplingParams())
        seq.cache_salt = cache_salt
        return self._store.names(seq, 0, len(token_ids) // self._store.block_size)

    def _slot(
        self, name: str, blocks: Sequence[BlockName], num_found: int, messages: Sequence[Mapping[str, str]]
    ) -> Slot:
        num_tokens = sum(len(block.tokens) for block in blocks) // 4
        return Slot(name, num_tokens, num_found * self._store.block_size, [dict(message) for message in messages])
