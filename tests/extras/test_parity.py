"""The engine computes what the checkpoint says: greedy output is that of `transformers`, token for token.

Shown for random Qwen3 models of many shapes, over budgets, block sizes, scarce caches, prefix hits and random traffic.
Oracle: `transformers` greedy `generate` in float32, one prompt at a time, and its logits of one forward pass. Prompts
are drawn so that the oracle's best and second-best logit are never closer than `MIN_MARGIN`: rounding cannot decide.
"""

import copy
import functools
import random

import pytest
import torch

from nanovllm_extras import LLM, Config, LLMEngine, SamplingParams
from tests.conftest import hf_greedy

NUM_OUTPUT_TOKENS = 12
MIN_MARGIN = 1e-3
STEM_LEN = 48
PROMPT_LENS = (1, 2, 7, 8, 9, 15, 16, 17, 33, 64, 130)
SHAPES = {
    "mha-tied-1-layer": {"num_key_value_heads": 4, "num_hidden_layers": 1, "tie_word_embeddings": True},
    "gqa": {},
    "mqa-tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "mqa-1-layer": {"num_attention_heads": 3, "num_key_value_heads": 1, "num_hidden_layers": 1, "head_dim": 16},
    "mha-bias": {"num_key_value_heads": 4, "attention_bias": True, "hidden_size": 48},
    "gqa-bias-tied": {"attention_bias": True, "tie_word_embeddings": True, "num_hidden_layers": 3},
    "gqa-12-layers": {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "num_hidden_layers": 12,
        "hidden_size": 32,
        "head_dim": 16,
    },
}


class Oracle:
    """A checkpoint with random norms and biases too, and what `transformers` answers to prompts, each computed once."""

    def __init__(self, name, shape, checkpoints, tmp_path_factory):
        self.model = copy.deepcopy(checkpoints.make(**shape)[1])
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter_name, parameter in self.model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if parameter_name.endswith("norm.weight"):
                    parameter.copy_(1 + 0.5 * noise)
                elif parameter_name.endswith("bias"):
                    parameter.copy_(0.5 * noise)
        self.folder = tmp_path_factory.mktemp(name)
        self.model.save_pretrained(self.folder)
        self._answers = {}

    @functools.cached_property
    def mixed(self):
        generator = torch.Generator().manual_seed(2)
        return [self._draw(generator, n) for n in PROMPT_LENS]

    @functools.cached_property
    def stem(self):
        return self._draw(torch.Generator().manual_seed(5), STEM_LEN)

    @functools.cached_property
    def overlapping(self):
        """Prompts that begin alike, for as long as a block of 8 or 16, one token less, one more, and longer."""
        generator = torch.Generator().manual_seed(4)
        lens = ((15, 3), (16, 1), (17, 20), (32, 16), (47, 2), (48, 1), (48, 40))
        return [self._draw(generator, extra, self.stem[:shared]) for shared, extra in lens] + [self.stem]

    @property
    def pool(self):
        return self.mixed + self.overlapping

    def answer(self, prompt):
        return self._answers[tuple(prompt)]

    def learn(self, prompt):
        """Compute a prompt's answer; whether the oracle is sure of each of its tokens."""
        output = hf_greedy(self.model, prompt, NUM_OUTPUT_TOKENS)
        best = self.logits(prompt + output)[len(prompt) - 1 : -1].topk(2).values  # [NUM_OUTPUT_TOKENS, 2]
        self._answers[tuple(prompt)] = output
        return bool((best[:, 0] - best[:, 1]).min() > MIN_MARGIN)

    def logits(self, token_ids):
        """[len(token_ids), vocab_size] of one forward pass."""
        with torch.no_grad():
            return self.model(torch.tensor([token_ids])).logits[0]

    def _draw(self, generator, num_tokens, prefix=()):
        """`prefix`, then `num_tokens` random tokens."""
        for _ in range(20):
            prompt = [*prefix, *torch.randint(300, (num_tokens,), generator=generator).tolist()]
            if self.learn(prompt):
                return prompt
        raise AssertionError("no prompt with a wide margin found")


@pytest.fixture(scope="module")
def oracles(checkpoints, tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = Oracle(name, SHAPES[name], checkpoints, tmp_path_factory)
        return made[name]

    return get


@pytest.fixture(scope="module")
def gqa(oracles):
    return oracles("gqa")


def make_llm(oracle, block_size=16, num_kv_blocks=None, **options):
    """An engine whose cache is large enough unless the test says how large."""
    return LLM(
        model=oracle.folder,
        dtype="float32",
        device="cpu",
        attention_backend="torch",
        block_size=block_size,
        num_kv_blocks=num_kv_blocks or 6400 // block_size,
        **options,
    )


def greedy(max_tokens=NUM_OUTPUT_TOKENS):
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def assert_at_rest(engine):
    """Nothing runs, waits or owns a block."""
    stats = engine.get_stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_kv_blocks
    assert engine.scheduler.block_manager.num_used_blocks == 0


def assert_parity(llm, oracle, prompts, max_tokens=None):
    """Generate greedily, compare each output with the oracle's, and return the outputs."""
    max_tokens = max_tokens or [NUM_OUTPUT_TOKENS] * len(prompts)
    outputs = llm.generate(prompts, [greedy(n) for n in max_tokens], use_tqdm=False)
    for prompt, n, output in zip(prompts, max_tokens, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        assert output.outputs[0].token_ids == oracle.answer(prompt)[:n]
        assert output.outputs[0].finish_reason == "length"
    assert_at_rest(llm.engine)
    return outputs


def hits(llm):
    return llm.get_stats().prefix_cache_hit_tokens


# --- shapes, budgets, block sizes ----------------------------------------------------------------------------------

SETTINGS = [(8192, 8), (64, 256), (7, 1), (1, 16), (64, 8), (7, 16), (8192, 8)]  # budget, block size


@pytest.mark.parametrize(
    ("name", "budget", "block_size"), [(name, *sizes) for name, sizes in zip(SHAPES, SETTINGS, strict=True)]
)
def test_mixed_batch_of_every_shape(oracles, name, budget, block_size):
    oracle = oracles(name)
    llm = make_llm(oracle, max_num_batched_tokens=budget, block_size=block_size)
    # outputs of different lengths, so that the batch shrinks while it runs
    max_tokens = [1 + 7 * i % NUM_OUTPUT_TOKENS for i in range(len(oracle.mixed))]
    assert_parity(llm, oracle, oracle.mixed, max_tokens)


def test_the_engines_own_defaults(gqa):
    llm = LLM(model=gqa.folder)
    assert_parity(llm, gqa, gqa.pool)


# --- scarce blocks: preemption -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "block_size", "enable_prefix_caching"), [("gqa", 1, True), ("mqa-tied", 8, False), ("mha-bias", 16, True)]
)
def test_preempted_sequences_lose_nothing(oracles, name, block_size, enable_prefix_caching):
    oracle = oracles(name)
    prompts = [prompt for prompt in oracle.pool if len(prompt) <= 33]
    num_kv_blocks = -(-(33 + NUM_OUTPUT_TOKENS) // block_size) + 1  # little more than the longest prompt needs
    llm = make_llm(
        oracle, block_size=block_size, num_kv_blocks=num_kv_blocks, enable_prefix_caching=enable_prefix_caching
    )
    assert_parity(llm, oracle, prompts)
    assert llm.get_stats().num_preemptions > 0


def test_preemption_amid_chunked_prefill_and_prefix_hits(gqa):
    llm = make_llm(gqa, block_size=4, num_kv_blocks=40, max_num_batched_tokens=7)
    for _ in range(2):
        assert_parity(llm, gqa, gqa.pool)
    stats = llm.get_stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hit_tokens > 0


# --- prefix caching ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "block_size", "budget"), [("gqa", 8, 5), ("mqa-tied", 16, 8192)])
def test_overlapping_prompts_one_after_another(oracles, name, block_size, budget):
    oracle = oracles(name)
    llm = make_llm(oracle, block_size=block_size, max_num_batched_tokens=budget)
    seen = []
    for prompt in [*oracle.overlapping, *oracle.overlapping]:
        (output,) = assert_parity(llm, oracle, [prompt])
        # every full block that is known is found, but at least one token is left to compute
        longest = max((shared_len(prompt, other) for other in seen), default=0)
        assert output.num_cached_tokens == min(longest, len(prompt) - 1) // block_size * block_size
        seen.append(prompt + oracle.answer(prompt)[:-1])  # K and V of the last token are never computed
    assert hits(llm) > 0


def shared_len(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_overlapping_prompts_of_one_batch(gqa):
    """Two of each at once: the second of a pair shares what the first computes."""
    llm = make_llm(gqa, block_size=8)
    prompts = [prompt for prompt in gqa.overlapping for _ in range(2)]
    outputs = assert_parity(llm, gqa, prompts)
    for output in outputs[1::2]:
        # full blocks of the equal prompt that is prefilled in the same step; a partial block would have to be copied
        assert output.num_cached_tokens == (len(output.prompt_token_ids) - 1) // 8 * 8


# --- logits --------------------------------------------------------------------------------------------------------


class RecordingModel:
    """Stands where the runner's model does, and keeps the logits of all rows."""

    def __init__(self, model):
        self.model = model
        self.compute_logits = model.compute_logits
        self.logits = []  # one [num_tokens, vocab_size] per step

    def __call__(self, *inputs):
        hidden = self.model(*inputs)
        self.logits.append(self.compute_logits(hidden))
        return hidden


@pytest.mark.parametrize(("name", "budget"), [("mha-bias", 1), ("gqa", 7), ("mqa-tied", 64), ("gqa-bias-tied", 8192)])
def test_logits_of_a_prompt_prefilled_in_chunks(oracles, name, budget):
    oracle = oracles(name)
    prompt = (oracle.mixed[-1] + oracle.mixed[-2])[:150]
    llm = make_llm(oracle, max_num_batched_tokens=budget, block_size=8)
    recorder = llm.engine.runner.model = RecordingModel(llm.engine.runner.model)
    (output,) = llm.generate([prompt], greedy(5), use_tqdm=False)
    assert len(recorder.logits) == -(-len(prompt) // budget) + 4
    expected = oracle.logits(prompt + output.outputs[0].token_ids[:-1])
    torch.testing.assert_close(torch.cat(recorder.logits), expected, atol=1e-4, rtol=0)


def test_logits_of_chunks_behind_cached_blocks(gqa):
    llm = make_llm(gqa, max_num_batched_tokens=7, block_size=8)
    llm.generate([gqa.stem], greedy(1), use_tqdm=False)
    recorder = llm.engine.runner.model = RecordingModel(llm.engine.runner.model)
    prompt = gqa.stem + gqa.mixed[-1]
    (output,) = llm.generate([prompt], greedy(1), use_tqdm=False)
    assert output.num_cached_tokens == STEM_LEN
    torch.testing.assert_close(torch.cat(recorder.logits), gqa.logits(prompt)[STEM_LEN:], atol=1e-4, rtol=0)


# --- random traffic ------------------------------------------------------------------------------------------------


def random_traffic(oracle, seed):
    """Requests that come and go at any step under random limits; returns the engine's statistics.

    All get the oracle's tokens, aborted ones the first of them.
    """
    rng = random.Random(seed)
    pool = rng.choice([oracle.pool, oracle.overlapping, [p for p in oracle.pool if len(p) < 40]])
    requests = [
        {
            "prompt": rng.choice(pool),
            "max_tokens": rng.choice([1, 5, NUM_OUTPUT_TOKENS, NUM_OUTPUT_TOKENS]),
            "arrival": rng.choice([0, 0, 1, 5, 20]),  # the step before which it is added
            "abort": rng.choice([None, None, None, rng.randrange(15)]),  # how many steps later
        }
        for _ in range(rng.randrange(6, 16))
    ]
    block_size = rng.choice([1, 3, 4, 8, 16])
    budget = rng.choice([3, 8, 40, 8192])
    max_num_seqs = rng.choice([2, 5, 16, 16])
    longest = max(len(request["prompt"]) + request["max_tokens"] for request in requests)
    config = Config(
        model=oracle.folder,
        device="cpu",
        attention_backend="torch",
        block_size=block_size,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        num_kv_blocks=-(-longest // block_size) + rng.choice([0, 2, 50]),
        enable_prefix_caching=rng.random() < 0.7,
    )
    engine = LLMEngine(config)
    engine.runner.kv_cache.tensor.fill_(50.0)  # garbage that would show
    outputs = {}
    step = 0
    while step <= 40 or engine.has_unfinished_requests():
        for i, request in enumerate(requests):
            if request["arrival"] == step:
                engine.add_request(str(i), request["prompt"], greedy(request["max_tokens"]))
            if request["abort"] is not None and request["arrival"] + request["abort"] == step:
                engine.abort_request(str(i))
        result = engine.step()
        assert result.num_scheduled_tokens <= budget
        assert result.num_seqs <= max_num_seqs
        outputs.update({output.request_id: output for output in result.outputs})
        step += 1
        assert step < 3000, "the engine hangs"
    assert_at_rest(engine)
    for i, request in enumerate(requests):
        expected = oracle.answer(request["prompt"])[: request["max_tokens"]]
        if request["abort"] is None:
            assert outputs[str(i)].finished
            assert outputs[str(i)].outputs[0].token_ids == expected
        elif str(i) in outputs:
            token_ids = outputs[str(i)].outputs[0].token_ids
            assert token_ids == expected[: len(token_ids)]
    return engine.get_stats()


@pytest.mark.parametrize(
    ("name", "num_engines"),
    [("gqa", 6), ("mqa-tied", 6), pytest.param("gqa-bias-tied", 25, marks=pytest.mark.slow)],
)
def test_random_traffic(oracles, name, num_engines):
    stats = [random_traffic(oracles(name), f"{name}-{i}") for i in range(num_engines)]
    assert sum(s.num_preemptions > 0 for s in stats) >= num_engines // 5
    assert sum(s.prefix_cache_hit_tokens > 0 for s in stats) >= num_engines // 5
    assert any(s.num_preemptions and s.prefix_cache_hit_tokens for s in stats)
