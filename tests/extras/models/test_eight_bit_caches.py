"""K and V in 8 bits beside recurrent states, in several shapes, and as latents.

The oracle is `transformers` with attention over K and V that are rounded before, and without a cache.
"""

import contextlib
import functools

import pytest
import torch

from nanovllm_extras import LLM, SamplingParams
from nanovllm_extras.scheduling.roll_back import reset_prefix_cache
from tests.extras.models.architectures import Checkpoints
from tests.extras.models.gemma4_checkpoints import Gemma4Checkpoints
from tests.extras.models.hybrid_checkpoints import MAX_TOKENS, continue_all, logprobs_of

PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
ONE_TABLE = {"disable_hybrid_kv_cache_manager": True}
SWAP = {"num_kv_blocks": 19, "max_num_batched_tokens": 64, "preemption_mode": "swap", "swap_space_bytes": 1 << 20}
STORE = {"kv_offloading_size": 0.01}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "disable_by_batch_size": 64, "prompt_lookup_min": 1}
C = {"attention_backend": "cpu", "block_size": 16}
CASES = [
    ("qwen3_5", "fp8", STORE),
    ("qwen3_5", "int8", {**C, "speculative_config": NGRAM}),
    ("lfm2", "fp8", SWAP),
    ("gemma4", "fp8", {**STORE, "speculative_config": NGRAM}),
    ("gemma4", "int8", C),
    ("gemma4", "int8", {**ONE_TABLE, **SWAP, **STORE}),
    ("deepseek_v3", "fp8", SWAP),
    ("deepseek_v3", "int8", {"attention_backend": "auto", "block_size": 16, **STORE}),
]


def to_e4m3(x):
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def to_int8(x):
    """One scale for each token and head."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (x / scale).round() * scale


ROUNDED = {"fp8": to_e4m3, "int8": to_int8}


class OfLatents:
    """As the others, for a model whose cache holds latents."""

    def __init__(self, root):
        self._checkpoints = Checkpoints(root)

    def make(self):
        return self._checkpoints.make("deepseek_v3", "plain")

    def prompts(self):
        return self._checkpoints.prompts("deepseek_v3", "plain")


@pytest.fixture(scope="module")
def checkpoints(all_hybrids, tmp_path_factory):
    roots = [tmp_path_factory.mktemp(name) for name in ("gemma", "deepseek")]
    of_gemma, of_latents = Gemma4Checkpoints(roots[0]), OfLatents(roots[1])
    hybrids = {"qwen3_5": all_hybrids["Qwen3_5"], "lfm2": all_hybrids["Lfm2"]}
    return {**hybrids, "gemma4": of_gemma, "deepseek_v3": of_latents}


@contextlib.contextmanager
def rounds(model, dtype):
    """Let `transformers` attend to rounded K and V, or to those that are computed from rounded latents."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    plain, rounded = ALL_ATTENTION_FUNCTIONS["sdpa"], ROUNDED[dtype]

    def attend(module, query, key, value, *arguments, **more):
        if not hasattr(module, "kv_a_layernorm"):
            return plain(module, query, rounded(key), rounded(value), *arguments, **more)
        latent, rotated = key.split((key.shape[-1] - module.qk_rope_head_dim, module.qk_rope_head_dim), -1)
        return plain(module, query, torch.cat((latent, rounded(rotated)), -1), value, *arguments, **more)

    latents = [module for name, module in model.named_modules() if name.endswith("kv_a_layernorm")]
    hooks = [module.register_forward_hook(lambda _, inputs, output: rounded(output)) for module in latents]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", attend)
        yield
    for hook in hooks:
        hook.remove()


@functools.cache
def continuations(checkpoints, dtype):
    """For each prompt: tokens and log-probabilities with rounded K and V, and those of the same tokens without."""
    model = checkpoints.make()[1]
    with rounds(model, dtype):
        rounded = continue_all(model, checkpoints.prompts())
    pairs = zip(checkpoints.prompts(), rounded, strict=True)
    return rounded, [logprobs_of(model, prompt, token_ids) for prompt, (token_ids, _) in pairs]


def logprobs_in(output):
    return [row[i].logprob for i, row in zip(output.token_ids, output.logprobs, strict=True)]


@pytest.mark.parametrize(("name", "dtype", "options"), CASES)
def test_tokens_are_those_of_rounded_k_and_v(checkpoints, name, dtype, options):
    """Each prompt runs twice, so that the second time its first blocks are found in the cache or the store.

    Also the queries and weights of int8 are rounded, to 16 bits.
    """
    prompts, (rounded, plain) = checkpoints[name].prompts(), continuations(checkpoints[name], dtype)
    sizes = {"block_size": 4, "num_kv_blocks": 120, "max_num_seqs": 8, "max_num_batched_tokens": 29}
    options = {"attention_backend": "torch", "kv_cache_dtype": dtype, **sizes, **options}
    llm = LLM(checkpoints[name].make()[0], dtype="float32", device="cpu", **options)
    if "cpu" not in options.values():
        dtypes = {str(cache.tensor.dtype) for cache in llm.engine.runner.kv_caches}
        assert dtypes == {"torch.float8_e4m3fn" if dtype == "fp8" else "torch.int8"}
    for again in range(2):
        if again and "kv_offloading_size" in options:
            assert llm.engine.parts.kv_store.saver.wait(5)
            reset_prefix_cache(llm.engine.scheduler)  # of the pool only
        outputs = [output.outputs[0] for output in llm.generate(prompts, PARAMS, use_tqdm=False)]
        assert [output.token_ids for output in outputs] == [token_ids for token_ids, _ in rounded]
        found = torch.tensor([logprobs_in(one) for one in outputs])
        error = (found - torch.tensor([logprobs for _, logprobs in rounded])).abs()
        if dtype == "fp8":
            assert error.max() < 2e-4
        assert error.mean() < 0.2 * (found - torch.tensor(plain)).abs().mean()
    stats = llm.get_stats()
    assert (stats.num_swaps > 0) == ("swap_space_bytes" in options)
    assert stats.prefix_cache_hit_tokens > 0 or "swap_space_bytes" in options or "kv_offloading_size" in options
    assert "kv_offloading_size" not in options or stats.kv_store.loaded_tokens > 0
    assert ("speculative_config" in options) == (stats.num_draft_tokens > 0)
