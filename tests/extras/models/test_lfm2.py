"""LFM2: its states, which are only those of convolutions, its checkpoints and its config.json.

`test_qwen3_5.py` compares its tokens with those of `transformers`, under all options.
"""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanovllm_extras.kernels.cpu.cpu_decoder_layer import CpuDecoderLayer
from nanovllm_extras.models.architectures import find_architecture
from nanovllm_extras.models.lfm2 import Lfm2ConvLayer
from tests.extras.models.hybrid_checkpoints import (
    LFM2,
    make_config,
)
from tests.extras.models.test_qwen3_5 import check_greedy, make_llm

pytest.importorskip("transformers.models.lfm2")


@pytest.fixture(scope="module")
def hybrids(all_hybrids):
    return all_hybrids["Lfm2"]


def test_the_state_is_that_of_the_convolutions_only(hybrids):
    """Three layers of three inputs of 64 channels in float32, and no matrices."""
    llm = make_llm(hybrids.make()[0], attention_backend="cpu", block_size=16)
    assert llm.get_stats().states.bytes_per_slot == 3 * 3 * 64 * 4
    assert llm.engine.runner.layout.pool.recurrent.numel() == 0
    kinds = [type(layer) for layer in llm.engine.runner.model.model.layers]
    assert kinds == [Lfm2ConvLayer if kind == "conv" else CpuDecoderLayer for kind in LFM2["layer_types"]]


def test_swapped_states_and_drafts_give_the_tokens_of_transformers(hybrids):
    swap = {"preemption_mode": "swap", "swap_space_bytes": 2_000_000, "num_kv_blocks": 22}
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "disable_by_batch_size": 64}
    drafts = {"speculative_config": ngram}
    llm = make_llm(hybrids.make()[0], block_size=4, max_num_batched_tokens=24, **swap, **drafts)
    check_greedy(llm, hybrids.prompts(), hybrids.greedy())
    stats = llm.get_stats()
    assert stats.num_swaps > 0
    assert stats.num_draft_tokens > 0


def test_swap_space_has_room_for_a_block(hybrids):
    """A block of 64 tokens has 16,384 bytes and a state 2,304: half of the space would be four states and no block."""
    options = {"preemption_mode": "swap", "block_size": 64, "num_kv_blocks": 8}
    runner = make_llm(hybrids.make()[0], swap_space_bytes=16384 + 2304, **options).engine.runner
    assert (runner.kv_cache.bytes_per_block, runner.layout.pool.bytes_per_slot) == (16384, 2304)
    assert (runner.transfers.num_swap_blocks, runner.transfers.num_swap_slots) == (1, 1)
    with pytest.raises(ValueError, match="swap_space_bytes must be >= 18688"):
        make_llm(hybrids.make()[0], swap_space_bytes=16384 + 2303, **options)


def test_names_may_lack_their_prefix(hybrids, tmp_path):
    """As `AutoModel` of `transformers` saves the network without its output layer."""
    folder, model = hybrids.make()
    model.model.save_pretrained(tmp_path)
    assert "embedding_norm.weight" in load_file(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    check_greedy(make_llm(tmp_path), hybrids.prompts()[:2], hybrids.greedy()[:2])


def test_a_tensor_that_is_missing_is_named(hybrids, tmp_path):
    folder, _ = hybrids.make()
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.conv.conv.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=r"1 tensors are missing .* model.layers.0.conv.conv.weight"):
        make_llm(tmp_path)


# ---- config.json


def written(**fields):
    return {**make_config("Lfm2", **fields).to_dict(), "architectures": ["Lfm2ForCausalLM"]}


def test_missing_fields_have_the_defaults_of_transformers():
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    fields = {**LFM2, "num_attention_heads": 8, "full_attn_idxs": [1]}
    raw = {"architectures": ["Lfm2ForCausalLM"], **{name: fields[name] for name in (*required, "full_attn_idxs")}}
    shape = find_architecture(raw)[1]
    theirs = transformers.Lfm2Config(**{name: raw[name] for name in (*required, "full_attn_idxs")})
    names = ("num_key_value_heads", "max_position_embeddings", "tie_word_embeddings", "conv_L_cache", "conv_bias")
    assert {name: getattr(shape, name) for name in names} == {name: getattr(theirs, name) for name in names}
    assert list(shape.layer_types) == theirs.layer_types
    assert (shape.rms_norm_eps, shape.rope.theta) == (theirs.norm_eps, theirs.rope_parameters["rope_theta"])
    with torch.device("meta"):
        mlp = transformers.models.lfm2.modeling_lfm2.Lfm2MLP(theirs)
    assert shape.intermediate_size == mlp.w1.out_features


def test_older_names_of_fields_count():
    """LFM2's files have these."""
    raw = written()
    other = {**raw, "block_ff_dim": 300, "tie_embedding": False, "block_use_swiglu": True, "conv_dim": 64}
    shape, theirs = find_architecture(other)[1], transformers.Lfm2Config(**other)
    assert theirs.intermediate_size == 300
    assert shape.intermediate_size == 224, "a multiple of 32 that is at least two thirds"
    assert shape.tie_word_embeddings is theirs.tie_word_embeddings is False


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["full_attention"] * 4}, "must name both"),
        ({"layer_types": ["conv"] * 4}, "must name both"),
        ({"layer_types": None, "full_attn_idxs": None}, "must name both"),
        ({"layer_types": ["sliding_attention", "conv"] * 2}, "layer_types must be"),
        ({"layer_types": ["conv"]}, "one entry for each"),
        ({"conv_L_cache": 1}, "conv_L_cache"),
        ({"block_multiple_of": 0}, "block_multiple_of"),
        ({"block_ffn_dim_multiplier": 0}, "block_ffn_dim_multiplier"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
        ({"block_use_swiglu": False}, "block_use_swiglu"),
        ({"use_pos_enc": False}, "use_pos_enc"),
        ({"conv_dim": 32}, "conv_dim"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_fields_that_would_be_computed_wrongly_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        find_architecture({**written(), **fields})


@pytest.mark.parametrize("fields", [{"conv_bias": 1}, {"full_attn_idxs": 3}, {"block_auto_adjust_ff_dim": "no"}])
def test_fields_of_another_type_are_refused(fields):
    with pytest.raises(TypeError, match=next(iter(fields))):
        find_architecture({**written(), **fields})
