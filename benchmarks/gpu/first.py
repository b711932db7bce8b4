"""The parts of a first run on a GPU that need more than one command: flash-attn, the same text, and nano-vllm.

    python -m benchmarks.gpu.first library --carried FOLDER --site FOLDER --output out.json
    python -m benchmarks.gpu.first text --output out.json
    python -m benchmarks.gpu.first check --output out.json
    python -m benchmarks.gpu.first peer --carried FOLDER --output out.json [-- options of bench.py]

`python -m benchmarks.gpu_suite --first` calls them. docs/gpu.md says which files the folder `--carried` may hold.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch

import bench
from example import QUESTIONS
from nanovllm import LLM, TINY_QWEN3, SamplingParams

TAIL_CHARS = 2000
LARGEST_GAP = 0.5
"""Rounding may decide between two tokens whose logits are no further apart. bfloat16 rounds a logit of 20 by 0.06, and
what the layers before have rounded adds up."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Run one part of a first run on a GPU.")
    parser.add_argument("part", choices=["library", "text", "peer", "check"])
    parser.add_argument("--carried", type=Path, help="the folder of what the machine lacks")
    parser.add_argument("--site", type=Path, help="the folder into which flash-attn is installed")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, required=True)
    given = sys.argv[1:]
    split = given.index("--") if "--" in given else len(given)
    args, options = parser.parse_args(given[:split]), given[split + 1 :]  # those of bench.py
    if args.part == "library":
        figures, is_good = check_library(args.carried, args.site)
    elif args.part == "text":
        figures, is_good = compare_text(args.device)
    elif args.part == "peer":
        figures, is_good = run_peer(args.carried, options)
    else:
        figures, is_good = check_kernels()
    args.output.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    sys.exit(0 if is_good else 1)


def run(*command: object, site: Path | None = None) -> str:
    """Run Python with these arguments, and return what it prints. RuntimeError with its last words if it fails."""
    path = os.pathsep.join(filter(None, [str(site or ""), os.environ.get("PYTHONPATH", "")]))
    result = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode:
        raise RuntimeError(f"{command} ended with {result.returncode}: {result.stdout[-TAIL_CHARS:]}")
    return result.stdout


def check_library(carried: Path | None, site: Path | None) -> tuple[dict[str, Any], bool]:
    """Install the wheel of flash-attn that was carried, and run the check that was carried with it."""
    if site is not None and carried is not None and not site.exists():
        wheel = sorted(carried.glob("flash_attn*.whl"))[-1]
        offline = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
        run("-m", "pip", "install", "-q", *offline, "--target", site, wheel)
    version = run("-c", "import flash_attn; print(flash_attn.__version__)", site=site).split()[-1]
    check = carried / "fa2_check.py" if carried else None
    if check is None or not check.exists():
        return {"version": version, "check": "no fa2_check.py was carried"}, True
    said = run(check, site=site)
    return {"version": version, "check": said[-TAIL_CHARS:]}, "all checks passed" in said


def compare_text(device: str) -> tuple[dict[str, Any], bool]:
    """Compare the core's answers on `device`, in the model's dtype, with those of a CPU in float32.

    Where they part, the logits of the two tokens, by `transformers` in float32, must be close.
    """
    answers, prompts, descriptions = [], [], []
    for options in ({"device": "cpu", "dtype": "float32", "attention_backend": "torch"}, {"device": device}):
        llm = LLM(TINY_QWEN3, **options)
        prompts = llm.render_chat([[{"role": "user", "content": question}] for question in QUESTIONS])
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=120), use_tqdm=False)
        answers.append([output.outputs[0] for output in outputs])
        descriptions.append(llm.engine.description)
    gaps = []
    for prompt, right, found in zip(prompts, *answers, strict=True):
        if right.token_ids != found.token_ids:
            gaps.append(gap_of_logits(prompt["prompt_token_ids"], right.token_ids, found.token_ids))
    figures = {
        "answers": len(prompts),
        "equal": len(prompts) - len(gaps),
        "gaps_of_logits": [round(gap, 4) for gap in gaps],
        "largest_gap_allowed": LARGEST_GAP,
        "engine_description": descriptions[1],
        "texts": [one.text for one in answers[1]],
    }
    return figures, all(gap <= LARGEST_GAP for gap in gaps)


def gap_of_logits(prompt: list[int], right: list[int], found: list[int]) -> float:
    """Return how far apart the logits of the first tokens are that differ; infinity if one answer only ends earlier."""
    from transformers import AutoModelForCausalLM

    pairs = [(i, a, b) for i, (a, b) in enumerate(zip(right, found, strict=False)) if a != b]
    if not pairs:
        return float("inf")
    i, a, b = pairs[0]
    model = AutoModelForCausalLM.from_pretrained(TINY_QWEN3, dtype=torch.float32)
    logits = model(torch.tensor([[*prompt, *right[:i]]])).logits[0, -1]
    return float(logits[a] - logits[b])


def run_peer(carried: Path, options: list[str]) -> tuple[dict[str, Any], bool]:
    """Run nano-vllm's own benchmark on the requests that bench.py serves with these options."""
    (archive,), (script,) = carried.glob("peers/*.tar.gz"), carried.glob("peers/*.py")
    with tempfile.TemporaryDirectory() as folder:
        package, work, out = Path(folder, "package"), Path(folder, "workloads.json"), Path(folder, "out.json")
        with tarfile.open(archive) as files:
            files.extractall(package, filter="data")
        if not (package / "nanovllm").is_dir():
            raise ValueError(f"{archive} must hold the folder nanovllm at its top")
        work.write_text(json.dumps({"offline": lengths_of_bench(options, Path(folder))}), encoding="utf-8")
        run(script, "--workloads", work, "--tokenizer", TINY_QWEN3, "--json", out, site=package)
        figures = json.loads(out.read_text(encoding="utf-8"))
    speeds = figures["output_tokens_per_second"]
    return {**figures, "output_tokens_per_second": max(speeds), "of_all_runs": speeds}, True


def check_kernels() -> tuple[dict[str, Any], bool]:
    """Run `nanovllm check`, whose report is JSON."""
    command = [sys.executable, "-m", "nanovllm_extras", "check", "--json"]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return json.loads(result.stdout), result.returncode == 0


def lengths_of_bench(options: list[str], scratch: Path) -> dict[str, list[int]]:
    """Return the lengths of the prompts and outputs of bench.py."""
    sys.argv = ["bench.py", *options]
    args = bench.parse_args(scratch)
    return {"prompt_lens": [len(prompt) for prompt in args.prompts], "output_lens": args.output_lens}


if __name__ == "__main__":
    main()
