"""The engine on a GPU gives what it gives anywhere, whatever attends, recorded in graphs, run ahead, or fused.

Some checks run on CPU with PyTorch's backend by default, and the others in the sweep, at a smaller size, so that a test
that fails on a card fails because of the card. Oracles: `transformers`, token for token in float32; in half precision
its logits in float64, from which the engine may differ as much as `transformers` itself does in that precision; and for
random traffic the engine with everything switched off, serving one request at a time.
`python -m benchmarks.gpu_suite --only tests` runs these and
the kernels' own tests.

Broken by hand on CPU, and seen here: attention with another scale; a decode that does not see its own token; the newest
token of the step before taken from the wrong row; K and V of another layer; positions rounded to bfloat16; uniforms
that depend on the batch; V that is not copied on write; swapped blocks that come back in another order; a preempted
sequence that goes on one token too far; an fp8 cache of 2 bits' precision.
"""

import copy
import random

import pytest
import torch
import transformers

from nanovllm.cuda_graphs import CudaGraphs as ForwardGraphs
from nanovllm_extras import LLM, TINY_QWEN3, Config, LLMEngine, SamplingParams
from nanovllm_extras.execution.step_graphs import CudaGraphs
from nanovllm_extras.kernels.cuda.flash_backend import FlashAttention
from tests.conftest import hf_greedy
from tests.extras.kv_groups.test_grouped_layers import MAX_TOKENS, GroupedCheckpoints, is_grouped
from tests.extras.models.hybrid_checkpoints import HybridCheckpoints
from tests.extras.test_all_configurations import make_requests, serve
from tests.extras.test_parity import NUM_OUTPUT_TOKENS, Oracle, assert_at_rest, assert_parity

ON_A_CARD = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def place(device, backend):
    marks = ON_A_CARD if device == "cuda" else [pytest.mark.slow]
    if backend == "flash_attn":
        reason = FlashAttention.why_not(torch.device("cuda"), torch.bfloat16, 64, None)
        marks = [*marks, pytest.mark.skipif(reason is not None, reason=str(reason))]
    return pytest.param(device, backend, marks=marks, id=f"{device}-{backend}")


CPU, CUDA_TORCH, CUDA_TRITON, CUDA_FLASH = (
    place(*pair) for pair in (("cpu", "torch"), ("cuda", "torch"), ("cuda", "triton"), ("cuda", "flash_attn"))
)
CPU_BY_DEFAULT = pytest.param(*CPU.values, id=CPU.id)
ON_CARDS = [CUDA_TORCH, CUDA_TRITON]
EXACT_PLACES = [CPU, *ON_CARDS]  # those that compute in float32
HALF_PLACES = [CPU, CUDA_TORCH, CUDA_TRITON, CUDA_FLASH]

# What is switched on, step by step. On a CPU there are no graphs, and with PyTorch's backend neither.
MODES = {
    "eager": {"enforce_eager": True, "enable_overlap": False},
    "layers": {"enable_cuda_graphs": False, "enable_overlap": False},
    "graphs": {"enable_overlap": False},
    "overlap": {"enable_cuda_graphs": False, "enable_overlap": True},
    "everything": {"enable_overlap": True},
}
SHAPES = {
    "gqa 2, heads of 64": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    "mha, heads of 128": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128, "num_hidden_layers": 3},
    "gqa 8, heads of 64": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64},
    "gqa 2, heads of 128, bias": {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
    "gqa 4, heads of 16, tied": {"num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True},
}
FIRST_SHAPE = next(iter(SHAPES))


def in_modes(places, modes=tuple(MODES)):
    """Each place in each mode. A CPU has no graphs and no fast layers, so one mode suffices."""
    pairs = [(mode, place) for place in places for mode in modes if place is not CPU or mode == "everything"]
    return [pytest.param(mode, *place.values, marks=place.marks, id=f"{mode}-{place.id}") for mode, place in pairs]


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    return GroupedCheckpoints(tmp_path_factory.mktemp("grouped"))


@pytest.fixture(autouse=True)
def _exact_products():
    """float32 means float32 on a card too."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(scope="module")
def oracles(checkpoints, tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = Oracle("oracle", SHAPES[name], checkpoints, tmp_path_factory)
        return made[name]

    return get


def make_options(device, backend, mode="everything", **options):
    """Of an engine whose cache is large enough, unless told how large."""
    block_size = 256 if backend == "flash_attn" else 16  # any version of flash-attn has blocks of 256
    defaults = {"block_size": block_size, "num_kv_blocks": 9600 // block_size, "max_num_seqs": 40, "dtype": "float32"}
    return {"device": device, "attention_backend": backend, **defaults, **MODES[mode], **options}


# ---- float32: token for token


@pytest.mark.parametrize(("device", "backend"), ON_CARDS)
@pytest.mark.parametrize("name", SHAPES)
def test_greedy_tokens_of_every_shape(oracles, name, device, backend):
    """`test_parity.py` has the shapes on CPU."""
    oracle = oracles(name)
    llm = LLM(oracle.folder, **make_options(device, backend))
    max_tokens = [1 + 7 * i % NUM_OUTPUT_TOKENS for i in range(len(oracle.pool))]
    assert_parity(llm, oracle, oracle.pool, max_tokens)


@pytest.mark.parametrize(("mode", "device", "backend"), in_modes(EXACT_PLACES))
def test_greedy_tokens_in_every_mode(oracles, monkeypatch, mode, device, backend):
    oracle = oracles(FIRST_SHAPE)
    replayed, can_replay = [], CudaGraphs.can_replay
    monkeypatch.setattr(CudaGraphs, "can_replay", lambda *a: replayed.append(can_replay(*a)) or replayed[-1])
    llm = LLM(oracle.folder, **make_options(device, backend, mode, max_num_batched_tokens=100))
    llm.engine.runner.kv_cache.tensor.fill_(50.0)  # garbage that would show
    for _ in range(2):  # the second time all prompts are in the prefix cache
        assert_parity(llm, oracle, oracle.pool)
    assert llm.get_stats().prefix_cache_hit_tokens > 0
    has_graphs = device == "cuda" and backend != "torch" and mode in ("graphs", "everything")
    assert sum(replayed) > NUM_OUTPUT_TOKENS if has_graphs else not replayed


@pytest.mark.parametrize(("device", "backend"), ON_CARDS)
@pytest.mark.parametrize("mode", ["eager", "graphs", "everything"])
@pytest.mark.parametrize("name", ["gemma3", "smollm3", "gemma4_e2b"])
def test_groups_of_layers(grouped, name, mode, device, backend):
    """Each group of layers has slots and block tables of its own, also in graphs."""
    options = {"device": device, "attention_backend": backend, "block_size": 16, "num_kv_blocks": 60, **MODES[mode]}
    llm, expected = LLM(grouped.of(name)[0], dtype="float32", max_num_seqs=5, **options), grouped.greedy(name)
    assert is_grouped(llm)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    outputs = llm.generate(grouped.prompts(), params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [token_ids for token_ids, _ in expected]


@pytest.mark.parametrize(("device", "backend"), ON_CARDS)
@pytest.mark.parametrize("mode", ["eager", "graphs", "everything"])
@pytest.mark.parametrize("kind", ["Qwen3_5", "Lfm2"])
def test_recurrent_states(tmp_path, monkeypatch, kind, mode, device, backend):
    """Each sequence has a slot of its own, also in graphs. The second time, prompts find snapshots."""
    pytest.importorskip("transformers.models.qwen3_5")
    hybrids, replayed, can_replay = HybridCheckpoints(tmp_path, kind), [], CudaGraphs.can_replay
    monkeypatch.setattr(CudaGraphs, "can_replay", lambda *a: replayed.append(can_replay(*a)) or replayed[-1])
    options = {"device": device, "attention_backend": backend, "block_size": 16, "num_kv_blocks": 60, **MODES[mode]}
    llm = LLM(hybrids.make()[0], dtype="float32", max_num_seqs=5, state_snapshot_interval=1, **options)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    for _ in range(2):
        outputs = llm.generate(hybrids.prompts(), params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [token_ids for token_ids, _ in hybrids.greedy()]
    assert llm.get_stats().prefix_cache_hit_tokens > 0
    has_graphs = device == "cuda" and backend != "torch" and mode != "eager"
    assert sum(replayed) > 5 if has_graphs else not replayed


@pytest.mark.parametrize(("device", "backend"), ON_CARDS)
def test_drafts_of_a_model_with_recurrent_states(tmp_path, device, backend):
    """Layers in Triton find drafts on the device, also in graphs. PyTorch's compute them in rounds."""
    pytest.importorskip("transformers.models.qwen3_5")
    from tests.extras.models.test_qwen3_5_drafts import Knowing, drafting, texts_of

    hybrids = HybridCheckpoints(tmp_path)
    speculation = drafting(Knowing(texts_of(hybrids)))
    options = {"device": device, "attention_backend": backend, "block_size": 16, "num_kv_blocks": 60}
    llm = LLM(hybrids.make()[0], dtype="float32", max_num_seqs=5, speculative_config=speculation, **options)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    outputs = llm.generate(hybrids.prompts(), params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [token_ids for token_ids, _ in hybrids.greedy()]
    assert 0 < llm.get_stats().num_accepted_tokens < llm.get_stats().num_draft_tokens


@pytest.mark.parametrize(("device", "backend"), EXACT_PLACES)
def test_batch_sizes_between_those_that_are_recorded(oracles, device, backend):
    """Batches of any size, a limit that is not a power of two, and a length that is not a multiple of a block's."""
    oracle = oracles(FIRST_SHAPE)
    prompts = [prompt for prompt in oracle.pool if len(prompt) <= 33] * 3
    llm = LLM(oracle.folder, **make_options(device, backend, max_num_seqs=37, max_model_len=101))
    for batch_size in (1, 2, 3, 5, 9, 17, 33, 37, 38):
        some = [prompts[i % len(prompts)] for i in range(batch_size)]
        # the batch shrinks one by one while it runs
        assert_parity(llm, oracle, some, [1 + i % NUM_OUTPUT_TOKENS for i in range(batch_size)])


@pytest.mark.parametrize(("device", "backend"), EXACT_PLACES)
def test_a_sequence_that_fills_the_model_to_its_last_token(oracles, device, backend):
    oracle = oracles(FIRST_SHAPE)
    prompt = oracle.mixed[-1][:70]
    llm = LLM(oracle.folder, **make_options(device, backend, max_num_seqs=3, max_model_len=101))
    params = SamplingParams(temperature=0, max_tokens=31, ignore_eos=True)
    outputs = llm.generate([prompt, prompt[:9], prompt], params, use_tqdm=False)
    expected = hf_greedy(oracle.model, prompt, 31)
    for output in (outputs[0], outputs[2]):
        assert output.outputs[0].token_ids == expected
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 101
    assert outputs[1].outputs[0].token_ids == hf_greedy(oracle.model, prompt[:9], 31)


@pytest.mark.parametrize(("device", "backend"), [CPU_BY_DEFAULT, *ON_CARDS])
def test_two_engines_in_one_process(oracles, checkpoints, tmp_path_factory, device, backend):
    """Step by step in turns: what one has recorded or allocated is not the other's."""
    both = [oracles(FIRST_SHAPE), oracles("gqa 4, heads of 16, tied")]
    options = [make_options(device, backend, max_num_seqs=n) for n in (7, 12)]
    engines = [LLMEngine(Config(one.folder, **of_it)) for one, of_it in zip(both, options, strict=True)]
    tokens = [{}, {}]
    for oracle, engine in zip(both, engines, strict=True):
        for i, prompt in enumerate(oracle.mixed):
            engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=NUM_OUTPUT_TOKENS))
    while any(engine.has_unfinished_requests() for engine in engines):
        for engine, found in zip(engines, tokens, strict=True):
            found |= {output.request_id: output.outputs[0].token_ids for output in engine.step().outputs}
    for oracle, found in zip(both, tokens, strict=True):
        assert found == {str(i): oracle.answer(prompt) for i, prompt in enumerate(oracle.mixed)}
    for engine in engines:
        assert_at_rest(engine)


# ---- random traffic

FEW = {"num_kv_blocks": 24}
TRAFFIC = {
    "few blocks": FEW,
    "few blocks, chunks": {**FEW, "max_num_batched_tokens": 40},
    "few blocks, no prefix caching": {**FEW, "enable_prefix_caching": False, "max_num_seqs": 19},
    "swap": {**FEW, "preemption_mode": "swap", "swap_space_bytes": 1 << 22},
    "capped chunks": {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 11},
}


@pytest.fixture(scope="module")
def unhurried(checkpoints):
    """Requests, and what each gets of an engine that serves them one by one with everything switched off."""
    folder, _ = checkpoints.make(num_hidden_layers=1, hidden_size=32, intermediate_size=48, head_dim=16)
    made = {}

    def get(device, backend):
        if (device, backend) not in made:
            requests = make_requests()[:100]
            options = make_options(device, backend, "eager", enable_prefix_caching=False)
            made[device, backend] = requests, serve(LLMEngine(Config(folder, **options)), requests, at_once=False)
        return folder, *made[device, backend]

    return get


@pytest.mark.parametrize("options", TRAFFIC.values(), ids=TRAFFIC)
@pytest.mark.parametrize(("device", "backend"), ON_CARDS)
def test_random_traffic(unhurried, device, backend, options):
    """`test_all_configurations.py` has it on CPU.

    Samples, stops, penalties, seeds, aborts; preempted, in chunks, over shared blocks, recorded and run ahead."""
    folder, requests, expected = unhurried(device, backend)
    engine = LLMEngine(Config(folder, **make_options(device, backend, **options)))
    engine.runner.kv_cache.tensor.fill_(50.0)
    assert serve(engine, requests, at_once=True) == expected
    assert_at_rest(engine)
    stats = engine.get_stats()
    assert (stats.num_preemptions > 0) == ("num_kv_blocks" in options)
    assert (stats.num_swaps > 0) == ("preemption_mode" in options)


@pytest.mark.parametrize(("mode", "device", "backend"), in_modes(EXACT_PLACES, [m for m in MODES if m != "eager"]))
def test_sampled_tokens_are_those_of_eager_steps(tiny_checkpoint, mode, device, backend):
    folder, _ = tiny_checkpoint
    rng = random.Random(3)
    prompts = [[rng.randrange(300) for _ in range(rng.randint(1, 40))] for _ in range(24)]
    kinds = [{}, {"top_p": 0.8}, {"top_k": 12}, {"top_k": 30, "top_p": 0.9}, {"min_p": 0.05}, {"temperature": 0}]
    params = [
        SamplingParams(**{"temperature": 0.9, "max_tokens": 12, "seed": None if i % 3 else i, **kinds[i % len(kinds)]})
        for i in range(24)
    ]
    tokens = {}
    for one in ("eager", mode):
        llm = LLM(folder, **make_options(device, backend, one, seed=5))
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens[one] = [output.outputs[0].token_ids for output in outputs]
    assert tokens[mode] == tokens["eager"]
    assert len({tuple(some) for some in tokens["eager"]}) > 20


# ---- half precision: as close to exact as `transformers` is


class Exact:
    """A checkpoint whose weights are numbers of `dtype`, in float64 and in `dtype` itself, by `transformers`."""

    def __init__(self, model, dtype, device="cpu"):
        self.rough = with_parameters(model, dtype).to(device).eval()
        self.exact = with_parameters(self.rough, torch.float64)

    @torch.no_grad()
    def logprobs(self, model, token_ids, start):
        """[len(token_ids) - start, vocab_size]: what is thought of the tokens from position `start` on."""
        cache, logits = None, []
        for chunk in torch.tensor([token_ids], device=model.device).split(512, dim=1):  # so that scores are not many
            output = model(chunk, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits.append(output.logits[0])
        return torch.cat(logits)[start - 1 : -1].double().log_softmax(dim=-1).cpu()

    def judge(self, outputs):
        """(our errors, those of `transformers` in the same dtype, how much likelier the best token was than ours)"""
        errors, rough_errors, gaps = [], [], []
        for output in outputs:
            token_ids = output.prompt_token_ids + output.outputs[0].token_ids
            judged = (output.prompt_logprobs or [None] * len(output.prompt_token_ids)) + output.outputs[0].logprobs
            start = 1 if output.prompt_logprobs else len(output.prompt_token_ids)
            if len(token_ids) == start:
                continue
            exact, rough = (self.logprobs(model, token_ids, start) for model in (self.exact, self.rough))
            for row, position in enumerate(range(start, len(token_ids))):
                ids = torch.tensor(list(judged[position]))
                ours = torch.tensor([logprob.logprob for logprob in judged[position].values()], dtype=torch.float64)
                errors.append(ours - exact[row, ids])
                rough_errors.append(rough[row, ids] - exact[row, ids])
                if position >= len(output.prompt_token_ids):
                    gaps.append(exact[row].max() - exact[row, token_ids[position]])
        return torch.cat(errors), torch.cat(rough_errors), torch.stack(gaps)

    def check(self, outputs, slack=0.0):
        """All tokens but those that rounding decides are the best, and the probabilities as good as a peer's."""
        errors, rough_errors, gaps = self.judge(outputs)
        allowed = 1.5 * rms(rough_errors) + slack
        assert rms(errors) < allowed, f"off by {rms(errors):.2e}, transformers by {rms(rough_errors):.2e}"
        assert errors.abs().max() < 12 * allowed
        assert gaps.max() < 12 * allowed
        return rms(errors)


def with_parameters(model, dtype):
    """A copy whose buffers stay as they are: the rotary frequencies in half precision would be others."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def rms(errors):
    return float(errors.square().mean().sqrt())


def judged_outputs(llm, prompts, num_tokens, prompt_logprobs=10):
    params = SamplingParams(
        temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=10, prompt_logprobs=prompt_logprobs
    )
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.fixture(scope="module")
def exacts(checkpoints):
    made = {}

    def get(name, dtype):
        key = name, dtype
        if key not in made:
            # smaller weights than for the greedy tests: half precision is as sure of its tokens as a trained model is
            folder, model = checkpoints.make(**SHAPES[name], initializer_range=0.08, intermediate_size=128)
            made[key] = folder, Exact(model, dtype)
        return made[key]

    return get


ON_CARDS_IN_HALF = [
    (name, dtype, where) for name in SHAPES for dtype in (torch.bfloat16, torch.float16) for where in HALF_PLACES[1:]
]


@pytest.mark.parametrize(
    ("name", "dtype", "device", "backend"),
    [
        pytest.param(name, dtype, *where.values, marks=where.marks, id=f"{name}-{dtype}-{where.id}")
        for name, dtype, where in [(FIRST_SHAPE, torch.bfloat16, CPU_BY_DEFAULT), *ON_CARDS_IN_HALF]
    ],
)
def test_logits_in_half_precision(exacts, name, dtype, device, backend):
    if backend == "flash_attn" and SHAPES[name]["head_dim"] % 32:
        pytest.skip("some builds of flash-attn have no heads of other sizes")
    folder, exact = exacts(name, dtype)
    rng = random.Random(0)
    prompts = [[rng.randrange(300) for _ in range(n)] for n in (1, 15, 16, 17, 60, 130, 260)]
    llm = LLM(folder, **make_options(device, backend, dtype=dtype, max_num_batched_tokens=150))
    exact.check(judged_outputs(llm, prompts, 12))


@pytest.mark.parametrize(("mode", "device", "backend"), in_modes(HALF_PLACES))
def test_logits_in_bfloat16_in_every_mode(exacts, mode, device, backend):
    folder, exact = exacts(FIRST_SHAPE, torch.bfloat16)
    prompts = [[(5 * i + j) % 300 for j in range(3 + 4 * i)] for i in range(13)]
    llm = LLM(folder, **make_options(device, backend, mode, dtype="bfloat16"))
    exact.check(judged_outputs(llm, prompts, 12, prompt_logprobs=None))


@pytest.mark.parametrize(("device", "backend"), [CUDA_TRITON, CUDA_FLASH])
def test_logits_of_the_cores_graphs(exacts, monkeypatch, device, backend):
    """Where no kernel draws tokens, the core's graphs replay the forward pass."""
    monkeypatch.setattr("nanovllm_extras.execution.cuda_startup.choose_draw", lambda *_: None)
    replays, replay = [], ForwardGraphs.replay
    monkeypatch.setattr(ForwardGraphs, "replay", lambda *args: (replays.append(args), replay(*args))[1])
    folder, exact = exacts(FIRST_SHAPE, torch.bfloat16)
    prompts = [[(5 * i + j) % 300 for j in range(3 + 4 * i)] for i in range(13)]
    llm = LLM(folder, **make_options(device, backend, dtype="bfloat16"))
    exact.check(judged_outputs(llm, prompts, 12, prompt_logprobs=None))
    assert len(replays) >= 10


# ---- long contexts

LONG = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 40_960}


@pytest.mark.parametrize(
    ("device", "backend", "dtype"),
    [
        pytest.param(*where.values, dtype, marks=where.marks, id=f"{where.id}-{str(dtype).removeprefix('torch.')}")
        for where, dtype in [
            (CPU, torch.float32),
            (CUDA_TORCH, torch.float32),
            (CUDA_TRITON, torch.float32),
            (CUDA_TRITON, torch.bfloat16),
            (CUDA_FLASH, torch.bfloat16),
        ]
    ],
)
def test_a_long_context(checkpoints, device, backend, dtype):
    """32k tokens on a card: prefilled in chunks, then decoded beside short sequences."""
    num_tokens = 1100 if device == "cpu" else 32_700
    folder, model = checkpoints.make(**LONG, initializer_range=0.08)
    exact = Exact(model, dtype, device)
    rng = random.Random(1)
    prompts = [[rng.randrange(300) for _ in range(n)] for n in (num_tokens, 3, 100)]
    budget = min(num_tokens // 5, 2048)
    options = {"max_num_batched_tokens": budget, "num_kv_blocks": None, "kv_cache_memory_bytes": 1 << 28}
    llm = LLM(folder, **make_options(device, backend, dtype=dtype, **options))
    outputs = judged_outputs(llm, prompts, 24, prompt_logprobs=None)
    exact.check(outputs, slack=2e-5)
    assert llm.get_stats().num_preemptions == 0


# ---- an fp8 cache


def bundled_llm(device, backend, kv_cache_dtype="auto", dtype="bfloat16"):
    return LLM(TINY_QWEN3, **make_options(device, backend, dtype=dtype, kv_cache_dtype=kv_cache_dtype))


QUESTIONS = [
    "What is paged attention?",
    "What is the KV cache?",
    "What is 27 + 58?",
    "Who are you?",
    "What is chunked prefill?",
    "Why does an LLM server use continuous batching?",
    "What is a block table?",
    "What is 13 + 45?",
]


def answers(llm):
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=60, logprobs=10)
    return llm.chat(chats, params, use_tqdm=False)


@pytest.mark.parametrize(("device", "backend"), HALF_PLACES)
def test_the_bundled_model_answers_as_on_a_cpu(device, backend):
    expected = [o.outputs[0].text for o in answers(bundled_llm("cpu", "torch", dtype="float32"))]
    assert expected[3].startswith("I am the tiny Qwen3 model")
    assert [o.outputs[0].text for o in answers(bundled_llm(device, backend))] == expected


@pytest.mark.parametrize(("device", "backend"), [CPU_BY_DEFAULT, *ON_CARDS])
def test_an_fp8_cache_changes_little(device, backend):
    """Three bits of mantissa: the answers of a trained model stay, and probabilities move by little."""
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY_QWEN3, dtype=torch.bfloat16)
    exact = Exact(model, torch.bfloat16)
    errors = {}
    texts = {}
    for kv_cache_dtype in ("auto", "fp8"):
        outputs = answers(bundled_llm(device, backend, kv_cache_dtype))
        ours, _, _ = exact.judge(outputs)
        errors[kv_cache_dtype] = rms(ours)
        texts[kv_cache_dtype] = [output.outputs[0].text for output in outputs]
    agreement = sum(a == b for a, b in zip(*texts.values(), strict=True))
    assert agreement >= len(QUESTIONS) - 1
    assert errors["auto"] < errors["fp8"] < 6 * errors["auto"]  # rounded to nearest; cut off, it would be 9


# ---- memory


@pytest.mark.parametrize(
    ("device", "options", "knob"),
    [
        pytest.param("cpu", {"kv_cache_memory_bytes": 1}, "kv_cache_memory_bytes", id="cpu"),
        pytest.param("cuda", {"kv_cache_memory_bytes": 1}, "kv_cache_memory_bytes", id="cuda", marks=ON_A_CARD),
        pytest.param("cuda", {"gpu_memory_utilization": 1e-6}, "gpu_memory_utilization", id="share", marks=ON_A_CARD),
    ],
)
def test_too_little_memory_is_refused_with_the_knob_to_turn(tiny_checkpoint, device, options, knob):
    with pytest.raises(ValueError, match=f"bytes are left for the KV cache.* raise {knob}"):
        LLM(tiny_checkpoint[0], **make_options(device, "torch", num_kv_blocks=None, **options))


@pytest.mark.alone
@pytest.mark.parametrize("backend", [pytest.param(name, marks=ON_A_CARD) for name in ("torch", "triton")])
def test_the_cache_is_sized_by_what_the_card_has_left(checkpoints, backend):
    """A share of the memory that is a little more than what is in use: the cache fills the rest, and it all runs."""
    folder, _ = checkpoints.make(
        num_hidden_layers=4, num_key_value_heads=4, head_dim=128, max_position_embeddings=32_768
    )
    free, total = torch.cuda.mem_get_info()
    wanted = 12 << 30
    if free < 1.3 * wanted:
        pytest.skip("the GPU has less than 16 GiB left")
    share = (total - free + wanted) / total
    options = make_options("cuda", backend, num_kv_blocks=None, gpu_memory_utilization=share, max_num_seqs=200)
    llm = LLM(folder, **options)
    runner = llm.engine.runner
    num_bytes = llm.engine.parts.num_kv_blocks * runner.kv_cache.bytes_per_block
    assert 0.3 * wanted < num_bytes < 1.05 * wanted  # the rest is for weights, a step and graphs
    outputs = llm.generate(
        [[1, 2, 3]] * 200, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False
    )
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
