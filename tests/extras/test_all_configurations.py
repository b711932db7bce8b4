"""The same random requests under ten configurations of the engine give the same tokens, in float32: more in the sweep.

Mixed lengths, shared prefixes, sampling parameters, samples, stops; some are aborted at a given number of tokens. The
oracle is the first configuration, which serves them one by one; greedy requests without penalties among them are
compared with `transformers` elsewhere (`test_parity.py`).
"""

import dataclasses
import functools
import random

import pytest

from nanovllm_extras import Config, LLMEngine, SamplingParams
from tests.conftest import examples
from tests.extras.late_runner import LateRunner

NUM_REQUESTS = 120
CONFIGURATIONS = {
    "all at once": {},
    "blocks of 1": {"block_size": 1},
    "blocks of 8, budget 64": {"block_size": 8, "max_num_batched_tokens": 64},
    "budget 33, few sequences": {"max_num_batched_tokens": 33, "max_num_seqs": 9},
    "no prefix caching": {"enable_prefix_caching": False, "block_size": 4},
    "few blocks": {"block_size": 4, "num_kv_blocks": 60},
    "few blocks, no prefix caching": {"block_size": 4, "num_kv_blocks": 60, "enable_prefix_caching": False},
    "swap": {"block_size": 4, "num_kv_blocks": 60, "preemption_mode": "swap", "swap_space_bytes": 1 << 18},
    "shortest first, capped chunks": {
        "scheduling_policy": "sjf",
        "long_prefill_token_threshold": 11,
        "max_num_seqs": 50,
    },
    "priority, few blocks": {"scheduling_policy": "priority", "block_size": 8, "num_kv_blocks": 40},
}


def make_requests():
    """(prompt, parameters, priority, tokens after which it is aborted or None)"""
    rng = random.Random(0)
    stems = [[rng.randrange(300) for _ in range(24)] for _ in range(4)]
    requests = []
    for i in range(NUM_REQUESTS):
        stem = rng.choice(stems)[: rng.choice([0, 7, 16, 24])]
        prompt = stem + [rng.randrange(300) for _ in range(rng.randint(1, 40))]
        fields = {"max_tokens": rng.randint(1, 16), "ignore_eos": True}
        if rng.random() < 0.3:
            fields |= {"stop_token_ids": [rng.randrange(300) for _ in range(20)], "min_tokens": rng.choice([0, 1])}
        if rng.random() < 0.5:
            fields |= {"temperature": 0.0}
        else:
            fields |= {"temperature": rng.choice([0.5, 1.0]), "seed": i, "n": rng.choice([1, 1, 2, 4])}
            fields |= rng.choice([{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}])
        fields |= rng.choice([{}, {}, {"repetition_penalty": 1.2}, {"frequency_penalty": 0.5}])
        if rng.random() < 0.15:
            fields |= {"logit_bias": {rng.randrange(300): 5.0}}
        abort_at = rng.randint(1, 5) if rng.random() < 0.1 else None
        requests.append((prompt, SamplingParams(**fields), rng.randint(0, 3), abort_at))
    return requests


def serve(engine, requests, at_once):
    """The tokens of every request's samples; of an aborted one those up to where it was to be aborted."""
    answers = {}
    todo = list(enumerate(requests))
    while todo or engine.has_unfinished_requests():
        while todo and (at_once or not engine.has_unfinished_requests()):
            i, (prompt, params, priority, _) = todo.pop(0)
            engine.add_request(str(i), prompt, params, priority)
        for output in engine.step().outputs:
            abort_at = requests[int(output.request_id)][3]
            tokens = [completion.token_ids for completion in output.outputs]
            if abort_at is not None and min(map(len, tokens)) >= abort_at and not output.finished:
                engine.abort_request(output.request_id)
                answers[output.request_id] = [some[:abort_at] for some in tokens]
            elif output.finished:
                answers[output.request_id] = [some[:abort_at] for some in tokens]
    assert engine.get_stats().num_free_blocks == engine.get_stats().num_kv_blocks
    return answers


KINDS = ["all that may be asked for", "nothing that reads the output"]
CASES = [(KINDS[i // 5], name, i % 2 == 1) for i, name in enumerate(CONFIGURATIONS)]


@pytest.fixture(scope="module")
def replay_of(checkpoints):
    """Return the checkpoint, the requests of a kind and their answers. The second kind is never waited for."""
    folder, _ = checkpoints.make(num_hidden_layers=1, hidden_size=32, intermediate_size=48, head_dim=16)

    @functools.cache
    def get(kind):
        requests = make_requests()[: max(30, examples(NUM_REQUESTS))]
        if kind == "nothing that reads the output":
            none = {"repetition_penalty": 1.0, "frequency_penalty": 0.0}
            requests = [(prompt, dataclasses.replace(params, **none), *rest) for prompt, params, *rest in requests]
        engine = LLMEngine(Config(folder, dtype="float32", enable_prefix_caching=False))
        return folder, requests, serve(engine, requests, at_once=False)

    return get


@pytest.mark.parametrize(("kind", "configuration", "overlap"), CASES)
@pytest.mark.examples
def test_replay(replay_of, kind, configuration, overlap):
    options = CONFIGURATIONS[configuration]
    folder, requests, expected = replay_of(kind)
    engine = LLMEngine(Config(folder, dtype="float32", enable_overlap=overlap, **options))
    late = LateRunner(engine)
    assert serve(engine, requests, at_once=True) == expected
    stats = engine.get_stats()
    assert (stats.num_preemptions > 0) == ("num_kv_blocks" in options)
    assert (stats.num_swaps > 0) == ("preemption_mode" in options)
    assert (stats.prefix_cache_hit_tokens > 0) == options.get("enable_prefix_caching", True)
    if not overlap:
        assert late.num_ahead == 0
    elif not any(p.repetition_penalty != 1 or p.frequency_penalty for _, p, _, _ in requests):
        assert late.num_ahead > late.num_steps / 2
        assert late.num_expected_ids > 100
