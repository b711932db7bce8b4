"""How much of the reserved KV cache holds no token, by block size, on a mixed workload.

    python -m benchmarks.kv_waste

A request's last block is full only by luck, so each wastes half a block on average; the PagedAttention paper reports
under 4 %. Runs the scheduler on the lengths of the `offline` workload (256 requests, 100-1024 tokens in and out) with
made-up tokens instead of a model, which memory does not depend on.
"""

import argparse

from benchmarks.common import Workload, named_workload
from nanovllm import SamplingParams
from nanovllm.scheduling.block_manager import BlockManager
from nanovllm.scheduling.observer import SchedulingStats
from nanovllm.scheduling.scheduler import Scheduler
from nanovllm.scheduling.sequence import Sequence


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the waste of KV slots by block size.")
    parser.add_argument("--block-size", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128, 256])
    args = parser.parse_args()
    workload = named_workload("offline", vocab_size=10_001)
    for block_size in args.block_size:
        print(f"block_size {block_size:>4}: {measure_waste(workload, block_size):.2%} of the reserved slots wasted")


def measure_waste(workload: Workload, block_size: int) -> float:
    """1 - tokens stored / slots reserved, summed over all steps."""
    num_blocks = sum(
        -(-(len(p) + n) // block_size) for p, n in zip(workload.prompts, workload.output_lens, strict=True)
    )
    stats = SchedulingStats()
    scheduler = Scheduler(BlockManager(num_blocks, block_size, observer=stats), 256, 8192, 4096)
    for i, (prompt, num_output) in enumerate(zip(workload.prompts, workload.output_lens, strict=True)):
        scheduler.add(Sequence(str(i), prompt, SamplingParams(max_tokens=num_output, ignore_eos=True)))
    while scheduler.has_unfinished():
        scheduled = scheduler.schedule()
        scheduler.update(scheduled, [0] * len(scheduled.samples))
    return 1 - stats.kv_tokens_stored / stats.kv_slots_reserved


if __name__ == "__main__":
    main()
