"""The K/V store for models with recurrent states: a snapshot is stored like a block, under a name of its own.

K and V of a prefix are of use only up to a position where the state is known. So each snapshot that is due
(`slots.py`) is saved after the step that has computed it. Its name is that of the block which ends there, with the key
hashed once more. A hit is the longest prefix that ends at a snapshot, and whose blocks are all found; both may be in
the pool or in the store. With blocks of 4, for a prompt of 18 tokens:

    positions     0 1 2 3     4 5 6 7     8 9 10 11     12 13 14 15     16 17
    K and V       pool        pool        store         store           computed
    snapshots           pool                      store         –

The pool finds 4 tokens by itself. With the store it is 12: block 1 is shared from the pool, block 2 is loaded, and the
snapshot after it is loaded to the slot of the sequence. The last 6 tokens are computed. The prompt leaves the known
blocks after 16 tokens, so a snapshot is due there, and the next such prompt finds it.

A loaded snapshot is not a snapshot of the pool: the next sequence with this prefix loads it, too.
"""

from typing import Any

import numpy as np

from nanovllm.prefix_cache import CachedBlock, PrefixCache
from nanovllm_extras.kv_store.keys import make_root_key
from nanovllm_extras.kv_store.share import Loaded, name_in_share
from nanovllm_extras.kv_store.store import KVStore, StoreHooks, check_holds
from nanovllm_extras.kv_store.tier import BlockName, Tier
from nanovllm_extras.records import Moves, Named
from nanovllm_extras.states.slots import SlotCopies

MAX_LOOKUPS = 256


class StateKVStore(KVStore):
    """A `KVStore` whose tiers also keep snapshots, which have another size than blocks.

    Raises ValueError if a tier is smaller than a block and a snapshot.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        cache = runner.kv_cache
        self.bytes_per_state: int = cache.bytes_per_slot
        check_holds(runner.config, "one block and one state", self.bytes_per_block + self.bytes_per_state)
        shape, dtypes = cache.state_shape, [str(states.dtype) for states in cache.states]
        facts = [shape.num_layers, shape.conv, shape.recurrent, dtypes]
        self.root_key = make_root_key({"blocks": self.root_key.hex(), "states": facts})

    def num_usable(self, names: list[BlockName], tier: Tier) -> int:
        """Return how many of the first of these blocks end at the last snapshot that `tier` has; 0 if it has none.

        Only the last `MAX_LOOKUPS` ends are looked up, because no step runs meanwhile. By default, a prefix that was
        computed once has a snapshot in each 64 blocks.
        """
        for count in range(len(names), max(0, len(names) - MAX_LOOKUPS), -1):
            if tier.match([name_of_state(names[count - 1])]):
                return count
        return 0

    def load_ahead(self, names: list[BlockName], tiers: Tier) -> int:
        buffer = np.empty(self.bytes_per_state, np.uint8)
        while num_usable := self.num_usable(names, tiers):
            names = names[:num_usable]
            num_loaded = super().load_ahead(names, tiers)
            if num_loaded == num_usable and tiers.load(name_of_state(names[-1]), buffer):
                return num_usable
            names = names[: min(num_loaded, num_usable - 1)]
        return 0

    def load_state(self, name: BlockName) -> Loaded | None:
        """Return the snapshot with this name, or None if it cannot be loaded."""
        return self.load(name, self.bytes_per_state)


class StateStoreHooks(StoreHooks):
    """Wraps the methods of a `StateBlockManager`, whose scheduler calls `take_copies` before `take_snapshot`."""

    def __init__(self, store: StateKVStore, blocks: Any) -> None:
        super().__init__(store, blocks)
        self._state_loads: list[Named] = []
        self._take_snapshot = blocks.take_snapshot
        self._put_back = blocks.put_back
        if store.can_save:
            blocks.take_snapshot = self.take_snapshot
            blocks.put_back = self.put_back

    # ---- the wrapped methods

    def take_copies(self) -> Moves:
        self._moves = self._add_to(self._take_copies())
        self._moves.state_loads, self._state_loads = self._state_loads, []
        return self._moves

    def put_back(self, copies: SlotCopies) -> None:
        """Keep for the next step what a step without chunks was to do. So its blocks are saved by the next one."""
        self._put_back(copies)
        self._saves = {block_id: name for name, block_id in self._moves.saves} | self._saves

    def take_snapshot(self, seq: Any) -> None:
        """Note the state after this step's chunk to be saved, unless the pool has the snapshot already.

        It is saved from the slot of `seq`. So it is saved even if the pool has no slot for a snapshot.
        """
        is_new = self._is_new(seq)
        self._take_snapshot(seq)
        if is_new:
            self._moves.state_saves.append((self._name(seq), self.blocks.slot_of(seq)))

    def _is_new(self, seq: Any) -> bool:
        """Return whether a snapshot of `seq` is due that the pool does not have."""
        is_due: bool = self.blocks.ends_at_snapshot(seq)
        return is_due and seq.parent_serial not in self.blocks.prefix_cache.snapshots

    def _name(self, seq: Any) -> BlockName:
        """Return the name of a snapshot after the registered blocks of `seq`."""
        num_blocks = seq.num_registered_blocks
        return name_of_state(*self._store.names(seq, num_blocks - 1, num_blocks))

    # ---- loading

    def _load_more(self, seq: Any) -> None:
        """Give `seq` more blocks, of the pool and of the store, up to the last stored snapshot, and load that."""
        first, stop = seq.block_table.length, seq.max_cached_tokens // self.blocks.block_size
        if first >= stop:
            return
        names = self._store.names(seq, first, stop)
        # the core's `find` also returns the blocks after the last snapshot of the pool
        cached = PrefixCache.find(self.blocks.prefix_cache, seq)[first:]
        num_found = len(cached) + self._store.match(names[len(cached) :])
        if num_found:
            branch = (first + num_found) * self.blocks.block_size
            self.blocks._branches[seq] = max(branch, self.blocks._branches.get(seq, 0))
            self._load_prefix(seq, first, names[:num_found], cached)

    def _load_prefix(self, seq: Any, first: int, names: list[BlockName], cached: list[CachedBlock]) -> None:
        """Load a snapshot and the blocks up to it, or an earlier snapshot if either cannot be loaded.

        names: of the blocks from `first` on, of which the pool has the first ones, `cached`
        """
        store: Any = self._store
        while num_usable := store.num_usable(names, store.tiers):
            names, shared = names[:num_usable], cached[:num_usable]
            start, stop = first + len(shared), first + num_usable
            state_name = name_of_state(names[-1])
            state = store.load_state(state_name)
            if state is None:
                names = names[:-1]
                continue
            num_blocks, loaded = self._load(names[len(shared) :], start, stop)
            if num_blocks < stop:
                names = names[: num_blocks - first]
                continue
            for block in shared:
                self.blocks._share(seq, block.block_id)
            self._append(seq, start, names[len(shared) :], loaded)
            self._state_loads.append((state_name, self.blocks.slot_of(seq)))
            self._loaded[state_name] = state.data
            store.stats.num_loaded_states += 1
            return


class KnownStateStoreHooks(StateStoreHooks):
    """Wraps the methods of a `KnownStateBlockManager`, which takes some snapshots after their step: in `settle`.

    The next step may change the state in the slot of such a sequence. So these snapshots are saved after the next step,
    from the pool's copy, which that step has made first. One that has no slot in the pool is not saved.
    """

    def __init__(self, store: StateKVStore, blocks: Any) -> None:
        super().__init__(store, blocks)
        self._is_settling = False
        self._late: list[tuple[BlockName, int]] = []  # (name, serial of the block at its end)
        self._settle = blocks.settle
        if store.can_save:
            blocks.settle = self.settle

    def settle(self, seq: Any) -> None:
        self._is_settling = True
        try:
            self._settle(seq)
        finally:
            self._is_settling = False

    def take_snapshot(self, seq: Any) -> None:
        snapshots = self.blocks.prefix_cache.snapshots
        if not self._is_settling:  # the step that is scheduled computes a chunk of `seq`
            saved = [(name, snapshots[serial]) for name, serial in self._late if serial in snapshots]
            self._moves.state_saves += saved
            self._late = []
            super().take_snapshot(seq)
            return
        is_new = self._is_new(seq)
        self._take_snapshot(seq)
        if is_new and seq.parent_serial in snapshots:
            self._late.append((self._name(seq), seq.parent_serial))


def name_of_state(name: BlockName) -> BlockName:
    """Return the name of the snapshot at the end of a block. It has the same tokens and another key."""
    return name_in_share(name, b"state")
