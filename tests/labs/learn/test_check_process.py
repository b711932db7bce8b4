"""Code that loops, raises, prints, exits, forks or takes memory without end is stopped with a clear word."""

import re
import time

import pytest

from labs.learn import check_process
from labs.learn.check_process import check_in_process
from labs.learn.report_printing import cut_printed

BEGINNING = "def generate(next_token, prompt, num_tokens):\n"
RIGHT = """    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens
"""
ENDLESS = {
    "loop": ("    while True:\n        pass\n", "still running after 1 s in line [23]"),
    "loop that catches": (
        "    while True:\n        try:\n            pass\n        except Exception:\n            pass\n",
        "still running",
    ),
}
BAD = {
    "exit": ("    raise SystemExit\n", "ended the program"),
    "hard exit": ("    import os\n    os._exit(0)\n", "ended the process"),
    "crash": ("    import ctypes\n    ctypes.string_at(0)\n", "crashed the process"),
    "print": ("    while True:\n        print('again')\n", "printed more than"),
    "fork": ("    import os\n    os.fork()\n", "start another process"),
    "command": ("    import subprocess\n    subprocess.run(['true'])\n", "start another process"),
    "memory": ("    return bytearray(1 << 34)\n", "ran out of memory"),
    "input": ("    input()\n", "Not yet right"),
    "raise": ("    return 1 / 0\n", "Not yet right"),
}


@pytest.fixture(autouse=True)
def _a_busy_machine_is_no_endless_loop(monkeypatch):
    monkeypatch.setattr(check_process, "CODE_S", 15.0)


@pytest.fixture
def answer(tmp_path):
    return tmp_path / "01_remove_one_line.py"


@pytest.mark.parametrize("kind", [*BAD, pytest.param("loop", marks=pytest.mark.slow), "loop that catches"])
def test_bad_code_is_stopped(kind, answer, monkeypatch):
    body, word = {**BAD, **ENDLESS}[kind]
    if kind in ENDLESS:
        monkeypatch.setattr(check_process, "CODE_S", 1.0)
    answer.write_text(BEGINNING + body)
    start = time.monotonic()
    report = check_in_process("remove_one_line", answer, "en")
    assert time.monotonic() - start < 20  # 5 s, on an idle machine
    assert not report.passed
    assert re.search(word, report.headline), report


def test_an_exception_names_its_line(answer):
    answer.write_text(BEGINNING + "    return 1 / 0\n")
    report = check_in_process("remove_one_line", answer, "en")
    assert "line 2" in str(report.drawings)
    assert "division by zero" in str(report.drawings)


def test_what_the_code_prints_in_the_failing_run_is_shown(answer):
    wrong = RIGHT.replace("    return", "    print('here', num_tokens)\n    return").replace("num_tokens)", "2)", 1)
    answer.write_text(BEGINNING + wrong)
    report = check_in_process("remove_one_line", answer, "en")
    assert not report.passed
    assert report.printed.count("here") == 1


def test_what_a_right_answer_prints_is_not_shown(answer):
    answer.write_text(BEGINNING + RIGHT.replace("    return", "    print('here' * 100)\n    return"))
    report = check_in_process("remove_one_line", answer, "en")
    assert report.passed, "the limit is for one run, not for all runs together"
    assert not report.printed


def test_what_stopped_code_has_printed_is_shown(answer):
    answer.write_text(BEGINNING + "    while True:\n        print('again')\n")
    assert check_in_process("remove_one_line", answer, "en").printed.startswith("again\n")


def test_at_most_ten_lines_are_shown():
    lines = cut_printed("\n".join(map(str, range(25))) + "\n", "en")
    assert lines == ["(15 lines before these)", *map(str, range(15, 25))]
    assert cut_printed("1\n2\n", "en") == ["1", "2"]


@pytest.mark.parametrize("text", ["def generate(:\n", "import nothing_of_this_name\n", "", "x = 1 / 0\n"])
def test_a_file_that_cannot_be_loaded_is_a_report(text, answer):
    answer.write_text(text)
    report = check_in_process("remove_one_line", answer, "en")
    assert not report.passed


def test_a_wrong_answer_in_chinese(answer):
    answer.write_text(BEGINNING + RIGHT.replace("range(num_tokens)", "range(num_tokens - 1)"))
    report = check_in_process("remove_one_line", answer, "zh")
    assert report.mistake == "少生成一个 token"
