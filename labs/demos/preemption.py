"""Preempt requests in a pool that is too small for three: the output of a preempted request does not change.

python -m labs.demos.preemption
python -m labs.demos.preemption --trace run.jsonl && nanovllm view run.jsonl
"""

import argparse
from typing import Any

from nanovllm.block_manager import BlockManager
from nanovllm.scheduler import Step
from nanovllm_extras import LLM, TINY_QWEN3, Config, LLMEngine, SamplingParams
from nanovllm_extras.records.full_observer import SchedulingStats
from nanovllm_extras.records.full_sequence import Sequence

PROMPT_LEN, MAX_TOKENS = 10, {"A": 6, "B": 12, "C": 9}
SMALL, LARGE = 10, 100  # blocks
OPTIONS: dict[str, Any] = {"block_size": 4, "dtype": "float32", "attention_backend": "torch", "enforce_eager": True}
WAYS: dict[str, dict[str, Any]] = {
    "large pool": {"num_kv_blocks": LARGE},
    "recompute, no prefix cache": {"num_kv_blocks": SMALL, "enable_prefix_caching": False},
    "recompute": {"num_kv_blocks": SMALL},
    "swap": {"num_kv_blocks": SMALL, "preemption_mode": "swap", "swap_space_bytes": 1 << 20},
}


class Watch(SchedulingStats):
    """Prints each scheduled step if `is_shown`, and counts the blocks that are copied to host memory."""

    def __init__(self, is_shown: bool) -> None:
        super().__init__()
        self.is_shown, self.num_copied, self.num_steps = is_shown, 0, 0

    def on_swap_out(self, seq: Sequence, host_block_ids: list[int]) -> None:
        super().on_swap_out(seq, host_block_ids)
        self.num_copied += len(host_block_ids)

    def on_schedule(self, step: Step, running: list[Sequence], blocks: BlockManager) -> None:
        super().on_schedule(step, running, blocks)
        self.num_steps += 1
        if self.is_shown:
            computed = {seq.request_id: f"{seq.request_id}+{num_new}" for seq, _, num_new in step.chunks}
            cells = "".join(f"{computed.get(name, ''):7}" for name in MAX_TOKENS)
            preempted = "".join(seq.request_id for seq in step.preempted)
            print(f"{self.num_steps:>4}   {cells}{blocks.num_free_blocks:>4}   {preempted}".rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description="Preemption in a small pool.")
    parser.add_argument("--trace", help="record the run with recompute to this file, and print nothing")
    args = parser.parse_args()
    if args.trace:
        with LLM(TINY_QWEN3, trace=args.trace, **OPTIONS, **WAYS["recompute"]) as llm:
            run(llm.engine)
        return
    print(f"recompute, {SMALL} blocks of 4: tokens that each step computes, free blocks, preempted requests\n")
    print("step   A      B      C      free   preempted")
    run(LLMEngine(Config(TINY_QWEN3, **OPTIONS, **WAYS["recompute"]), Watch(is_shown=True)))
    print("\n                             steps   tokens computed   preemptions   blocks copied out   same outputs")
    expected = None
    for name, options in WAYS.items():
        watch = Watch(is_shown=False)
        engine = LLMEngine(Config(TINY_QWEN3, **OPTIONS, **options), watch)
        outputs = run(engine)
        expected = expected or outputs
        stats = engine.get_stats()
        print(
            f"{name:28} {stats.steps:>5} {stats.scheduled_tokens:>17} {stats.num_preemptions:>13} "
            f"{watch.num_copied:>19}   {'yes' if outputs == expected else 'NO'}"
        )


def run(engine: LLMEngine) -> dict[str, list[int]]:
    """Serve the three requests, and return the output tokens of each."""
    for i, (name, max_tokens) in enumerate(MAX_TOKENS.items()):
        prompt = list(range(100 * i + 100, 100 * i + 100 + PROMPT_LEN))
        engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
    outputs: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output.outputs[0].token_ids for output in engine.step().outputs}
    return outputs


if __name__ == "__main__":
    main()
