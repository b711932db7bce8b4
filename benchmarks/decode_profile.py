"""Measure each part of a decode step on a CPU, and compare it with the minimum time on this machine.

    python -m benchmarks.decode_profile
    python -m benchmarks.decode_profile --num-seqs 1 8 32 --context-len 300 --png docs/images/cpu_decode_step.png

The model has the shape of Qwen3-0.6B and random weights. Clocks are read around the layers of an engine's steps. Here
each part of a decoder layer is called by itself, not all in one call as usual
(`nanovllm_extras/kernels/cpu/cpu_decoder_layer.py`). The bound of a part is the time to read its bytes at the measured
bandwidth, or the time of its arithmetic at the measured rate of matrix products, whichever is longer (see roofline.py).
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import DTYPE_BYTES, QWEN3_06B, ModelShape, describe_machine, resolve_dtype_name
from benchmarks.roofline import Rates, best_rates, measure_rates_apart
from nanovllm_extras import LLM, SamplingParams
from nanovllm_extras.kernels.cpu.cpu_decoder_layer import CpuDecoderLayer

PROJECTIONS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
PARTS = (*PROJECTIONS, "lm_head", "attention", "norms and activations", "rest of the model", "sampling", "engine")


def main() -> None:
    parser = argparse.ArgumentParser(description="Profile decode steps on CPU.")
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context-len", type=int, default=300)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--model", type=Path, default=QWEN3_06B)
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--enforce-eager", action="store_true", help="PyTorch's layers")
    parser.add_argument("--png", type=Path, help="draw it (needs matplotlib)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dtype = resolve_dtype_name(args.dtype, args.model)
    rates = measure_rates_apart(dtype)
    llm = LLM(args.model, load_format="dummy", dtype=args.dtype, device="cpu", max_num_seqs=max(args.num_seqs),
              max_model_len=args.context_len + args.steps + 8, enable_prefix_caching=False,
              attention_backend=args.attention_backend, enforce_eager=args.enforce_eager)  # fmt: skip
    shape = ModelShape.from_folder(args.model)
    clock = Clock(llm)
    measured = {n: measure(llm, clock, n, args.context_len, args.steps) for n in args.num_seqs}
    rates = best_rates([rates, measure_rates_apart(dtype)])
    bounds = {n: bound(shape, llm, n, args.context_len, DTYPE_BYTES[dtype], rates) for n in args.num_seqs}
    print(llm.engine.description)
    print(f"{rates.read_bytes_per_s / 1e9:.1f} GB/s, {rates.gemm_flops_per_s / 1e9:.0f} GFLOP/s")
    print_table(measured, bounds)
    if args.json:
        rows = [{"num_seqs": n, "measured_ms": measured[n], "bound_ms": bounds[n]} for n in args.num_seqs]
        report = {"context_len": args.context_len, "dtype": dtype, "rates": vars(rates), "rows": rows}
        args.json.write_text(json.dumps({**report, "machine": describe_machine("cpu")}, indent=2) + "\n")
    if args.png:
        draw(measured, bounds, args.png, f"context {args.context_len}, {llm.engine.description.split('; ')[-1]}")


class Clock:
    """Adds up the seconds of each part of the steps."""

    def __init__(self, llm: LLM) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        runner = llm.engine.runner
        model: Any = runner.model
        for name, module in model.named_modules():
            if isinstance(module, CpuDecoderLayer):  # call its parts one by one, to measure each
                module.forward = module.layer.forward  # type: ignore[method-assign]
            leaf = name.rpartition(".")[2]
            if leaf in PROJECTIONS or leaf == "attention":
                self.watch(module, "forward", leaf)
            elif leaf == "activation" or leaf.endswith("norm"):
                self.watch(module, "forward", "norms and activations")
        self.watch(model, "forward", "model")
        self.watch(model, "compute_logits", "lm_head")
        self.watch(runner, "run", "run")
        self.watch(llm.engine, "step", "step")

    def watch(self, owner: object, method: str, part: str) -> None:
        """Count the time of this object's method as this part."""
        setattr(owner, method, self.timed(part, getattr(owner, method)))

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[part] += time.perf_counter() - start
            return result

        return wrapped

    def read(self) -> dict[str, float]:
        """Return the milliseconds of each part since the last call."""
        s = self.seconds
        parts = {part: s[part] for part in PARTS if part in s}
        parts["rest of the model"] = s["model"] - sum(parts.values()) + s["lm_head"]
        parts["sampling"] = s["run"] - s["model"] - s["lm_head"]
        parts["engine"] = s["step"] - s["run"]
        self.seconds.clear()
        return {part: 1e3 * parts[part] for part in PARTS}


def measure(llm: LLM, clock: Clock, num_seqs: int, context_len: int, num_steps: int) -> dict[str, float]:
    """Return the median milliseconds of each part when all sequences decode with about `context_len` tokens."""
    start = context_len - num_steps // 2
    params = SamplingParams(temperature=0, max_tokens=num_steps + 2, ignore_eos=True)
    for i in range(num_seqs):
        llm.engine.add_request(str(i), [(7 * i + j) % 1000 for j in range(start)], params)
    while llm.engine.step().num_prefill_tokens:
        pass
    clock.read()
    steps = []
    for _ in range(num_steps - 1):
        llm.engine.step()
        steps.append(clock.read())
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    return {part: median(step[part] for step in steps) for part in PARTS}


def bound(
    shape: ModelShape, llm: LLM, num_seqs: int, context_len: int, bytes_per_value: int, rates: Rates
) -> dict[str, float]:
    """The least milliseconds of each part that reads weights or the KV cache."""

    def least_ms(num_values: int, flops: int) -> float:
        return 1e3 * max(num_values * bytes_per_value / rates.read_bytes_per_s, flops / rates.gemm_flops_per_s)

    config = llm.engine.parts.model_config
    q_size, kv_size = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    weights = {
        "qkv_proj": config.hidden_size * (q_size + 2 * kv_size),
        "o_proj": config.hidden_size * q_size,
        "gate_up_proj": 2 * config.hidden_size * config.intermediate_size,
        "down_proj": config.hidden_size * config.intermediate_size,
    }
    result = {part: config.num_hidden_layers * least_ms(n, 2 * n * num_seqs) for part, n in weights.items()}
    result["lm_head"] = least_ms(shape.head_params, 2 * shape.head_params * num_seqs)
    num_tokens = num_seqs * context_len
    result["attention"] = least_ms(num_tokens * shape.kv_values_per_token, num_tokens * shape.attention_flops_per_pair)
    return result


def print_table(measured: dict[int, dict[str, float]], bounds: dict[int, dict[str, float]]) -> None:
    print("| milliseconds | " + " | ".join(f"batch of {n} | bound" for n in measured) + " |")
    print("|---|" + "---:|---:|" * len(measured))
    for part in PARTS:
        cells = [f"{measured[n][part]:.2f}" for n in measured]
        least = [f"{bounds[n][part]:.2f}" if part in bounds[n] else "" for n in measured]
        print(f"| {part} | " + " | ".join(f"{a} | {b}" for a, b in zip(cells, least, strict=True)) + " |")
    sums = [f"**{sum(measured[n].values()):.1f}** | {sum(bounds[n].values()):.1f}" for n in measured]
    print("| **step** | " + " | ".join(sums) + " |")


def draw(measured: dict[int, dict[str, float]], bounds: dict[int, dict[str, float]], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 1.2 + 0.95 * len(measured)))
    color_map = plt.get_cmap("tab20")
    colors = {part: color_map(i) for i, part in enumerate(PARTS)}
    labels: list[tuple[float, str]] = []
    for row, n in enumerate(measured):
        for offset, (label, values) in enumerate([(f"batch of {n}", measured[n]), ("bound", bounds[n])]):
            y, left = -2.4 * row - offset, 0.0
            for part in PARTS:
                if part in values:
                    axes.barh(y, values[part], 0.85, left=left, color=colors[part], label=part if not labels else None)
                    left += values[part]
            axes.text(left, y, f" {left:.0f} ms", va="center")
            labels.append((y, label))
    axes.set_yticks([y for y, _ in labels], [label for _, label in labels])
    axes.set_xlabel("milliseconds of one decode step")
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.1)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, dpi=130, bbox_inches="tight")


if __name__ == "__main__":
    main()
