"""Offline throughput: all requests arrive at once. How many tokens per second does the engine generate?

    python bench.py                      # on a CPU workload W (32 requests), on CUDA 256 longer random requests
    python bench.py --extras             # the engine of nanovllm_extras; its own options imply it
    python bench.py --engine hf          # the same work through transformers' generate, in static padded batches
    python bench.py --model Qwen/Qwen3-0.6B --load-format safetensors --tensor-parallel-size 2
    python bench.py --temperature 0.6    # sample, as nano-vllm's bench.py does
    python bench.py --num-requests 64 --input-len 100 500 --output-len 16 64 --json out.json

The default model has the shape of Qwen3-0.6B and random weights: speed does not depend on their values. Every request
generates as many tokens as the workload says. This file needs only an installed nanovllm, and can be copied elsewhere.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16"}  # fmt: skip
WORKLOADS = {  # tokens of each prompt, tokens of each output
    "W": ([248, 246, 105, 84, 208, 58, 64, 162, 227, 163, 168, 72, 199, 219, 89, 98,
           142, 206, 65, 140, 249, 230, 83, 137, 135, 191, 104, 169, 119, 117, 178, 132],
          [81, 91, 125, 116, 51, 109, 67, 41, 99, 78, 38, 70, 122, 57, 64, 124,
           46, 94, 61, 65, 100, 52, 112, 128, 83, 119, 35, 39, 61, 110, 104, 32]),
    "W2": ([64], [64])}  # fmt: skip
OPTIONS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_kv_blocks",
           "attention_backend", "enforce_eager", "enable_prefix_caching")  # fmt: skip
OPTIONS_OF_EXTRAS = ("quantization", "kv_cache_dtype", "tensor_parallel_size", "speculative_config", "trace",
                     "enable_overlap", "enable_cuda_graphs")  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        args = parse_args(Path(scratch))
        report = run_hf(args) if args.engine == "hf" else run_nanovllm(args)
    for name, value in report.items():
        print(f"{name:<26} {value}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def parse_args(scratch: Path) -> argparse.Namespace:
    """Parse the command line, find the model, and make the requests: `prompts` and `output_lens`."""
    parser = argparse.ArgumentParser(description="Measure offline throughput.")
    parser.add_argument("--engine", choices=["nanovllm", "hf"], default="nanovllm")
    parser.add_argument("--extras", action="store_true", help="use the engine of nanovllm_extras, not of nanovllm")
    parser.add_argument("--model", help="folder or hub id (default: the shape of Qwen3-0.6B)")
    parser.add_argument(
        "--load-format", help="safetensors (default for a folder with weights), or dummy for random ones"
    )
    parser.add_argument("--dtype", default="auto", help="auto (the model's), bfloat16, float16, float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workload", choices=WORKLOADS, help="default: W on a CPU, random requests on CUDA")
    parser.add_argument("--num-requests", type=int, help="serve random requests (default on CUDA: 256)")
    parser.add_argument("--input-len", type=int, nargs=2, default=(100, 1024), metavar=("MIN", "MAX"))
    parser.add_argument("--output-len", type=int, nargs=2, default=(100, 1024), metavar=("MIN", "MAX"))
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="default 0, greedy; nano-vllm's bench.py has 0.6"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hf-batch-size", type=int, default=32, help="requests in a batch of hf (default: 32)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.add_argument_group("options of nanovllm's LLM; each value is JSON, a name, or left out for true")
    for name in (*OPTIONS, *OPTIONS_OF_EXTRAS):
        options.add_argument("--" + name.replace("_", "-"), type=parse_value, nargs="?", const=True, metavar="VALUE")
    args = parser.parse_args()
    args.options = {
        name: value for name in (*OPTIONS, *OPTIONS_OF_EXTRAS) if (value := getattr(args, name)) is not None
    }
    if args.engine == "hf" and args.options:
        parser.error(f"--{next(iter(args.options)).replace('_', '-')} is for nanovllm, not for --engine hf")
    if args.engine == "hf" and args.temperature:
        parser.error("--temperature is for nanovllm, not for --engine hf, which is greedy")
    args.extras = args.extras or not args.options.keys().isdisjoint(OPTIONS_OF_EXTRAS)
    args.model_name = Path(args.model or "qwen3-0.6b").name
    has_weights = args.model is not None and any(Path(args.model).glob("*.safetensors"))
    args.load_format = args.load_format or ("safetensors" if has_weights else "dummy")
    try:
        if args.model is None:
            args.model = scratch
            (scratch / "config.json").write_text(json.dumps(QWEN3_06B), encoding="utf-8")
        elif not Path(args.model).is_dir():
            files = ["config.json"] if args.load_format == "dummy" else ["*.json", "*.safetensors"]
            args.model = import_module("huggingface_hub").snapshot_download(args.model, allow_patterns=files)
        config = json.loads(Path(args.model, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        parser.error(f"--model must be a folder with a config.json, or a hub id, got {args.model!r}: {error}")
    args.max_model_len = args.max_model_len or min(4096, config.get("max_position_embeddings", 4096))
    if args.num_requests or (args.workload is None and args.device != "cpu"):
        args.workload, args.num_requests = "random", args.num_requests or 256
        inputs, outputs = [args.input_len] * args.num_requests, [args.output_len] * args.num_requests
    else:
        args.workload = args.workload or "W"
        inputs, outputs = ([(n, n) for n in lens] for lens in WORKLOADS[args.workload])
    rng, top = random.Random(args.seed), min(10_000, config["vocab_size"] - 1)
    args.prompts = [[rng.randint(0, top) for _ in range(rng.randint(*limits))] for limits in inputs]
    args.output_lens = [rng.randint(*limits) for limits in outputs]
    return args


def parse_value(text: str) -> Any:
    return json.loads(text) if text[0] in "0123456789{" or text in ("true", "false") else text


def note(line: str) -> None:
    """Say on stderr what the next seconds or minutes are for."""
    print(line, file=sys.stderr, flush=True)


def run_nanovllm(args: argparse.Namespace) -> dict[str, Any]:
    note("starting the engine: it loads the model, compiles kernels the first time, and warms up …")
    nanovllm = import_module("nanovllm_extras" if args.extras else "nanovllm")
    options = {"dtype": args.dtype, "device": args.device, "seed": args.seed, "load_format": args.load_format}
    llm = nanovllm.LLM(args.model, **options, **args.options | {"max_model_len": args.max_model_len})
    fields = {"temperature": args.temperature, "ignore_eos": True}
    params = [nanovllm.SamplingParams(max_tokens=n, **fields) for n in (4, *args.output_lens)]
    # Compile kernels first, on reversed prompts, so that the prefix cache has no prompt of the measured run.
    llm.generate([p[::-1] for p in args.prompts[: 2 if args.device == "cpu" else None]], params[0], use_tqdm=False)
    note(f"serving {len(args.prompts)} requests; the bar first moves when one of them has ended …")
    start, busy = time.perf_counter(), time.process_time()
    outputs = llm.generate(args.prompts, params[1:])
    elapsed_s, processor_s = time.perf_counter() - start, time.process_time() - busy
    assert [len(output.outputs[0].token_ids) for output in outputs] == args.output_lens
    metrics = [output.metrics for output in outputs] if args.extras else []  # only the extras record times
    about = {"computed_by": llm.engine.description.split("; ")[-1], "processor_s": round(processor_s, 3)}
    return about | make_report(args, elapsed_s, metrics)


def load_hf(args: argparse.Namespace) -> Any:
    transformers = import_module("transformers")
    dtype = {} if args.dtype == "auto" else {"dtype": getattr(torch, args.dtype)}
    if args.load_format != "dummy":
        return transformers.AutoModelForCausalLM.from_pretrained(args.model, **dtype)
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(args.model), **dtype)


def run_hf(args: argparse.Namespace) -> dict[str, Any]:
    """Serve batches in order of arrival, padded on the left, each until its longest request is finished."""
    note("loading the model …")
    model = load_hf(args).to(args.device).eval()

    def generate(prompts: list[list[int]], n: int) -> None:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=args.device)  # [batch, longest]
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=args.device)
        model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, max_new_tokens=n, min_new_tokens=n)

    generate(args.prompts[:2], 4)  # warm-up
    note(f"serving {len(args.prompts)} requests in batches of {args.hf_batch_size}; nothing is shown meanwhile …")
    start = time.perf_counter()
    for i in range(0, len(args.prompts), args.hf_batch_size):
        end = i + args.hf_batch_size
        generate(args.prompts[i:end], max(args.output_lens[i:end]))
    return make_report(args, time.perf_counter() - start, [])


def make_report(args: argparse.Namespace, elapsed_s: float, metrics: list[Any]) -> dict[str, Any]:
    num, num_in, num_out = len(args.prompts), sum(map(len, args.prompts)), sum(args.output_lens)
    report = {"engine": args.engine, "workload": args.workload, "model": args.model_name, "device": args.device,
              "load_format": args.load_format, "temperature": args.temperature,
              "elapsed_s": round(elapsed_s, 3), "requests": num, "prompt_tokens": num_in, "output_tokens": num_out,
              "requests_per_second": round(num / elapsed_s, 3),
              "output_tokens_per_second": round(num_out / elapsed_s, 2),
              "total_tokens_per_second": round((num_in + num_out) / elapsed_s, 2)}  # fmt: skip
    for name in ("ttft", "tpot"):
        if values := [value for one in metrics if (value := getattr(one, name)) is not None]:
            report[name + "_s"] = {f"p{p}": round(float(np.percentile(values, p)), 5) for p in (50, 90, 99)}
    return report


if __name__ == "__main__":
    main()
