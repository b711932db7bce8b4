"""Quantised checkpoints of models with recurrent states and of models with K and V of several shapes.

The oracle is `transformers` with what the packed weights mean, and with rounded activations (`packed_models.py`).
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.layers.attention import TorchAttention
from nanovllm.layers.basic import FusedLinear
from nanovllm.models.qwen3 import Qwen3DecoderLayer
from nanovllm_extras.kernels.dense_layers import dense_parts
from nanovllm_extras.weights.quantised_linear import QuantisedFusedLinear, SplitFusedLinear, quantise_weight
from tests.extras.kernels.processors import need_a_compiler
from tests.extras.quantization.packed_models import (
    FORMATS,
    GREEDY,
    Models,
    check_tokens,
    greedy_of,
    is_product,
    make_llm,
    order_of,
    with_weights,
    write_packed,
)
from tests.extras.speculation.test_mtp import check_draws, predicting, record_draws

pytest.importorskip("transformers.models.gemma4")
KINDS = ("Qwen3_5", "Lfm2", "Gemma4")
DEFAULT_CASES = [("Qwen3_5", "awq"), ("Gemma4", "int-quantized"), ("Lfm2", "pack-quantized")]


def cases():
    for i, case in enumerate(itertools.product(KINDS, FORMATS)):
        backend = ("torch", "cpu")[(i + i // len(FORMATS)) % 2]  # each format in both
        yield pytest.param(*case, backend, marks=[] if case in DEFAULT_CASES else [pytest.mark.slow])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("packed"))


@pytest.mark.parametrize(("kind", "form", "backend"), list(cases()))
def test_tokens_are_those_of_transformers_with_these_weights(models, tmp_path, kind, form, backend):
    if backend == "cpu":
        need_a_compiler(torch.float32)
    of, model = models.make(kind)
    meanings = write_packed(tmp_path / "model", of, form)
    llm = make_llm(tmp_path / "model", attention_backend=backend, max_num_batched_tokens=13)
    group_size = FORMATS[form][2]
    if backend == "torch":
        layers = [layer for layer in llm.engine.runner.model.modules() if hasattr(layer, "quantised")]
        assert (group_size is not None) == (len(layers) > 8)
    prompts = models.prompts(kind)[1:3]
    oracle = with_weights(model, meanings, group_size, *([order_of] if "desc_act" in form else []))
    check_tokens(llm, oracle, prompts, group_size is not None)


@pytest.mark.parametrize("form", ["awq", "int-quantized"])
def test_a_layer_of_which_only_some_projections_are_quantised(models, tmp_path, form):
    """The small projections of Gated DeltaNet have four outputs here, which AWQ cannot pack."""
    write_packed(
        tmp_path / "model", models.make("Qwen3_5")[0], form, lambda *one: is_product(*one, 8 if form == "awq" else 1)
    )
    model = make_llm(tmp_path / "model").engine.runner.model
    layer = model.model.layers[0].linear_attn.in_proj
    assert type(layer) is (SplitFusedLinear if form == "awq" else QuantisedFusedLinear)
    if form == "awq":
        assert [list(one.parts) for one in layer.products] == [["in_proj_qkv", "in_proj_z"], ["in_proj_b", "in_proj_a"]]


def test_any_projection_of_a_layer_may_be_in_floats(models, tmp_path):
    """k is behind q and v in memory, and between them in the result."""
    of, model = models.make("Gemma4")
    meanings = write_packed(
        tmp_path / "model", of, "gptq", lambda name, one: is_product(name, one) and ".k_proj" not in name
    )
    prompts = models.prompts("Gemma4")[1:3]
    check_tokens(make_llm(tmp_path / "model"), with_weights(model, meanings, 32), prompts, is_rounded=True)


@pytest.mark.parametrize(
    ("kind", "variant", "form"),
    [("Qwen3_5Moe", "plain", "int-quantized"), pytest.param("Gemma4", "experts", "fp8", marks=pytest.mark.slow)],
)
def test_experts_mean_what_their_format_says(models, tmp_path, kind, variant, form):
    """Tools store each expert by itself. The oracle is the engine with the same weights in floats."""
    of, _ = models.make(kind, variant)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_bytes((of / "config.json").read_bytes())
    tensors = dict(one for pair in load_file(of / "model.safetensors").items() for one in expert_by_expert(*pair))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "plain" / "model.safetensors")

    def is_packed(name, tensor):
        return is_product(name, tensor, 1) and not name.endswith(("mlp.gate.weight", "router.proj.weight"))

    meanings = write_packed(tmp_path / "model", tmp_path / "plain", form, is_packed)
    assert any("experts.3.gate_proj" in path for path in meanings)
    floats = {name: meanings.get(name.removesuffix(".weight"), tensor) for name, tensor in tensors.items()}
    save_file({name: tensor.contiguous() for name, tensor in floats.items()}, tmp_path / "plain" / "model.safetensors")
    found, expected = (greedy_of(make_llm(tmp_path / one), models.prompts(kind)[:3]) for one in ("model", "plain"))
    if form == "fp8":
        assert found == expected
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=0.3)


def expert_by_expert(name, tensor):
    """Yield the tensors of each expert, of one that has those of all."""
    path, _, projection = name.rpartition(".")
    if not path.endswith("experts"):
        yield name, tensor
        return
    for i, weight in enumerate(tensor):
        if projection == "down_proj":
            yield f"{path}.{i}.down_proj.weight", weight
        else:
            gate, up = weight.chunk(2)
            yield f"{path}.{i}.gate_proj.weight", gate
            yield f"{path}.{i}.up_proj.weight", up


# ---- weights that are quantised when they are loaded


@pytest.mark.parametrize(
    ("variant", "method", "bits", "backend"),
    [("plain", "int8", 8, "torch"), pytest.param("keys are values", "int4", 4, "cpu", marks=pytest.mark.slow)],
)
def test_k_and_v_of_several_shapes_with_weights_that_are_quantised_here(models, variant, method, bits, backend):
    if backend == "cpu":
        need_a_compiler(torch.float32)
    folder, model = models.make("Gemma4", variant)
    meanings = {
        path: quantise_weight(module.weight.data, bits, 32).dequantised()
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and path != "lm_head"
    }
    given = {"method": method, "group_size": 32, "embeddings": False}
    llm = make_llm(folder, quantization=given, attention_backend=backend, max_num_batched_tokens=13)
    check_tokens(llm, with_weights(model, meanings, 32), models.prompts("Gemma4")[1:3], is_rounded=True)


def test_the_table_of_the_layers_is_quantised_too(models):
    """Gemma 4's layers have embeddings of their own."""
    folder, model = models.make("Gemma4")
    meanings = {
        path: quantise_weight(module.weight.data, 8 if is_inside(path) else 4, 32).dequantised()
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
    }
    given = {"method": "int8", "group_size": 32, "embeddings": "int4"}
    llm = make_llm(folder, quantization=given)
    assert type(llm.engine.runner.model.model.embed_tokens_per_layer).__name__ == "QuantisedEmbedding"
    check_tokens(llm, with_weights(model, meanings, 32), models.prompts("Gemma4")[1:3], is_rounded=True)


def is_inside(path):
    return "embed" not in path and path != "lm_head"


# ---- drafts


@pytest.mark.parametrize("form", ["fp8", pytest.param("gptq", marks=pytest.mark.slow)])
def test_the_head_for_drafts_is_quantised_too(heads, tmp_path, form):
    """In fp8 the drafts are those of the reference with these weights. In 4 bits, all weights mean what they should."""
    of, model, head = heads.make(is_trained=False)
    meanings = write_packed(tmp_path / "model", of, form)
    llm = make_llm(tmp_path / "model", speculative_config=predicting())
    draws = record_draws(llm.engine)
    llm.generate(heads.hybrids.prompts()[1:3], GREEDY, use_tqdm=False)
    assert draws
    of_head = {path.removeprefix("mtp."): one for path, one in meanings.items() if path.startswith("mtp.")}
    assert len(of_head) == 7
    if form == "fp8":
        of_model = {path: one for path, one in meanings.items() if not path.startswith("mtp.")}
        check_draws(with_weights(model, of_model, None), with_weights(head, of_head, None), draws)
    else:
        layer = llm.engine.runner.model.mtp.layers[0].self_attn.o_proj
        assert torch.equal(layer.quantised.dequantised(), of_head["layers.0.self_attn.o_proj"])


@pytest.mark.triton
def test_whole_layers_on_cuda_need_one_product_for_each_input():
    cuda_decoder_layer = pytest.importorskip("nanovllm_extras.kernels.cuda.cuda_decoder_layer")
    shape = SimpleNamespace(hidden_size=64, head_dim=16, num_attention_heads=4, num_key_value_heads=2,
                            intermediate_size=96, rms_norm_eps=1e-6, attention_bias=False)  # fmt: skip
    layer = Qwen3DecoderLayer(shape, TorchAttention(4, 2, 16, 16))
    assert cuda_decoder_layer.has_fast_version(dense_parts(layer), layer.self_attn.attention.backend)
    layer.self_attn.qkv_proj = SplitFusedLinear([FusedLinear(64, {"q_proj": 64, "v_proj": 32}),
                                                 FusedLinear(64, {"k_proj": 32})],
                                                {"q_proj": 64, "k_proj": 32, "v_proj": 32})  # fmt: skip
    assert not cuda_decoder_layer.has_fast_version(dense_parts(layer), layer.self_attn.attention.backend)
    assert [y.shape[1] for y in layer.self_attn.qkv_proj(torch.zeros(3, 64))] == [64, 32, 32]
