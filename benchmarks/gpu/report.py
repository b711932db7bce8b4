"""Make the figures, the Markdown table and the pictures from the suite's JSON.

    python -m benchmarks.gpu.report benchmarks/results/nvidia-h200-2026-11-21.json --images docs/images

Only the JSON is needed, so they can be made again on any machine. Jobs that failed or never ran are left out.
"""

import argparse
import json
from pathlib import Path
from typing import Any

LABELS = {
    "eager": "PyTorch's layers, triton attention",
    "layers": "+ fused layers",
    "graphs": "+ CUDA graphs",
    "overlap": "+ overlap of steps",
    "fp8": "+ fp8 KV cache",
    "triton-256": "triton, blocks of 256",
    "flash_attn": "flash-attn",
    "transformers": "transformers",
}
NOT_BF16 = ("fp8", "transformers")  # these are no candidates for the best configuration
Results = dict[str, Any]
# (job, other job, least ratio of their tokens per second, what is wrong if it is lower)
HOPES = (
    ("first/core-graphs", "first/core-eager", 1.3, "Launches take time although graphs replay them: see the profile"),
    ("first/core-graphs", "first/nano-vllm", 1.0, "Count launches and idle time in the profile of a decode step"),
    ("first/extras-triton", "first/nano-vllm", 1.3, "Attention must read K and V at 2.9 TB/s: see the job kernels"),
    ("first/extras-fp8", "first/extras-triton", 1.0, "Half of the bytes of K and V take longer: see the job kernels"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw and tabulate the suite's results.")
    parser.add_argument("results", type=Path)
    parser.add_argument("--images", type=Path, help="the folder of the pictures (needs matplotlib; default: none)")
    args = parser.parse_args()
    results = json.loads(args.results.read_text(encoding="utf-8"))
    args.results.with_suffix(".md").write_text(markdown(results), encoding="utf-8")
    if args.images:
        args.images.mkdir(parents=True, exist_ok=True)
        draw_ablation(results, args.images / f"{args.results.stem}-offline.png")
        draw_step(results, args.images / f"{args.results.stem}-step.png")


def figures(results: Results, name: str) -> dict[str, Any]:
    """Return the figures of a job, or nothing if it has none."""
    return results["jobs"].get(name, {}).get("figures") or {}


def stage_rows(results: Results, stage: str) -> dict[str, dict[str, Any]]:
    """Return the figures of a group's successful jobs, by the part of the name after the slash."""
    rows = {name.partition("/")[2]: job for name, job in results["jobs"].items() if name.startswith(f"{stage}/")}
    order = list(LABELS)
    names = sorted(rows, key=lambda name: order.index(name) if name in order else len(order))  # not as they were run
    return {name: rows[name]["figures"] for name in names if rows[name]["status"] == "ok" and rows[name].get("figures")}


def label(name: str, row: dict[str, Any]) -> str:
    """Return the label of a job of the group `offline`; `transformers` serves only some of the requests."""
    return f"transformers, the first {row['requests']} requests" if name == "transformers" else LABELS.get(name, name)


def best_offline(results: Results) -> dict[str, Any] | None:
    """The fastest bfloat16 configuration of the offline workload: what `offline` in the results is."""
    rows = {name: row for name, row in stage_rows(results, "offline").items() if name not in NOT_BF16}
    if not rows:
        return None
    name = max(rows, key=lambda name: rows[name]["output_tokens_per_second"])
    kept = ("output_tokens_per_second", "roofline_fraction", "elapsed_s", "workload", "dtype", "engine_description")
    return {"configuration": name, **{key: rows[name].get(key) for key in kept}}


def advice(results: Results, names: list[str]) -> list[str]:
    """Return what to do next: about jobs that failed, in the order of `names`, then about speeds that are too low."""
    lines = []
    for name in names:
        job = results["jobs"].get(name, {})
        if job.get("status") in ("failed", "timeout"):
            said = [line for line in (job.get("tail") or "").splitlines() if is_of_use(line)] or ["nothing was printed"]
            late = f"its time was up after {job['seconds']} s. " if job["status"] == "timeout" else ""
            lines.append(f"fix {name}: {late}{said[-1][:300]}")
    for faster, slower, least, meaning in HOPES:
        ours, other = [figures(results, name).get("output_tokens_per_second", 0.0) for name in (faster, slower)]
        if ours and ours < least * other:
            ratio = f"{ours / other:.2f} times {slower}, hoped for {least}"
            lines.append(f"look at {faster}: {ratio}. {meaning}")
    return [f"{i}. {line}" for i, line in enumerate(lines, 1)] or ["nothing to fix: all that ran is as hoped"]


def is_of_use(line: str) -> bool:
    """Return whether a line tells something; the last one of a process that is stopped lists its modules."""
    return bool(line.strip()) and not line.startswith("Extension modules: ")


# ---- Markdown


def markdown(results: Results) -> str:
    machine = results.get("machine", {})
    title = "Rehearsal on a CPU: no figure means anything" if results["rehearsal"] else machine.get("device", "GPU")
    parts = [f"# {title}, {results['date']}", "Made by `python -m benchmarks.gpu_suite` from the JSON beside it.",
             describe_machine(results), offline_table(results), latency_table(results), profile_tables(results),
             kernel_tables(results), sampling_table(results), job_table(results)]  # fmt: skip
    return "\n\n".join(part for part in parts if part) + "\n"


def table(header: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table; empty without rows. None is an empty cell."""
    if not rows:
        return ""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join("" if cell is None else str(cell) for cell in line) + " |" for line in lines)


def section(title: str, *parts: str) -> str:
    return "\n\n".join([f"## {title}", *parts]) if any(parts) else ""


def percent(fraction: float | None) -> str | None:
    return None if fraction is None else f"{fraction:.1%}"


def describe_machine(results: Results) -> str:
    machine, rates = results.get("machine", {}), results.get("rates")
    rows = [[name, value] for name, value in machine.items()] + [["commit of the suite", results["commit"]]]
    if rates:
        rows.append(["copy, read and written", f"{rates['read_bytes_per_s'] / 1e9:,.0f} GB/s"])
        rows.append(["matrix products, bfloat16", f"{rates['gemm_flops_per_s'] / 1e12:,.1f} TFLOP/s"])
    return section("Machine", table(["what", "value"], rows))


def offline_table(results: Results) -> str:
    rows = [
        [label(name, row), f"{row['output_tokens_per_second']:,.0f}", percent(row.get("roofline_fraction")),
         row["elapsed_s"], row.get("steps"), row.get("preemptions"), row.get("startup_s"), row["requests"]]
        for name, row in stage_rows(results, "offline").items()
    ]  # fmt: skip
    header = ["offline workload", "output tokens/s", "share of roofline", "seconds", "steps", "preemptions",
              "start-up in s", "requests"]  # fmt: skip
    note = (
        "Each line is a process of its own; the first five add to each other, those after are other choices with "
        "everything on. `transformers` serves its requests as one static padded batch."
    )
    return section("Offline throughput", table(header, rows), note if rows else "")


def latency_table(results: Results) -> str:
    rows = [
        [name, row["ms_per_token"], row["least_ms_per_token"], percent(row["fraction_of_limit"]), row["p99_gap_ms"],
         row["short_ttft_ms"], row["long_ttft_s"], row["least_long_ttft_s"]]
        for name, row in stage_rows(results, "latency").items()
    ]  # fmt: skip
    shown = next(iter(stage_rows(results, "latency").values()), {})
    header = [f"one stream, {shown.get('input_len')} in, {shown.get('output_len')} out", "ms per token", "limit",
              "of limit", "p99 gap, ms", "TTFT, ms", f"TTFT of {shown.get('long_len'):,} tokens, s", "limit, s"] \
        if shown else []  # fmt: skip
    return section("A single user", table(header, rows))


def profile_tables(results: Results) -> str:
    rows = figures(results, "profile").get("rows", [])
    if not rows:
        return ""
    lines = [[kind, *[row["kinds_us"][kind] for row in rows]] for kind in rows[0]["kinds_us"]]
    lines += [["step", *[row["step_us"] for row in rows]], ["launches", *[row["launches"] for row in rows]]]
    header = ["microseconds of a decode step", *[f"batch of {row['num_seqs']}" for row in rows]]
    return section("Where a decode step's time goes", table(header, lines), *map(kernel_table, rows))


def kernel_table(row: dict[str, Any]) -> str:
    """The kernels that take longest at one batch size."""
    lines = [
        [f"`{k['name'].replace('|', '/')[:80]}`", k["kind"], k["us_per_step"], k["calls_per_step"], k["us_each"]]
        for k in row["top_kernels"]
    ]
    return table([f"batch of {row['num_seqs']}: kernel", "kind", "us a step", "calls a step", "us each"], lines)


def kernel_tables(results: Results) -> str:
    """Every table that benchmarks.kernels has written, whatever its columns."""
    parts = []
    for backend, tables in figures(results, "kernels").items():
        for name, rows in tables.items() if isinstance(tables, dict) else ():
            if isinstance(rows, list) and rows and isinstance(rows[0], dict):
                parts += [f"{backend}: {name}", table(list(rows[0]), [list(row.values()) for row in rows])]
    return section("Attention kernels", *parts)


def sampling_table(results: Results) -> str:
    """The cases of benchmarks.sampling, whatever was measured of each."""
    rows = figures(results, "sampling").get("results", {})
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [[name, *[f"{row[c]:.3g}" if c in row else None for c in columns]] for name, row in rows.items()]
    return section("Sampling", table(["requests ask for", *columns], lines))


def job_table(results: Results) -> str:
    rows = []
    for name, job in results["jobs"].items():
        figures = job.get("figures") or {}
        counts = ", ".join(f"{figures[k]} {k}" for k in ("passed", "failed", "skipped") if k in figures)
        rows.append([name, job["status"], job.get("seconds"), job.get("reason") or counts])
    failures = [f"`{test}`" for name in results["jobs"] for test in figures_of_failures(results, name)]
    return section("What ran", table(["job", "status", "seconds", "note"], rows), "\n".join(failures))


def figures_of_failures(results: Results, name: str) -> list[str]:
    found = figures(results, name).get("failures", {})
    return list(found) if isinstance(found, dict) else []


# ---- pictures


def draw_ablation(results: Results, path: Path) -> None:
    """Output tokens per second of each configuration, with its share of the roofline."""
    rows = stage_rows(results, "offline")
    if not rows:
        return
    figure, axes = new_axes(0.8 + 0.42 * len(rows))
    for y, (name, row) in enumerate(rows.items()):
        speed, share = row["output_tokens_per_second"], row.get("roofline_fraction")
        axes.barh(-y, speed, 0.7, color="tab:gray" if name == "transformers" else "tab:blue")
        axes.text(speed, -y, f" {speed:,.0f}" + (f" ({share:.0%})" if share else ""), va="center", fontsize=8)
    axes.set_yticks([-y for y in range(len(rows))], [label(*item) for item in rows.items()], fontsize=8)
    axes.set_xlabel("output tokens per second (share of the roofline)", fontsize=8)
    axes.set_title(f"{caption(results)}: offline workload, Qwen3-0.6B's shape", fontsize=9)
    axes.margins(x=0.18)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def draw_step(results: Results, path: Path) -> None:
    """One stacked bar for each batch size: the kinds of kernels, and the time with none."""
    rows = figures(results, "profile").get("rows", [])
    if not rows:
        return
    figure, axes = new_axes(0.9 + 0.6 * len(rows))
    colors = ["tab:blue", "tab:purple", "tab:olive", "tab:orange", "tab:green", "tab:brown", "lightgray"]
    for y, row in enumerate(rows):
        left = 0.0
        whole = sum(row["kinds_us"].values())
        for color, (kind, us) in zip(colors, row["kinds_us"].items(), strict=True):
            axes.barh(-y, us / whole, 0.7, left=left, color=color, label=kind if y == 0 else None)
            left += us / whole
        axes.text(1, -y, f" {row['step_us']:,.0f} µs", va="center", fontsize=8)
    axes.set_yticks([-y for y in range(len(rows))], [f"batch of {row['num_seqs']}" for row in rows], fontsize=8)
    axes.set_xlabel("share of a decode step", fontsize=8)
    axes.set_title(f"{caption(results)}: where a decode step's time goes", fontsize=9)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.28), ncols=3, frameon=False, fontsize=8)
    axes.margins(x=0.1)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def caption(results: Results) -> str:
    device = results.get("machine", {}).get("device", "GPU")
    return f"{'REHEARSAL ON ' if results['rehearsal'] else ''}{device}"


def new_axes(height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, height))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    return figure, axes


if __name__ == "__main__":
    main()
