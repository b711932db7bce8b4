"""The tier in host memory: a dict of blocks, bounded in bytes. The least recently used block is evicted first."""

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nanovllm_extras.records.tier import BlockName, Tier


class KeptBlock(NamedTuple):
    """One block: its tokens, and its data: [num_bytes] uint8. The data is never written again."""

    tokens: bytes
    data: np.ndarray


class MemoryTier(Tier):
    """Keeps at most `max_bytes` of data. The lock is never held while data is copied."""

    name = "memory"

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._blocks: OrderedDict[bytes, KeptBlock] = OrderedDict()  # the least recently used first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, blocks: Sequence[BlockName]) -> int:
        with self._lock:
            num_found = 0
            for block in blocks:
                kept = self._blocks.get(block.key)
                if kept is None or kept.tokens != block.tokens:
                    break
                num_found += 1
            for block in reversed(blocks[:num_found]):  # the ends of prefixes are evicted first
                self._blocks.move_to_end(block.key)
            self.stats.hits += num_found
            self.stats.misses += len(blocks) - num_found
        return num_found

    def load(self, block: BlockName, out: np.ndarray) -> bool:
        start = time.perf_counter()
        with self._lock:
            kept = self._blocks.get(block.key)
        if kept is None or kept.tokens != block.tokens or kept.data.nbytes != out.nbytes:
            return False
        np.copyto(out, kept.data)
        self.stats.loaded_bytes += out.nbytes
        self.stats.load_time_s += time.perf_counter() - start
        return True

    def save(self, block: BlockName, data: np.ndarray) -> None:
        if data.nbytes > self.max_bytes:
            return
        start = time.perf_counter()
        with self._lock:
            if block.key in self._blocks:
                return
        kept = KeptBlock(block.tokens, data.copy())
        with self._lock:
            if block.key not in self._blocks:
                self._make_room(data.nbytes)
                self._blocks[block.key] = kept
                self.num_bytes += data.nbytes
                self.stats.saved_bytes += data.nbytes
            self.stats.save_time_s += time.perf_counter() - start

    def failed(self, block: BlockName) -> None:
        with self._lock:
            kept = self._blocks.pop(block.key, None)
            if kept is not None:
                self.num_bytes -= kept.data.nbytes

    def close(self) -> None:
        with self._lock:
            self._blocks.clear()
            self.num_bytes = 0

    def _make_room(self, num_bytes: int) -> None:
        while self.num_bytes + num_bytes > self.max_bytes:
            _, evicted = self._blocks.popitem(last=False)
            self.num_bytes -= evicted.data.nbytes
            self.stats.evictions += 1
