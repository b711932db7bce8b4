"""Offline throughput of any engine, compared with the least time that the machine allows.

    python -m benchmarks.offline                               # nanovllm; 256 requests on CUDA, workload W on a CPU
    python -m benchmarks.offline --engine hf                   # transformers' generate, in static padded batches
    path/to/its/python -m benchmarks.offline --engine vllm     # in the engine's own environment: see cpu_peers.md
    python -m benchmarks.offline --workload W3 --first 8 --json out.json
    python -m benchmarks.offline --model Qwen/Qwen3-1.7B       # another shape; its weights: --load-format safetensors

`benchmarks.cpu` and `benchmarks.gpu_suite` start it, one process for each run. It serves the same work as `bench.py`
and also reports details of the engine, peak memory, and the fraction reached of the machine's roofline
(benchmarks/roofline.py). `bench.py` is the short version for users.
"""

import argparse
import json
import time
from pathlib import Path

from benchmarks.common import (
    QWEN3_06B,
    Measurement,
    ModelShape,
    Workload,
    describe_machine,
    find_model,
    named_workload,
    peak_memory_bytes,
    random_workload,
    read_config,
    resolve_device_name,
    resolve_dtype_name,
)
from benchmarks.peers import PACKAGES, PEERS
from benchmarks.roofline import Rates, best_rates, measure_rates_apart, report_roofline


def main() -> None:
    args = parse_args()
    device = resolve_device_name(args.device)
    dtype = resolve_dtype_name(args.dtype, args.model)
    shape = ModelShape.from_folder(args.model)
    if args.num_requests:
        workload = random_workload(args.num_requests, args.input_len, args.output_len, args.seed, shape.vocab_size)
    else:
        workload = named_workload(args.workload or ("W" if device == "cpu" else "offline"), shape.vocab_size)
    if args.first:
        workload = workload.first(args.first)
    print(f"{args.engine}: {len(workload.prompts)} requests, {workload.num_prompt_tokens} tokens in, "
          f"{workload.num_output_tokens} out, {device}, dtype {dtype}, quantization {args.quantization}")  # fmt: skip
    rates = [Rates(*(1e9 * rate for rate in args.rates))] if args.rates else []
    measures_rates = not (args.rates or args.no_roofline)
    if measures_rates:
        rates.append(measure_rates_apart(dtype, device, args.quantization is not None))
    measurement = {"nanovllm": run_nanovllm, **PEERS}[args.engine](workload, args, device)
    report = {"workload": workload.name, "model": args.model_name, "dtype": dtype, "quantization": args.quantization}
    report |= measurement.report()
    if measures_rates and device == "cpu":  # a second time, because other processes may have disturbed the first
        rates.append(measure_rates_apart(dtype, device, args.quantization is not None))
    if rates:
        kinds = (dtype, args.quantization, args.kv_cache_dtype)
        report |= report_roofline(shape, workload, kinds, best_rates(rates), measurement.elapsed_s)
    report["machine"] = describe_machine(device, PACKAGES[args.engine])
    for name, value in report.items():
        print(f"{name:<26} {value}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure offline throughput.")
    parser.add_argument("--engine", choices=["nanovllm", *PEERS], default="nanovllm")
    parser.add_argument("--model", default=str(QWEN3_06B), help="folder or hub id (default: Qwen3-0.6B's shape)")
    parser.add_argument("--load-format", default="dummy", help="dummy (default) or safetensors")
    parser.add_argument("--dtype", default="auto", help="auto (the model's), bfloat16, float16, float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workload", choices=["offline", "W", "W2", "W3"], help="default: offline on CUDA, W on CPU")
    parser.add_argument("--num-requests", type=int, help="a random workload of this many requests instead")
    parser.add_argument("--first", type=int, metavar="N", help="serve only the first N requests of the workload")
    parser.add_argument("--input-len", type=int, nargs=2, default=(100, 1024), metavar=("MIN", "MAX"))
    parser.add_argument("--output-len", type=int, nargs=2, default=(100, 1024), metavar=("MIN", "MAX"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--no-roofline", action="store_true", help="do not measure the machine's rates")
    parser.add_argument("--rates", type=float, nargs=2, metavar=("GB/S", "GFLOP/S"), help="the rates, if known")
    engine = parser.add_argument_group("nanovllm and vllm")
    engine.add_argument("--max-model-len", type=int, help="default: 4096, or the model's own limit if that is smaller")
    engine.add_argument("--max-num-seqs", type=int, default=256)
    engine.add_argument("--max-num-batched-tokens", type=int, help="default: the engine's own")
    engine.add_argument("--no-prefix-caching", action="store_true")
    engine.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--quantization", type=parse_quantization,
                        help="int8 or int4: nanovllm (or a dict as JSON), llamacpp, openvino")  # fmt: skip
    ours = parser.add_argument_group("nanovllm")
    ours.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="processes that share each step")
    ours.add_argument("--trace", type=Path, metavar="JSONL", help="record each step; `nanovllm view` replays them")
    ours.add_argument("--temperature", type=float, default=0.0)
    ours.add_argument("--block-size", type=int)
    ours.add_argument("--num-kv-blocks", type=int)
    ours.add_argument("--attention-backend", default="auto")
    ours.add_argument("--kv-cache-dtype", default="auto", help="auto (the model's) or fp8")
    ours.add_argument(
        "--speculative-config", type=json.loads, metavar="JSON", help="how tokens are drafted (default: not at all)"
    )
    ours.add_argument("--overlap", action=argparse.BooleanOptionalAction, help="launch steps early (default: on CUDA)")
    ours.add_argument("--cuda-graphs", action=argparse.BooleanOptionalAction, help="of decodes (default: on CUDA)")
    theirs = parser.add_argument_group("hf, vllm, llamacpp, openvino")
    theirs.add_argument("--hf-batch-size", type=int, default=32, help="requests in a static batch (default: 32)")
    theirs.add_argument("--engine-option", type=parse_option, action="append", default=[], metavar="NAME=JSON",
                        help="of vLLM's LLM, llama.cpp's context, OpenVINO's scheduler; may be repeated")  # fmt: skip
    args = parser.parse_args()
    args.model_name = Path(args.model).name
    try:
        args.model = find_model(args.model, with_weights=args.load_format != "dummy")
    except ValueError as error:
        parser.error(str(error))
    if args.max_model_len is None:
        args.max_model_len = min(4096, read_config(args.model).get("max_position_embeddings", 4096))
    return args


def parse_option(text: str) -> tuple[str, object]:
    """Parse `block_size=32` to ("block_size", 32)."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=JSON, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{value!r} is not JSON (a string needs double quotes)") from error


def parse_quantization(text: str) -> object:
    """Return `int8` as it is, and parse `{"method": "int4"}` to a dict."""
    return json.loads(text) if text.startswith("{") else text


def run_nanovllm(workload: Workload, args: argparse.Namespace, device: str) -> Measurement:
    from nanovllm_extras import LLM, SamplingParams  # not at the top: other engines' environments lack its dependencies

    start = time.perf_counter()
    llm = LLM(
        model=args.model,
        load_format=args.load_format,
        dtype=args.dtype,
        quantization=args.quantization,
        device=args.device,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        block_size=args.block_size,
        num_kv_blocks=args.num_kv_blocks,
        attention_backend=args.attention_backend,
        tensor_parallel_size=args.tensor_parallel_size,
        kv_cache_dtype=args.kv_cache_dtype,
        enable_prefix_caching=not args.no_prefix_caching,
        enforce_eager=args.enforce_eager,
        enable_overlap=args.overlap,
        enable_cuda_graphs=args.cuda_graphs,
        speculative_config=args.speculative_config,
        seed=args.seed,
        trace=args.trace,
    )
    startup_s = time.perf_counter() - start
    print(llm.engine.description)
    params = [SamplingParams(temperature=args.temperature, max_tokens=n, ignore_eos=True) for n in workload.output_lens]
    # Compile kernels first. On a GPU they depend on the sizes of batches; a short run of all requests takes seconds.
    warm_up = workload.prompts[:2] if device == "cpu" else workload.prompts
    llm.generate(warm_up, SamplingParams(temperature=args.temperature, max_tokens=4, ignore_eos=True), use_tqdm=False)
    llm.reset_prefix_cache()  # the warm-up must not have computed anything in advance
    before = llm.get_stats()
    start = time.perf_counter()
    outputs = llm.generate(workload.prompts, params)
    elapsed = time.perf_counter() - start
    stats = llm.get_stats()
    print(f"prefix-cache hit rate {stats.prefix_cache_hit_rate:.1%}, KV waste {stats.waste:.2%}, "
          f"{stats.num_preemptions} preemptions, {stats.num_kv_blocks} KV blocks")  # fmt: skip
    if stats.num_draft_tokens:
        print(f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} drafts accepted")
    generated = [len(output.outputs[0].token_ids) for output in outputs]
    assert generated == workload.output_lens, "a request generated a different number of tokens"
    return Measurement(
        engine="nanovllm",
        elapsed_s=elapsed,
        num_requests=len(outputs),
        num_prompt_tokens=workload.num_prompt_tokens,
        num_output_tokens=sum(generated),
        ttfts_s=[output.metrics.ttft for output in outputs if output.metrics.ttft is not None],
        tpots_s=[output.metrics.tpot for output in outputs if output.metrics.tpot is not None],
        peak_memory_bytes=peak_memory_bytes(device),
        details={
            "engine_description": llm.engine.description,
            "startup_s": round(startup_s, 2),
            "startup_parts_s": {part: round(seconds, 3) for part, seconds in llm.engine.parts.startup_seconds.items()},
            "steps": stats.steps - before.steps,
            "preemptions": stats.num_preemptions - before.num_preemptions,
            "kv_blocks": stats.num_kv_blocks,
        },
    )


if __name__ == "__main__":
    main()
