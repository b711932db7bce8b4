"""Qwen3.5, with and without experts, and LFM2 give the tokens and log-probabilities of `transformers` in float32.

However their steps are made up: the oracle recomputes all tokens for each new one, without a cache and so without
states. The sweep (`pytest -m slow`) takes more combinations of options, and all variants of the config. What differs
between the three is in `test_qwen3_5_moe.py` and `test_lfm2.py`.
"""

import itertools
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanovllm_extras import LLM, BeamSearchParams, Config, SamplingParams
from nanovllm_extras.memory.slots import StateStats
from nanovllm_extras.models.architectures import find_architecture
from nanovllm_extras.models.layer_inputs import StateShape
from tests.conftest import every_second
from tests.extras.failing_request import FailingError, isolating_engine, serve_beside_a_failing_one
from tests.extras.models.hybrid_checkpoints import (
    LFM2_VARIANTS,
    MAX_TOKENS,
    QWEN35,
    VARIANTS,
    continue_all,
    continue_greedily,
    logprobs_of,
    make_config,
    set_weights_that_matter,
)

pytest.importorskip("transformers.models.qwen3_5")
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
TINY_POOLS = {4: 19, 16: 6}  # blocks, by their size: one prompt fits, not all of them


GRID = list(itertools.product(("torch", "cpu"), (1, 7, 13, 64), (4, 16), ("large", "tiny")))
DEFAULT_CASES = [("Qwen3_5", "cpu", 7, 16, "large"), ("Qwen3_5", "torch", 13, 4, "tiny"),
                 ("Lfm2", "cpu", 64, 16, "tiny"), ("Qwen3_5Moe", "cpu", 64, 16, "large")]  # fmt: skip


def cases():
    """(kind, backend, budget, block size, pool), most of which only the sweep takes. `cpu` has blocks of 16."""
    for kind, rest in itertools.product(("Qwen3_5", "Lfm2", "Qwen3_5Moe"), GRID):
        if rest[0] == "torch" or rest[2] == 16:
            case = (kind, *rest)
            yield pytest.param(*case, marks=[] if case in DEFAULT_CASES else [pytest.mark.slow])


@pytest.fixture(scope="module")
def hybrids(all_hybrids):
    return all_hybrids["Qwen3_5"]


def make_llm(folder, **options):
    options = {"attention_backend": "torch", "block_size": 4, "num_kv_blocks": 120, "max_num_seqs": 8, **options}
    return LLM(folder, dtype="float32", device="cpu", **options)


def logprobs(completion):
    rows = zip(completion.token_ids, completion.logprobs, strict=True)
    return [row[token_id].logprob for token_id, row in rows]


def check_greedy(llm, prompts, expected):
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for output, (token_ids, wanted) in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == token_ids
        assert logprobs(output.outputs[0]) == pytest.approx(wanted, abs=2e-4)
    check_all_free(llm)


def check_all_free(llm):
    blocks = llm.engine.scheduler.block_manager
    assert blocks.num_used_blocks == 0
    assert blocks.states.num_free_slots == blocks.states.num_slots


@pytest.mark.parametrize(("kind", "backend", "budget", "block_size", "pool"), list(cases()))
def test_tokens_are_those_of_transformers(all_hybrids, kind, backend, budget, block_size, pool):
    """Seen to fail with a state that is not cleared for the next sequence, one that the chunk border loses, a shared
    expert without its gate, and weights of experts that are not normalised.
    """
    hybrids, num = all_hybrids[kind], 3 if budget == 1 else 6  # a budget of one is slow
    prompts, expected = hybrids.prompts()[:num], hybrids.greedy()[:num]
    options = {"attention_backend": backend, "block_size": block_size, "max_num_batched_tokens": budget}
    if pool == "tiny":
        options["num_kv_blocks"] = TINY_POOLS[block_size]
    llm = make_llm(hybrids.make()[0], **options)
    check_greedy(llm, prompts, expected)
    # a smaller budget computes one prompt after the other
    assert (llm.get_stats().num_preemptions > 0) == (pool == "tiny" and budget > 7)
    check_greedy(llm, prompts[::-1], expected[::-1])  # slots and blocks are used again
    if pool == "large":  # each prompt finds its own last full block
        assert llm.get_stats().prefix_cache_hit_tokens >= sum((len(prompt) - 1) // block_size for prompt in prompts)


@pytest.mark.slow
@pytest.mark.thinned
@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize(
    ("kind", "variant"), [*(("Qwen3_5", name) for name in VARIANTS), *(("Lfm2", name) for name in LFM2_VARIANTS)]
)
def test_variants_give_the_tokens_of_transformers(all_hybrids, kind, variant, backend):
    hybrids = all_hybrids[kind]
    llm = make_llm(hybrids.make(variant)[0], attention_backend=backend, block_size=16, max_num_batched_tokens=13)
    check_greedy(llm, hybrids.prompts(), hybrids.greedy(variant))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 2, "max_num_batched_tokens": 5},
        {"scheduling_policy": "sjf", "num_kv_blocks": 19, "long_prefill_token_threshold": 6},
        {"enforce_eager": True, "attention_backend": "auto", "block_size": None},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_how_they_are_scheduled(hybrids, options):
    check_greedy(make_llm(hybrids.make()[0], **options), hybrids.prompts(), hybrids.greedy())


def check_samples(llm, model, prompts):
    """Sample three times. The oracle: the log-probabilities that `transformers` gives to the tokens."""
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert len({tuple(sample.token_ids) for sample in output.outputs}) == 3
        for sample in output.outputs:
            assert logprobs(sample) == pytest.approx(logprobs_of(model, prompt, sample.token_ids), abs=2e-4)
    check_all_free(llm)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 7},
        pytest.param({"max_num_batched_tokens": 64, "max_num_seqs": 3, "num_kv_blocks": 24}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_samples_have_states_of_their_own(hybrids, options):
    folder, model = hybrids.make()
    check_samples(make_llm(folder, **options), model, hybrids.prompts()[:4])


def test_beams_have_states_of_their_own(hybrids):
    folder, model = hybrids.make()
    llm, prompts = make_llm(folder, num_kv_blocks=20, max_num_batched_tokens=11), hybrids.prompts()[1:4]
    outputs = llm.beam_search(prompts, BeamSearchParams(3, 6, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        for beam in output.sequences:
            found = sum(logprobs_of(model, prompt, beam.tokens[len(prompt) :]))
            assert beam.cum_logprob == pytest.approx(found, abs=1e-3)
    check_all_free(llm)


def test_aborted_requests_leave_nothing(hybrids):
    folder, _ = hybrids.make()
    llm, prompts = make_llm(folder, max_num_batched_tokens=9), hybrids.prompts()
    engine = llm.engine
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, SamplingParams(n=1 + i % 2, max_tokens=30))
    for i in range(5):
        engine.step()
        engine.abort_request(str(i))
    engine.abort_request("5")
    check_all_free(llm)
    check_greedy(llm, prompts[:4], hybrids.greedy()[:4])


@pytest.mark.parametrize(
    "options", every_second([{"enable_overlap": True}, {"max_num_batched_tokens": 11, "num_kv_blocks": 30}]), ids=str
)
def test_a_conversation_finds_its_earlier_turns(hybrids, options):
    """Each prompt is the one before with its answer and two tokens. Snapshots are every two blocks, also of outputs."""
    folder, model = hybrids.make()
    llm = make_llm(folder, state_snapshot_interval=2, **options)
    prompt, hits = hybrids.prompts()[2], []
    for turn in range(4):
        output = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
        token_ids, wanted = continue_greedily(model, prompt)
        assert output.outputs[0].token_ids == token_ids
        assert logprobs(output.outputs[0]) == pytest.approx(wanted, abs=2e-4)
        hits.append(output.num_cached_tokens)
        prompt = [*prompt, *token_ids, turn, 7 * turn]
    # of 16, 27, 38 and 49 tokens: every eighth token has a snapshot, and the last is not computed
    assert hits == [0, 24, 32, 40]


def test_few_slots_keep_the_newest_snapshots(hybrids):
    """Without room for snapshots of all prompts, the oldest ones are computed again."""
    llm = make_llm(hybrids.make()[0], max_num_seqs=2)
    check_greedy(llm, hybrids.prompts(), hybrids.greedy())
    check_greedy(llm, hybrids.prompts()[::-1], hybrids.greedy()[::-1])
    assert 0 < llm.get_stats().prefix_cache_hit_tokens < sum((len(p) - 1) // 4 * 4 for p in hybrids.prompts())
    assert len(llm.engine.scheduler.block_manager.states.snapshots) <= 4
    num_hits = llm.get_stats().prefix_cache_hit_tokens
    llm.reset_prefix_cache()
    check_greedy(llm, hybrids.prompts()[:3], hybrids.greedy()[:3])
    assert llm.get_stats().prefix_cache_hit_tokens == num_hits


def test_metrics_have_slots_and_prompt_tokens_without_a_snapshot(hybrids):
    llm = make_llm(hybrids.make()[0], explain_prefix_misses=True, state_snapshot_interval=0)
    prompt = hybrids.prompts()[3]  # 33 tokens
    for tokens in (prompt, [*prompt[:14], 1, 2, 3], [*prompt[:13], 4, 5], prompt):
        llm.generate([tokens], GREEDY, use_tqdm=False)
    found = {(one.name.removeprefix("nanovllm:"), *one.labels.values()): getattr(one, "value", None)
             for one in llm.get_metrics()}  # fmt: skip
    # the second prompt finds 12 tokens without a state, the third one its snapshot, and the last one that of the first
    assert found["prefix_cache_misses", "no_snapshot"] == 12
    assert found["prefix_cache_hits",] == 12 + 32
    assert found["prefix_cache_misses", "never_seen"] == 32
    assert found["prefix_cache_misses", "partial_block"] + found["prefix_cache_misses", "differs"] == 1 + 5 + 3 + 1
    uses = {use: found["state_slots", use] for use in ("running", "snapshot", "free")}
    assert uses == {"running": 0, "snapshot": 3, "free": 13}, "two ends of prompts, one of which is a branch, and 16"
    assert found["state_slot_bytes",] == llm.engine.runner.layout.pool.bytes_per_slot


def test_without_prefix_caching_there_are_no_snapshots(hybrids):
    llm = make_llm(hybrids.make()[0], enable_prefix_caching=False)
    for _ in range(2):
        check_greedy(llm, hybrids.prompts()[:3], hybrids.greedy()[:3])
    assert llm.get_stats().prefix_cache_hit_tokens == 0
    assert llm.engine.runner.layout.pool.num_slots == 8
    assert not llm.engine.scheduler.block_manager.states.snapshots


def test_a_request_that_fails_does_not_change_the_states_of_others(hybrids):
    """The step runs again: first to find the request, then without it. Seen to fail if states are not brought back."""
    engine = isolating_engine(
        Config(model=hybrids.make()[0], device="cpu", dtype="float32", attention_backend="torch", block_size=4,
               num_kv_blocks=120, max_num_seqs=8, max_num_batched_tokens=16)
    )  # fmt: skip

    tokens = serve_beside_a_failing_one(engine, hybrids.prompts(), GREEDY)
    assert tokens == [token_ids for token_ids, _ in hybrids.greedy()]


def test_a_failed_step_starts_its_sequences_again(hybrids, monkeypatch):
    """The engine computes them from their first token; it does not go on from states that the step has overwritten."""
    llm, prompts = make_llm(hybrids.make()[0], max_num_batched_tokens=16), hybrids.prompts()
    engine, forward = llm.engine, llm.engine.runner.forward
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, GREEDY)
    for _ in range(4):
        engine.step()

    def computed_but_lost(batch):
        forward(batch)
        raise FailingError

    monkeypatch.setattr(engine.runner, "forward", computed_but_lost)
    with pytest.raises(FailingError):
        engine.step()
    monkeypatch.setattr(engine.runner, "forward", forward)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {one.request_id: one.outputs[0].token_ids for one in engine.step().outputs}
    assert [outputs[str(i)] for i in range(len(prompts))] == [token_ids for token_ids, _ in hybrids.greedy()]


def test_the_error_of_a_forward_pass_of_plain_requests_is_the_one_that_is_raised(hybrids, monkeypatch):
    """A model that fails has overwritten states, and no request is at fault."""
    options = {"device": "cpu", "dtype": "float32", "attention_backend": "torch", "block_size": 4}
    engine = isolating_engine(Config(model=hybrids.make()[0], num_kv_blocks=120, **options))
    engine.add_request("plain", [1, 2, 3], SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True))

    def fail(batch):
        raise FailingError

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "forward", fail)
        with pytest.raises(FailingError):
            engine.step()
    while engine.has_unfinished_requests():
        outputs = engine.step().outputs
    assert len(outputs[0].outputs[0].token_ids) == MAX_TOKENS


# ---- checkpoints


def test_the_text_of_a_checkpoint_with_vision_and_mtp(tmp_path, hybrids):
    """Names and config are nested as on the hub. Vision and multi-token prediction are left out."""
    config = make_config()
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
              "num_position_embeddings": 16}  # fmt: skip
    whole = transformers.Qwen3_5Config(text_config=config.to_dict(), vision_config=vision)
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForConditionalGeneration(whole).eval()
    set_weights_that_matter(model.model.language_model)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in weights)
    assert any(name.startswith("model.language_model.layers.") for name in weights)
    save_file({**weights, "mtp.fc.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors", {"format": "pt"})
    expected = continue_all(model, hybrids.prompts()[:3])
    check_greedy(make_llm(tmp_path), hybrids.prompts()[:3], expected)


def test_end_of_sequence_tokens_of_the_text_config_count_if_there_are_no_others(hybrids, tmp_path):
    """The core reads them from generation_config.json and from the top level of config.json, and no others then."""
    (raw := json.loads((hybrids.make()[0] / "config.json").read_text())).pop("eos_token_id", None)
    text = {**raw, "eos_token_id": [7, -1, 999]}
    nested = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}

    def eos_of(config, generation=None):
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "generation_config.json").write_text(json.dumps(generation or {}))
        return make_llm(tmp_path, load_format="dummy").engine.input_processor.eos_token_ids

    assert eos_of(nested) == {7}
    assert eos_of({**nested, "eos_token_id": 5}) == {5}
    assert eos_of(nested, {"eos_token_id": 9}) == {9}
    text["eos_token_id"] = "7"
    with pytest.raises(TypeError, match=r"config.json: text_config: eos_token_id\[0\] must be an int"):
        eos_of(nested)


def written(**fields):
    return {**make_config(**fields).to_dict(), "architectures": ["Qwen3_5ForCausalLM"]}


def test_fields_beside_the_text_replace_those_within():
    nested = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": written(), "vision_config": {}}
    flat = find_architecture(written())[1]
    assert find_architecture(nested)[1] == flat
    assert find_architecture({**nested, "rms_norm_eps": 0.5})[1].rms_norm_eps == 0.5
    with pytest.raises(TypeError, match="text_config must be an object"):
        find_architecture({**nested, "text_config": [1]})


def test_missing_fields_have_the_defaults_of_transformers():
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    raw = {"architectures": ["Qwen3_5ForCausalLM"], **{name: QWEN35[name] for name in required}}
    shape, theirs = find_architecture(raw)[1], transformers.Qwen3_5TextConfig(**{name: raw[name] for name in required})
    names = ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
             "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
             "linear_conv_kernel_dim")  # fmt: skip
    assert {name: getattr(shape, name) for name in names} == {name: getattr(theirs, name) for name in names}
    assert list(shape.layer_types) == theirs.layer_types
    assert shape.rotary_dim == shape.head_dim * theirs.rope_parameters["partial_rotary_factor"]
    assert shape.rope.theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        ({"layer_types": ["full_attention"] * 4}, "must name both"),
        ({"layer_types": ["linear_attention"] * 4}, "must name both"),
        ({"layer_types": ["sliding_attention", "linear_attention"] * 2}, "layer_types must be"),
        ({"layer_types": ["linear_attention"]}, "one entry for each"),
        ({"linear_num_value_heads": 3}, "must be a multiple of linear_num_key_heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim"),
        ({"partial_rotary_factor": 2.0, "rope_parameters": None}, "partial_rotary_factor"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_fields_that_would_be_computed_wrongly_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        find_architecture({**written(), **fields})


# ---- options


def test_a_model_with_states_drafts_for_none(hybrids, tiny_checkpoint, tmp_path):
    folder = tmp_path / "target"
    folder.mkdir()
    raw = json.loads((tiny_checkpoint[0] / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "vocab_size": QWEN35["vocab_size"]}))
    draft = {"model": str(hybrids.make()[0]), "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match="recurrent states"):
        LLM(folder, device="cpu", load_format="dummy", max_model_len=64, speculative_config=draft)


# ---- memory


def test_states_and_blocks_share_the_memory(hybrids):
    """Half of the memory is for states at most; what they do not need is for blocks."""
    folder, _ = hybrids.make()
    shape = StateShape(num_layers=3, conv=(3, 192), recurrent=(4, 16, 32))
    size = shape.bytes_per_slot(torch.float32)
    assert size == 3 * 4 * (3 * 192 + 4 * 16 * 32)
    few = make_llm(folder, num_kv_blocks=None, kv_cache_memory_bytes=10 * size, max_num_seqs=100)
    cache, pool = few.engine.runner.kv_cache, few.engine.runner.layout.pool
    assert pool.bytes_per_slot == size
    assert (pool.num_slots, few.engine.config.max_num_seqs, few.engine.scheduler.max_num_seqs) == (4, 4, 4)
    assert few.get_stats().states == StateStats(num_slots=4, num_running=0, num_snapshots=0, bytes_per_slot=size)
    assert (cache.num_blocks + 1) * cache.bytes_per_block <= 5 * size < (cache.num_blocks + 2) * cache.bytes_per_block
    check_greedy(few, hybrids.prompts()[:3], hybrids.greedy()[:3])
    assert few.get_stats().states.num_snapshots == 1, "three prompts have run at the same time"
    samples = few.generate([[1, 2]], SamplingParams(n=5, temperature=1.0, max_tokens=3), use_tqdm=False)[0].outputs
    assert len(samples) == 5, "more samples than states: the rest waits"
    many = make_llm(folder, num_kv_blocks=None, kv_cache_memory_bytes=100 * size, max_num_seqs=2)
    pool = many.engine.runner.layout.pool
    assert (pool.num_slots, many.engine.config.max_num_seqs) == (4, 2), "two sequences and two snapshots"
    num_bytes = pool.conv.nbytes + pool.recurrent.nbytes
    assert many.engine.description.startswith(
        f"4 slots of states, which take {num_bytes:,} bytes; a state of {size:,} "
    )
    with pytest.raises(ValueError, match="raise kv_cache_memory_bytes"):
        make_llm(folder, num_kv_blocks=None, kv_cache_memory_bytes=3 * size)
