"""Serve a workload with llama.cpp: its decode loop, driven as its server does, on random weights.

Every request is a sequence of one context. A step takes one token of each sequence that generates, then fills the batch
with prompt tokens in order of arrival. A prefix that all prompts share is computed once, and llama.cpp shares it by
reference. This file takes the most likely token. `dummy_gguf.py` writes the weights. peers.py calls this file, which
needs llama-cpp-python and gguf.
"""

import argparse
import ctypes
import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import torch

from benchmarks.common import ModelShape, Workload, package_version, resolve_dtype_name
from benchmarks.dummy_gguf import architecture_of, dummy_gguf
from benchmarks.roofline import shared_prefix_len

MAX_SEQS = 256  # llama.cpp's own limit
CONTEXT_OPTIONS = {
    "n_batch": 2048,
    "n_ubatch": 512,
    "flash_attn_type": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "kv_unified": True,  # with a buffer per sequence it computes prompts of different lengths in many small pieces
}
QUANTISED = {"int8": ("Q8_0", llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0), "int4": ("Q4_0", llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0)}


@dataclass
class Request:
    """A sequence and its progress; `times` has the time of each generated token."""

    prompt: list[int]
    output_len: int
    seq_id: int = -1
    num_computed: int = 0
    last_token: int = -1
    times: list[float] = field(default_factory=list)

    @property
    def is_prefilled(self) -> bool:
        return self.num_computed >= len(self.prompt)


def serve(workload: Workload, args: argparse.Namespace) -> tuple[float, list[list[float]]]:
    """Return the seconds for all requests and, for each request, the times at which its tokens arrived."""
    lens = [len(p) + n for p, n in zip(workload.prompts, workload.output_lens, strict=True)]
    shared_len = 0 if args.no_prefix_caching else shared_prefix_len(workload.prompts)
    num_seqs = min(len(lens), args.max_num_seqs, MAX_SEQS)
    context = Context(args, lens, num_seqs, shared_len)
    context.run([Request(prompt, 4) for prompt in workload.prompts[:2]], 0)  # warm-up
    context.clear()
    requests = [Request(p, n) for p, n in zip(workload.prompts, workload.output_lens, strict=True)]
    start = time.perf_counter()
    context.run(requests, shared_len)
    elapsed = time.perf_counter() - start
    return elapsed, [[t - start for t in request.times] for request in requests]


class Context:
    """A loaded model, its KV cache and one batch, reused at every step."""

    def __init__(self, args: argparse.Namespace, lens: list[int], num_seqs: int, shared_len: int) -> None:
        llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        path = dummy_gguf(args.model, resolve_dtype_name(args.dtype, args.model), args.seed)
        if args.quantization is not None:
            path = quantised_gguf(path, args.quantization)
        model_params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        if not self.model:
            version = package_version("llama-cpp-python")
            raise ValueError(f"llama-cpp-python {version} cannot load the architecture {architecture_of(args.model)}")
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = num_seqs
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        for name, value in (CONTEXT_OPTIONS | dict(args.engine_option)).items():
            if not hasattr(params, name):
                raise ValueError(f"--engine-option {name}: llama.cpp's context has no such parameter")
            setattr(params, name, value)
        largest = sorted(lens)[-num_seqs:]
        params.n_ctx = round_up(sum(largest)) if params.kv_unified else num_seqs * round_up(largest[-1])
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise ValueError("llama.cpp could not make a context with these options")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.num_vocab = ModelShape.from_folder(args.model).vocab_size
        self.num_seqs = num_seqs
        self.max_tokens = params.n_batch
        self.batch = llama_cpp.llama_batch_init(self.max_tokens, 0, 1)

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self.memory, False)

    def run(self, requests: list[Request], shared_len: int) -> None:
        """Serve all requests; the first `shared_len` positions, which they share, are computed once."""
        waiting = deque(requests)
        free = deque(range(self.num_seqs))
        running: list[Request] = []
        if shared_len:
            self.compute_shared(requests, shared_len)
        while waiting or running:
            while waiting and free:
                request = waiting.popleft()
                request.seq_id = free.popleft()
                running.append(request)
            self.step(running)
            for request in [r for r in running if len(r.times) == r.output_len]:
                running.remove(request)
                if waiting:  # otherwise no request needs its memory
                    llama_cpp.llama_memory_seq_rm(self.memory, request.seq_id, -1, -1)
                    free.append(request.seq_id)

    def compute_shared(self, requests: list[Request], shared_len: int) -> None:
        """Compute the prefix as sequence 0, and let the other sequences refer to it."""
        if len(requests) > self.num_seqs:
            raise ValueError(f"a shared prefix needs a sequence per request: {len(requests)} > {self.num_seqs}")
        prefix = requests[0].prompt
        for start in range(0, shared_len, self.max_tokens):
            self.decode([(prefix[p], p, 0, False) for p in range(start, min(start + self.max_tokens, shared_len))])
        for seq_id, request in enumerate(requests):
            request.num_computed = shared_len
            if seq_id:
                llama_cpp.llama_memory_seq_cp(self.memory, 0, seq_id, 0, shared_len)

    def step(self, running: list[Request]) -> None:
        """Compute one token of each sequence that generates, then prompt tokens until the batch is full."""
        tokens: list[tuple[int, int, int, bool]] = []
        sampled: list[tuple[int, Request]] = []
        for request in sorted(running, key=lambda r: not r.is_prefilled):
            room = self.max_tokens - len(tokens)
            start, prompt = request.num_computed, request.prompt
            new = [request.last_token][:room] if request.is_prefilled else prompt[start : start + room]
            tokens += [(token, start + i, request.seq_id, False) for i, token in enumerate(new)]
            request.num_computed += len(new)
            if new and request.is_prefilled:
                tokens[-1] = (*tokens[-1][:3], True)
                sampled.append((len(tokens) - 1, request))
        self.decode(tokens)
        for row, request in sampled:
            logits = llama_cpp.llama_get_logits_ith(self.context, row)
            request.last_token = int(np.argmax(np.ctypeslib.as_array(logits, (self.num_vocab,))))
        now = time.perf_counter()
        for _, request in sampled:
            request.times.append(now)

    def decode(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        """Run llama.cpp on (token id, position, sequence, whether its logits are needed)."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, position, seq_id, wants_logits) in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = seq_id
            batch.logits[i] = wants_logits
        if code := llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode failed with {code}")


@llama_cpp.llama_log_callback
def silent(level: int, text: bytes, user_data: Any) -> None:
    """Print only errors."""
    if level == 4:
        print(text.decode(errors="replace"), end="")


def round_up(num_tokens: int) -> int:
    return -(-num_tokens // 256) * 256  # what llama.cpp pads its caches to


def quantised_gguf(path: Path, quantization: str) -> Path:
    """Quantise the file as llama.cpp's own command does. Q4_0 stores the tied embedding in six bits."""
    if quantization not in QUANTISED:
        raise ValueError(f"--engine llamacpp has --quantization {' and '.join(QUANTISED)}, got {quantization!r}")
    name, kind = QUANTISED[quantization]
    made = path.with_name(f"{path.stem}-{name}.gguf")
    if not made.exists():
        part = made.with_suffix(f".{os.getpid()}.part")
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = kind
        if code := llama_cpp.llama_model_quantize(str(path).encode(), str(part).encode(), params):
            raise RuntimeError(f"llama_model_quantize failed with {code}")
        part.replace(made)
    return made
