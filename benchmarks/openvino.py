"""Serve a workload with OpenVINO GenAI: its continuous batching over a paged KV cache, on a model of random weights.

optimum-intel exports the model, also in 8 or 4 bits, and the result is kept for later runs. peers.py calls this file,
which needs openvino-genai, optimum-intel, nncf and transformers.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
import torch
from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import Workload, resolve_dtype_name

SCHEDULER_OPTIONS = {"cache_size": 4, "dynamic_split_fuse": True}  # GB of KV cache; chunked prefill
WEIGHTS = {
    None: {"load_in_8bit": False},
    "int8": {"quantization_config": OVWeightQuantizationConfig(bits=8)},
    "int4": {"quantization_config": OVWeightQuantizationConfig(bits=4, group_size=128, sym=True, ratio=1.0)},
}


def serve(workload: Workload, args: argparse.Namespace) -> tuple[float, list[list[float]]]:
    """Return the seconds for all requests and, for each request, the times at which its tokens arrived."""
    folder = dummy_model(args.model, resolve_dtype_name(args.dtype, args.model), args.quantization, args.seed)
    scheduler = openvino_genai.SchedulerConfig()
    given = {"max_num_seqs": args.max_num_seqs, "enable_prefix_caching": not args.no_prefix_caching}
    if args.max_num_batched_tokens:
        given["max_num_batched_tokens"] = args.max_num_batched_tokens
    for name, value in (SCHEDULER_OPTIONS | given | dict(args.engine_option)).items():
        if not hasattr(scheduler, name):
            raise ValueError(f"--engine-option {name}: OpenVINO GenAI's scheduler has no such option")
        setattr(scheduler, name, value)
    threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", threads)
    others = [prompt[::-1] for prompt in workload.prompts[:2]]  # the prefix cache must not have the timed prompts
    run(pipeline, others, [4] * len(others))  # warm-up
    return run(pipeline, workload.prompts, workload.output_lens)


def run(pipeline: Any, prompts: list[list[int]], output_lens: list[int]) -> tuple[float, list[list[float]]]:
    """Add all requests at once, and run until all are finished."""
    start = time.perf_counter()
    handles = [
        pipeline.add_request(i, openvino.Tensor(np.array([prompt], dtype=np.int64)), greedy(num_tokens))
        for i, (prompt, num_tokens) in enumerate(zip(prompts, output_lens, strict=True))
    ]
    times: list[list[float]] = [[] for _ in handles]
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now = time.perf_counter() - start
        for handle, seen in zip(handles, times, strict=True):
            while handle.can_read():
                seen += [now] * sum(len(output.generated_ids) for output in handle.read().values())
    return time.perf_counter() - start, times


def greedy(num_tokens: int) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.do_sample = num_tokens, False
    config.set_eos_token_id(0)  # one is required, and then ignored
    config.ignore_eos = True
    return config


def dummy_model(folder: Path, dtype: str, quantization: str | None, seed: int) -> Path:
    """Return a model of random weights in OpenVINO's format, made at the first call and kept."""
    if quantization not in WEIGHTS:
        raise ValueError(f"--engine openvino has --quantization int8 and int4, got {quantization!r}")
    cache = Path(os.environ.get("XDG_CACHE_HOME", tempfile.gettempdir())) / "nanovllm-dummy-openvino"
    path = cache / f"{folder.name}-{dtype}-{quantization}-{seed}"
    if not path.exists():
        torch.manual_seed(seed)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as parts:  # an interrupted run must not look finished
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=getattr(torch, dtype))
            model.save_pretrained(f"{parts}/plain")
            exported = OVModelForCausalLM.from_pretrained(
                f"{parts}/plain", export=True, compile=False, **WEIGHTS[quantization]
            )
            exported.save_pretrained(f"{parts}/exported")
            Path(f"{parts}/exported").replace(path)
    return path
