"""Make the recording that `nanovllm view` shows without a file: a short run with every kind of moment of the story.

    python -m tools.story_recording            # writes nanovllm_extras/trace/story.jsonl

The requests arrive one after the other and need more than the 20 blocks: they share blocks, wait and are preempted.
The core's scheduler can make this run, so `nanovllm what-if` repeats it, and the page answers "what if". A swap would
also be a moment of the story, but the core has none.
"""

from pathlib import Path

from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from nanovllm_extras.trace.view import STORY

SHORT = "What is a block table?"
LONG = "Explain why a long prompt is cut into chunks, and what else the scheduler does in a step."
OPTIONS = {
    "num_kv_blocks": 20,
    "block_size": 4,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
    "dtype": "float32",
    "device": "cpu",
    "attention_backend": "torch",
}


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


TWO_SAMPLES = SamplingParams(temperature=1, seed=1, n=2, max_tokens=18, ignore_eos=True)
ARRIVALS = {  # step before which a request arrives -> its id, prompt and parameters
    1: ("A", SHORT, greedy(16)),
    2: ("B", "Name two colors", TWO_SAMPLES),
    4: ("C", LONG, greedy(10)),
    10: ("D", SHORT, greedy(10)),
    13: ("E", "What is paging?", greedy(16)),
    17: ("F", LONG, greedy(6)),
}


def record(path: Path) -> None:
    path.unlink(missing_ok=True)
    with LLM(TINY_QWEN3, trace=path, **OPTIONS) as llm:
        for step in range(1, max(ARRIVALS) + 1):
            if step in ARRIVALS:
                llm.engine.add_request(*ARRIVALS[step])
            llm.engine.step()
        while llm.engine.has_unfinished_requests():
            llm.engine.step()


if __name__ == "__main__":
    record(STORY)
