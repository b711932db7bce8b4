"""Report the GPU, its driver, the versions, and its highest rates: the first job of the suite.

    python -m benchmarks.gpu.machine --output machine.json

Rooflines are computed from these rates: a large copy (bytes read and written) and large products in bfloat16.
"""

import argparse
import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import describe_machine
from benchmarks.roofline import Rates, best_time, measure_rates

PACKAGES = ("triton", "flash-attn", "transformers", "numpy")
SMI_FIELDS = ("driver_version", "power.limit", "clocks.max.sm", "clocks.max.memory")


def main() -> None:
    parser = argparse.ArgumentParser(description="Describe the GPU and measure its rates.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    is_cuda = args.device.startswith("cuda")
    rates = measure_rates("bfloat16", args.device) if is_cuda else rehearse_rates()
    machine = describe_machine(args.device, PACKAGES) | (describe_gpu() if is_cuda else {})
    args.output.write_text(json.dumps({"machine": machine, "rates": asdict(rates)}, indent=1))


def describe_gpu() -> dict[str, Any]:
    """Return what torch and, if available, nvidia-smi report about the first GPU."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        **ask_nvidia_smi(),
    }


def ask_nvidia_smi() -> dict[str, str]:
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader", "--id=0"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [value.strip() for value in result.stdout.splitlines()[0].split(",")] if result.stdout else []
    return dict(zip(SMI_FIELDS, values, strict=False)) if result.returncode == 0 else {}


def rehearse_rates() -> Rates:
    """Something of the right kind, in no time."""
    source, target, x = torch.zeros(1 << 22), torch.empty(1 << 22), torch.rand(256, 256)
    copied = 2 * source.numel() * source.itemsize / best_time(lambda: target.copy_(source), 3)
    return Rates(copied, 2 * 256**3 / best_time(lambda: x @ x, 3))


if __name__ == "__main__":
    main()
