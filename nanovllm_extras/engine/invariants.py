"""Invariants: what always holds between two steps, whichever parts the engine has.

`check_invariants(engine)` raises an AssertionError that names the rule, the block or slot, and the sequence. The option
`check_invariants=True` calls it after each step.

    pools          each block and each slot is free or owned, never both; it has as many references as owners; nothing
                   is leaked; the null block and the null slot belong to nobody
    queues         each sequence is in one queue once; a sequence that waits owns nothing, unless it is swapped out
    block tables   they have the blocks of exactly the computed tokens. Null blocks only replace blocks behind a window,
                   and all that a window and a chunk cannot see has been given back
    prefix cache   a block is found by one hash, which is that of its parent and its tokens. A block that a sequence
                   owns is cached for the tokens that the sequence has there, and after the same parents
    states         exactly the running sequences own slots; snapshots belong to cached blocks
    swap           sequences that are swapped out wait, and as many host blocks as they have filled keep their K and V

A block manager that has more than the core's says so itself, by methods that this module calls where they exist:

    tables_of(seq) -> list[Table]               the block tables of a sequence, if not only one
    slot_pools() -> list[Pool]                  slots of states, whose owners are the running sequences
    host_pools() -> list[Pool]                  of host memory; the owners of the first are swapped out
    blocks_beside() -> Mapping[int, int]        cached blocks of other groups -> the serial under which they are found
    serials_beside() -> Iterable[int]           serials under which something else is found
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from typing import NoReturn, TypeVar

from nanovllm import prefix_cache
from nanovllm.block_manager import BlockManager
from nanovllm.engine import LLMEngine
from nanovllm.prefix_cache import ROOT_SERIAL
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import CachedBlock, Sequence
from nanovllm_extras.memory.kinds import NULL_BLOCK
from nanovllm_extras.records.moves import Pool, Table

T = TypeVar("T")


def check_invariants(engine_or_scheduler: LLMEngine | Scheduler) -> None:
    """Raise AssertionError if the scheduler or the block manager contradicts itself. Call it between two steps."""
    given = engine_or_scheduler
    scheduler = given if isinstance(given, Scheduler) else given.scheduler
    blocks = scheduler.block_manager
    host_pools: list[Pool] = call(blocks, "host_pools", [])
    slot_pools: list[Pool] = call(blocks, "slot_pools", [])
    swapped = {owner for pool in host_pools for owner, _ in pool.owned}
    check_queues(scheduler, swapped)
    tables = {seq: tables_of(blocks, seq) for seq in scheduler.running}
    for seq in scheduler.running:
        check_tables(blocks, seq, tables[seq])
    owned = [
        (seq, [block_id for table in own for block_id in table.entries if block_id != NULL_BLOCK])
        for seq, own in tables.items()
    ]
    check_pool(Pool("block", range(1, blocks.num_blocks + 1), blocks._free, owned, blocks._ref_counts))
    for pool in slot_pools + host_pools:
        check_pool(pool)
    check_slots(scheduler, slot_pools)
    check_swapped(scheduler, host_pools)
    check_cache(blocks, tables)
    if blocks._copies:
        fail("block copies are still to be done", blocks._copies[0][1])


def call(one: object, method: str, default: T) -> T:
    """Return what a method returns, or `default` if the object has no such method."""
    found = getattr(one, method, None)
    return default if found is None else found()


def fail(rule: str, one: object = None, owner: object = None, kind: str = "block") -> NoReturn:
    what = "" if one is None else f"; {kind} {one}"
    raise AssertionError(f"{rule}{what}" + ("" if owner is None else f"; {name_of(owner)}"))


def name_of(owner: object) -> str:
    if isinstance(owner, Sequence):
        return f"sample {owner.sample_index} of request {owner.request_id!r}"
    return str(owner)


# ---- pools


def check_pool(pool: Pool) -> None:
    """Each id is free or owned, and has the references of its owners."""
    owners: Counter[int] = Counter()
    for owner, ids in pool.owned:
        owners.update(ids)
        if len(set(ids)) < len(ids):
            fail("a sequence owns it twice", next(one for one in ids if ids.count(one) > 1), owner, pool.kind)
    free = set(pool.free)
    for some in (free, owners.keys()):
        for one in (min(some), max(some)) if some else ():
            if one not in pool.ids:
                fail("it is not of the pool, but free or owned", one, owner_of(pool, one), pool.kind)
    for one in owners.keys() & free:
        fail("it is free and owned", one, owner_of(pool, one), pool.kind)
    if len(free) < len(pool.free):
        fail("it is free twice", next(one for one, count in Counter(pool.free).items() if count > 1), None, pool.kind)
    if len(free) + len(owners) < len(pool.ids):
        fail("it is leaked: neither free nor owned", min(set(pool.ids) - free - owners.keys()), None, pool.kind)
    for one, count in owners.items():
        expected = 1 if pool.ref_counts is None else pool.ref_counts[one]
        if count != expected:
            rule = (
                "it has two owners" if pool.ref_counts is None else f"it has {count} owners and {expected} references"
            )
            fail(rule, one, owner_of(pool, one), pool.kind)
    if pool.ref_counts is not None and sum(pool.ref_counts) != sum(owners.values()):
        one = next(one for one, count in enumerate(pool.ref_counts) if count != owners[one])
        fail(f"it has no owner and {pool.ref_counts[one]} references", one, None, pool.kind)


def owner_of(pool: Pool, one: int) -> object:
    return next((owner for owner, ids in reversed(pool.owned) if one in ids), None)


# ---- queues and tables


def check_queues(scheduler: Scheduler, swapped: Collection[object]) -> None:
    running, waiting = scheduler.running, scheduler.waiting
    unborn = [child for seq in (*running, *waiting) for child in seq.children]
    for seq, count in Counter([*running, *waiting, *unborn]).items():
        if count > 1:
            fail("a sequence is in the queues twice", owner=seq)
        if seq.finish_reason is not None:
            fail("a sequence that has ended is in a queue", owner=seq)
    if len(running) + sum([len(seq.children) for seq in running]) > scheduler.max_num_seqs:
        fail(f"more than max_num_seqs {scheduler.max_num_seqs} sequences run")
    for seq in (*waiting, *unborn):
        if seq.block_table:
            fail("a sequence that waits owns blocks", seq.block_table[0], seq)
        if seq.num_computed_tokens and seq not in swapped:
            fail(f"a sequence that waits has {seq.num_computed_tokens} computed tokens, but no K and V", owner=seq)
        if seq.cached_blocks or seq.has_shared_tail:
            fail("a sequence that waits still has what it had while it ran", owner=seq)


def tables_of(blocks: BlockManager, seq: Sequence) -> list[Table]:
    """Return the block tables of a sequence: as the block manager says, or the one that the core knows."""
    own = getattr(blocks, "tables_of", None)
    return [Table(seq.block_table.tolist())] if own is None else own(seq)


def check_tables(blocks: BlockManager, seq: Sequence, tables: list[Table]) -> None:
    """The tables of a running sequence have the blocks of its computed tokens, and what may be null is null."""
    size, num_computed = blocks.block_size, seq.num_computed_tokens
    if not 0 <= num_computed <= seq.num_tokens:
        fail(f"{num_computed} of {seq.num_tokens} tokens are computed", owner=seq)
    if len(seq.cached_blocks) > num_computed // size:
        fail(f"{len(seq.cached_blocks)} blocks are registered, of {num_computed} computed tokens", owner=seq)
    for i, (entries, num_behind, max_held) in enumerate(tables):
        if len(entries) != -(-num_computed // size):
            fail(f"block table {i} has {len(entries)} entries for {num_computed} computed tokens", owner=seq)
        num_null = entries.count(NULL_BLOCK)
        if NULL_BLOCK in entries[num_null:]:
            fail(f"block table {i} has a null block behind other blocks", NULL_BLOCK, seq)
        if num_null > num_behind:
            fail(f"block table {i} has {num_null} null blocks, but only {num_behind} are behind the window", owner=seq)
        if max_held is not None and len(entries) - num_null > max_held:
            fail(f"block table {i} keeps more than {max_held} blocks of a window", entries[num_null], seq)
        is_shared = num_computed % size > 0 and blocks._ref_counts[entries[-1]] > 1
        if is_shared and not seq.has_shared_tail:
            fail("a block that others own too would be written without a copy", entries[-1], seq)


# ---- the prefix cache


def check_cache(blocks: BlockManager, tables: Mapping[Sequence, list[Table]]) -> None:
    cache = blocks.prefix_cache
    by_id, by_hash = cache._by_id, cache._by_hash
    by_serial = {known.serial: known for known in by_id.values()}
    for block_id, known in by_id.items():
        if known.block_id != block_id or by_hash.get(known.block_hash) is not known:
            fail("a cached block is not found by its hash", block_id)
        check_hash(known, by_serial.get(known.parent_serial))
    if not len(by_hash) == len(by_id) == len(by_serial):
        fail(f"{len(by_hash)} hashes and {len(by_serial)} serials find {len(by_id)} cached blocks")
    beside: Mapping[int, int] = call(blocks, "blocks_beside", {})
    serials: Iterable[int] = call(blocks, "serials_beside", ())
    for serial in (*beside.values(), *serials):
        if serial not in by_serial:
            fail(f"something is found beside a block that is not cached, of serial {serial}")
    if not by_id.keys().isdisjoint(beside):
        fail("a block is found in two groups", min(by_id.keys() & beside.keys()))
    serial_of = {block_id: known.serial for block_id, known in by_id.items()} | dict(beside)
    for block_id in serial_of:
        if block_id not in range(1, blocks.num_blocks + 1):
            fail("a block is cached that is not of the pool", block_id)
    for seq, own in tables.items():
        check_contents(blocks.block_size, seq, own, serial_of, by_serial)


def check_hash(known: CachedBlock, parent: CachedBlock | None) -> None:
    """The hash of a cached block is that of its tokens after its parent, or after the root of its sequence."""
    is_first = known.parent_serial == ROOT_SERIAL or known.parent_serial >= 1 << 255  # with a salt (`cache_salt.py`)
    if parent is None and not is_first:
        return  # the parent is evicted
    before = known.parent_serial if parent is None else parent.block_hash
    if prefix_cache.hash_block(before % (1 << 64), known.tokens) != known.block_hash:
        fail("a cached block has another hash than its tokens and its parent", known.block_id)


def check_contents(
    size: int, seq: Sequence, tables: list[Table], serial_of: Mapping[int, int], by_serial: Mapping[int, CachedBlock]
) -> None:
    """Cached blocks that a sequence owns are cached for its tokens at their place, after those before them."""
    right: dict[int, int] = {}  # serial -> place, of cached blocks that hold the tokens of `seq` there

    for entries, _, _ in tables:
        for place, block_id in enumerate(entries):
            serial, at = serial_of.get(block_id, ROOT_SERIAL), place
            while serial in by_serial and serial not in right:  # the block, and its parents that are not checked yet
                known, stop = by_serial[serial], (at + 1) * size
                if stop > min(len(seq.token_ids), seq.num_computed_tokens):
                    fail(f"block {at} of a sequence is cached before its tokens are known and computed", block_id, seq)
                # a prefix cache of one's own (`prefix_cache_cls`) may add to the tokens, such as the hash of an image
                if not known.tokens.startswith(seq.token_ids[at * size : stop].tobytes()):
                    fail(f"block {at} of a sequence is cached for other tokens", block_id, seq)
                if (known.parent_serial == seq.root_serial) != (at == 0):
                    fail(f"block {at} of a sequence is cached after serial {known.parent_serial}", block_id, seq)
                right[serial] = at
                serial, at = known.parent_serial, at - 1
            if right.get(serial, at) != at:
                fail(f"a block is cached for place {right[serial]} and for place {at}", block_id, seq)


# ---- states, and host memory


def check_slots(scheduler: Scheduler, pools: list[Pool]) -> None:
    """Exactly the running sequences own slots."""
    for pool in pools:
        owners = {owner for owner, _ in pool.owned if isinstance(owner, Sequence)}
        for seq in scheduler.running:
            if seq not in owners:
                fail(f"a running sequence has no {pool.kind}", owner=seq)
        for owner in owners.difference(scheduler.running):
            fail(f"a sequence that does not run has a {pool.kind}", owner=owner)


def check_swapped(scheduler: Scheduler, pools: list[Pool]) -> None:
    """Sequences that are swapped out wait, own something of each host pool, and keep the K and V of their tokens."""
    waiting, blocks = set(scheduler.waiting), scheduler.block_manager
    for pool in pools:
        for owner, _ in pool.owned:
            if owner not in waiting:
                fail(f"a sequence that does not wait has a {pool.kind}", owner=owner)
    for one, other in pairwise(pools):
        for owner in {owner for owner, _ in one.owned} ^ {owner for owner, _ in other.owned}:
            fail(f"a sequence that is swapped out does not have both a {one.kind} and a {other.kind}", owner=owner)
    for seq, held in pools[0].owned if pools else ():
        assert isinstance(seq, Sequence)
        num_blocks = -(-seq.num_computed_tokens // blocks.block_size)
        tables = tables_of(blocks, seq)  # empty ones, which say how many there are and whether they have windows
        least = sum([num_blocks for table in tables if table.max_held is None])
        if not max(1, least) <= len(held) <= num_blocks * len(tables):
            fail(f"{len(held)} host blocks keep {seq.num_computed_tokens} tokens in {len(tables)} tables", owner=seq)
