"""Compare a decode step with PyTorch's layers and with one call of C for each decoder layer.

    python -m labs.demos.fast_layers
    python -m labs.demos.fast_layers --plot picture.png      # one decode step of each, operation by operation

Both engines do the same arithmetic in float32, and give the same tokens. The times differ by what a step does besides
arithmetic. Only one thread computes, so that no time is spent waiting for other threads. The fast layers need Linux and
a C compiler.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams

LAYERS: dict[str, dict[str, Any]] = {
    "PyTorch": {"attention_backend": "torch", "enforce_eager": True},
    "fast, in C": {"attention_backend": "cpu"},
}
NUM_STEPS = 30
DECODER_LAYER = "decoder layer in C"


def main() -> None:
    parser = argparse.ArgumentParser(description="A decode step with PyTorch's layers, and with fast ones.")
    parser.add_argument("--plot", type=Path, help="draw one decode step of each to this file, and print nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    compare(args.plot)


def compare(picture: Path | None) -> None:
    """Print the table, or draw the picture."""
    spans, answers = {}, []
    if not picture:
        print("layers       sequences   ms a step   of it the engine   tokens/s   torch operations a step")
    for name, options in LAYERS.items():
        with LLM(TINY_QWEN3, dtype="float32", **options) as llm:
            if picture:
                spans[name] = profile_step(llm)
                continue
            for num_seqs in (1, 32):
                step_ms, engine_ms = time_steps(llm, num_seqs)
                operations = profile_step(llm, num_seqs, num_steps=4)
                num_operations = sum(operation != DECODER_LAYER for operation, _, _ in operations)
                rate = 1e3 * num_seqs / step_ms
                print(
                    f"{name:10}   {num_seqs:9}   {step_ms:9.2f}   {engine_ms:16.2f}   {rate:8.0f}   {num_operations:23}"
                )
            params = SamplingParams(temperature=0, max_tokens=40)
            answers.append(llm.generate("A block table", params, use_tqdm=False)[0].outputs[0].token_ids)
    if picture:
        plot(spans, picture)
    else:
        print(f"same tokens: {answers[0] == answers[1]}")


def start_decodes(llm: LLM, num_seqs: int) -> None:
    """Add requests, and run steps until all of them decode."""
    params = SamplingParams(temperature=0, max_tokens=NUM_STEPS + 2, ignore_eos=True)
    for i in range(num_seqs):
        llm.engine.add_request(str(i), [(7 * i + j) % 1000 for j in range(32)], params, stream=False)
    while llm.engine.step().num_prefill_tokens:
        pass


def finish(llm: LLM) -> None:
    while llm.engine.has_unfinished_requests():
        llm.engine.step()


def time_steps(llm: LLM, num_seqs: int) -> tuple[float, float]:
    """Return the milliseconds of the fastest decode step, and of its part outside the model and the sampler."""
    start_decodes(llm, num_seqs)
    steps = []
    for _ in range(NUM_STEPS):
        start = time.perf_counter()
        step = llm.engine.step()
        seconds = time.perf_counter() - start
        steps.append((1e3 * seconds, 1e3 * (seconds - step.run_time_s)))
    finish(llm)
    return min(steps)


def profile_step(llm: LLM, num_seqs: int = 1, num_steps: int = 24) -> list[tuple[str, float, float]]:
    """Return (operation, start, end) in microseconds for the shortest decode step, without nested operations.

    Reading a step from the profiler takes longer than the step itself. A picture needs many steps, to find a quiet
    one; to count operations, a few are enough.
    """
    for module in llm.engine.runner.model.modules():
        if type(module).__name__ == "CpuDecoderLayer" and "forward" not in vars(module):
            module.forward = record_function(DECODER_LAYER)(module.forward)  # the profiler does not see C code
    start_decodes(llm, num_seqs)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(num_steps):
            with record_function("step"):
                llm.engine.step()
    finish(llm)
    steps = [event for event in profiler.events() if event.name == "step"]
    shortest = min(steps, key=lambda event: event.time_range.elapsed_us())
    begin = shortest.time_range.start
    return [(one.name, one.time_range.start - begin, one.time_range.end - begin) for one in shortest.cpu_children]


def plot(spans: dict[str, list[tuple[str, float, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    kinds = {"product": "C3", DECODER_LAYER: "C2", "another operation": "C0"}
    figure, axes = plt.subplots(figsize=(11, 2.6))
    for row, steps in enumerate(spans.values()):
        for name, start, end in steps:
            kind = "product" if name in ("aten::linear", "aten::matmul", "aten::scaled_dot_product_attention") else name
            axes.barh(-row, end - start, left=start, color=kinds.get(kind, "C0"), edgecolor="none")
    for kind, color in kinds.items():
        axes.barh(0, 0, color=color, label=kind)
    axes.set_yticks([-row for row in range(len(spans))], list(spans))
    axes.set_xlabel("microseconds of one decode step, under the profiler; white: no operation runs")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=130, bbox_inches="tight")


if __name__ == "__main__":
    main()
