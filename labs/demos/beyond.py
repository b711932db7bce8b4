"""Compare three routers in front of two engines: the router determines the hit rate of their prefix caches.

    python -m labs.demos.beyond
    python -m labs.demos.beyond --trace run.jsonl     # record replica 0 with the last router

Five applications send 48 requests. Each prompt has the application's instructions and a short question. The first
application sends six of ten requests. At each tick, one request arrives and both engines run one step.
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from os.path import commonprefix
from pathlib import Path
from typing import Any

import torch

from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams

INSTRUCTIONS = [
    "You help people who read about paged attention. Answer in one short sentence, and name the file that does it.",
    "Translate each question about the KV cache into plain words for a newcomer, then answer it in one sentence.",
    "You are a reviewer of schedulers. Say what a step does with its budget of tokens, and what must wait for it.",
    "Write a test for the block manager. Each block has one owner or more, and a free block has none at all.",
    "List what happens when memory is full: which sequence is preempted, which blocks it gives back, and when.",
]
QUESTIONS = ["What is a block?", "Who owns it?", "What waits?", "How many tokens?", "What comes next?", "Which step?"]
ENGINE: dict[str, Any] = {"dtype": "float32", "attention_backend": "torch", "enforce_eager": True}
POOL: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 32, "max_num_batched_tokens": 32, "max_num_seqs": 4}
NUM_REQUESTS = 48


@dataclass
class Replica:
    llm: LLM
    prompts: list[str] = field(default_factory=list)  # that the router has sent to this replica
    num_unfinished: int = 0

    def match(self, prompt: str) -> int:
        """Return the length of the longest prefix that `prompt` shares with an earlier prompt of this replica.

        The replica may have evicted this prefix.
        """
        return max([len(commonprefix([prompt, earlier])) for earlier in self.prompts], default=0)


Router = Callable[[list[Replica], str, int], Replica]


def round_robin(replicas: list[Replica], prompt: str, number: int) -> Replica:
    return replicas[number % len(replicas)]


def longest_prefix(replicas: list[Replica], prompt: str, number: int) -> Replica:
    """Choose the replica with the longest shared prefix. If that is less than half the prompt, the least loaded one."""
    best = max(replicas, key=lambda replica: replica.match(prompt))
    return best if best.match(prompt) >= len(prompt) / 2 else least_loaded(replicas)


def longest_prefix_balanced(replicas: list[Replica], prompt: str, number: int) -> Replica:
    """Choose as `longest_prefix`, but the least loaded replica if the numbers of unfinished requests differ by 4."""
    unfinished = [replica.num_unfinished for replica in replicas]
    if max(unfinished) - min(unfinished) >= 4:
        return least_loaded(replicas)
    return longest_prefix(replicas, prompt, number)


def least_loaded(replicas: list[Replica]) -> Replica:
    return min(replicas, key=lambda replica: (replica.num_unfinished, len(replica.prompts)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Two engines behind a router.")
    parser.add_argument("--trace", type=Path, help="record replica 0 with the last router to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)  # steps are too small for more
    compare(args.trace)


def compare(recording: Path | None) -> None:
    """Run the workload with each router, and print a row for each."""
    generator = random.Random(1)
    sent_by = generator.choices(range(len(INSTRUCTIONS)), weights=[6, 1, 1, 1, 1], k=NUM_REQUESTS)
    prompts = [f"{INSTRUCTIONS[i]} {generator.choice(QUESTIONS)}" for i in sent_by]
    print("router                    requests   tokens: in   found   computed   hit rate   ticks   most unfinished")
    for router in (round_robin, longest_prefix, longest_prefix_balanced):
        trace = recording if router is longest_prefix_balanced else None
        with LLM(TINY_QWEN3, trace=trace, **ENGINE, **POOL) as first, LLM(TINY_QWEN3, **ENGINE, **POOL) as second:
            replicas = [Replica(first), Replica(second)]
            num_ticks, most_unfinished = serve(replicas, router, prompts)
            stats = [replica.llm.get_stats() for replica in replicas]
            num_in, num_found, num_computed = (
                sum(getattr(one, name) for one in stats)
                for name in ("prompt_tokens", "prefix_cache_hit_tokens", "scheduled_tokens")
            )
            share = " + ".join(str(len(replica.prompts)) for replica in replicas)
            print(
                f"{router.__name__:24}  {share:>8}   {num_in:10}   {num_found:5}   {num_computed:8}   "
                f"{num_found / num_in:8.2f}   {num_ticks:5}   {most_unfinished:15}"
            )


def serve(replicas: list[Replica], router: Router, prompts: list[str]) -> tuple[int, int]:
    """Serve all prompts. Return the number of ticks, and the most unfinished requests of a replica at the same time."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    num_ticks = most_unfinished = 0
    while num_ticks < len(prompts) or any(replica.num_unfinished for replica in replicas):
        if num_ticks < len(prompts):
            replica = router(replicas, prompts[num_ticks], num_ticks)
            replica.llm.engine.add_request(str(num_ticks), prompts[num_ticks], params, stream=False)
            replica.prompts.append(prompts[num_ticks])
            replica.num_unfinished += 1
        most_unfinished = max(most_unfinished, *[replica.num_unfinished for replica in replicas])
        for replica in replicas:
            replica.num_unfinished -= len(replica.llm.engine.step())
        num_ticks += 1
    return num_ticks, most_unfinished


if __name__ == "__main__":
    main()
