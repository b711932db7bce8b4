"""`nanovllm check`: what this machine has, what is missing, and whether each way to compute is right, and how fast.

    nanovllm check
    nanovllm check --model path/or/hub-id
    nanovllm check --json > report.json

Every way to compute is started and checked, and generates text for about a second. The status is 1 if one is wrong.
Paste the output into a report of a problem.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from nanovllm import TINY_QWEN3
from nanovllm_extras.cli.machine_report import describe_machine, describe_packages, memory_bandwidth
from nanovllm_extras.cli.way_report import WayReport, forget_results, measure_ways
from nanovllm_extras.machine.printing import say
from nanovllm_extras.options.argument_types import filled


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    parser = argparse.ArgumentParser(prog="nanovllm check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=filled, default=str(TINY_QWEN3), help="folder or hub id (the bundled model)")
    parser.add_argument(
        "--device", type=filled, default="auto", help="cpu, cuda or cuda:1 (auto: CUDA if there is one)"
    )
    parser.add_argument("--dtype", type=filled, default="auto", help="float32, bfloat16 or float16 (the checkpoint's)")
    parser.add_argument("--load-format", choices=("auto", "safetensors", "gguf", "dummy"), default="auto")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    args = parser.parse_args(arguments)
    try:
        report = make_report(args.model, {"device": args.device, "dtype": args.dtype, "load_format": args.load_format})
    except (ValueError, OSError) as error:
        parser.error(str(error))
    say(json.dumps(report, indent=2)) if args.json else print_report(report)
    return int(any(way["result"] == "wrong" for way in report["ways"]))


def make_report(model: str, options: dict[str, str]) -> dict[str, Any]:
    """Return everything that is printed, as JSON can hold it. ValueError if the model cannot be loaded."""
    forget_results()
    ways = measure_ways(model, options)
    return {
        "machine": describe_machine(),
        "packages": describe_packages(),
        "memory_gb_per_s": round(memory_bandwidth(options["device"]), 1),
        "model": model,
        "ways": [way._asdict() for way in ways],
    }


def print_report(report: dict[str, Any]) -> None:
    """Print tables: with Rich if it is installed, otherwise as plain text."""
    packages = [(name, version or "missing", command) for name, version, command in report["packages"]]
    print_table("machine", ("", ""), list(report["machine"].items()))
    print_table("packages", ("", "version", "to install it"), packages)
    say(f"memory     {report['memory_gb_per_s']} GB/s are read by one PyTorch sum")
    say(f"model      {report['model']}\n")
    header = ("way to compute", "result", "tokens/s", "weights read, GB/s", "KV cache, tokens")
    print_table("ways to compute", header, [row_of(WayReport(**way)) for way in report["ways"]])
    for way in report["ways"]:
        if way["reason"]:
            say(f"{way['name']}: {way['reason']}")


def row_of(way: WayReport) -> tuple[str, ...]:
    def shown(value: float | None) -> str:
        return "" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.2g}"

    speeds = (way.tokens_per_s, way.weights_gb_per_s, way.kv_cache_tokens)
    return (way.name, way.result, *map(shown, speeds))


def print_table(title: str, header: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print_plain(title, [header, *rows] if any(header) else rows)
        return
    table = Table(*header, title=title, title_justify="left", show_header=any(header), title_style="bold")
    for row in rows:
        table.add_row(*map(str, row))
    Console(markup=False).print(table)


def print_plain(title: str, rows: Sequence[tuple[object, ...]]) -> None:
    """Print columns that are as wide as their widest cell."""
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    say(title)
    for row in rows:
        say("  " + "  ".join(f"{cell!s:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    say()
