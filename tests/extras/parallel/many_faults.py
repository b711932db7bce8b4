"""All scenarios of faults, again and again: how long until the error, and whether anything is left behind.

    python -m tests.extras.parallel.many_faults 50

Prints a table. The exit status is 1 if anything did not end as it must.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.extras.parallel.zygote import Zygote

SIGKILL = -9

# name -> function of scenarios.py, its arguments after the model, the exit status
SCENARIOS = {
    "rank killed, idle": ("rank_killed_idle", (), 0),
    **{
        f"rank raises at {stage!r} of a step": ("rank_fails_in_step", (stage, "raise", "RuntimeError: planted"), 0)
        for stage in ("message", "embedding", "attention", "logits", "draw", "reader")
    },
    "rank killed in a forward pass": ("rank_fails_in_step", ("attention", "kill", "ended by SIGKILL"), 0),
    "rank aborts in a forward pass": ("rank_fails_in_step", ("attention", "abort", "ended by SIGABRT"), 0),
    "rank exits in a forward pass": ("rank_fails_in_step", ("attention", "exit", "SystemExit: 3"), 0),
    "rank out of memory (RLIMIT_AS)": ("rank_fails_in_step", ("attention", "no memory", "memory"), 0),
    "rank with a MemoryError": ("rank_fails_in_step", ("attention", "MemoryError", "MemoryError: planted"), 0),
    "rank raises at its import": ("rank_fails_at_start", ("import", "raise", "RuntimeError: planted"), 0),
    "rank killed before it connects": ("rank_fails_at_start", ("plan", "kill", "ended by SIGKILL"), 0),
    "rank killed while it connects": ("rank_fails_at_start", ("connect", "kill", "ended by SIGKILL"), 0),
    "rank killed while it loads": ("rank_fails_at_start", ("load", "kill", "ended by SIGKILL"), 0),
    "rank raises while it loads": ("rank_fails_at_start", ("load", "MemoryError", "MemoryError: planted"), 0),
    "rank 0 raises in a forward pass": ("rank_0_fails_in_forward_pass", ("RuntimeError",), 0),
    "rank 0 with a MemoryError": ("rank_0_fails_in_forward_pass", ("MemoryError",), 0),
    "^C while ranks import": ("interrupted_in_start", ("import", 1), 0),
    "^C while loading": ("interrupted_in_start", ("load", 1), 0),
    "^C twice while loading": ("interrupted_in_start", ("load", 2), 0),
    "^C in generate, 20 times": ("interrupted_in_generate", (), 0),
    "^C twice while a rank hangs": ("interrupted_twice_while_a_rank_hangs", ("gloo",), 0),
    "^C twice while a call in C hangs": ("interrupted_twice_while_a_rank_hangs", ("shared_memory",), 0),
    "driver killed while ranks import": ("killed", ("import",), SIGKILL),
    "driver killed while loading": ("killed", ("load",), SIGKILL),
    "driver killed, idle": ("killed", ("idle",), SIGKILL),
    "driver killed in a step": ("killed", ("step",), SIGKILL),
    "driver killed, a forked process stays": ("killed", ("forked",), SIGKILL),
    **{
        f"end by {how}": ("ends", (how,), 0)
        for how in ("shutdown", "shutdown after an error", "del", "with", "exit", "sys.exit in a step")
    },
    "processes that fork": ("forks", (), 0),
}


def play(zygote, name, model):
    """Seconds until the error, or until all has gone where there is none. AssertionError if it does not end well."""
    function, arguments, status = SCENARIOS[name]
    driver = zygote.start(f"tests.extras.parallel.scenarios:{function}", str(model), *arguments)
    try:
        found = driver.wait(90)
        ended = time.monotonic()
        gone = driver.wait_until_gone()
        said = driver.said()
        assert found == status, (found, said)
        lines = [json.loads(line) for line in said.splitlines() if line.startswith(('{"seconds"', '{"killed"'))]
        assert len(lines) == 1, said
        left = sorted(path.name for path in driver.folder.iterdir())
        assert left == [], (left, said)
        driver.output.unlink()
        if "killed" in lines[0]:
            return ended - lines[0]["killed"] + gone
        return lines[0]["seconds"]
    finally:
        driver.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", type=int, nargs="?", default=1)
    parser.add_argument("--only", default="", help="scenarios whose names contain this")
    parser.add_argument("--ranks", choices=["gloo", "shared_memory"], default="gloo")
    args = parser.parse_args()
    seconds, failures = {name: [] for name in SCENARIOS if args.only in name}, []
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("models", "marks", "drivers"):
            (Path(folder) / kind).mkdir()
        os.environ["NANOVLLM_TEST_MARKS"] = str(Path(folder) / "marks")
        os.environ["NANOVLLM_TEST_RANKS"] = args.ranks
        model = make_model(Path(folder) / "models")
        with Zygote(Path(folder) / "drivers") as zygote:
            for i, (name, found) in itertools.product(range(args.rounds), seconds.items()):
                try:
                    found.append(play(zygote, name, model))
                except AssertionError as error:
                    failures.append(f"round {i}, {name}: {error}")
    print(f"| what happens, {args.rounds} times | ended well | seconds until the error: median | worst |")
    print("|---|---|---|---|")
    for name, found in seconds.items():
        times = f"{statistics.median(found):.3f} | {max(found):.3f}" if found else "- | -"
        print(f"| {name} | {len(found)} of {args.rounds} | {times} |")
    print(*failures, sep="\n")
    sys.exit(1 if failures else 0)


def make_model(folder):
    from tests.conftest import TinyCheckpoints

    return TinyCheckpoints(folder).make()[0]


if __name__ == "__main__":
    main()
