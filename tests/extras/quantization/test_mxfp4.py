"""Weights in MXFP4: each code and scale, whole tensors as transformers widens them, and checkpoints of gpt-oss."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm_extras import LLM, SamplingParams
from nanovllm_extras.weights.mxfp4 import dequantise
from tests.extras.models.architectures import MAX_TOKENS, Checkpoints

VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]  # by code (OCP Microscaling Formats 1.0)
OPTIONS = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 25, "block_size": 16, "num_kv_blocks": 40}


def widened(blocks, scales, dtype):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, scales, dtype=dtype)


def random_bytes(*shape, low=0, high=256, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("scale", [0, 1, 126, 127, 128, 254])
def test_each_code(scale):
    """Two of them are a byte, the first in its low bits."""
    codes = list(range(16)) * 2
    blocks = torch.tensor([[low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]])
    found = dequantise(blocks.to(torch.uint8), torch.tensor([scale], dtype=torch.uint8))
    expected = torch.tensor([VALUES[code] * 2.0 ** (scale - 127) for code in codes], dtype=torch.float64).float()
    assert torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit())


def test_a_scale_of_255_is_no_number():
    assert dequantise(random_bytes(2, 16), torch.tensor([255, 127], dtype=torch.uint8)).isnan().tolist() == (
        [True] * 32 + [False] * 32
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_those_of_transformers(dtype):
    blocks, scales = random_bytes(3, 10, 4, 16), random_bytes(3, 10, 4, low=90, high=160)
    theirs = widened(blocks, scales, dtype=dtype)  # [3, 128, 10]
    assert torch.equal(dequantise(blocks, scales).to(dtype), theirs.transpose(1, 2))


# ---- checkpoints


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """(folder, tensors, model of transformers) of a small gpt-oss with experts in MXFP4."""
    checkpoints = Checkpoints(tmp_path_factory.mktemp("mxfp4"))
    folder, model = checkpoints.make("gpt_oss", "clamped")
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        file.unlink()
    ends = ("experts.gate_up_proj", "experts.down_proj")
    for i, name in enumerate(sorted(name for name in tensors if name.endswith(ends))):
        num_experts, num_inputs, num_outputs = tensors.pop(name).shape
        shape = (num_experts, num_outputs, num_inputs // 32)
        blocks, scales = random_bytes(*shape, 16, seed=i), random_bytes(*shape, low=122, high=126, seed=i)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        model.get_parameter(name).data = widened(blocks, scales, dtype=torch.float32)
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder, tensors, model


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_tokens_are_those_of_transformers(quantised, backend):
    folder, tensors, model = quantised
    save_file(tensors, folder / "model.safetensors")
    ids = [(37 * i) % 200 for i in range(40)]
    llm = LLM(folder, attention_backend=backend, **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    (output,) = llm.generate([ids], params, use_tqdm=False)
    expected = list(ids)
    for _ in range(MAX_TOKENS):
        with torch.no_grad():
            expected.append(model(torch.tensor([expected]), use_cache=False).logits[0, -1].argmax().item())
    assert output.outputs[0].token_ids == expected[len(ids) :]


FIRST = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({f"{FIRST}_scales": None}, f"{FIRST}_blocks .* is in MXFP4, but has no {FIRST}_scales"),
        ({f"{FIRST}_blocks": None}, "tensors are missing .*experts.0.down_proj.weight"),
        ({f"{FIRST}_scales": torch.zeros(4, 64, 2, dtype=torch.uint8)}, "its scales .4, 64, 2. torch.uint8"),
        ({f"{FIRST}_blocks": torch.zeros(4, 64, 3, 16)}, "must be .* uint8; .* is .4, 64, 3, 16. torch.float32"),
        ({"model.norm.weight_blocks": torch.zeros(4, 16, dtype=torch.uint8),
          "model.norm.weight_scales": torch.zeros(4, dtype=torch.uint8)}, "model.norm.weight_blocks"),
    ],
    ids=["no scales", "no blocks", "few scales", "floats", "another tensor"],
)  # fmt: skip
def test_what_is_no_mxfp4_is_refused(quantised, changed, message):
    folder, tensors, _ = quantised
    save_file({name: one for name, one in (tensors | changed).items() if one is not None}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        LLM(folder, attention_backend="torch", **OPTIONS)
