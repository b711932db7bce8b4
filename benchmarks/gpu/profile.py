"""Measure a decode step on the GPU: the time of each kernel and kind of kernels, and the idle time between them.

    python -m benchmarks.gpu.profile --output profile.json --trace here/trace

torch.profiler records ten steps in which every sequence decodes. The kernels' times come from its trace. The time of a
step, and so the idle time of the GPU, is measured without the profiler, because the profiler slows the host down. On a
CPU, for rehearsals, operators replace kernels. The trace can be opened at https://ui.perfetto.dev.
"""

import argparse
import gzip
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import QWEN3_06B
from nanovllm_extras import LLM, SamplingParams

NUM_STEPS = 10  # that are traced
TIMED_STEPS = 40
MAX_TRACE_BYTES = 1_000_000
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
# The first kind with a word of a kernel's name, in lower case, is the kernel's kind.
KINDS = {
    "attention": ("decode_kernel", "prefill_kernel", "merge_kernel", "flash", "fmha", "attention", "splitkv"),
    "sampling": ("sampl", "argmax", "softmax", "sort", "topk", "top_k", "top_p", "gumbel", "cumsum", "scan", "logprob",
                 "stats_kernel", "truncate_kernel", "pick_kernel", "penal", "uniform", "multinomial"),
    "copies": ("memcpy", "memset", "copy", "catarray", "aten::cat", "aten::to"),
    "matrix products": ("gemm", "gemv", "nvjet", "cutlass", "cublas", "xmma", "splitk", "dot_kernel", "few_tokens",
                        "aten::mm", "aten::addmm", "aten::bmm", "linear", "matmul"),
    "norms, rotary, activation, K and V": ("norm", "rope", "rotary", "silu", "swiglu", "gate", "store", "elementwise",
                                           "reduce_kernel", "aten::mul", "aten::add", "aten::pow", "aten::rsqrt",
                                           "index", "gather", "embedding", "fill"),
}  # fmt: skip
OTHER = "other"


class Event(NamedTuple):
    """One kernel, copy or fill; times in microseconds."""

    name: str
    start: float
    duration: float


def main() -> None:
    parser = argparse.ArgumentParser(description="Profile decode steps.")
    parser.add_argument("--model", type=Path, default=QWEN3_06B)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[256, 1])
    parser.add_argument("--context-len", type=int, default=512)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--trace", help="how the names of the traces begin (default: none are kept)")
    args = parser.parse_args()
    max_len = args.context_len + TIMED_STEPS + NUM_STEPS + 200  # with room for what decodes beside others' prefill
    llm = LLM(args.model, load_format="dummy", device=args.device, attention_backend=args.attention_backend,
              max_model_len=max_len, max_num_seqs=max(args.num_seqs), enable_prefix_caching=False)  # fmt: skip
    fill(llm, 1, 8, 1)
    record_steps(llm, 1, 1)  # a profiler's first use takes seconds
    rows = []
    for num_seqs in args.num_seqs:
        row, trace = measure(llm, num_seqs, args.context_len)
        if args.trace:
            row["trace"] = keep_trace(trace, Path(f"{args.trace}-decode-{num_seqs}.trace.json.gz"))
        rows.append(row)
        print_row(row)
    report = {"context_len": args.context_len, "engine_description": llm.engine.description, "rows": rows}
    if args.output:
        args.output.write_text(json.dumps(report, indent=1))


# ---- in the engine


def measure(llm: LLM, num_seqs: int, context_len: int) -> tuple[dict[str, Any], bytes]:
    """The figures of one batch size, and the trace they come from."""
    fill(llm, num_seqs, context_len, 3 + TIMED_STEPS + NUM_STEPS)
    time_steps(llm, num_seqs, 3)
    step_us = 1e6 * time_steps(llm, num_seqs, TIMED_STEPS)
    trace = record_steps(llm, num_seqs, NUM_STEPS)
    events = device_events(json.loads(trace)["traceEvents"])
    return {"num_seqs": num_seqs, **describe(events, NUM_STEPS, step_us)}, trace


def fill(llm: LLM, num_seqs: int, context_len: int, num_steps: int) -> None:
    """Sequences that all decode from here on, for at least `num_steps` steps."""
    num_prefill_steps = -(-num_seqs * (context_len + 1) // llm.engine.parts.max_num_batched_tokens)
    # those that are prefilled first decode beside the others' prefill; with overlap one step more is under way
    params = SamplingParams(temperature=0, max_tokens=num_steps + 2 * num_prefill_steps + 4, ignore_eos=True)
    for i in range(num_seqs):
        llm.engine.add_request(str(i), [(7 * i + j) % 1000 for j in range(context_len)], params, stream=False)
    while llm.engine.step().num_prefill_tokens:
        pass


def time_steps(llm: LLM, num_seqs: int, num_steps: int) -> float:
    """Median seconds from the end of one step to the end of the next."""
    ends = [time.perf_counter()]
    for _ in range(num_steps):
        decode_all(llm, num_seqs)
        ends.append(time.perf_counter())
    return median(later - earlier for earlier, later in zip(ends, ends[1:], strict=False))


def decode_all(llm: LLM, num_seqs: int) -> None:
    step = llm.engine.step()
    if (step.num_decode_tokens, step.num_prefill_tokens) != (num_seqs, 0):
        raise RuntimeError(f"a step of {num_seqs} decodes had {step.num_decode_tokens}, and {step.num_prefill_tokens}")


def record_steps(llm: LLM, num_seqs: int, num_steps: int) -> bytes:
    """torch.profiler's trace of the next steps; then the requests are finished."""
    is_cuda = llm.engine.runner.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_cuda
    if is_cuda:
        torch.cuda.synchronize()  # what is in flight stays out of the trace
    with profile(activities=activities) as profiler:
        for _ in range(num_steps):
            decode_all(llm, num_seqs)
        if is_cuda:
            torch.cuda.synchronize()  # and what was launched last is in it
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return path.read_bytes()


def keep_trace(trace: bytes, path: Path) -> str | None:
    """Its file's name; None if it would be too large to keep beside the results."""
    packed = gzip.compress(trace)
    if len(packed) > MAX_TRACE_BYTES:
        return None
    path.write_bytes(packed)
    return path.name


# ---- in the trace: pure


def device_events(trace_events: Iterable[dict[str, Any]]) -> list[Event]:
    """What ran on the GPU, in order of start; where nothing did, the CPU operators that no other called."""
    complete = [e for e in trace_events if e.get("ph") == "X"]
    chosen = [e for e in complete if e.get("cat") in DEVICE_CATEGORIES]
    chosen = chosen or outermost([e for e in complete if e.get("cat") == "cpu_op"])
    return sorted((Event(e["name"], e["ts"], e["dur"]) for e in chosen), key=lambda event: event.start)


def outermost(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that no other of the same thread contains."""
    chosen: list[dict[str, Any]] = []
    for e in sorted(events, key=lambda e: (e.get("tid", 0), e["ts"], -e["dur"])):
        last = chosen[-1] if chosen else None
        if last is None or last.get("tid", 0) != e.get("tid", 0) or e["ts"] >= last["ts"] + last["dur"]:
            chosen.append(e)
    return chosen


def describe(events: list[Event], num_steps: int, step_us: float) -> dict[str, Any]:
    """Per step, from `num_steps` steps' events; `step_us` is how long a step takes with no profiler around."""
    by_kind, span_us = busy_by_kind(events)
    busy_us = sum(by_kind.values())
    per_step = {kind: us / num_steps for kind, us in by_kind.items()}
    idle_us = max(0.0, step_us - busy_us / num_steps)
    whole_us = idle_us + busy_us / num_steps
    kinds = {kind: per_step.get(kind, 0.0) for kind in [*KINDS, OTHER]} | {"idle": idle_us}
    return {
        "step_us": round(step_us, 1),
        "busy_us": round(busy_us / num_steps, 1),
        "idle_share": round(idle_us / whole_us, 4) if whole_us else 0.0,
        "idle_share_in_trace": round(1 - busy_us / span_us, 4) if span_us else 0.0,
        "launches": round(len(events) / num_steps, 1),
        "kinds_us": {kind: round(us, 1) for kind, us in kinds.items()},
        "top_kernels": top_kernels(events, num_steps, 20),
    }


def busy_by_kind(events: list[Event]) -> tuple[dict[str, float], float]:
    """(busy microseconds of each kind, microseconds from the first start to the last end).

    An instant in which several kernels run counts once, for the one that started first, so that the kinds' sum is the
    length of the intervals' union.
    """
    by_kind: dict[str, float] = defaultdict(float)
    first = min((event.start for event in events), default=0.0)
    covered = first  # everything before is accounted for
    for event in sorted(events, key=lambda event: event.start):
        end = event.start + event.duration
        by_kind[kind_of(event.name)] += max(0.0, end - max(covered, event.start))
        covered = max(covered, end)
    return dict(by_kind), covered - first


def kind_of(name: str) -> str:
    name = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), OTHER)


def top_kernels(events: list[Event], num_steps: int, count: int) -> list[dict[str, Any]]:
    """By time, per step; a kernel's long C++ name is cut."""
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        times[event.name].append(event.duration)
    rows = sorted(times.items(), key=lambda item: -sum(item[1]))[:count]
    return [
        {
            "name": name[:120],
            "kind": kind_of(name),
            "us_per_step": round(sum(durations) / num_steps, 2),
            "calls_per_step": round(len(durations) / num_steps, 2),
            "us_each": round(sum(durations) / len(durations), 2),
        }
        for name, durations in rows
    ]


def print_row(row: dict[str, Any]) -> None:
    print(f"\nbatch of {row['num_seqs']}: {row['step_us']:.0f} us a step, {row['idle_share']:.1%} of it idle")
    for kind, us in row["kinds_us"].items():
        print(f"  {kind:<36} {us:>9.1f} us")
    for kernel in row["top_kernels"]:
        print(f"  {kernel['us_per_step']:>9.1f} us  {kernel['calls_per_step']:>6.1f} x  {kernel['name'][:90]}")


if __name__ == "__main__":
    main()
