"""Random requests to the core's engine, for tests that compare two ways of serving them."""

from collections.abc import Iterator
from random import Random
from typing import Any

from nanovllm import TINY_QWEN3
from nanovllm.sampling_params import SamplingParams

MODEL = TINY_QWEN3
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 4,
    "num_kv_blocks": 22,
    "max_num_batched_tokens": 13,
    "max_num_seqs": 5,
    "max_model_len": 80,
}


def random_requests(rng: Random, count: int) -> Iterator[tuple[list[int], SamplingParams]]:
    """Yield (prompt, parameters): prompts share prefixes; greedy and sampled, one or several samples, with stops."""
    base = [rng.randrange(3, 2000) for _ in range(24)]
    for _ in range(count):
        prompt = base[: rng.randrange(0, 24)] + [rng.randrange(3, 2000) for _ in range(rng.randrange(1, 20))]
        is_greedy = rng.random() < 0.3
        yield (
            prompt,
            SamplingParams(
                n=1 if is_greedy else rng.randrange(1, 4),
                temperature=0.0 if is_greedy else rng.choice([0.5, 1.0]),
                top_p=rng.choice([1.0, 0.8]),
                top_k=rng.choice([0, 20]),
                min_p=rng.choice([0.0, 0.02]),
                seed=rng.randrange(1 << 40),
                max_tokens=rng.randrange(1, 24),
                stop=rng.choice([None, ["e"], [" the"]]),
                ignore_eos=True,
            ),
        )


def drive(engine: Any, requests: list[tuple[list[int], SamplingParams]], rng: Random) -> list[list[tuple[Any, ...]]]:
    """Add the requests over time, and step until all are finished.

    Returns for each request [(text, token ids, finish reason) of each sample].
    """
    finished: dict[str, list[tuple[Any, ...]]] = {}
    waiting = list(enumerate(requests))
    while waiting or engine.has_unfinished_requests():
        while waiting and rng.random() < 0.5:
            i, (prompt, params) = waiting.pop(0)
            engine.add_request(str(i), prompt, params, stream=rng.random() < 0.5)
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = [(one.text, one.token_ids, one.finish_reason) for one in output.outputs]
    return [finished[str(i)] for i in range(len(requests))]
