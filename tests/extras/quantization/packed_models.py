"""Small models with recurrent states, or with K and V of several shapes, whose weights are packed; and their oracle.

The oracle is the model of `transformers` with what the packed weights mean. Where the engine rounds activations, the
oracle rounds them as the definition does (`round_rows`).
"""

import functools
import shutil
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from nanovllm_extras import LLM, SamplingParams
from nanovllm_extras.weights.quantised_linear import round_rows, spread
from tests.extras.models.gemma4_checkpoints import Gemma4Checkpoints
from tests.extras.models.hybrid_checkpoints import MAX_TOKENS, HybridCheckpoints
from tests.extras.quantization.packers import (
    awq,
    fp8,
    gptq,
    int_quantized,
    of_compressed,
    pack_quantized,
    set_config,
)

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [32, 32]}


def order_of(path, num_inputs):
    """Return the order in which desc_act puts inputs into groups."""
    return np.random.default_rng(num_inputs).permutation(num_inputs)


def in_another_order(weight):
    return gptq(weight, 8, 32, order=order_of(None, weight.shape[1]))


FORMATS = {  # name -> config.json's field, packer, inputs of an activation's group (None: floats)
    "awq": (AWQ, partial(awq, group_size=32), 32),
    "gptq": (GPTQ, partial(gptq, group_size=32), 32),
    "gptq, 8 bits, desc_act": ({**GPTQ, "bits": 8}, in_another_order, 32),
    "pack-quantized": (
        of_compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
        partial(pack_quantized, group_size=32),
        32,
    ),
    "int-quantized": (of_compressed("int-quantized", num_bits=8, strategy="channel"), int_quantized, 128),
    "fp8": (FP8, partial(fp8, block=(32, 32)), None),
}
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)


class Models:
    """The small checkpoints of each kind, each made once: `make(kind, variant)` -> (folder, transformers model)"""

    def __init__(self, root):
        self._root = root

    @functools.cache  # noqa: B019 (lives as long as the module's tests)
    def checkpoints(self, kind):
        folder = self._root / kind
        folder.mkdir()
        return Gemma4Checkpoints(folder) if kind == "Gemma4" else HybridCheckpoints(folder, kind)

    def make(self, kind, variant="plain"):
        return self.checkpoints(kind).make(variant)

    def prompts(self, kind):
        return self.checkpoints(kind).prompts()


def is_product(name, tensor, num_outputs=8):
    """Whether tools quantise it: a projection of a layer. AWQ and GPTQ pack eight outputs in a word."""
    return tensor.dim() == 2 and ".layers." in name and "conv1d" not in name and len(tensor) % num_outputs == 0


def write_packed(folder, of, name, is_packed=is_product):
    """Write the model in `of` with packed weights -> what they mean, by path: [out, in] float32"""
    config, pack, _ = FORMATS[name]
    shutil.copytree(of, folder)
    tensors, meanings = load_file(folder / "model.safetensors"), {}
    for key in list(tensors):
        if is_packed(key, tensors[key]):
            path = key.removesuffix(".weight")
            packed, meaning = pack(tensors.pop(key))
            meanings[path] = meaning.float()
            tensors |= {f"{path}.{one}": tensor.contiguous() for one, tensor in packed.items()}
    save_file(tensors, folder / "model.safetensors")
    set_config(folder, config)
    return meanings


def rounded(x, group_size, order=slice(None)):
    """Round x as the definition does. order: of the inputs, of which each `group_size` are a group"""
    q, scales = round_rows(x.flatten(0, -2)[:, order], group_size)
    y = torch.empty_like(q)
    y[:, order] = q * spread(scales, group_size, q.shape[1])
    return y.view(x.shape)


def with_weights(model, meanings, group_size, order=lambda path, num_inputs: slice(None)):
    """Return a copy of a `transformers` model whose products have these weights, and round their inputs.

    meanings: path -> weight; group_size: None to round no inputs; order: the order in which inputs are put into groups
    """
    copy, found = deepcopy(model), set()

    def round_inputs(path, module, inputs):
        return rounded(inputs[0], group_size, order(path, module.in_features)), *inputs[1:]

    for path, module in copy.named_modules():
        if path in meanings:
            found.add(path)
            module.weight = nn.Parameter(meanings[path])  # its own, if embeddings are tied
            if group_size is not None and isinstance(module, nn.Linear):
                module.register_forward_pre_hook(partial(round_inputs, path))
    assert found == set(meanings)
    return copy


def check_tokens(llm, oracle, prompts, is_rounded):
    """Compare log-probabilities of the engine's tokens, which must be the likeliest of the oracle, or nearly so.

    is_rounded: whether both round activations. One rounding that goes the other way then changes the rest of a text a
    little; other weights would change most tokens by much more.
    """
    differences, most = [], 0.3 if is_rounded else 2e-4
    for prompt, (token_ids, scores) in zip(prompts, greedy_of(llm, prompts), strict=True):
        with torch.no_grad():
            logits = oracle(torch.tensor([[*prompt, *token_ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        rows = logits.log_softmax(-1)  # [num_tokens, vocab_size]
        wanted = rows.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()
        assert scores == pytest.approx(wanted, abs=most)
        assert scores == pytest.approx(rows.amax(-1).tolist(), abs=most)
        differences += [abs(score - one) for score, one in zip(scores, wanted, strict=True)]
    assert sorted(differences)[len(differences) // 2] < (0.02 if is_rounded else 1e-4)


def make_llm(folder, **options):
    options = {"attention_backend": "torch", "block_size": 16, "num_kv_blocks": 60, "max_num_seqs": 8, **options}
    return LLM(folder, dtype="float32", device="cpu", **options)


def greedy_of(llm, prompts):
    """Return the tokens of each prompt's continuation, and their log-probabilities."""
    found = []
    for output in llm.generate(prompts, GREEDY, use_tqdm=False):
        rows = zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
        scores = [row[token_id].logprob for token_id, row in rows]
        found.append((output.outputs[0].token_ids, scores))
    return found
