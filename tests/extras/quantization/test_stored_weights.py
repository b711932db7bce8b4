"""Checkpoints that are quantised already: what they mean in float64, what they answer, and what is refused by name."""

import copy
import shutil
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from nanovllm_extras.kernels.cpu.cpu_quantised import replace_quantised
from nanovllm_extras.weights.formats import Format
from nanovllm_extras.weights.stored_format import read_format
from tests.conftest import every_second
from tests.extras.kernels.processors import need_a_compiler
from tests.extras.models.architectures import Checkpoints
from tests.extras.quantization import packed_models
from tests.extras.quantization.packers import (
    awq,
    fp8,
    gptq,
    int_quantized,
    of_compressed,
    pack_quantized,
    set_config,
    write,
)

CHAT = [{"role": "user", "content": "What is a block table?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


def in_another_order(weight):
    """As desc_act makes it: every input in a group that its importance decides, the same for what is fused."""
    order = np.random.default_rng(weight.shape[1]).permutation(weight.shape[1])
    return gptq(weight, order=order)


FORMATS = {
    "awq": (AWQ, awq),
    "awq, groups of 64": ({**AWQ, "group_size": 64}, partial(awq, group_size=64)),
    "gptq": (GPTQ, gptq),
    "gptq, symmetric, groups of 32": ({**GPTQ, "group_size": 32}, partial(gptq, group_size=32, symmetric=True)),
    "gptq, zeros in some parts": (GPTQ, lambda weight: gptq(weight, symmetric=len(weight) == 128)),
    "gptq, 8 bits": ({**GPTQ, "bits": 8}, partial(gptq, bits=8)),
    "gptq, a scale for each output": ({**GPTQ, "group_size": -1}, partial(gptq, group_size=None)),
    "gptq_v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, partial(gptq, is_v2=True)),
    "gptq, desc_act": ({**GPTQ, "desc_act": True}, in_another_order),
    "pack-quantized": (of_compressed("pack-quantized", num_bits=4, strategy="group", group_size=128), pack_quantized),
    "pack-quantized, zeros": (
        of_compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
        partial(pack_quantized, group_size=32, symmetric=False),
    ),
    "pack-quantized, 8 bits": (
        of_compressed("pack-quantized", num_bits=8, strategy="channel"),
        partial(pack_quantized, bits=8, group_size=None),
    ),
    "int-quantized": (of_compressed("int-quantized", num_bits=8, strategy="channel"), int_quantized),
    "int-quantized, zeros": (
        of_compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False),
        partial(int_quantized, symmetric=False),
    ),
}
FLOATS = {
    "fp8 in blocks": (FP8, partial(fp8, block=(128, 128))),
    "fp8 in other blocks": ({**FP8, "weight_block_size": [48, 80]}, partial(fp8, block=(48, 80))),
    "fp8, one scale": ({"quant_method": "fp8"}, partial(fp8, scale_name="weight_scale")),
    "float-quantized": (
        of_compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        partial(fp8, per_output=True, scale_name="weight_scale"),
    ),
    "float-quantized in blocks": (
        of_compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
        partial(fp8, block=(128, 128), scale_name="weight_scale"),
    ),
}
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def weights_of(llm):
    """By the name in the checkpoint: what each projection multiplies by, [out, in] float32."""
    found = {}
    for path, layer in llm.engine.runner.model.named_modules():
        if not path.endswith("_proj"):
            continue
        weight = layer.quantised.dequantised() if hasattr(layer, "quantised") else layer.weight
        parent, _, name = path.rpartition(".")
        if name in FUSED:
            rows = weight.split(tuple(layer.parts.values()))
            found |= {f"{parent}.{part}": one for part, one in zip(FUSED[name], rows, strict=True)}
        else:
            found[path] = weight
    return found


def eager(folder, **options):
    return LLM(folder, attention_backend="torch", enforce_eager=True, num_kv_blocks=40, dtype="float32", **options)


def answer(llm):
    return llm.chat(CHAT, GREEDY, use_tqdm=False)[0].outputs[0].text


@pytest.fixture(scope="module")
def expected():
    return answer(eager(TINY_QWEN3))


@pytest.mark.parametrize("name", every_second(FORMATS))
def test_a_checkpoint_means_what_its_format_says(name, tmp_path):
    config, pack = FORMATS[name]
    meanings = write(tmp_path / "model", config, pack)
    llm = eager(tmp_path / "model")
    assert "QuantisedLinear" in llm.engine.description
    found = weights_of(llm)
    assert found.keys() == meanings.keys()
    for path, meaning in meanings.items():
        assert torch.equal(found[path].double(), meaning), path  # 11 bits of a scale times 9: exact in float32


def formats_of(config):
    """The parsed format, or what is wrong."""
    try:
        return read_format("quantization_config", config)
    except ValueError as error:
        return str(error)


def test_null_is_an_absent_field():
    more = ("checkpoint_format", "dynamic", "version", "w_bit", "q_group_size", "zero_point", "fmt", "kv_cache_scheme",
            "sparsity_config", "weight_block_size")  # fmt: skip
    for config, _ in {**FORMATS, **FLOATS}.values():
        for field in {*config, *more} - {"quant_method"}:
            rest = {key: value for key, value in config.items() if key != field}
            assert formats_of({**config, field: None}) == formats_of(rest), field
        for group in config.get("config_groups", {}):
            weights = config["config_groups"][group]["weights"]
            for field in (*weights, "type", "symmetric", "actorder", "block_structure"):
                given, absent = copy.deepcopy(config), copy.deepcopy(config)
                given["config_groups"][group]["weights"][field] = None
                absent["config_groups"][group]["weights"].pop(field, None)
                assert formats_of(given) == formats_of(absent), field


def test_awqs_older_names():
    """Those of AutoAWQ and llm-awq, which vLLM takes too."""
    older = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}
    assert formats_of(older) == formats_of({**AWQ, "group_size": 64})
    assert formats_of({**older, "w_bit": 8}) == formats_of({**AWQ, "bits": 8})


@pytest.mark.parametrize("bits", [4, 8])
def test_gptqs_zeros_wrap(bits):
    """A group without negative weights has a zero of 0, which is stored as the largest number."""
    weight = torch.rand(64, 256, generator=torch.Generator().manual_seed(0))
    tensors, meaning = gptq(weight, bits)
    assert tensors["qzeros"].unique().tolist() == [-1]
    decoded = Format("gptq", bits, 128, zero_offset=1).decode(tensors, 256)
    assert torch.equal(decoded.dequantised().double(), meaning)


@pytest.mark.parametrize("name", every_second(FLOATS))
def test_floats_of_8_bits_are_widened(name, tmp_path):
    config, pack = FLOATS[name]
    meanings = write(tmp_path / "model", config, pack)
    llm = eager(tmp_path / "model")
    assert "Quantised" not in llm.engine.description
    for path, weight in weights_of(llm).items():
        torch.testing.assert_close(weight.double(), meanings[path], rtol=2**-23, atol=0)


@pytest.mark.parametrize(
    "name",
    ["gptq, desc_act", "int-quantized"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("awq", "gptq, 8 bits", "pack-quantized, zeros")],
)
def test_kernels_multiply_as_the_definition(name, tmp_path, expected):
    need_a_compiler(torch.float32)
    write(tmp_path / "model", *FORMATS[name])
    model = eager(tmp_path / "model").engine.runner.model
    layers = {path: layer for path, layer in model.named_modules() if hasattr(layer, "quantised")}
    x = torch.randn(5, 640, generator=torch.Generator().manual_seed(0))
    inputs = {path: x[:, : layer.quantised.q.shape[1]] for path, layer in layers.items()}
    products = {path: layer(inputs[path]) for path, layer in layers.items()}
    replace_quantised(model, torch.float32)
    for path, product in products.items():
        torch.testing.assert_close(model.get_submodule(path)(inputs[path]), product, rtol=1e-5, atol=1e-5)
    llm = LLM(tmp_path / "model", dtype="float32", num_kv_blocks=40)
    assert "Quantised" not in llm.engine.description, "all have fast versions"
    assert answer(llm) == expected


def test_a_projection_that_was_left_out_is_plain(tmp_path, expected):
    write(tmp_path / "model", AWQ, awq, is_packed=lambda path: not path.endswith("down_proj") and ".0." not in path)
    llm = eager(tmp_path / "model")
    kinds = {path: type(layer).__name__ for path, layer in llm.engine.runner.model.named_modules()}
    assert kinds["model.layers.1.mlp.down_proj"] == kinds["model.layers.0.self_attn.o_proj"] == "Linear"
    assert kinds["model.layers.1.self_attn.o_proj"] == "QuantisedLinear"
    assert answer(llm) == expected


def test_what_the_checkpoint_has_left_can_be_quantised_too(tmp_path, expected):
    write(tmp_path / "model", GPTQ, gptq)
    llm = eager(tmp_path / "model", quantization="int8")
    assert type(llm.engine.runner.model.model.embed_tokens).__name__ == "QuantisedEmbedding"
    assert answer(llm) == expected
    write(tmp_path / "fp8", FP8, partial(fp8, block=(128, 128)))
    assert "QuantisedLinear" in eager(tmp_path / "fp8", quantization="int8").engine.description


def test_vllms_users_name_the_format_too(tmp_path, expected):
    write(tmp_path / "model", AWQ, awq)
    assert answer(eager(tmp_path / "model", quantization="awq")) == expected
    with pytest.raises(ValueError, match="quantization='gptq' needs a checkpoint in this format, config.json has awq"):
        eager(tmp_path / "model", quantization="gptq")
    with pytest.raises(ValueError, match="quantization='fp8' needs .* config.json has plain weights"):
        eager(TINY_QWEN3, quantization="fp8")


def test_biases_of_zero_that_tools_write_are_dropped(tmp_path):
    def add_biases(value):
        return lambda tensors: tensors.update({"model.layers.0.mlp.down_proj.bias": torch.full((256,), value)})

    write(tmp_path / "zeros", GPTQ, gptq, change=add_biases(0.0))
    eager(tmp_path / "zeros")
    write(tmp_path / "ones", GPTQ, gptq, change=add_biases(1.0))
    with pytest.raises(ValueError, match=r"unexpected tensor .*down_proj\.bias .* has no bias"):
        eager(tmp_path / "ones")


def test_biases_are_loaded(tmp_path):
    """Qwen2's projections of q, k and v have one each."""
    config = transformers.Qwen2Config(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(config)
    biases = {name: nn.init.normal_(bias) for name, bias in model.named_parameters() if name.endswith("_proj.bias")}
    assert len(biases) == 6
    model.save_pretrained(tmp_path / "plain")
    write(tmp_path / "model", {**GPTQ, "group_size": 64}, partial(gptq, group_size=64), of=tmp_path / "plain")
    for i, layer in enumerate(eager(tmp_path / "model").engine.runner.model.model.layers):
        parts = [biases[f"model.layers.{i}.self_attn.{name}.bias"] for name in ("q_proj", "k_proj", "v_proj")]
        assert torch.equal(layer.self_attn.qkv_proj.bias, torch.cat(parts))
    write(tmp_path / "none", GPTQ, gptq, of=tmp_path / "plain", change=without("k_proj.bias"))
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.k_proj\.bias is missing"):
        eager(tmp_path / "none")


NOT_KNOWN = [
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "quantised with bitsandbytes, .*known are awq, gptq"),
    ({**AWQ, "bits": 3}, "field bits .* must be 4, config.json has 3"),
    ({**AWQ, "group_size": None, "q_group_size": 256}, "field group_size .* config.json has 256"),
    ({**AWQ, "group_size": None}, "field group_size .* config.json has None"),
    ({**AWQ, "version": "gemv"}, "field version .* must be 'gemm', config.json has 'gemv'"),
    ({**AWQ, "group_size": 256}, "field group_size .* must be 32 or 64 or 128 or -1, config.json has 256"),
    ({**GPTQ, "bits": 3}, "field bits .* must be 4 or 8, config.json has 3"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "field checkpoint_format .* config.json has 'marlin'"),
    ({**GPTQ, "dynamic": {"-:lm_head": {}}}, "field dynamic"),
    (of_compressed("marlin-24", num_bits=4), "field format .* config.json has 'marlin-24'"),
    (of_compressed("pack-quantized", num_bits=3, strategy="channel"), "weights: num_bits .* must be 4 or 8"),
    (of_compressed("pack-quantized", num_bits=4, strategy="tensor"), "weights: strategy .* config.json has 'tensor'"),
    (of_compressed("pack-quantized", num_bits=4, strategy="channel", actorder="group"), "weights: actorder"),
    (
        {**of_compressed("int-quantized", num_bits=8, strategy="channel"), "kv_cache_scheme": {"num_bits": 8}},
        "kv_cache",
    ),
    ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "config_groups: their number"),
    ({**FP8, "fmt": "e5m2"}, "field fmt .* config.json has 'e5m2'"),
    ({**FP8, "weight_block_size": 128}, r"must be \[rows, columns\], config.json has 128"),
]


def test_what_is_not_known_is_refused_by_name(tmp_path):
    for config, message in NOT_KNOWN:
        with pytest.raises(ValueError, match=message):
            read_format("quantization_config", config)
    write(tmp_path / "model", config, lambda weight: ({"weight": weight}, None))
    with pytest.raises(ValueError, match=message):
        eager(tmp_path / "model")


def without(ending):
    def change(tensors):
        del tensors[next(name for name in sorted(tensors) if name.endswith(ending))]

    return change


def shorter(ending):
    def change(tensors):
        name = next(name for name in sorted(tensors) if name.endswith(ending))
        tensors[name] = tensors[name][:-1].contiguous()

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(".qzeros"), r"layers\.0\.mlp\.down_proj in .* lacks qzeros"),
        (shorter(".scales"), r"down_proj in .*: wrong shapes .*the model needs 640 inputs in groups of 128"),
        (shorter("q_proj.qweight"), r"q_proj in .* the model needs 256 inputs"),
        (without("k_proj.qweight"), r"layers\.0\.self_attn\.k_proj\.weight is missing in"),
        (without("norm.weight"), "1 tensors are missing"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_named(change, message, tmp_path):
    write(tmp_path / "model", GPTQ, gptq, change=change)
    with pytest.raises(ValueError, match=message):
        eager(tmp_path / "model")


def test_integers_without_a_scale_are_not_taken_for_floats(tmp_path):
    write(tmp_path / "model", *FORMATS["int-quantized"], change=without("k_proj.weight_scale"))
    with pytest.raises(ValueError, match=r"k_proj\.weight in .* is torch\.int8, but lacks weight_scale"):
        eager(tmp_path / "model")


def test_a_format_that_no_tensor_has_is_refused(tmp_path):
    write(tmp_path / "model", AWQ, lambda weight: ({"weight": weight}, None))
    with pytest.raises(ValueError, match=r"config\.json says awq, but no projection in .* is quantised so"):
        eager(tmp_path / "model")


# ---- layers for which there is no kernel


WITHOUT_A_KERNEL = ("lm_head", "mlp.gate", "kv_b_proj", "embed_tokens")


def with_others_packed(root, name, config, pack):
    """Return two folders of the same weights: in one, layers without a kernel are packed, in the other they are floats.

    Projections are packed in both.
    """
    of, _ = Checkpoints(root / "plain").make(name, "plain", intermediate_size=128)
    packed, plain = {}, {}
    for file in of.glob("*.safetensors"):
        for key, tensor in load_file(file).items():
            path = key.removesuffix(".weight")
            if tensor.dim() != 2 or not path.endswith((*WITHOUT_A_KERNEL, "_proj", "with_mqa")):
                packed[key] = plain[key] = tensor
                continue
            parts, meaning = pack(tensor)
            packed |= {f"{path}.{one}": part for one, part in parts.items()}
            is_other = path.endswith(WITHOUT_A_KERNEL)
            plain |= {key: meaning.float()} if is_other else {f"{path}.{one}": part for one, part in parts.items()}
    folders = []
    for kind, tensors in (("packed", packed), ("floats", plain)):
        folder = root / kind
        folder.mkdir()
        shutil.copy(of / "config.json", folder)
        save_file({key: one.contiguous() for key, one in tensors.items()}, folder / "model.safetensors")
        set_config(folder, config)
        folders.append(folder)
    return folders


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("llama", "int-quantized"),
        pytest.param("qwen3_moe", "gptq, 8 bits, desc_act", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "awq", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "fp8", marks=pytest.mark.slow),
    ],
)
def test_quantised_routers_output_layers_and_up_projections_are_widened(tmp_path, name, form):
    (tmp_path / "plain").mkdir()
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=5, ignore_eos=True)
    found = []
    for folder in with_others_packed(tmp_path, name, *packed_models.FORMATS[form][:2]):
        outputs = eager(folder).generate([[5, 7, 11], [3] * 9], params, use_tqdm=False)
        found.append([(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs])
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_quantised_tensor_without_a_layer_is_named_with_the_true_reason(tmp_path):
    extra = {"model.layers.0.self_attn.g_proj.qweight": torch.zeros(8, 8, dtype=torch.int32)}
    write(tmp_path / "model", GPTQ, gptq, change=lambda tensors: tensors.update(extra))
    with pytest.raises(ValueError, match=r"tensor model.*g_proj\.qweight in .*: the model has no such quantised"):
        eager(tmp_path / "model")


@pytest.mark.slow
def test_scales_of_a_cache_in_fp8_are_passed_over(tmp_path):
    names = ("k_scale", "v_scale", "k_proj.k_scale", "v_proj.output_scale", "kv_scale", "q_scale", "prob_scale")
    scales = {f"model.layers.{i}.self_attn.{name}": torch.ones(1) for i in range(2) for name in names}
    for form in (FLOATS["fp8, one scale"], FORMATS["gptq"]):
        write(tmp_path / form[0]["quant_method"], *form, change=lambda tensors: tensors.update(scales))
        eager(tmp_path / form[0]["quant_method"])
