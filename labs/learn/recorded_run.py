"""Record how nanovllm runs the requests of a check, so that the viewer can show each step.

The engine's scheduler is not the exercise's line by line, and its tokens are the bundled model's. But it serves the
same requests with the same pool and budget, so it shows what should happen.
"""

from pathlib import Path
from typing import Any

from labs.learn.traffic import Request
from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "attention_backend": "torch", "self_check": "off"}


def record(traffic: list[Any], file: Path) -> None:
    """Write a recording of the requests of `traffic`, which is `Traffic` as a list."""
    num_blocks, block_size, budget, requests = traffic
    file.unlink(missing_ok=True)
    sizes = {"num_kv_blocks": num_blocks, "block_size": block_size, "max_num_batched_tokens": budget}
    arrivals = [Request(tuple(prompt), *others) for prompt, *others in requests]
    with LLM(TINY_QWEN3, trace=file, **sizes, **OPTIONS) as llm:
        for step in range(max(one.arrival for one in arrivals) + 1):
            for i, one in enumerate(arrivals):
                if one.arrival == step:
                    params = SamplingParams(n=one.n, max_tokens=one.max_tokens, seed=i, ignore_eos=True)
                    llm.engine.add_request(chr(ord("A") + i), list(one.prompt), params)
            if llm.engine.has_unfinished_requests():
                llm.engine.step()
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
