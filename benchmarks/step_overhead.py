"""Measure the cost of a step besides the model: schedule, build_batch, update, outputs, and the whole `step()`.

    python -m benchmarks.step_overhead
    python -m benchmarks.step_overhead --core
    python -m benchmarks.step_overhead --num-seqs 256 1024 4096 --context-len 512 131072
    python -m benchmarks.step_overhead --num-seqs 8 --option speculative_config="{'method': 'ngram'}"

The engine is the one that `nanovllm_extras` (or with `--core`, `nanovllm`) makes for the bundled model with these
options. Only the runner is wrapped: a stand-in gives each sequence its newest token again, at once, and its KV cache
has as many blocks as the sequences need, without their memory. Prints medians in microseconds over steps in which all
sequences decode and stream text. `sum` is schedule, build_batch and update; `step` is everything besides the stand-in,
including what the engine does around these parts.
"""

import argparse
import ast
import itertools
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import nanovllm
import nanovllm_extras
from benchmarks.common import describe_machine
from nanovllm import TINY_QWEN3
from nanovllm.batch import Batch
from nanovllm.loader import read_json
from nanovllm_extras.sampling.runner_hooks import LapClock, StepTokens

PARTS = ("schedule", "build_batch", "update", "sum", "outputs", "step")
FIRST_WORD, NUM_WORDS = 400, 600  # ids of words and parts of words in the bundled tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the engine's own cost per decode step.")
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[256])
    parser.add_argument("--context-len", type=int, nargs="+", default=[512])
    parser.add_argument("--block-size", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--core", action="store_true", help="the engine of nanovllm, instead of nanovllm_extras'")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the engine")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options = dict(map(parse_option, args.option))
    columns = ("num_seqs", "context_len", "block_size", *PARTS)
    print(" ".join(f"{name:>11}" for name in columns), "(microseconds)")
    rows = []
    for num_seqs, context_len, block_size in itertools.product(args.num_seqs, args.context_len, args.block_size):
        row = measure(num_seqs, context_len, block_size, args.steps, args.core, options)
        print(" ".join(f"{row[name]:>11.0f}" for name in columns))
        rows.append(row)
    if args.json:
        report = {"machine": describe_machine("cpu"), "core": args.core, "options": options, "rows": rows}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def parse_option(text: str) -> tuple[str, Any]:
    """`max_num_seqs=8` -> ("max_num_seqs", 8); a value that is no literal of Python is a string"""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def measure(
    num_seqs: int, context_len: int, block_size: int, num_steps: int, is_core: bool, options: dict[str, Any]
) -> dict[str, float]:
    """Return medians in microseconds over `num_steps` steps in which all `num_seqs` sequences decode."""
    engine = start_decoding(num_seqs, context_len, block_size, num_steps, is_core, options)
    times: dict[str, list[float]] = {name: [] for name in PARTS}
    for _ in range(num_steps):
        engine.clock = clock = engine.runner.clock = LapClock()
        engine.step()
        clock.lap("rest")
        seconds = clock.seconds
        seconds["sum"] = seconds["schedule"] + seconds["build_batch"] + seconds["update"]
        seconds["step"] = seconds["sum"] + seconds["outputs"] + seconds["rest"]
        for name in PARTS:
            times[name].append(seconds[name] * 1e6)
    sizes = {"num_seqs": num_seqs, "context_len": context_len, "block_size": block_size}
    return {**sizes, **{name: round(median(values), 1) for name, values in times.items()}}


def start_decoding(
    num_seqs: int,
    context_len: int,
    block_size: int = 16,
    num_steps: int = 1,
    is_core: bool = False,
    options: dict[str, Any] | None = None,
) -> Any:
    """Return a `CoreEngine` or `FullEngine` whose sequences have computed their prompts and can take `num_steps`."""
    options = options or {}
    drafts = options.get("speculative_config") or {}
    most_tokens = 1 + drafts.get("num_speculative_tokens", 5) * bool(drafts)  # of a sequence in a step
    max_len = context_len + (num_steps + 2) * most_tokens
    sizes: dict[str, Any] = {
        "block_size": block_size,
        "max_num_seqs": num_seqs,
        "max_model_len": max_len,
        "max_num_batched_tokens": num_seqs * context_len,
        "num_kv_blocks": 1,
    }
    package: Any = nanovllm if is_core else nanovllm_extras
    kind: Any = CoreEngine if is_core else FullEngine
    params = package.SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        model = with_long_contexts(max_len, Path(folder))
        engine = kind(package.Config(model, **{**sizes, **options}), num_seqs * -(-max_len // block_size))
    for i in range(num_seqs):
        prompt = [i % 1000] + [FIRST_WORD + i % NUM_WORDS] * (context_len - 1)
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    scheduler = engine.scheduler
    while scheduler.waiting or any(seq.num_tokens - seq.num_computed_tokens > 1 for seq in scheduler.running):
        engine.step()
    return engine


def with_long_contexts(max_len: int, folder: Path) -> Path:
    """Return the bundled model, or a copy of it in `folder` that allows sequences of `max_len` tokens."""
    raw = read_json(TINY_QWEN3 / "config.json")
    if max_len <= raw["max_position_embeddings"]:
        return TINY_QWEN3
    for path in TINY_QWEN3.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**raw, "max_position_embeddings": max_len}), encoding="utf-8")
    return folder


# ---- engines that are timed, with a stand-in for the model


class Tokens:
    """The result of one step. Both engines can read it: the core by `tolist`, the extras by `wait`."""

    def __init__(self, token_ids: list[int], clock: LapClock) -> None:
        self.token_ids, self.clock = token_ids, clock

    def tolist(self) -> list[int]:
        self.clock.lap("rest")
        return self.token_ids

    def wait(self) -> StepTokens:
        return StepTokens(self.tolist(), None, ())


class StandIn:
    """A runner that computes nothing: `run` gives each row the token that it has as input. The rest is `runner`'s."""

    def __init__(self, runner: Any, num_blocks: int, clock: LapClock) -> None:
        self.runner, self.clock = runner, clock
        self.kv_cache = UnstoredBlocks(runner.kv_cache, num_blocks)
        self.batch: Batch | None = None  # the newest
        self.newest = np.empty(0, dtype=np.int32)  # the newest tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def run(self, batch: Batch) -> Tokens:
        self.clock.lap("build_batch")
        ids = batch.input_ids[batch.logits_indices].numpy()
        in_flight = ids < 0  # with overlap, a token that is not known yet is -1 - row
        ids[in_flight] = self.newest[-1 - ids[in_flight]]
        self.newest, self.batch = ids, batch
        tokens = Tokens(ids.tolist(), self.clock)
        self.clock.lap("model")
        return tokens


class UnstoredBlocks:
    """A KV cache that has `num_blocks` blocks but no memory for them. The rest is `cache`'s."""

    def __init__(self, cache: Any, num_blocks: int) -> None:
        self.cache, self.num_blocks = cache, num_blocks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


class CoreEngine(nanovllm.LLMEngine):
    """The engine of `nanovllm`. `clock` has the seconds of each part of a step."""

    def __init__(self, config: Any, num_blocks: int) -> None:
        self.clock, self.num_blocks = LapClock(), num_blocks
        super().__init__(config)

    def make_runner(self, folder: Path) -> Any:
        return StandIn(super().make_runner(folder), self.num_blocks, self.clock)

    def launch(self) -> Any:
        self.clock.lap("rest")
        return super().launch()

    def compute(self, step: Any) -> Any:
        self.clock.lap("schedule")
        return super().compute(step)

    def make_outputs(self, advanced: Any) -> Any:
        self.clock.lap("update")
        outputs = super().make_outputs(advanced)
        self.clock.lap("outputs")
        return outputs


class FullEngine(nanovllm_extras.LLMEngine):
    """The engine of `nanovllm_extras`. `clock` has the seconds of each part of a step."""

    def __init__(self, config: Any, num_blocks: int) -> None:
        self.clock, self.num_blocks = LapClock(), num_blocks
        super().__init__(config)

    def make_runner(self, folder: Path) -> Any:
        return StandIn(super().make_runner(folder), self.num_blocks, self.clock)

    def launch(self) -> Any:
        self.clock.lap("rest")
        return super().launch()

    def compute(self, step: Any) -> Any:
        self.clock.lap("schedule")
        return super().compute(step)

    def read_outputs(self, *arguments: Any) -> Any:
        self.clock.lap("update")
        outputs = super().read_outputs(*arguments)
        self.clock.lap("outputs")
        return outputs


if __name__ == "__main__":
    main()
