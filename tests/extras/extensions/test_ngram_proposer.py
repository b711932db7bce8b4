"""`examples/extensions/ngram_proposer.py`: the oracles are a search by plain loops, and the engine without drafts."""

import random
from pathlib import Path

import numpy as np

from nanovllm.extension import import_extension
from nanovllm_extras import LLM, SamplingParams

EXTENSION = Path(__file__).parents[3] / "examples" / "extensions" / "ngram_proposer.py"


def search(tokens, count, longest, shortest):
    """The drafts, found by comparing all pairs of places."""
    found = []
    for end in range(1, len(tokens)):  # an n-gram that ends before `end`, and the one at the end of all
        n = 0
        while n < min(longest, end) and tokens[end - 1 - n] == tokens[-1 - n]:
            n += 1
        if n >= shortest:
            found.append((n, end))
    if not found:
        return []
    _, end = max(found)
    return tokens[end : end + count]


def test_drafts_are_those_of_a_search_by_loops():
    module, rng, num_found = import_extension(EXTENSION), random.Random(0), 0
    for _ in range(500):
        tokens = [rng.randrange(rng.choice([1, 2, 4, 20])) for _ in range(rng.randrange(1, 25))]
        count = rng.randrange(1, 6)
        expected = search(tokens, count, module.LONGEST, module.SHORTEST)
        assert module.look_up(np.array(tokens), count) == expected, tokens
        num_found += bool(expected)
    assert 100 < num_found < 400


def test_outputs_are_those_without_drafts(tiny_checkpoint):
    """Greedy and sampled requests, several samples, and preemption. Repeated prompts make some drafts right."""
    rng = random.Random(1)
    prompts = [[rng.randrange(4) for _ in range(8)] * 3 for _ in range(6)]
    params = [
        SamplingParams(
            n=1 + (i % 3 == 2), temperature=0.0 if i % 3 < 2 else 0.3, seed=i, max_tokens=40, ignore_eos=True
        )
        for i in range(6)
    ]
    options = {"dtype": "float32", "device": "cpu", "attention_backend": "torch", "block_size": 4, "num_kv_blocks": 60}
    speculation = {"num_speculative_tokens": 4, "disable_by_batch_size": 256}
    outputs = []
    for more in ({}, {"extension": EXTENSION, "speculative_config": speculation}):
        with LLM(tiny_checkpoint[0], **options, **more) as llm:
            done = llm.generate(prompts, params, use_tqdm=False)
            outputs.append([one.token_ids for output in done for one in output.outputs])
            stats = llm.get_stats()
    assert outputs[0] == outputs[1]
    assert stats.num_preemptions > 0
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
