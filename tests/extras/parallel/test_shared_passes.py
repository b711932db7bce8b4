"""Several ranks give what one rank gives, whatever is asked for, and the greedy tokens of `transformers`, in float32.

One module for all architectures. A case is an architecture's variant with a number of ranks, of K and V heads, and one
configuration of the engine. By default five cases meet each configuration; the sweep (`pytest -m slow`) has a case of
each other architecture. The ranks are threads of this process.
"""

import pytest
import torch

from nanovllm_extras import LLM, BeamSearchParams, PoolingParams, SamplingParams
from tests.extras.kernels.processors import need_a_compiler
from tests.extras.parallel.shareable import likeliest

SWAP = {"preemption_mode": "swap", "swap_space_bytes": 1 << 20}
ENGINES = {
    "chunks": {"max_num_batched_tokens": 17, "block_size": 3, "num_kv_blocks": 120},
    "overlap": {"max_num_batched_tokens": 40, "block_size": 8, "num_kv_blocks": 60, "enable_overlap": True},
    "swap": {"max_num_batched_tokens": 64, "block_size": 4, "num_kv_blocks": 26, **SWAP},
    "cpu": {"attention_backend": "cpu", "max_num_batched_tokens": 33, "block_size": 16, "num_kv_blocks": 40},
    "cpu, preemption": {
        "attention_backend": "cpu",
        "max_num_batched_tokens": 64,
        "block_size": 16,
        "num_kv_blocks": 8,
        "enable_overlap": True,
    },
}
KINDS = {"cpu": "shared_memory", "cpu, preemption": "shared_memory", "overlap": "gloo"}  # queues for the others
FEW = (26, 8)  # blocks
CASES = [  # (architecture, variant, number of ranks, of K and V heads, engine)
    ("llama", "biases", 2, 2, "chunks"),
    ("qwen2", "tied", 2, 1, "overlap"),
    ("gemma3", "capped", 2, 6, "swap"),
    ("qwen3_moe", "a dense layer", 2, 2, "cpu"),
    ("deepseek_v2", "biases", 2, 1, "cpu, preemption"),
    ("mixtral", "plain", 3, 6, "cpu"),
    ("deepseek_v3", "yarn with mscales", 3, 6, "chunks"),
    ("gpt_oss", "clamped", 2, 2, "cpu"),
    ("granite", "factors", 3, 3, "cpu, preemption"),
    ("phi3", "partial", 3, 1, "swap"),
    ("mistral", "short window", 3, 3, "cpu"),
    ("smollm3", "biases", 2, 1, "cpu"),
    ("qwen3", "biases", 4, 2, "overlap"),  # of four ranks two hold the same K and V head
]
NUM_DEFAULT = 5
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
STEM = [(37 * i) % 251 + 3 for i in range(48)]
PROMPTS = [STEM[:9], STEM[20:36], STEM[:33], STEM]  # three begin alike


def shout(output_token_ids, logits):
    """A logits processor that reads the output."""
    logits[(7 * len(output_token_ids)) % 250] += 5.0
    return logits


def sampled(**fields):
    return SamplingParams(temperature=0.9, max_tokens=6, ignore_eos=True, **fields)


REQUESTS = [
    *((prompt, GREEDY) for prompt in PROMPTS),
    (STEM[5:30], SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=2, ignore_eos=True)),
    (STEM[:20], sampled(seed=5, n=3, top_k=50)),
    (STEM[10:19], sampled(seed=6, repetition_penalty=1.3, presence_penalty=0.5, logit_bias={11: 4.0}, logprobs=0)),
    (STEM[12:40], sampled(seed=7, logits_processors=[shout])),
    (STEM[2:14], sampled(seed=8, structured_outputs={"regex": "[a-f]{3,5}x?"})),
]
BEAMS = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)


def cases():
    for i, case in enumerate(CASES):
        yield pytest.param(*case, marks=[pytest.mark.slow] * (i >= NUM_DEFAULT), id="-".join(map(str, case)))


def serve(llm):
    """Everything that may be asked for: ({what: tokens}, {what: numbers})"""
    tokens, numbers = {}, {}
    for again in (False, True):  # then prefixes are cached
        prompts, params = zip(*REQUESTS[: 5 if again else None], strict=True)
        for i, output in enumerate(llm.generate(list(prompts), list(params), use_tqdm=False)):
            tokens["generate", again, i] = [one.token_ids for one in output.outputs]
            tokens["text", again, i] = [(one.text, one.finish_reason) for one in output.outputs]
            for j, one in enumerate([output.prompt_logprobs, *(one.logprobs for one in output.outputs)]):
                for k, position in enumerate(one or []):
                    numbers |= {("logprobs", again, i, j, k, t): x.logprob for t, x in (position or {}).items()}
    for pooling in ("last", "mean"):
        outputs = llm.embed(PROMPTS, PoolingParams(pooling=pooling), use_tqdm=False)
        for i, output in enumerate(outputs):
            numbers |= {(pooling, i, j): x for j, x in enumerate(output.outputs.embedding)}
    beams = llm.beam_search(PROMPTS[:1], BEAMS)
    tokens["beams"] = [[sequence.tokens for sequence in output.sequences] for output in beams]
    return tokens, numbers


@pytest.mark.parametrize(("name", "variant", "size", "num_kv_heads", "engine"), list(cases()))
def test_ranks_give_what_one_gives(shareable, request, name, variant, size, num_kv_heads, engine):
    kind = KINDS.get(engine)
    ranks = request.getfixturevalue("quick_ranks" if kind is None else "rank_threads")
    if kind == "shared_memory":
        need_a_compiler(torch.float32)
    folder, model = shareable.make(name, variant, num_kv_heads, num_heads=8 if size == 4 else 6)
    options = {**shareable.options(name, variant), "attention_backend": "torch", **ENGINES[engine]}
    expected = serve(LLM(folder, **options))
    with LLM(folder, tensor_parallel_size=size, **options) as llm:
        found, stats = serve(llm), llm.get_stats()
        description, window = llm.engine.description, llm.engine.parts.model_config.widest_window
        gives_back = "windows of" in description or (window is not None and window <= 60)  # blocks behind a window
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], abs=1e-4)
    for i, prompt in enumerate(PROMPTS):
        output = found[0]["generate", False, i][0]
        assert output == likeliest(model, prompt, output)
    assert [rank.wait(60) for rank in ranks] == [0] * (size - 1)
    assert description.endswith(f", {size} ranks ({kind or 'gloo'})")
    assert stats.prefix_cache_hit_tokens > 0
    if not gives_back:  # else the few blocks suffice
        assert (stats.num_preemptions > 0) == (ENGINES[engine]["num_kv_blocks"] in FEW)
        assert (stats.num_swaps > 0) == ("swap_space_bytes" in ENGINES[engine])


def test_ranks_keep_k_and_v_in_8_bits(shareable, rank_threads):
    """Each its own heads, with their scales: what is rounded is what one rank rounds."""
    need_a_compiler(torch.float32)
    folder, _ = shareable.make("qwen3", "biases", 2, num_heads=6)
    options = {**shareable.options("qwen3", "biases"), **ENGINES["cpu"], "kv_cache_dtype": "int8"}
    outputs = []
    for size in (1, 2):
        with LLM(folder, tensor_parallel_size=size, **options) as llm:
            outputs.append([one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY, use_tqdm=False)])
    assert outputs[0] == outputs[1]
    assert [rank.wait(60) for rank in rank_threads] == [0]
