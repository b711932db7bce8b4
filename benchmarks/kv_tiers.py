"""Measure how fast the tiers of the K/V store save and load blocks of Qwen3-0.6B's size, compared with a memory copy.

    python -m benchmarks.kv_tiers [--blocks 64] [--repeats 5] [--folder DIR] [--json out.json]

A block has 16 tokens of bfloat16 K and V: 1.75 MiB. Prints the median of passes through all blocks, in GB/s (10^9
bytes) and in milliseconds for each block, and the best pass, which other processes have disturbed least. "Cold" means
after `fsync` and `posix_fadvise(POSIX_FADV_DONTNEED)` on each file; the disk itself, or the host of a virtual machine,
may still have it in a cache.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

import numpy as np
import xxhash

from benchmarks.common import QWEN3_06B, ModelShape, describe_machine
from nanovllm_extras.kv_store.disk_tier import DiskTier
from nanovllm_extras.kv_store.shared_tier import SharedTier
from nanovllm_extras.records.tier import BlockName, Tier

BLOCK_SIZE, BYTES_PER_VALUE = 16, 2
Row = dict[str, float | str]


def main() -> None:
    parser = argparse.ArgumentParser(description="Save and load blocks of K and V.")
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; by default a temporary one")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    num_bytes = BLOCK_SIZE * ModelShape.from_folder(QWEN3_06B).kv_values_per_token * BYTES_PER_VALUE
    data = np.random.default_rng(0).integers(0, 256, (args.blocks, num_bytes), dtype=np.uint8)
    names = [BlockName(i.to_bytes(32, "little"), bytes(4 * BLOCK_SIZE)) for i in range(args.blocks)]
    rows = measure_memory(data, args.repeats)
    room = 2 * data.nbytes + (1 << 20)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        disk = DiskTier(Path(folder) / "store", room)
        rows += measure_tier(disk, names, data, args.repeats)
        rows += measure_cold(disk, names, data, args.repeats)
    shared = SharedTier(f"benchmark-{os.getpid()}", room)
    try:
        rows += measure_tier(shared, names, data, args.repeats)
    finally:
        shared.close()
    print(f"{args.blocks} blocks of {num_bytes / 2**20:.2f} MiB, median of {args.repeats}")
    for row in rows:
        rates = f"{row['gb_per_s']:6.2f} GB/s {row['best_gb_per_s']:6.2f} best" if "gb_per_s" in row else ""
        print(f"{row['what']:<30}{rates:>24}{row['ms_per_block']:10.4f} ms/block")
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "machine": describe_machine("cpu")}, indent=2) + "\n")


def measure_memory(data: np.ndarray, repeats: int) -> list[Row]:
    """Measure the limits: a copy, and the checksum of data that is not copied."""
    out = np.zeros(data.shape[1], np.uint8)

    def copy() -> None:
        for block in data:
            np.copyto(out, block)

    def checksum() -> None:
        for block in data:
            xxhash.xxh3_64(block.data).digest()

    return [timed("memory copy", copy, data, repeats), timed("checksum (XXH3)", checksum, data, repeats)]


def measure_tier(tier: Tier, names: list[BlockName], data: np.ndarray, repeats: int) -> list[Row]:
    def save() -> None:
        for name, block in zip(names, data, strict=True):
            tier.save(name, block)

    def forget() -> None:
        for name in names:
            tier.failed(name)

    saving = timed(f"{tier.name}: save", save, data, repeats, prepare=forget)
    unknown = [BlockName(bytes(31) + b"x", names[0].tokens)] * len(names)

    def miss() -> None:
        for name in unknown:
            tier.match([name])

    found = timed(f"{tier.name}: match, found", lambda: check(tier.match(names) == len(names)), data, repeats)
    missed = timed(f"{tier.name}: match, nothing found", miss, data, repeats)
    for row in (found, missed):  # no data is read
        del row["gb_per_s"], row["best_gb_per_s"]
    return [
        saving,
        timed(f"{tier.name}: load, warm", lambda: load_all(tier, names, data), data, repeats),
        found,
        missed,
    ]


def measure_cold(tier: DiskTier, names: list[BlockName], data: np.ndarray, repeats: int) -> list[Row]:
    def drop() -> None:
        drop_from_page_cache(map(tier.path_of, names))

    return [timed(f"{tier.name}: load, cold", lambda: load_all(tier, names, data), data, repeats, prepare=drop)]


def drop_from_page_cache(paths: Iterable[str | Path]) -> None:
    """Let the next read of these files come from the disk, or from what is behind it."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # dirty pages are not dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def load_all(tier: Tier, names: list[BlockName], data: np.ndarray) -> None:
    out = np.zeros(data.shape[1], np.uint8)
    for name in names:
        check(tier.load(name, out))
    check(np.array_equal(out, data[-1]))


def check(is_right: bool) -> None:
    if not is_right:
        raise RuntimeError("the tier has lost a block: is there enough space?")


def timed(
    what: str, run: Callable[[], None], data: np.ndarray, repeats: int, prepare: Callable[[], None] = lambda: None
) -> Row:
    """Return the median time of a pass through all blocks. `prepare` comes before each pass and is not measured."""
    seconds = []
    for _ in range(repeats):
        prepare()
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    rates = [data.nbytes / passed / 1e9 for passed in seconds]
    ms_per_block = median(seconds) / len(data) * 1e3
    return {"what": what, "gb_per_s": median(rates), "best_gb_per_s": max(rates), "ms_per_block": ms_per_block}


if __name__ == "__main__":
    main()
