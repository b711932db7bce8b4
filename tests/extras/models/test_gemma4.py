"""Gemma 4 gives the tokens and log-probabilities of `transformers` in float32, however its steps are made up.

Most engines have one block table. `kv_groups/test_grouped_layers.py` has those with a table for each group. The oracle
recomputes all tokens for each new one, without a cache. By default each option has each of its values; the sweep
(`pytest -m slow`) takes all combinations, and all variants of the config.
"""

import itertools
import json
import logging

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanovllm_extras import LLM, SamplingParams
from nanovllm_extras.models.architectures import find_architecture
from nanovllm_extras.weights.cut import share_of
from tests.extras.models.gemma4_checkpoints import (
    FULL,
    GEMMA4,
    K_IS_V,
    VARIANTS,
    WINDOW,
    Gemma4Checkpoints,
    make_config,
    set_weights_that_matter,
)
from tests.extras.models.hybrid_checkpoints import MAX_TOKENS, continue_all, continue_greedily, logprobs_of

pytest.importorskip("transformers.models.gemma4")
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
TINY_POOLS = {4: 19, 16: 6}  # blocks, by their size: one prompt fits, not all of them
ONE_TABLE = {"disable_hybrid_kv_cache_manager": True}
SWAP = {"preemption_mode": "swap", "swap_space_bytes": 1 << 20}
DEFAULT_CASES = [("cpu", 7, 16, "large"), ("torch", 13, 4, "tiny")]


def cases():
    """(backend, budget, block size, pool), most of which only the sweep takes. The backend `cpu` has blocks of 16."""
    for case in itertools.product(["torch", "cpu"], [1, 7, 13, 64], [4, 16], ["large", "tiny"]):
        if case[0] == "torch" or case[2] == 16:
            yield pytest.param(*case, marks=[] if case in DEFAULT_CASES else [pytest.mark.slow])


@pytest.fixture(scope="module")
def gemmas(tmp_path_factory):
    return Gemma4Checkpoints(tmp_path_factory.mktemp("gemma4"))


def make_llm(folder, **options):
    sizes = {"block_size": 4, "num_kv_blocks": 120, "max_num_seqs": 8}
    return LLM(folder, dtype="float32", device="cpu", **{"attention_backend": "torch", **sizes, **ONE_TABLE, **options})


def logprobs(completion):
    rows = zip(completion.token_ids, completion.logprobs, strict=True)
    return [row[token_id].logprob for token_id, row in rows]


def check_greedy(llm, prompts, expected):
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for output, (token_ids, wanted) in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == token_ids
        assert logprobs(output.outputs[0]) == pytest.approx(wanted, abs=2e-4)
    assert llm.engine.scheduler.block_manager.num_used_blocks == 0


@pytest.mark.parametrize(("backend", "budget", "block_size", "pool"), list(cases()))
def test_tokens_are_those_of_transformers(gemmas, backend, budget, block_size, pool):
    """Seen to fail if a layer that shares K and V reads the cache of another layer."""
    options = {"attention_backend": backend, "block_size": block_size, "max_num_batched_tokens": budget}
    if pool == "tiny":
        options["num_kv_blocks"] = TINY_POOLS[block_size]
    llm = make_llm(gemmas.make()[0], **options)
    if budget == 1:  # which is slow
        check_greedy(llm, gemmas.prompts()[:2], gemmas.greedy()[:2])
        return
    check_greedy(llm, gemmas.prompts(), gemmas.greedy())
    # a smaller budget computes one prompt after the other
    assert (llm.get_stats().num_preemptions > 0) == (pool == "tiny" and budget > 7)
    check_greedy(llm, gemmas.prompts()[::-1], gemmas.greedy()[::-1])
    if pool == "large":  # each prompt finds its own full blocks
        assert llm.get_stats().prefix_cache_hit_tokens >= sum((len(p) - 1) // block_size for p in gemmas.prompts())


@pytest.mark.slow
@pytest.mark.thinned
@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_give_the_tokens_of_transformers(gemmas, variant, backend):
    """With one block table in PyTorch, and with those of groups in C."""
    options = {"attention_backend": backend, "block_size": 16, "max_num_batched_tokens": 13}
    llm = make_llm(gemmas.make(variant)[0], **options, disable_hybrid_kv_cache_manager=backend == "torch")
    check_greedy(llm, gemmas.prompts(), gemmas.greedy(variant))


def test_experts_give_the_tokens_of_transformers(gemmas):
    folder, model = gemmas.make("experts")
    prompts = gemmas.prompts()[2:5]
    llm = make_llm(folder, attention_backend="cpu", block_size=16, max_num_batched_tokens=64)
    check_greedy(llm, prompts, continue_all(model, prompts))


@pytest.mark.parametrize(
    "options",
    [
        {**SWAP, "num_kv_blocks": 19, "max_num_batched_tokens": 30},
        pytest.param({**SWAP, "num_kv_blocks": 19, "enable_overlap": True}, marks=pytest.mark.slow),
        pytest.param({"enable_overlap": True, "max_num_batched_tokens": 5, "max_num_seqs": 2}, marks=pytest.mark.slow),
        pytest.param({"scheduling_policy": "sjf", "long_prefill_token_threshold": 6}, marks=pytest.mark.slow),
        pytest.param(
            {"enforce_eager": True, "attention_backend": "auto", "block_size": None, "enable_prefix_caching": False},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_how_they_are_scheduled(gemmas, options):
    """Seen to fail if only one group's blocks are swapped."""
    llm = make_llm(gemmas.make()[0], **options)
    check_greedy(llm, gemmas.prompts(), gemmas.greedy())
    assert (llm.get_stats().num_swaps > 0) == ("swap_space_bytes" in options)


def test_drafts_change_no_token(gemmas):
    """Prompts that repeat themselves, so that n-grams are found."""
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "disable_by_batch_size": 8}
    llm = make_llm(gemmas.make()[0], speculative_config=speculation, attention_backend="cpu", block_size=16)
    prompts = [prompt[:12] * 3 for prompt in gemmas.prompts()[2:4]]
    check_greedy(llm, prompts, continue_all(gemmas.make()[1], prompts))
    assert llm.get_stats().num_draft_tokens > 0


def test_samples_share_the_blocks_of_all_groups(gemmas):
    """The oracle: the log-probabilities of `transformers`. Seen to fail if the blocks of one group are not copied."""
    folder, model = gemmas.make()
    llm, prompts = make_llm(folder, max_num_batched_tokens=13, num_kv_blocks=24), gemmas.prompts()[1:4:2]
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert len({tuple(sample.token_ids) for sample in output.outputs}) == 3
        for sample in output.outputs:
            assert logprobs(sample) == pytest.approx(logprobs_of(model, prompt, sample.token_ids), abs=2e-4)
    assert llm.engine.scheduler.block_manager.num_used_blocks == 0


@pytest.mark.slow
def test_bfloat16_is_close_to_float32(gemmas):
    """Not much farther away than `transformers` is in bfloat16: that is the effect of rounding."""
    folder, model = gemmas.make("keys are values")
    prompt = gemmas.prompts()[-1]
    exact = torch.tensor(logprobs_of(model, [prompt[0]], prompt[1:]))
    theirs = type(model)(model.config).to(torch.bfloat16).eval()
    theirs.load_state_dict(model.state_dict())
    rounded = torch.tensor(logprobs_of(theirs, [prompt[0]], prompt[1:])).float()
    for backend in ("torch", "cpu"):
        llm = LLM(folder, dtype="bfloat16", device="cpu", attention_backend=backend, block_size=16, num_kv_blocks=30)
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        rows = llm.generate([prompt], params, use_tqdm=False)[0].prompt_logprobs[1:]
        ours = torch.tensor([row[token_id].logprob for row, token_id in zip(rows, prompt[1:], strict=True)])
        assert (ours - exact).norm() < 1.5 * (rounded - exact).norm()


# ---- memory


def test_each_group_has_its_share_of_a_block(gemmas):
    """Layers that share K and V own none: 3 layers with windows, and 1 that sees all."""
    folder, _ = gemmas.make()
    size = 4 * 2 * 16 * (3 * 2 * 32 + 1 * 2 * 64)  # bytes of a number, K and V, tokens, (layers, heads, channels)
    for backend in ("torch", "cpu"):
        options = {"attention_backend": backend, "block_size": 16, "num_kv_blocks": None}
        llm = make_llm(folder, kv_cache_memory_bytes=10 * size + 1, **options)
        caches = llm.engine.runner.kv_caches
        assert sum(cache.bytes_per_block for cache in caches) == size
        assert [cache.num_blocks for cache in caches] == [9, 9], "and the null block"
        assert sum(cache.tensor.nbytes for cache in caches) == 10 * size


def test_the_description_ends_with_what_computes(gemmas):
    """The announcement of a server shows the part after the last semicolon."""
    first, second, *_, last = make_llm(gemmas.make()[0]).engine.description.split("; ")
    assert first.startswith("one block table for all layers (disable_hybrid_kv_cache_manager is set")
    assert second.startswith("groups of layers with K and V: 3 that see ")
    assert last.startswith("PyTorch on cpu, ")


def test_swap_space_holds_whole_blocks(gemmas):
    """A block of 4 tokens has 2 * 4 * (3 * 2 * 32 + 1 * 2 * 64) numbers of 4 bytes: 10,240 bytes."""
    folder, _ = gemmas.make()
    llm = make_llm(folder, preemption_mode="swap", swap_space_bytes=3 * 10240 - 1)
    assert llm.engine.runner.num_swap_blocks == 2
    with pytest.raises(ValueError, match="swap_space_bytes must be >= 10240"):
        make_llm(folder, preemption_mode="swap", swap_space_bytes=10239)


# ---- checkpoints


@pytest.mark.slow
def test_the_text_of_a_checkpoint_with_vision_and_audio(tmp_path, gemmas):
    """Names and config are nested as on the hub. Other parts are left out, as are weights that are not used."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16}  # fmt: skip
    config = {name: value for name, value in make_config().to_dict().items() if name != "per_layer_config"}
    whole = transformers.Gemma4Config(text_config=config | {"global_head_dim": 64}, vision_config=vision,
                                      tie_word_embeddings=False)  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma4ForConditionalGeneration(whole).eval()
    set_weights_that_matter(model.model.language_model)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("model.vision_tower.") for name in weights)
    assert any(name.startswith("model.language_model.layers.") for name in weights)
    unused = {"model.language_model.layers.5.self_attn.k_proj.weight": torch.zeros(128, 64),
              "model.language_model.layers.4.self_attn.k_norm.weight": torch.zeros(32)}  # fmt: skip
    save_file({**weights, **unused}, tmp_path / "model.safetensors", {"format": "pt"})
    expected = continue_all(model, gemmas.prompts()[:3])
    check_greedy(make_llm(tmp_path), gemmas.prompts()[:3], expected)


def written(**fields):
    return {**make_config(**fields).to_dict(), "architectures": ["Gemma4ForCausalLM"]}


def as_on_the_hub(**fields):
    """Return a config with the fields of Google's files, where transformers writes `per_layer_config`."""
    raw = {name: value for name, value in written(**fields).items() if name != "per_layer_config"}
    return {**raw, **{name: {**GEMMA4, **fields}[name] for name in ("global_head_dim",)}, **fields}


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_forms_of_head_sizes_are_read(variant):
    fields = VARIANTS[variant]
    hub = {name: value for name, value in as_on_the_hub(**fields).items() if value is not None}
    assert "per_layer_config" in written(**fields)
    assert "per_layer_config" not in hub
    assert find_architecture(hub)[1] == find_architecture(written(**fields))[1]


def test_missing_fields_have_the_defaults_of_transformers():
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    raw = {"architectures": ["Gemma4ForCausalLM"], **{name: GEMMA4[name] for name in required}}
    shape, theirs = find_architecture(raw)[1], transformers.Gemma4TextConfig(**{name: raw[name] for name in required})
    names = ("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "hidden_size_per_layer_input",
             "vocab_size_per_layer_input", "attention_k_eq_v", "use_double_wide_mlp")  # fmt: skip
    assert {name: getattr(shape, name) for name in names} == {name: getattr(theirs, name) for name in names}
    assert list(shape.layer_types) == theirs.layer_types
    for kind, group in zip((WINDOW, FULL), shape.kv_groups, strict=True):
        of_kind = theirs.per_layer_config[kind]
        assert (group.num_kv_heads, group.head_dim) == (of_kind.num_key_value_heads, of_kind.head_dim)
        assert group.num_layers == theirs.layer_types.count(kind)
    assert shape.kv_groups[0].options.window == theirs.sliding_window
    assert shape.rope.theta == theirs.rope_parameters[FULL]["rope_theta"]
    assert shape.rope.share == theirs.rope_parameters[FULL]["partial_rotary_factor"]
    assert shape.local_rope.theta == theirs.rope_parameters[WINDOW]["rope_theta"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"enable_moe_block": True}, "lacks num_experts"),
        ({"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3, "moe_intermediate_size": 8}, "top_k_experts"),
        ({"hidden_activation": "gelu"}, "hidden_activation"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 5}, "must leave a layer of each type"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"layer_types": ["chunked_attention"] * 6}, "layer_types"),
        ({"layer_types": [FULL]}, "one entry for each"),
        ({"vocab_size_per_layer_input": 150}, "vocab_size_per_layer_input"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping"),
        ({"per_layer_config": {"1": {"head_dim": 64}}}, "same for all layers"),
        ({"per_layer_config": {"1": {"intermediate_size": 64}}}, "per_layer_config"),
        ({"per_layer_config": None, "global_head_dim": 0}, "head_dim of layers with full_attention"),
        ({"per_layer_config": None, "attention_k_eq_v": True, "num_global_key_value_heads": 3}, "must be a multiple"),
        ({"rope_parameters": {FULL: {"rope_theta": 1.0}}}, "rope_parameters must have"),
        ({"rope_parameters": {kind: {"rope_type": "yarn", "rope_theta": 9.0} for kind in (FULL, WINDOW)}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_fields_that_would_be_computed_wrongly_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        find_architecture({**written(), **fields})


CHANGES = {
    "sliding_window": 5,
    "num_kv_shared_layers": 1,
    "hidden_activation": "silu",
    "rms_norm_eps": 0.3,
    "final_logit_softcapping": 2.0,
    "num_attention_heads": 2,
    "attention_bias": True,
    "attention_k_eq_v": True,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "layer_types": [WINDOW, FULL, FULL, FULL, WINDOW, FULL],
    "per_layer_config": {},
    "rope_theta": 77.0,
    "partial_rotary_factor": 0.5,
    "query_pre_attn_scalar": 50,
    "attn_logit_softcapping": 2.0,
    "rope_parameters": {
        FULL: {"rope_type": "default", "rope_theta": 70.0},
        WINDOW: {"rope_type": "default", "rope_theta": 7.0},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_field_is_computed_as_in_transformers_or_refused(gemmas, tmp_path, caplog, name):
    """In the file of a checkpoint whose weights were made with another value."""
    caplog.set_level(logging.ERROR)
    folder, _ = gemmas.make("nothing shared")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, name: CHANGES[name]}))
    prompt = gemmas.prompts()[3]
    try:
        model, info = transformers.Gemma4ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        fits = not info["missing_keys"] and not info["mismatched_keys"] and not info["unexpected_keys"]
    except (RuntimeError, ValueError):
        fits = False
    if not fits:
        with pytest.raises(ValueError, match=r"tensor|must"):
            make_llm(tmp_path)
        return
    check_greedy(make_llm(tmp_path), [prompt], [continue_greedily(model.eval(), prompt)])


# ---- options


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "must divide num_attention_heads, config.json has 4"),
        ({"num_attention_heads": 6}, "num_key_value_heads of the layers with a window, or be .* config.json has 2"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3, **K_IS_V, "num_global_key_value_heads": 2},
         "num_key_value_heads of the layers that see all tokens, or be a multiple of it, config.json has 2"),
    ],
    ids=str,
)  # fmt: skip
def test_sizes_that_three_ranks_do_not_divide(fields, message):
    shape = find_architecture(written(**fields))[1]
    with pytest.raises(ValueError, match=f"tensor_parallel_size 3 .*{message}"):
        share_of(shape, 3)
