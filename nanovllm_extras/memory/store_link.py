"""Which blocks and states a K/V store loads when a sequence is admitted, and which are saved after a step.

A `KVStore` (`kv_store/store.py`) lives as long as the engine. Each block manager has a link to it. A prompt of which
the pool has a block, and the store another one, with block_size 4:

    prompt          [ 0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 ]
    pool            [ block 7 ]
    store                     [ loaded into block 2 ]
    computed                                [ block 5, saved after the step | block 3 ]

Loading is synchronous: when `load` has filled a buffer, the block counts as computed, and the buffer is copied to the
device before the step's forward pass. If a load fails, the sequence computes from this block on.

**Groups of layers.** A block of each group is loaded and saved under a name of its own. A hit from the store is the
longest prefix of which it has, in every group, the blocks that the next token sees. With a window of 5, and position 12
next:

    positions     0 1 2 3     4 5 6 7     8 9 10 11
    group 0       loaded      loaded      loaded         the names of the tokens
    group 1       –           –           loaded         the same keys, hashed with the number of the group

A block that a sequence gave back while it was not known yet was not saved, so the hit ends before it.

**Recurrent states.** K and V of a prefix are of use only up to a position where the state is known. So each snapshot
that is due (`slots.py`) is saved after the step that has computed it. Its name is that of the block which ends there,
with the key hashed once more. A hit is the longest prefix that ends at a stored snapshot, and whose blocks are all
found, in the pool or in the store. For a prompt of 18 tokens:

    positions     0 1 2 3     4 5 6 7     8 9 10 11     12 13 14 15     16 17
    K and V       pool        pool        store         store           computed
    snapshots           pool                      store         –

The pool finds 4 tokens by itself. With the store it is 12: block 1 is shared from the pool, block 2 is loaded, and the
snapshot after it is loaded to the slot of the sequence. The last 6 tokens are computed. The prompt leaves the known
blocks after 16 tokens, so a snapshot is due there, and the next such prompt finds it. A loaded snapshot is not a
snapshot of the pool: the next sequence with this prefix loads it, too.

A snapshot is saved from the slot of the sequence, even if the pool has no slot for it. If it is taken after its step,
because tokens became known later, the next step may change the state in that slot. So it is saved after the next step,
from the pool's copy, which that step makes first. One that has no slot in the pool is not saved.
"""

from nanovllm.sequence import CachedBlock
from nanovllm_extras.kv_store.share import Loaded, name_in_group, name_of_state
from nanovllm_extras.kv_store.store import KVStore
from nanovllm_extras.memory.block_manager import BlockManager
from nanovllm_extras.memory.prefix_cache import PrefixCache
from nanovllm_extras.memory.slots import Slots
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.records.moves import Moves, Named
from nanovllm_extras.records.tier import BlockName


class StoreLink:
    """A part of the prefix cache (`prefix_cache.py`), which notes the blocks that are registered, to be saved."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._is_loading = False  # blocks that are registered are not new
        self._saves: dict[int, BlockName] = {}  # block id -> name, of blocks that are full after the next step
        self._late: list[tuple[BlockName, int]] = []  # of snapshots: name, and serial number of the block at its end
        self._loads = Moves()  # with what is loaded before the next step

    # ---- the part of the prefix cache

    def num_usable(self, hits: list[CachedBlock]) -> int:
        return len(hits)

    def registered(self, cache: PrefixCache, seq: Sequence, i: int) -> None:
        """Note that block `i` of `seq` is to be saved, in each group."""
        if self._is_loading or not self._store.can_save:
            return
        block_ids = [table[i] for table in (seq.block_table, *seq.window_tables)]
        name = None
        for group, block_id in enumerate(block_ids):
            if block_id in cache:  # else another block with the same contents is
                name = name or self._store.names(seq, i, i + 1)[0]
                self._saves[block_id] = name_in_group(name, group)

    def forgotten(self, block_id: int, serial: int | None) -> None:
        self._saves.pop(block_id, None)

    def forget_all(self) -> None:
        """Do nothing: K and V of blocks that are to be saved are right, even if the pool does not find them."""

    # ---- saving

    def note_state(self, seq: Sequence, states: Slots, moves: Moves | None) -> None:
        """Note that the state after the computed tokens of `seq`, for which a snapshot was due, is to be saved.

        moves: of the step that computes it. None if its step has run already
        """
        if not self._store.can_save:
            return
        num_blocks = seq.num_registered_blocks
        name = name_of_state(*self._store.names(seq, num_blocks - 1, num_blocks))
        if moves is not None:
            moves.state_saves.append((name, states.owned[seq]))
        elif seq.parent_serial in states.snapshots:
            self._late.append((name, seq.parent_serial))

    def save_late(self, moves: Moves, states: Slots) -> None:
        """Save the snapshots that were taken since the step before this one."""
        saved: list[Named] = [(name, states.snapshots[one]) for name, one in self._late if one in states.snapshots]
        moves.state_saves += saved
        self._late = []

    # ---- a step

    def take_moves(self, moves: Moves) -> None:
        """Add what the step that is scheduled loads and saves."""
        loads, self._loads = self._loads, Moves()
        moves.loads, moves.state_loads, moves.loaded = loads.loads, loads.state_loads, loads.loaded
        moves.saves = [(name, block_id) for block_id, name in self._saves.items()]
        self._saves = {}

    def put_back(self, moves: Moves) -> None:
        """Let a later step save what this one, which has no chunks, was to save, except for blocks taken until then."""
        self._saves = {block_id: name for name, block_id in moves.saves} | self._saves

    def forget_step(self) -> None:
        """Forget what is to be loaded and saved."""
        self._loads, self._saves, self._late = Moves(), {}, []

    # ---- loading

    def load_more(self, blocks: BlockManager, seq: Sequence) -> None:
        """Load what the store has after the computed tokens of `seq`, which are those of a hit.

        With states, that is a snapshot, and all blocks up to it that the pool does not have.
        """
        store, first, stop = self._store, len(seq.block_table), seq.max_cached_tokens // blocks.block_size
        if not store.can_load or first >= stop:
            return
        names = store.names(seq, first, stop)
        cached = [] if blocks.states is None else blocks.prefix_cache.chain(seq)[first:]
        num_found = len(cached) + store.match(names[len(cached) :])
        if not num_found:
            return
        if blocks.states is not None:
            blocks.states.note_branch(seq, (first + num_found) * blocks.block_size)
        names = names[:num_found]
        data: dict[BlockName, Loaded] = {}
        while num_usable := store.num_usable(names, store.tiers):
            names, shared = names[:num_usable], cached[:num_usable]
            state = None
            if blocks.states is not None:
                state = store.load_state(names[-1])
                if state is None:
                    names = names[:-1]
                    continue
            num_loaded = self._load(blocks, names, first, len(shared), data)
            if num_loaded < num_usable:
                names = names[:num_loaded]
                continue
            self._append(blocks, seq, names, shared, data)
            if blocks.states is not None and state is not None:
                name = name_of_state(names[-1])
                self._loads.state_loads.append((name, blocks.states.owned[seq]))
                self._loads.loaded[name] = state.data
                store.stats.num_loaded_states += 1
            return

    def _load(
        self, blocks: BlockManager, names: list[BlockName], first: int, num_shared: int, data: dict[BlockName, Loaded]
    ) -> int:
        """Load what a sequence lacks in all groups to go on after the blocks with these names, which follow `first`.

        The first `num_shared` ones are of the pool. Adds to `data`, and returns how many of the names can be used: all,
        or those before a block that cannot be loaded.
        """
        position = (first + len(names)) * blocks.block_size
        for i, name in enumerate(names):
            kinds = [(0, blocks.kind), *((group, blocks.other_kind) for group in range(1, blocks.num_groups))]
            for group, kind in kinds:
                own = name_in_group(name, group)
                is_needed = first + i >= kind.num_behind(position) and (group or i >= num_shared)
                if is_needed and own not in data:
                    loaded = self._store.load(own)
                    if loaded is None:
                        return i
                    data[own] = loaded
        return len(names)

    def _append(
        self,
        blocks: BlockManager,
        seq: Sequence,
        names: list[BlockName],
        shared: list[CachedBlock],
        data: dict[BlockName, Loaded],
    ) -> None:
        """Append blocks with these names to the tables of `seq`: those of the pool, `shared`, and then loaded ones."""
        store, num_loaded = self._store, len(names) - len(shared)
        by_tier: dict[str, list[int]] = {}  # name of a tier -> ids of the blocks that it had
        self._is_loading = True
        try:
            taken = blocks.append_loaded(seq, shared, num_loaded)
        finally:
            self._is_loading = False
        for i, group, block_id in taken:
            name = name_in_group(names[i], group)
            self._loads.loads.append((name, block_id))
            self._loads.loaded[name] = data[name].data
            by_tier.setdefault(data[name].tier, []).append(block_id)
        num_tokens = num_loaded * blocks.block_size
        store.stats.num_loaded_blocks += sum(map(len, by_tier.values()))
        store.stats.loaded_tokens += num_tokens
        if num_tokens:  # else only a state is loaded
            blocks.observer.on_load_blocks(seq, by_tier, num_tokens)
