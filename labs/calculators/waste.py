"""Compute the share of reserved KV slots that hold no token, by block size and for contiguous reservation.

    python -m labs.calculators.waste
    python -m labs.calculators.waste --block-size 16 --input-len 500 4000 --output-len 10 200 --max-model-len 8192
    python -m labs.calculators.waste --plot waste.png

Blocks waste only the empty end of a sequence's last block. The number of its empty slots is 0 … block_size - 1, all
equally likely:

    expected waste of a sequence = (block_size - 1) / 2        as a share: waste / (waste + mean tokens stored)

The table compares this formula with the counts of the real scheduler. The scheduler serves the workload with invented
tokens instead of a model, because the memory does not depend on the model. The default workload is `offline`: 256
requests with 100-1024 tokens of input and of output.

Contiguous reservation gives a sequence one range of slots when it begins. `waste_by_rule` counts three rules over the
same steps; their names are from PagedAttention (Kwon et al. 2023, https://arxiv.org/abs/2309.06180):

    Max      max_model_len slots
    Pow2     its prompt, and its output rounded up to a power of two
    Oracle   exactly what it will store: prompt + output - 1, because the last token's K and V are never stored

An empty slot of a range is *reserved* if the sequence fills it later, or *internal* waste if it is never filled. Ranges
also have external fragmentation, the gaps between them, which is not counted here. Blocks have none.
"""

import argparse
from collections import Counter
from pathlib import Path

from benchmarks.common import Workload, named_workload, random_workload
from labs.calculators.common import Panel, draw, print_table
from nanovllm.block_manager import BlockManager
from nanovllm.scheduler import Scheduler, Step
from nanovllm.sequence import Sequence
from nanovllm_extras import SamplingParams
from nanovllm_extras.records.full_observer import SchedulingStats

VOCAB_SIZE = 10_001


class Slots(SchedulingStats):
    """Also counts the slots that contiguous ranges would have reserved for the running sequences.

    A sequence holds its range from admission to its end. No sequence is preempted, because all requests fit.
    """

    def __init__(self, max_model_len: int) -> None:
        super().__init__()
        self.num_steps_of_sequences = 0
        self.reserved: Counter[str] = Counter()  # by rule, summed over all steps
        self.never_filled: Counter[str] = Counter()
        self._held: Counter[str] = Counter()  # by rule, at this moment
        self._held_in_vain: Counter[str] = Counter()
        self._max_model_len = max_model_len

    def on_admit(self, seq: Sequence) -> None:
        super().on_admit(seq)  # type: ignore[arg-type]
        ranges = self._ranges(seq)
        self._held.update(ranges)
        self._held_in_vain.update({rule: size - ranges["Oracle"] for rule, size in ranges.items()})

    def on_schedule(self, step: Step, running: list[Sequence], blocks: BlockManager) -> None:
        super().on_schedule(step, running, blocks)  # type: ignore[arg-type]
        self.num_steps_of_sequences += len(running)
        self.reserved.update(self._held)
        self.never_filled.update(self._held_in_vain)

    def on_finish(self, seq: Sequence) -> None:
        ranges = self._ranges(seq)
        self._held.subtract(ranges)
        self._held_in_vain.subtract({rule: size - ranges["Oracle"] for rule, size in ranges.items()})

    def _ranges(self, seq: Sequence) -> dict[str, int]:
        """Return the size of the sequence's range by each rule."""
        num_prompt, num_outputs = seq.num_prompt_tokens, seq.max_num_tokens - seq.num_prompt_tokens
        pow2 = 1 << (num_outputs - 1).bit_length()
        return {"Max": self._max_model_len, "Pow2": num_prompt + pow2, "Oracle": num_prompt + num_outputs - 1}


def main() -> None:
    parser = argparse.ArgumentParser(description="The waste of KV slots, by block size and in contiguous ranges.")
    parser.add_argument("--block-size", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--max-model-len", type=int, default=2048, help="slots that the rule Max reserves")
    parser.add_argument("--input-len", type=int, nargs=2, metavar=("LOW", "HIGH"), help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, nargs=2, metavar=("LOW", "HIGH"), default=[100, 1024])
    parser.add_argument("--num-requests", type=int, default=256, help="with --input-len")
    parser.add_argument("--plot", type=Path, help="draw the curve to this file (needs matplotlib)")
    args = parser.parse_args()
    workload = named_workload("offline", VOCAB_SIZE)
    if args.input_len is not None:
        workload = random_workload(args.num_requests, args.input_len, args.output_len, 0, VOCAB_SIZE)
    try:
        counts = {size: count_slots(workload, size, args.max_model_len) for size in args.block_size}
    except ValueError as error:
        parser.error(str(error))
    measured = {size: waste_of_blocks(slots) for size, slots in counts.items()}
    expected = {size: expected_waste(size, mean_stored(slots)) for size, slots in counts.items()}
    first = next(iter(counts.values()))
    ranges = waste_by_rule(first)
    rows = [[str(size), f"{expected[size]:.2%}", f"{measured[size]:.2%}"] for size in counts]
    print(f"{len(workload.prompts)} requests; a running sequence holds {mean_stored(first):,.0f} tokens on average\n")
    print_table(["block_size", "waste by the formula", "by the scheduler's count"], rows)
    print()
    rows = [[rule, f"{later + never:.2%}", f"{later:.2%}", f"{never:.2%}"] for rule, (later, never) in ranges.items()]
    print_table(["contiguous", "empty", "reserved: filled later", "internal: never filled"], rows)
    if args.plot:
        levels = {rule: 100 * (later + never) for rule, (later, never) in ranges.items()}
        lines = {"blocks": [100 * share for share in measured.values()]}
        panel = Panel("block size", "reserved slots without a token, %", args.block_size, lines, levels)
        draw(args.plot, "Blocks against contiguous ranges", [panel])


def count_slots(workload: Workload, block_size: int, max_model_len: int) -> Slots:
    """Serve the workload with invented tokens. The cache is large enough for all requests at the same time."""
    lens = [len(prompt) + n for prompt, n in zip(workload.prompts, workload.output_lens, strict=True)]
    if block_size < 1 or max(lens) > max_model_len:
        raise ValueError(
            f"block_size must be >= 1 and max_model_len >= {max(lens)}, the longest request, "
            f"got {block_size} and {max_model_len}"
        )
    slots = Slots(max_model_len)
    num_blocks = sum(-(-num_tokens // block_size) for num_tokens in lens)
    blocks = BlockManager(num_blocks, block_size, enable_prefix_caching=False, observer=slots)
    scheduler = Scheduler(blocks, 256, 8192, max_model_len)
    for i, (prompt, num_output) in enumerate(zip(workload.prompts, workload.output_lens, strict=True)):
        scheduler.add(Sequence(str(i), prompt, SamplingParams(max_tokens=num_output, ignore_eos=True)))
    while scheduler.running or scheduler.waiting:
        scheduled = scheduler.schedule()
        scheduler.update(scheduled, [0] * len(scheduled.samples))
    return slots


def waste_of_blocks(slots: Slots) -> float:
    """Return 1 - tokens stored / slots reserved, both summed over all steps."""
    return 1 - slots.kv_tokens_stored / slots.kv_slots_reserved


def mean_stored(slots: Slots) -> float:
    """Return the mean number of tokens that a running sequence has in the cache, over all steps."""
    return slots.kv_tokens_stored / slots.num_steps_of_sequences


def expected_waste(block_size: int, num_stored: float) -> float:
    waste = (block_size - 1) / 2
    return waste / (waste + num_stored)


def waste_by_rule(slots: Slots) -> dict[str, tuple[float, float]]:
    """Return for each rule the shares of its reserved slots that are (filled later, never filled)."""
    shares = {}
    for rule, num_reserved in slots.reserved.items():
        num_empty, num_never = num_reserved - slots.kv_tokens_stored, slots.never_filled[rule]
        shares[rule] = ((num_empty - num_never) / num_reserved, num_never / num_reserved)
    return shares


if __name__ == "__main__":
    main()
