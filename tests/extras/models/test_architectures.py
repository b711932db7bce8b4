"""Every architecture gives the tokens and the logits of `transformers` in float32, however its steps are made up.

One module for all: `architectures.py` lists them with their variants. By default the first variant of each is run, the
sweep (`pytest -m slow`) takes all variants, and all configurations of the engine.
"""

import itertools

import pytest
import torch

from nanovllm_extras import LLM, SamplingParams
from tests.extras.models.architectures import ARCHITECTURES, MAX_TOKENS, Checkpoints

# of the engine; blocks of 16 are the `cpu` backend's too
ENGINES = {
    "small budget, small blocks": {"attention_backend": "torch", "max_num_batched_tokens": 7, "block_size": 3},
    "cpu": {"attention_backend": "cpu", "max_num_batched_tokens": 64, "block_size": 16},
    "budget of 1": {"attention_backend": "torch", "max_num_batched_tokens": 1, "block_size": 16},
    "budget of 1, cpu": {"attention_backend": "cpu", "max_num_batched_tokens": 1, "block_size": 16},
    "blocks of 1": {"attention_backend": "torch", "max_num_batched_tokens": 20, "block_size": 1},
    "blocks of 256": {"attention_backend": "torch", "max_num_batched_tokens": 300, "block_size": 256},
    "preemption": {"attention_backend": "torch", "max_num_batched_tokens": 30, "block_size": 4, "num_kv_blocks": 19},
    "preemption, cpu": {"attention_backend": "cpu", "max_num_batched_tokens": 30, "block_size": 16, "num_kv_blocks": 6},
    "swap": {
        "attention_backend": "torch",
        "max_num_batched_tokens": 30,
        "block_size": 4,
        "num_kv_blocks": 19,
        "preemption_mode": "swap",
        "swap_space_bytes": 1 << 20,
    },
    "swap, cpu": {
        "attention_backend": "cpu",
        "max_num_batched_tokens": 30,
        "block_size": 16,
        "num_kv_blocks": 6,
        "preemption_mode": "swap",
        "swap_space_bytes": 1 << 20,
    },
    "overlap": {"attention_backend": "torch", "max_num_batched_tokens": 11, "block_size": 8, "enable_overlap": True},
}


def cases():
    """(architecture, variant, engine), most of which only the sweep takes."""
    for name, architecture in ARCHITECTURES.items():
        grid = itertools.product(enumerate(architecture.variants), enumerate(ENGINES))
        for (i, variant), (j, engine) in grid:
            is_default = i < architecture.num_default and engine == "cpu"
            if i and (i + j) % 3:  # the first variant has all engines, each of the others a third
                continue
            marks = [] if is_default else [pytest.mark.slow]
            yield pytest.param(name, variant, engine, marks=marks, id=f"{name}-{variant}-{engine}")


def variants():
    for name, architecture in ARCHITECTURES.items():
        for i, variant in enumerate(architecture.variants):
            yield pytest.param(
                name, variant, marks=[pytest.mark.slow] * (i >= architecture.num_default), id=f"{name}-{variant}"
            )


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return Checkpoints(tmp_path_factory.mktemp("architectures"))


def make_llm(checkpoints, name, variant, **options):
    folder, _ = checkpoints.make(name, variant)
    options = {"num_kv_blocks": 300 // options["block_size"] + 8, "dtype": "float32", **options}
    return LLM(folder, device="cpu", **checkpoints.engine_options(name, variant), **options)


@pytest.mark.parametrize(("name", "variant", "engine"), list(cases()))
@pytest.mark.thinned
def test_tokens_are_those_of_transformers(checkpoints, name, variant, engine):
    expected, prompts = checkpoints.greedy(name, variant), checkpoints.prompts(name, variant)
    llm = make_llm(checkpoints, name, variant, **ENGINES[engine])
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    # of all layers, or of groups of layers
    stats, blocks = llm.get_stats(), llm.engine.scheduler.block_manager
    kinds = [getattr(blocks, name, None) for name in ("kind", "other_kind")]
    if all(getattr(kind, "window", 61) > 60 for kind in kinds):  # else the few blocks suffice
        assert (stats.num_preemptions > 0) == ("num_kv_blocks" in ENGINES[engine])
        assert (stats.num_swaps > 0) == ("swap_space_bytes" in ENGINES[engine])
    else:
        assert (stats.num_window_blocks > 0) == (ENGINES[engine]["block_size"] < 60)
    again = llm.generate(prompts[::-1], params, use_tqdm=False)  # prefixes are cached now
    assert [output.outputs[0].token_ids for output in again] == expected[::-1]
    if "num_kv_blocks" not in ENGINES[engine] and ENGINES[engine]["block_size"] < 60:
        assert llm.get_stats().prefix_cache_hit_tokens > 0


def logits_of(llm, prompt):
    """Of each position, by way of the engine's own steps: [len, vocab_size] float32

    A step computes the logits of the tokens that it draws (none, but for the last chunk), then of the prompt's rows.
    """
    model, seen = llm.engine.runner.model, []
    compute = model.compute_logits
    model.compute_logits = lambda hidden: (seen.append(compute(hidden)), seen[-1])[1]
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    del model.compute_logits
    return torch.cat([*seen[1::2], seen[-2]]).float()


@pytest.mark.parametrize(("name", "variant"), list(variants()))
def test_logits_are_those_of_transformers(checkpoints, name, variant):
    """Of the definition in PyTorch; the tokens above are those of the kernels by default."""
    llm = make_llm(checkpoints, name, variant, attention_backend="torch", max_num_batched_tokens=25, block_size=16)
    logits = logits_of(llm, checkpoints.prompts(name, variant)[-1])
    torch.testing.assert_close(logits, checkpoints.logits(name, variant), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("name", "variant"), list(variants()))
def test_bfloat16_on_cpu_is_close_to_float32(checkpoints, name, variant):
    """Also not much farther away than `transformers` is in bfloat16: that is the effect of rounding."""
    options = {"dtype": "bfloat16", "attention_backend": "cpu", "max_num_batched_tokens": 25, "block_size": 16}
    logits = logits_of(make_llm(checkpoints, name, variant, **options), checkpoints.prompts(name, variant)[-1])
    exact = checkpoints.logits(name, variant)
    error, theirs = (
        ((found - exact).norm() / exact.norm()).item()
        for found in (logits, checkpoints.logits(name, variant, torch.bfloat16))
    )
    assert error < min(ARCHITECTURES[name].bf16_error, ARCHITECTURES[name].bf16_ratio * theirs), (
        f"transformers has {theirs:.4f}"
    )
