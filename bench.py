"""Offline throughput: a number of requests, all there at once, and how fast they are served.

    python bench.py                              # this engine; 256 requests on CUDA, 32 shorter ones on CPU
    python bench.py --engine hf                  # the same work through transformers' generate, static padded batches
    python bench.py --workload W3 --json out.json
    python bench.py --num-requests 64 --input-len 100 500 --output-len 16 64

The default model has the exact shape of Qwen3-0.6B, and dummy weights, so nothing is downloaded: speed does not depend
on what the weights are. Every request generates exactly the tokens that the workload says.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import (
    QWEN3_06B,
    Measurement,
    Workload,
    describe_machine,
    named_workload,
    peak_memory_bytes,
    random_workload,
)
from nanovllm import LLM, SamplingParams
from nanovllm.config import resolve_device, resolve_dtype
from nanovllm.loader import read_model_config


def main() -> None:
    args = parse_args()
    device = str(resolve_device(args.device))
    vocab_size = read_model_config(args.model)[1].vocab_size
    if args.num_requests:
        workload = random_workload(args.num_requests, args.input_len, args.output_len, args.seed, vocab_size)
    else:
        workload = named_workload(args.workload or ("offline" if device.startswith("cuda") else "W"), vocab_size)
    print(f"{args.engine}: {len(workload.prompts)} requests, {workload.num_prompt_tokens} tokens in, "
          f"{workload.num_output_tokens} out, {device}, dtype {args.dtype}")  # fmt: skip
    run = {"nanovllm": run_nanovllm, "hf": run_hf}[args.engine]
    measurement = run(workload, args, device)
    report = {"workload": workload.name, "model": args.model.name, "dtype": args.dtype, **measurement.report()}
    report["machine"] = describe_machine(device)
    for name, value in report.items():
        print(f"{name:<26} {value}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure offline throughput.")
    parser.add_argument("--engine", choices=["nanovllm", "hf"], default="nanovllm")
    parser.add_argument("--model", type=Path, default=QWEN3_06B, help="model folder (default: Qwen3-0.6B's shape)")
    parser.add_argument("--load-format", default="dummy", help="dummy (default) or safetensors")
    parser.add_argument("--dtype", default="auto", help="auto (the model's), bfloat16, float16, float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workload", choices=["offline", "W", "W2", "W3"], help="default: offline on CUDA, W on CPU")
    parser.add_argument("--num-requests", type=int, help="a random workload of so many requests instead")
    parser.add_argument("--input-len", type=int, nargs=2, default=(100, 1024), metavar=("MIN", "MAX"))
    parser.add_argument("--output-len", type=int, nargs=2, default=(100, 1024), metavar=("MIN", "MAX"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    ours = parser.add_argument_group("nanovllm")
    ours.add_argument("--temperature", type=float, default=0.0)
    ours.add_argument("--block-size", type=int)
    ours.add_argument("--num-kv-blocks", type=int)
    ours.add_argument("--max-model-len", type=int, default=4096)
    ours.add_argument("--max-num-seqs", type=int, default=256)
    ours.add_argument("--max-num-batched-tokens", type=int, help="default: the engine's")
    ours.add_argument("--attention-backend", default="auto")
    ours.add_argument("--no-prefix-caching", action="store_true")
    ours.add_argument("--enforce-eager", action="store_true")
    theirs = parser.add_argument_group("hf")
    theirs.add_argument("--hf-batch-size", type=int, default=32, help="requests in a static batch (default: 32)")
    return parser.parse_args()


def run_nanovllm(workload: Workload, args: argparse.Namespace, device: str) -> Measurement:
    llm = LLM(
        model=args.model,
        load_format=args.load_format,
        dtype=args.dtype,
        device=args.device,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        block_size=args.block_size,
        num_kv_blocks=args.num_kv_blocks,
        attention_backend=args.attention_backend,
        enable_prefix_caching=not args.no_prefix_caching,
        enforce_eager=args.enforce_eager,
        seed=args.seed,
    )
    params = [SamplingParams(temperature=args.temperature, max_tokens=n, ignore_eos=True) for n in workload.output_lens]
    llm.generate(workload.prompts[:2], SamplingParams(temperature=args.temperature, max_tokens=4), use_tqdm=False)
    llm.reset_prefix_cache()  # the warm-up must not have computed anything in advance
    start = time.perf_counter()
    outputs = llm.generate(workload.prompts, params)
    elapsed = time.perf_counter() - start
    stats = llm.get_stats()
    print(f"prefix-cache hit rate {stats.prefix_cache_hit_rate:.1%}, KV waste {stats.waste:.2%}, "
          f"{stats.num_preemptions} preemptions, {stats.num_kv_blocks} KV blocks")  # fmt: skip
    generated = [len(output.outputs[0].token_ids) for output in outputs]
    assert generated == workload.output_lens, "every request must do its whole work"
    return Measurement(
        engine="nanovllm",
        elapsed_s=elapsed,
        num_requests=len(outputs),
        num_prompt_tokens=workload.num_prompt_tokens,
        num_output_tokens=sum(generated),
        ttfts_s=[output.metrics.ttft for output in outputs if output.metrics.ttft is not None],
        tpots_s=[output.metrics.tpot for output in outputs if output.metrics.tpot is not None],
        peak_memory_bytes=peak_memory_bytes(device),
    )


def run_hf(workload: Workload, args: argparse.Namespace, device: str) -> Measurement:
    """Batches in order of arrival, padded on the left, each until its longest request is done."""
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
    return Measurement(
        engine="hf",
        elapsed_s=elapsed,
        num_requests=len(workload.prompts),
        num_prompt_tokens=workload.num_prompt_tokens,
        num_output_tokens=workload.num_output_tokens,  # what a batch generates beyond a request's length is of no use
        ttfts_s=ttfts,
        tpots_s=tpots,
        peak_memory_bytes=peak_memory_bytes(device),
    )


def load_hf(args: argparse.Namespace, device: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = resolve_dtype(args.dtype, read_model_config(args.model)[1].dtype)
    if args.load_format != "dummy":
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(device).eval()
    torch.manual_seed(args.seed)
    config = AutoConfig.from_pretrained(args.model)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()


def hf_generate(model: Any, prompts: list[list[int]], num_tokens: int, device: str) -> list[float]:
    """Greedy; returns the clock at each of the `num_tokens` steps."""
    longest = max(map(len, prompts))
    input_ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)  # [batch, longest]
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    times: list[float] = []

    def read_clock(input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)  # nobody stops early

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


if __name__ == "__main__":
    main()
