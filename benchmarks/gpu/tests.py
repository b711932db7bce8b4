"""Run pytest, and write the outcomes as JSON after every test, so that a crash or a time limit loses none.

    python -m benchmarks.gpu.tests --output tests.json -- -m gpu

Arguments after `--` go to pytest. Exits with pytest's own status.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

MESSAGE_CHARS = 600  # of each failure; the end, where the error is


class Recorder:
    """A plugin of pytest that counts outcomes and keeps the names and last words of failures."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.failures: dict[str, str] = {}
        self.slowest: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":  # setup and teardown count where they go wrong
            self.counts[report.outcome] += 1
        if report.failed:
            self.failures[report.nodeid] = str(report.longrepr)[-MESSAGE_CHARS:]
        if report.when == "call":
            self.slowest[report.nodeid] = round(report.duration, 2)
            self.slowest = dict(sorted(self.slowest.items(), key=lambda item: -item[1])[:10])
        self.write()

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:  # a file that cannot be imported
            self.counts["failed"] += 1
            self.failures[report.nodeid] = str(report.longrepr)[-MESSAGE_CHARS:]
            self.write()

    def write(self) -> None:
        figures = {**self.counts, "failures": self.failures, "slowest_s": self.slowest}
        self.output.write_text(json.dumps(figures, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Run pytest, and write what came of it.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("pytest_args", nargs="*")
    args = parser.parse_args()
    options = ["-q", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=90", "--continue-on-collection-errors"]
    sys.exit(pytest.main([*options, *args.pytest_args], plugins=[Recorder(args.output)]))


if __name__ == "__main__":
    main()
