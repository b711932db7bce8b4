"""`nanovllm test my_file.py`: find faults in parts of an engine that a file names (`LLM(…, extension="my_file.py")`).

    nanovllm test my_scheduler.py
    nanovllm test my_cache.py --examples 2000 --seed 7
    nanovllm test streaming_llm.py --approximate

Schedulers, block managers and prefix caches serve random traffic without a model, and each step is checked. Then the
engine with all parts of the file must give the tokens of an engine that computes each request by itself, without a
cache. Attention backends and samplers are compared with references in float64. The command prints a line for each check
and, for a check that fails, the shortest run that it finds. The status is 1 if a check fails.

A module that declares `extra_args` may have a function `example_extra_args(rng)`, which returns those of a request.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

from nanovllm import TINY_QWEN3, Config, extension
from nanovllm.checks import check_class
from nanovllm.engine import PARTS
from nanovllm.layers.attention import TorchAttention
from nanovllm.loader import read_json
from nanovllm_testing import attention_check, engine_check, sampler_check
from nanovllm_testing.fake_kv_cache import count
from nanovllm_testing.played_run import Parts, Played, describe_error, explain, play
from nanovllm_testing.shrink import shrink
from nanovllm_testing.traffic import ExtraArgs, no_extra_args, random_traffic

SCHEDULING = ("scheduler_cls", "block_manager_cls", "prefix_cache_cls")
NUM_EXAMPLES = 300
ONCE = "The same run did not fail when it was repeated: the failure depends on the time, or on chance."
ENGINE_SHARE = 75
"""One example of the engine for this number of examples: it takes as long as hundreds without a model."""


@dataclass(frozen=True)
class Result:
    """The result of one check: "ok", "FAILED" or "skipped"."""

    name: str
    status: str
    text: str = ""
    lines: tuple[str, ...] = ()
    """What fails: the shortest run that was found."""


@dataclass(frozen=True)
class Plan:
    """The parts of a file, and how they are checked."""

    parts: Mapping[str, Any]
    skipped: Mapping[str, str]
    """Names of parts that cannot be tested, and the reasons."""
    extra_args: ExtraArgs
    seed: int
    num_examples: int
    model: str
    is_exact: bool
    patience_s: float


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    parser = argparse.ArgumentParser(prog="nanovllm test", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("extension", help="a Python file, or the name of a module, that names parts of an engine")
    parser.add_argument("--seed", type=int, default=0, help="of the random examples (default: 0)")
    parser.add_argument(
        "--examples", type=positive, default=NUM_EXAMPLES, help=f"random examples of each check ({NUM_EXAMPLES})"
    )
    parser.add_argument("--model", default=str(TINY_QWEN3), help="the folder of a model (the bundled one)")
    parser.add_argument(
        "--approximate",
        action="store_true",
        help="do not compare results: for caches that forget or round K and V, and for other distributions",
    )
    text = "how long steps may compute nothing, for a scheduler that waits for the clock (default: 20 steps)"
    parser.add_argument("--patience", type=float, default=0.0, metavar="SECONDS", help=text)
    args = parser.parse_args(arguments)
    try:
        module = extension.import_extension(args.extension)
    except Exception as error:  # a module raises any kind
        parser.error(f"{args.extension} cannot be imported ({describe_error(error)}); give a Python file or a module")
    try:
        parts, skipped = find_parts(module)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    if not parts and not skipped:
        names = ", ".join(part_names())
        parser.error(f"{args.extension} names no part of an engine; its top-level names may be {names}")
    example = getattr(module, "example_extra_args", no_extra_args)
    plan = Plan(parts, skipped, example, args.seed, args.examples, args.model, not args.approximate, args.patience)
    with quiet_engines():
        return report(run_checks(plan))


@contextmanager
def quiet_engines() -> Iterator[None]:
    """Log only the errors of the core within the context."""
    logger = logging.getLogger("nanovllm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def report(results: Iterator[Result]) -> int:
    """Print the results as they come, and return the exit status."""
    num_failed = 0
    for result in results:
        text = f": {result.text}" if result.text else ""
        print(f"{result.status:<8} {result.name}{text}", flush=True)
        for line in result.lines:
            print(f"         {line}".rstrip())
        num_failed += result.status == "FAILED"
    if num_failed:
        print(f"\n{count(num_failed, 'check')} failed", file=sys.stderr)
    return int(num_failed > 0)


# ---- the parts of a file


def part_names() -> list[str]:
    """Return the options of the core's `Config` that are parts of one's own."""
    names = [one.name for one in fields(Config) if one.name.endswith("_cls")]
    return [*names, "attention_backend", "models", "extra_args"]


def find_parts(module: ModuleType) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the parts that a module names, and for those that cannot be tested the reason.

    Raises TypeError or ValueError, as the engine does, for a part that is not a subclass of the core's class.
    """
    known = part_names()
    given = {name: getattr(module, name, None) for name in known}
    found = {name: value for name, value in extension.find_parts(given, None).items() if value is not None}
    for name, base in PARTS.items():
        check_class(name, found.get(name), base)
    skipped = {
        name: "the core has no such part: only nanovllm_extras.LLM takes it"
        for name in vars(module)
        if name.endswith("_cls") and name not in known
    }
    for name, value in found.items():
        if any(one.__module__.startswith("nanovllm_extras.") for one in getattr(value, "__mro__", ())):
            skipped[name] = "it extends a class of nanovllm_extras; only parts of the core's engine are tested"
    return {name: value for name, value in found.items() if name not in skipped}, skipped


# ---- the checks


def run_checks(plan: Plan) -> Iterator[Result]:
    """Yield the results of all checks that fit the parts."""
    parts, has_failed = plan.parts, False
    checks: list[Iterator[Result]] = []
    if any(name in parts for name in SCHEDULING):
        checks.append(check_scheduling(plan))
    if "attention_backend" in parts:
        checks.append(check_attention(plan))
    if "sampler_cls" in parts:
        checks.append(check_sampler(plan))
    for results in checks:
        for result in results:
            has_failed = has_failed or result.status == "FAILED"
            yield result
    if "models" in parts:
        yield Result(
            "models", "skipped", "compare a network with `transformers`, layer by layer (docs/adding_a_model.md)"
        )
    for name, reason in plan.skipped.items():
        yield Result(name, "skipped", reason)
    if set(parts) - {"models", "extra_args"}:
        why_not = "the checks above fail" if has_failed else reason_against_engine(plan)
        if why_not is not None:
            yield Result("the engine with a model", "skipped", why_not)
        else:
            yield check_engine(plan)


def until_failure(play_one: Callable[[Any], Played], error: Exception) -> Callable[[Any], int | None]:
    """Return a function for `shrink`: after how many steps a case fails with the same class of error, None if never."""

    def num_steps_until(case: Any) -> int | None:
        played = play_one(case)
        return len(played.rows) if type(played.error) is type(error) else None

    return num_steps_until


def check_scheduling(plan: Plan) -> Iterator[Result]:
    """Serve random traffic without a model."""
    given = {name: plan.parts[name] for name in SCHEDULING if name in plan.parts}
    name = f"random traffic without a model ({', '.join(given)})"
    parts, rng = Parts(**given, patience_s=plan.patience_s), Random(plan.seed)
    for i in range(plan.num_examples):
        traffic = random_traffic(rng, plan.extra_args)
        first = play(parts, traffic)
        if first.error is None:
            continue
        shortest = shrink(traffic, until_failure(partial(play, parts, seconds=0.1), first.error))
        again = play(parts, shortest)
        lines = explain(traffic, first) + [ONCE] if again.error is None else explain(shortest, again)
        yield Result(name, "FAILED", f"run {i + 1} of {plan.num_examples}; the shortest that fails:", tuple(lines))
        return
    yield Result(name, "ok", count(plan.num_examples, "run"))


def check_attention(plan: Plan) -> Iterator[Result]:
    """Compute random steps with an attention backend."""
    backend = plan.parts["attention_backend"]
    name = "attention over a cache with NaN in unused slots"
    if not (isinstance(backend, type) and issubclass(backend, TorchAttention)):
        text = f"attention_backend must be a subclass of TorchAttention for this check, got {backend!r}"
        yield Result(name, "skipped", text)
        return
    shapes, reason = attention_check.usable_shapes(backend)
    if not shapes:
        yield Result(name, "skipped", f"the backend cannot compute float32 on a CPU: {reason}")
        return
    check, rng = attention_check.AttentionCheck(backend, plan.is_exact), Random(plan.seed)
    for i in range(plan.num_examples):
        case = attention_check.random_case(rng, shapes, backend.default_block_size)
        error = check.find_error(case)
        if error is not None:
            shortest = shrink(case, until_failure(check.play, error))
            text = f"step {i + 1} of {plan.num_examples}; the smallest that fails:"
            yield Result(name, "FAILED", text, tuple(check.explain(shortest)))
            return
    compared = "" if plan.is_exact else ", not compared with the reference"
    yield Result(name, "ok", count(plan.num_examples, "step") + compared)


def check_sampler(plan: Plan) -> Iterator[Result]:
    """Call a sampler with random rows."""
    for name, check in sampler_check.checks_of(plan.parts["sampler_cls"], plan.seed, plan.is_exact):
        yield run_check(f"sampler: {name}", check)
    if not plan.is_exact:
        yield Result("sampler: draws follow softmax", "skipped", "--approximate")


def run_check(name: str, check: Callable[[], None]) -> Result:
    """Return the result of a check that raises if it fails."""
    try:
        check()
    except Exception as error:  # the code under test raises any kind
        return Result(name, "FAILED", lines=(f"wrong: {describe_error(error)}",))
    return Result(name, "ok")


def reason_against_engine(plan: Plan) -> str | None:
    """Return why no engine with these parts can serve the model of the plan on this machine, None if one can."""
    backend, models = plan.parts.get("attention_backend"), plan.parts.get("models")
    if isinstance(backend, type) and not attention_check.usable_shapes(backend)[0]:
        return "its attention backend cannot compute float32 on a CPU"
    if models and plan.model == str(TINY_QWEN3):
        names = read_json(TINY_QWEN3 / "config.json")["architectures"]
        if not set(names) & set(models):
            return f"the file has networks ({', '.join(models)}), and the bundled model is none of them: give --model"
    return None


def check_engine(plan: Plan) -> Result:
    """Serve random requests with a model, and compare the tokens with those of the naive engine."""
    name = f"the engine with {Path(plan.model).name}, " + (
        "token for token" if plan.is_exact else "whose tokens are not compared"
    )
    try:
        check = engine_check.EngineCheck(plan.model, plan.parts, plan.is_exact, plan.patience_s)
    except Exception as raised:  # as above
        return Result(name, "FAILED", "the engine does not start", (f"wrong: {describe_error(raised)}",))
    rng = Random(plan.seed)
    num_examples = -(-plan.num_examples // ENGINE_SHARE)
    for i in range(num_examples):
        case = engine_check.random_case(rng, check.vocab_size, check.has_samples, plan.extra_args)
        first = check.play(case)
        if first.error is None:
            continue
        lines = check.explain(case, first)
        shortest = shrink(case, until_failure(check.play, first.error))
        again = check.play(shortest)
        lines = [*lines, ONCE] if again.error is None else check.explain(shortest, again)
        return Result(name, "FAILED", f"run {i + 1} of {num_examples}; the shortest that fails:", tuple(lines))
    return Result(name, "ok", f"{count(num_examples, 'run')} of six requests")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
