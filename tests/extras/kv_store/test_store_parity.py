"""Engines with a store give the tokens of engines without: float32 with PyTorch's layers, bfloat16 bit for bit on C."""

import random

import pytest

from nanovllm_extras import Config, LLMEngine, SamplingParams
from tests.extras.models.architectures import ARCHITECTURES, Checkpoints

MEMORY = {"kv_offloading_size": 1e-2}
TORCH = {"attention_backend": "torch", "enforce_eager": True, "block_size": 4, "num_kv_blocks": 20, "dtype": "float32"}
KERNELS = {"attention_backend": "cpu", "block_size": 16, "num_kv_blocks": 6, "dtype": "bfloat16"}
SWAP = {"preemption_mode": "swap", "swap_space_bytes": 1 << 16}
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}
OVERLAP = {"enable_overlap": True}
CASES = [  # (architecture, options); `test_pairs.py` has more with PyTorch's layers
    pytest.param("mistral", KERNELS | NGRAM, marks=pytest.mark.slow),
    ("gemma3", KERNELS | SWAP),
    pytest.param("deepseek_v2", KERNELS, marks=pytest.mark.slow),
    ("qwen3", KERNELS | OVERLAP | {"kv_cache_dtype": "int8"}),
    ("qwen3", TORCH | {"kv_cache_dtype": "fp8"}),  # on a CPU only PyTorch's layers have fp8
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return Checkpoints(tmp_path_factory.mktemp("models"))


def make_requests(seed, num_requests):
    """(prompt, parameters, steps until the next request). Prompts share stems, which leave the pool and come back."""
    rng = random.Random(seed)
    stems = [[rng.randrange(200) for _ in range(48)] for _ in range(3)]
    requests = []
    for i in range(num_requests):
        prompt = rng.choice(stems)[: rng.choice([0, 16, 20, 33, 48])] + [
            rng.randrange(200) for _ in range(rng.randint(1, 9))
        ]
        fields = {"max_tokens": rng.randint(1, 8), "ignore_eos": True, "logprobs": 1, "seed": i}
        temperature, n = rng.choice([(0, 1), (0, 1), (1.0, 1), (1.0, 2)])  # greedy samples would be equal
        fields |= {"temperature": temperature, "n": n}
        requests.append((prompt, SamplingParams(**fields), rng.choice([0, 0, 1, 5, 20])))
    return requests


def serve(engine, requests):
    """Return the tokens and the exact log-probabilities of each request."""
    answers = {}

    def step():
        for output in engine.step().outputs:
            if output.finished:
                answers[output.request_id] = [(one.token_ids, logprobs_of(one)) for one in output.outputs]

    for i, (prompt, params, num_steps) in enumerate(requests):
        engine.add_request(str(i), prompt, params)
        for _ in range(num_steps):
            step()
        if engine.parts.kv_store is not None and not num_steps:
            assert engine.parts.kv_store.saver.wait(5)
    while engine.has_unfinished_requests():
        step()
    return answers


def logprobs_of(completion):
    return [{token_id: one.logprob for token_id, one in row.items()} for row in completion.logprobs]


def tokens_of(answers):
    return {name: [token_ids for token_ids, _ in samples] for name, samples in answers.items()}


@pytest.mark.parametrize(("name", "options"), CASES)
def test_tokens_are_those_without_a_store(models, name, options):
    folder = models.make(name, next(iter(ARCHITECTURES[name].variants)))[0]
    requests = make_requests(seed=0, num_requests=12)
    layers = KERNELS if options["attention_backend"] == "cpu" else TORCH
    same_numbers = {name: value for name, value in options.items() if name == "kv_cache_dtype"}
    expected = serve(LLMEngine(Config(folder, **layers, **same_numbers)), requests)
    engine = LLMEngine(Config(folder, **options, **MEMORY))
    answers = serve(engine, requests)
    assert tokens_of(answers) == tokens_of(expected)
    if layers is KERNELS:
        assert answers == expected, "bit for bit"
    stats = engine.get_stats()
    assert stats.kv_store.num_loaded_blocks > 0
    assert stats.kv_store.tiers["memory"].saved_bytes > 0 == stats.kv_store.num_dropped_blocks
    assert stats.num_free_blocks == stats.num_kv_blocks
