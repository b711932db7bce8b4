"""Count the prefix hits of a model whose layers keep states, and follow the slots of its sequences.

    python -m labs.demos.states                      # hit rates, with and without snapshots of the states
    python -m labs.demos.states --text               # a conversation in words, and what each prompt finds
    python -m labs.demos.states --slots              # the slots at each step of two requests; no model runs
    python -m labs.demos.states --trace run.jsonl    # record the third workload, snapshots at ends and branches

In three of the four layers of the bundled tiny-qwen3.5 each sequence has a state, and the fourth keeps K and V. Its
prompts are random tokens. The first row of each workload is the bundled tiny-qwen3, which has K and V in all layers.
"""

import argparse
import random
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import torch

from nanovllm_extras import LLM, TINY_QWEN3, TINY_QWEN3_5, SamplingParams
from nanovllm_extras.memory.block_manager import BlockManager
from nanovllm_extras.memory.slots import Slots
from nanovllm_extras.records.full_observer import SchedulingStats
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.scheduling.scheduler import Scheduler

ENGINE: dict[str, Any] = {"dtype": "float32", "attention_backend": "torch", "enforce_eager": True, "block_size": 4}
NEVER = 100  # blocks between snapshots: longer than any sequence here

# ---- hit rates


class Setting(NamedTuple):
    """What the engine keeps of a prefix."""

    name: str
    interval: int | None
    """Blocks between snapshots. None for a model without states."""
    has_cache: bool = True


SETTINGS = [
    Setting("K and V in all layers", None),
    Setting("states, no prefix cache", NEVER, has_cache=False),
    Setting("states, ends and branches", NEVER),
    Setting("states, every 4 blocks", 4),
    Setting("states, every block", 1),
]


class Result(NamedTuple):
    outputs: list[list[int]]
    num_prompt_tokens: int
    num_found: int
    num_steps: int
    num_snapshots: int | None


def random_tokens(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(10, 2048), k=length)


def converse(llm: LLM) -> list[list[int]]:
    """Run a conversation: four questions of 22 tokens, and answers of 20 tokens that become a part of the prompt."""
    prompt: list[int] = []
    answers = []
    for turn in range(4):
        prompt = prompt + random_tokens(turn, 22)
        answers.append(generate(llm, prompt, 20))
        prompt = prompt + answers[-1]
    return answers


def share_prefix(llm: LLM) -> list[list[int]]:
    """Send five requests, one after the other. They begin with the same 64 tokens, and have 12 of their own."""
    common = random_tokens(10, 64)
    return [generate(llm, common + random_tokens(11 + i, 12), 4) for i in range(5)]


def send_prefix_first(llm: LLM) -> list[list[int]]:
    """Do the same after a request that has only the common tokens, and one more, which must be computed."""
    generate(llm, [*random_tokens(10, 64), 1], 1)
    return share_prefix(llm)


def generate(llm: LLM, prompt: list[int], max_tokens: int) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


WORKLOADS: dict[str, Callable[[LLM], list[list[int]]]] = {
    "a conversation": converse,
    "a common prefix": share_prefix,
    "a common prefix, sent first by itself": send_prefix_first,
}


def measure(setting: Setting, workload: Callable[[LLM], list[list[int]]], trace: Path | None = None) -> Result:
    """Run a workload on a new engine."""
    model = TINY_QWEN3 if setting.interval is None else TINY_QWEN3_5
    pool: dict[str, Any] = {"num_kv_blocks": 60, "max_num_seqs": 60, "enable_prefix_caching": setting.has_cache}
    options: dict[str, Any] = {"skip_tokenizer_init": True, "trace": trace}
    if setting.interval is not None:
        options["state_snapshot_interval"] = setting.interval
    with LLM(model, max_model_len=256, **ENGINE, **pool, **options) as llm:
        outputs = workload(llm)
        stats = llm.get_stats()
    num_snapshots = None if stats.states is None else stats.states.num_snapshots
    return Result(outputs, stats.prompt_tokens, stats.prefix_cache_hit_tokens, stats.steps, num_snapshots)


def compare() -> None:
    """Print a row for each workload and setting."""
    for name, workload in WORKLOADS.items():
        print(f"{name:38} prompt tokens   found   hit rate   steps   snapshots")
        results = [measure(setting, workload) for setting in SETTINGS]
        for setting, result in zip(SETTINGS, results, strict=True):
            rate = result.num_found / result.num_prompt_tokens
            num_snapshots = "-" if result.num_snapshots is None else result.num_snapshots
            print(
                f"  {setting.name:36} {result.num_prompt_tokens:>13} {result.num_found:>7} {rate:>10.0%} "
                f"{result.num_steps:>7} {num_snapshots:>11}"
            )
        is_same = all(result.outputs == results[1].outputs for result in results[2:])
        print(f"  same tokens from all engines with states: {'yes' if is_same else 'NO'}\n")


# ---- words


QUESTIONS = ["What is the KV cache?", "What is prefix caching?", "What is a block table?", "What is 12 + 34?"]


def talk() -> None:
    """Ask the bundled hybrid four questions in one conversation, and print what each prompt finds."""
    messages: list[dict[str, str]] = []
    with LLM(TINY_QWEN3_5, num_kv_blocks=200, max_num_seqs=8, **ENGINE) as llm:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=200), use_tqdm=False)
            messages.append({"role": "assistant", "content": output.outputs[0].text})
            print(f"{len(output.prompt_token_ids):>4} tokens, {output.num_cached_tokens:>3} found: {question}")
            print(fill(output.outputs[0].text, 100, initial_indent="  ", subsequent_indent="  "))


# ---- slots


def add(scheduler: Scheduler, name: str, prompt: list[int], n: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    seqs: list[Any] = [Sequence(name, prompt, params, sample_index=i) for i in range(n)]
    seqs[0].children = seqs[1:]
    scheduler.add(seqs[0])


def run_steps(scheduler: Scheduler) -> Iterator[Any]:
    """Yield each step after it is scheduled. A arrives before step 1, B with two samples before step 3."""
    add(scheduler, "A", list(range(10)), n=1)
    for number in count(1):
        if number == 3:
            add(scheduler, "B", list(range(9)), n=2)
        step = scheduler.schedule()
        if not step.chunks:
            return
        yield step
        # what a model would sample: the two samples of B differ
        scheduler.update(step, [100 * (1 + seq.sample_index) + number for seq in step.samples])


def follow_slots() -> None:
    """Print the owner of each slot at each step. The pool of blocks is so small that a sequence is preempted."""
    stats = SchedulingStats()
    states = Slots(num_slots=4, block_size=4, observer=stats)
    blocks = BlockManager(6, 4, observer=stats, states=states)
    scheduler = Scheduler(blocks, max_num_seqs=3, max_num_batched_tokens=64, max_model_len=64)
    lengths: dict[int, int] = {}  # serial number of a full block -> tokens up to its end
    print("(8) is a snapshot of the state after 8 tokens\n")
    titles = " ".join(f"{f'slot {slot}':10}" for slot in range(1, 5))
    print(f"step   {'copies':14} {'positions that are computed':38} {titles} events")
    for number, step in enumerate(run_steps(scheduler), 1):
        for seq in scheduler.running:
            lengths[seq.parent_serial] = seq.num_registered_blocks * blocks.block_size
        owners = {slot: name_of(seq) for seq, slot in states.owned.items()}
        owners |= {slot: f"({lengths[serial]})" for serial, slot in states.snapshots.items()}
        copies = ", ".join(f"{source} to {destination}" for source, destination in step.copies.state_copies)
        chunks = ", ".join(f"{name_of(seq)}: {show_range(start, length)}" for seq, start, length in step.chunks)
        slots = " ".join(f"{owners.get(slot, '-'):10}" for slot in range(1, 5))
        events = [f"{name_of(seq)} is admitted" for seq in stats.take_admitted()]
        events += [f"{name_of(seq)} is preempted" for seq in step.preempted]
        print(f"{number:>4}   {copies:14} {chunks:38} {slots} {', '.join(events)}".rstrip())


def name_of(seq: Any) -> str:
    return seq.request_id if seq.request_id == "A" else f"{seq.request_id}.{seq.sample_index}"


def show_range(start: int, length: int) -> str:
    return f"{start}" if length == 1 else f"{start} … {start + length - 1}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Hit rates and slots of a model with recurrent states.")
    parser.add_argument("--text", action="store_true", help="ask the model questions instead")
    parser.add_argument("--slots", action="store_true", help="follow the slots of two requests instead")
    parser.add_argument("--trace", type=Path, help="record the third workload to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)  # steps are too small for more
    if args.slots:
        follow_slots()
    elif args.text:
        talk()
    elif args.trace:
        measure(SETTINGS[2], send_prefix_first, args.trace)
    else:
        compare()


if __name__ == "__main__":
    main()
