"""Run the command `nanovllm run-batch -i in.jsonl -o out/`: parse its options, and answer the rows."""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import torch

from nanovllm import TINY_QWEN3
from nanovllm_extras.machine.printing import say
from nanovllm_extras.options.option_checks import first_given
from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.serve.batch.batch_inputs import Digests, Input, are_in, find_sources, scan
from nanovllm_extras.serve.batch.batch_options import form_of, make_parser
from nanovllm_extras.serve.batch.one_machine import answer_here
from nanovllm_extras.serve.batch.parts import Parts
from nanovllm_extras.serve.batch.replica import ReplicaSpec
from nanovllm_extras.serve.batch.rows import Form
from nanovllm_extras.serve.serve_settings import keep_from_collector, log_to_stderr, shared_options
from nanovllm_extras.serve.server_options import ServerOptions
from nanovllm_extras.vllm.engine_args import EngineArgs


def main(arguments: list[str]) -> int:
    """Run the command and return its exit status.

    0 if each row has an answer or an error, 1 if the run failed, 2 for a bad command line, 130 after Ctrl-C.
    """
    parser = make_parser()
    args = parser.parse_args(arguments)
    log_to_stderr(args.server_log_level)
    args.model = first_given(args.batch_model, args.model, TINY_QWEN3)
    try:
        engine_args = EngineArgs.from_cli_args(args)
        engine_args.create_engine_config()
        form, options = form_of(args), replace(shared_options(args), log_requests=False)
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    try:
        return run_batch(args, form, options, partial(load, engine_args))
    except ModuleNotFoundError as error:
        install = "pip install 'nanovllm[ray]'"
        print(f"nanovllm run-batch --replicas needs the package {error.name}: run {install}", file=sys.stderr)
        return 1
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        print(f"nanovllm run-batch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("nanovllm run-batch: stopped; run the same command to continue", file=sys.stderr)
        return 130


def load(engine_args: EngineArgs) -> AsyncLLM:
    """Load the engine. This runs in the process of the replica."""
    llm = AsyncLLM.from_engine_args(engine_args)
    keep_from_collector()
    return llm


def run_batch(args: argparse.Namespace, form: Form, options: ServerOptions, load: Callable[[], AsyncLLM]) -> int:
    """Answer the rows that are not done, print a summary, and return the exit status."""
    start, answer = time.monotonic(), way_of(args)
    batch = scan(find_sources(args.input), form, args.rows_per_part)
    with Parts.opened(args.output) as parts:
        parts.check_same({"model": args.model, **vars(form)})
        done, paths_before = parts.done(), set(parts.paths())
        num_left = int((~are_in(batch.digests, done)).sum())
        say(f"{len(batch.digests):,} rows, of which {len(batch.digests) - num_left:,} are done")
        if num_left:
            max_in_flight = args.max_in_flight or 2 * args.max_num_seqs
            spec = ReplicaSpec(load, options, parts.attempts, parts.run, max_in_flight, args.replicas or 1)
            answer(batch, parts, done, spec)
        new = [path for path in parts.paths() if path not in paths_before]
        say(summary(new, num_left, time.monotonic() - start))
        return check_each_once(batch, parts)


def way_of(args: argparse.Namespace) -> Callable[[Input, Parts, Digests, ReplicaSpec], None]:
    """Return the function that answers the rows. Raises ModuleNotFoundError if Ray is needed but not installed."""
    if args.replicas is None:
        return answer_here
    from nanovllm_extras.serve.batch.ray_data import Pool, answer_with_ray

    return partial(answer_with_ray, pool=Pool(args.replicas, num_devices(args), args.ray_address))


def num_devices(args: argparse.Namespace) -> int:
    """Return the number of GPUs of one engine. With `--device cuda`, this machine itself does not need a GPU."""
    has_gpu = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    return int(args.tensor_parallel_size) if has_gpu else 0


def summary(paths: list[Path], num_rows: int, seconds: float) -> str:
    """Return a line with the number of answers, errors and tokens in the parts at `paths`."""
    num_errors = num_in = num_out = 0
    for path in paths:
        table = pq.read_table(path, columns=["error", "prompt_tokens", "completion_tokens"])
        num_errors += len(table) - table.column("error").null_count
        num_in += table.column("prompt_tokens").drop_null().to_numpy().sum()
        num_out += table.column("completion_tokens").drop_null().to_numpy().sum()
    return (
        f"{num_rows:,} rows in {seconds:.1f} s ({num_rows / seconds:,.1f} rows/s): {num_rows - num_errors:,} answers, "
        f"{num_errors:,} errors; {num_in:,} tokens in, {num_out:,} out ({num_out / seconds:,.0f} tokens/s)"
    )


def check_each_once(batch: Input, parts: Parts) -> int:
    """Return 0 if the parts contain each row of the input exactly once, else 1."""
    done = parts.done()
    num_missing, num_twice = int((~are_in(batch.digests, done)).sum()), int((done[1:] == done[:-1]).sum())
    if num_missing or num_twice:
        print(f"nanovllm run-batch: {num_missing} rows have no answer, {num_twice} have two", file=sys.stderr)
        return 1
    return 0
