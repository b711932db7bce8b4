"""Runs the code that launches kernels, on CPU: what it would launch on a GPU is compiled for one, and that is all.

    python -m tests.extras.kernels.launched_kernels 90 bfloat16 float32    # dtypes of logits

The interpreter takes all arguments and options, but the compiler does not; what `benchmarks.kernel_resources` compiles
is described there once more, while this is what the launches say themselves. Prints a dict for each compiled kernel.
Kernels leave everything as it is, so the outputs mean nothing.
"""

import json
import os
import sys
from dataclasses import asdict

os.environ["TRITON_INTERPRET"] = "0"  # read by Triton when it is imported

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.kernel_resources import GPUS, Resources, read_cubin
from nanovllm.layers.triton_layers import norm_and_rotate
from nanovllm_extras import LLM, TINY_QWEN3, TINY_QWEN3_5, SamplingParams
from nanovllm_extras.kernels.adapter_rows import AdapterRows, LayerShape
from nanovllm_extras.kernels.cuda import (
    adapter_kernels,
    few_tokens,
    sample,
    triton_attention,  # noqa: F401 (before the next line)
)

os.environ["TRITON_INTERPRET"] = "1"  # read by `LLM`, which would refuse the backend on CPU

VOCAB_SIZE = 151_936  # Qwen3's


class Driver:
    """As much of a GPU's as compiling needs."""

    def __init__(self, arch):
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self):
        return self._target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_launches(arch):
    """From now on; returns the dict that grows by a line for each kernel."""
    driver.set_active(Driver(arch))
    few_tokens.describe_gpu = triton_attention.describe_gpu = lambda device: GPUS[arch]
    compile_or_launch, lines = JITFunction.run, {}

    def compile_only(self, *args, grid, **options):
        assert all(isinstance(size, int) and 0 < size < 1 << 31 for size in grid)
        kernel = compile_or_launch(self, *args, grid=grid, **{**options, "warmup": True})
        if kernel.hash not in lines:
            about = kernel.metadata
            used = Resources(*read_cubin(kernel.asm["cubin"]), about.shared, about.num_warps, about.num_stages)
            programs = used.programs_per_multiprocessor(GPUS[arch])
            lines[kernel.hash] = {"kernel": self.fn.__name__, **asdict(used), "programs": programs}
        return kernel

    JITFunction.run = compile_only
    return lines


def launch_all(kv_cache_dtypes, logits_dtypes):
    empty = torch.empty
    torch.empty = lambda *args, **kwargs: empty(*args, **kwargs).zero_()  # it is used as token ids
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    options = {"device": "cpu", "dtype": "bfloat16", "num_kv_blocks": 99, "attention_backend": "triton"}
    for quantization in ("int8", {"method": "int4", "group_size": 128}):
        llm = LLM(TINY_QWEN3, quantization=quantization, **options)
        llm.generate([[5] * 40, [7] * 9], params, use_tqdm=False)
    for kv_cache_dtype in kv_cache_dtypes:
        llm = LLM(TINY_QWEN3, kv_cache_dtype=kv_cache_dtype, **options)
        # few tokens and many, decodes and mixed, a context that is split
        for prompts in ([[1, 2, 3]], [[5] * 40, [7] * 9], [[8] * 300, [9]], [[6] * 1100]):
            llm.generate(prompts, params, use_tqdm=False)
    q, angles = torch.zeros(2, 16, 128, dtype=torch.bfloat16), torch.zeros(2, 1, 64, dtype=torch.bfloat16)
    norm_and_rotate(q, angles, angles, torch.zeros(128, dtype=torch.bfloat16), 1e-6)  # the core's
    # a model with recurrent states: decodes, long and short chunks, and the steps with drafts that a start measures
    speculation = {"method": "ngram", "num_speculative_tokens": 3}
    llm = LLM(TINY_QWEN3_5, **options, max_num_seqs=4, max_num_batched_tokens=45, speculative_config=speculation)
    llm.generate([[5] * 40, [7] * 9], params, use_tqdm=False)
    rows = AdapterRows()
    rows.slots = torch.ones(20, dtype=torch.int32)
    shape, sizes = LayerShape(1024, (0, 2048, 3072, 4096)), (4, torch.bfloat16, 16, torch.device("cpu"))
    x, y = torch.zeros(20, 1024, dtype=torch.bfloat16), torch.zeros(20, 4096, dtype=torch.bfloat16)
    adapter_kernels.TritonProducts(shape, rows, *sizes).add(x, y)
    temperatures, uniforms = torch.ones(2), torch.zeros(2, dtype=torch.float64)
    for dtype in logits_dtypes:
        logits = torch.zeros(2, VOCAB_SIZE, dtype=dtype)
        for limits in ({"uniforms": None}, {}, {"top_k": torch.ones(2, dtype=torch.int64)}, {"top_p": torch.ones(2)}):
            sample.sample_tokens(logits, temperatures, **{"uniforms": uniforms, **limits})


if __name__ == "__main__":
    arch = int(sys.argv[1])
    lines = compile_launches(arch)
    launch_all(["auto", "fp8"] if arch >= 89 else ["auto"], [getattr(torch, name) for name in sys.argv[2:]])
    for line in lines.values():
        print(json.dumps(line))
