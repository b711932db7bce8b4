"""Writes weights as AWQ, GPTQ, compressed-tensors and fp8 checkpoints have them, from their documented layouts.

Nothing here is shared with the readers. Each packer returns the tensors, by the names behind a projection's own, and
what they mean: [out, in] float64.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from nanovllm import TINY_QWEN3

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def rounded(weight, bits, group_size, has_zeros, groups=None):
    """weight: [out, in] -> q [out, in], scales [out, groups] of float16's precision, zeros [out, groups], all numpy"""
    weight = weight.double().numpy()
    size = group_size or weight.shape[1]
    groups = np.arange(weight.shape[1]) // size if groups is None else groups
    num_groups = groups.max() + 1
    most = 2**bits - 1
    scales, zeros = np.zeros((len(weight), num_groups)), np.full((len(weight), num_groups), 2 ** (bits - 1))
    for group in range(num_groups):
        part = weight[:, groups == group]
        if has_zeros:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scales[:, group] = np.float16((high - low) / most)
            zeros[:, group] = np.clip(np.round(-low / scales[:, group]), 0, most)
        else:
            scales[:, group] = np.float16(np.abs(part).max(1) / (2 ** (bits - 1) - 1))
    q = np.clip(np.round(weight / scales[:, groups]) + zeros[:, groups], 0, most).astype(np.int64)
    return q, scales, zeros.astype(np.int64), torch.from_numpy(scales[:, groups] * (q - zeros[:, groups]))


def in_words(values, bits):
    """[n, m] -> [n, m · bits / 32] int32: the first of a word's numbers in its lowest bits"""
    count = 32 // bits
    values = np.pad(values, ((0, 0), (0, -values.shape[1] % count))).astype(np.uint64)
    words = sum(values[:, i::count] << np.uint64(bits * i) for i in range(count))
    return torch.from_numpy(np.ascontiguousarray(words.astype(np.uint32)).view(np.int32)).contiguous()


def half(values):
    return torch.from_numpy(values).half().contiguous()


def awq(weight, group_size=128):
    q, scales, zeros, meaning = rounded(weight, 4, group_size, has_zeros=True)
    places = [8 * (i // 8) + (0, 2, 4, 6, 1, 3, 5, 7)[i % 8] for i in range(len(q))]  # of the outputs
    tensors = {"qweight": in_words(q.T[:, places], 4), "qzeros": in_words(zeros.T[:, places], 4)}
    return {**tensors, "scales": half(scales.T)}, meaning


def gptq(weight, bits=4, group_size=128, symmetric=False, is_v2=False, order=None):
    """order: of the inputs, which are put into groups in this order (desc_act)"""
    size = group_size or weight.shape[1]
    groups = np.arange(weight.shape[1]) // size
    if order is not None:
        groups[order] = groups.copy()
    q, scales, zeros, meaning = rounded(weight, bits, group_size, not symmetric, groups)
    stored = zeros if is_v2 else (zeros - 1) % 2**bits
    tensors = {"qweight": in_words(q, bits).T.contiguous(), "qzeros": in_words(stored.T, bits)}
    g_idx = torch.from_numpy(groups.astype(np.int32))
    return {**tensors, "scales": half(scales.T), "g_idx": g_idx}, meaning


def pack_quantized(weight, bits=4, group_size=128, symmetric=True):
    q, scales, zeros, meaning = rounded(weight, bits, group_size, not symmetric)
    tensors = {"weight_packed": in_words(q, bits), "weight_scale": half(scales)}
    tensors["weight_shape"] = torch.tensor(weight.shape)
    if not symmetric:
        tensors["weight_zero_point"] = in_words(zeros.T, bits).T.contiguous()
    return tensors, meaning


def int_quantized(weight, symmetric=True):
    q, scales, zeros, meaning = rounded(weight, 8, None, not symmetric)
    tensors = {"weight": torch.from_numpy((q - 128).astype(np.int8)), "weight_scale": half(scales)}
    if not symmetric:
        tensors["weight_zero_point"] = torch.from_numpy((zeros - 128).astype(np.int8))
    return tensors, meaning


def fp8(weight, block=None, per_output=False, scale_name="weight_scale_inv"):
    weight = weight.double()
    scale = torch.ones(1, dtype=torch.float64)
    spread = scale
    if block is None and per_output:
        scale = spread = weight.abs().amax(1, keepdim=True) / 448
    elif block is None:
        scale = spread = (weight.abs().max() / 448).view(1)
    else:
        counts = [-(-size // step) for size, step in zip(weight.shape, block, strict=True)]
        scale = torch.empty(counts, dtype=torch.float64)
        spread = torch.empty_like(weight)
        for i in range(counts[0]):
            for j in range(counts[1]):
                part = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
                scale[i, j] = weight[part].abs().max() / 448
                spread[part] = scale[i, j].float().double()
    scale = scale.float()
    spread = spread.float().double()
    stored = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": stored, scale_name: scale}, stored.double() * spread


def write(folder, quantization_config, pack, is_packed=lambda name: True, change=lambda tensors: None, of=TINY_QWEN3):
    """The model in `of` with the projections that `is_packed` names packed -> their meanings by name"""
    shutil.copytree(of, folder)
    tensors, meanings = load_file(folder / "model.safetensors"), {}
    for name in list(tensors):
        path = name.removesuffix(".weight")
        if path.endswith(PROJECTIONS) and is_packed(path):
            packed, meanings[path] = pack(tensors.pop(name))
            tensors |= {f"{path}.{one}": tensor for one, tensor in packed.items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    set_config(folder, quantization_config)
    return meanings


def set_config(folder, quantization_config):
    file = Path(folder) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantization_config}))


def of_compressed(name, **weights):
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": group}}
