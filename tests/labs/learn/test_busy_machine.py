"""Right answers pass beside other programs that keep all cores busy."""

import os
import subprocess
import sys
import time

import pytest

from labs.learn.catalog import list_exercises
from labs.learn.check_process import PROCESSOR_S, check_in_process
from labs.learn.exercise import Build

NUM_BUSY = 4
NUM_RUNS = 20


@pytest.fixture
def _busy():
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(NUM_BUSY)]
    yield
    for program in programs:
        program.kill()
        program.wait()


@pytest.mark.slow
@pytest.mark.usefixtures("_busy")
@pytest.mark.parametrize("name", ["whole_engine", pytest.param("others", id="each of chapters 1 to 9")])
def test_no_right_answer_is_rejected_beside_four_busy_programs(name, tmp_path):
    """Prints the longest run of each exercise with `pytest -m slow -s`."""
    builds = [one for one in list_exercises() if isinstance(one, Build) and one.chapter < "10"]
    whole = [one for one in builds if one.name == "whole_engine"]
    others = [one for one in builds if one.name != "whole_engine" and not one.name.startswith("bug_")]
    rejected = []
    for exercise in whole * NUM_RUNS if name == "whole_engine" else others:
        file = tmp_path / f"{exercise.name}.py"
        file.write_text(exercise.solution, encoding="utf-8")
        start, start_processor = time.monotonic(), read_processor_s()
        report = check_in_process(exercise.name, file, "en")
        wall, processor = time.monotonic() - start, read_processor_s() - start_processor
        print(f"{exercise.name}: {processor:.2f} s of processor time (limit {PROCESSOR_S:g}), {wall:.2f} s in all")
        rejected += [] if report.passed else [(exercise.name, report.headline)]
    assert not rejected


def read_processor_s() -> float:
    """Return the processor time of the processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system
