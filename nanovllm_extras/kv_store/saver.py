"""The thread that saves blocks. The engine copies them to the host and goes on; the thread gives them to the tiers.

What waits to be saved is bounded in bytes. A block that does not fit is dropped: it is not in the store, and if its
prefix comes back, it is computed.
"""

import threading
import weakref
from collections.abc import Sequence
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import torch

from nanovllm_extras.kv_store.copies import Arriving, copy_out
from nanovllm_extras.records.tier import BlockName, Chain, Tier

MAX_PENDING_BYTES = 1 << 30
MAX_EXIT_S = 10.0  # how long the end of an engine waits for blocks that are not saved yet


class Pending(NamedTuple):
    names: list[BlockName]
    parts: list[Arriving]  # of each KV cache: a draft model has one of its own


class Backlog:
    """Counts the bytes that wait to be saved. The engine's thread adds, and the saver's thread subtracts."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.changed = threading.Condition()

    def add(self, num_bytes: int) -> None:
        with self.changed:
            self.num_bytes += num_bytes
            self.changed.notify_all()


class Saver:
    """Saves blocks to `store`. The thread ends with this object: it saves what is left, and closes `own_tiers`."""

    def __init__(
        self,
        store: Tier,
        bytes_per_block: int,
        own_tiers: Sequence[Tier] = (),
        max_pending_bytes: int = MAX_PENDING_BYTES,
    ) -> None:
        self.max_pending_bytes = max(max_pending_bytes, bytes_per_block)
        self.num_dropped = 0
        self._queue: SimpleQueue[Pending | None] = SimpleQueue()
        self._backlog = Backlog()
        self._stream: torch.cuda.Stream | None = None
        arguments = (store, self._queue, self._backlog, Chain(own_tiers))
        thread = threading.Thread(target=save_all, args=arguments, name="kv-store-saver", daemon=True)
        thread.start()
        self.stop = weakref.finalize(self, stop, self._queue, thread)

    def save(self, tensors: list[torch.Tensor], saves: list[tuple[BlockName, int]], num_bytes: int) -> None:
        """Copy blocks to the host and queue them. The first ones are kept if not all fit.

        tensors: [parts, num_layers, num_blocks, …] each, of which a block has `num_bytes` together
        """
        room = (self.max_pending_bytes - self._backlog.num_bytes) // num_bytes
        self.num_dropped += max(0, len(saves) - max(0, room))
        saves = saves[: max(0, room)]
        if not saves:
            return
        if tensors[0].is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream(tensors[0].device)
        names, block_ids = map(list, zip(*saves, strict=True))
        parts = [copy_out(tensor, block_ids, self._stream) for tensor in tensors]
        self._backlog.add(len(saves) * num_bytes)
        self._queue.put(Pending(names, parts))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all blocks are saved. Returns False if this takes longer than `timeout_s`."""
        with self._backlog.changed:
            return self._backlog.changed.wait_for(lambda: self._backlog.num_bytes == 0, timeout_s)


def save_all(store: Tier, queue: "SimpleQueue[Pending | None]", backlog: Backlog, own_tiers: Chain) -> None:
    """Save what comes through the queue, until None comes. The store never raises: it is a `Chain`."""
    while (pending := queue.get()) is not None:
        parts = [part.wait() for part in pending.parts]
        data = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)  # [num_blocks, bytes_per_block]
        for i in reversed(range(len(pending.names))):  # the beginning of a prefix is evicted last
            store.save(pending.names[i], data[i])
        store.finished()
        num_bytes = data.nbytes
        del data, parts, pending  # their memory is free while the thread waits for the next ones
        backlog.add(-num_bytes)
    own_tiers.close()


def stop(queue: "SimpleQueue[Pending | None]", thread: threading.Thread) -> None:
    queue.put(None)
    if thread is not threading.current_thread():
        thread.join(MAX_EXIT_S)
