"""Code that loops, raises, prints, exits, forks or takes memory without end is stopped with a clear word."""

import re

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
CATCH_ALL = """    while True:
        try:
            for i in range(100):
                pass
        except BaseException:
            pass
"""
CALLBACK = """    import ctypes
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

    def compare(a, b):
        while True:
            pass

    ctypes.CDLL(None).qsort(ctypes.create_string_buffer(8), 2, 4, kind(compare))
"""
NEVER_LETS_OTHERS_RUN = "    return sum(range(1 << 60))\n"
ENDLESS = {
    "loop": ("    while True:\n        pass\n", "still running after 0.5 s of processor time in line [23]"),
    "loop that catches all": (CATCH_ALL, "still running after 0.5 s of processor time in line [3-7]"),
    "loop in a callback of C": (CALLBACK, "still running after 0.5 s of processor time in line [67]"),
    "loop in C": (NEVER_LETS_OTHERS_RUN, "did not end in time"),
    "wait": ("    import time\n    time.sleep(1000)\n", "had not ended after 1 s in line 3"),
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


@pytest.fixture
def answer(tmp_path):
    return tmp_path / "01_remove_one_line.py"


@pytest.mark.parametrize("kind", BAD)
def test_bad_code_is_stopped(kind, answer):
    body, word = BAD[kind]
    answer.write_text(BEGINNING + body)
    report = check_in_process("remove_one_line", answer, "en")
    assert not report.passed
    assert re.search(word, report.headline), report


@pytest.mark.parametrize(
    "kind",
    [
        "loop that catches all",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in [*ENDLESS][:1] + [*ENDLESS][2:]),
    ],
)
def test_code_without_an_end_is_stopped(kind, answer, monkeypatch):
    body, word = ENDLESS[kind]
    monkeypatch.setattr(check_process, "PROCESSOR_S", 0.5)
    monkeypatch.setattr(check_process, "WALL_S", 1.0 if kind == "wait" else 60.0)
    answer.write_text(BEGINNING + body)
    report = check_in_process("remove_one_line", answer, "en")
    assert not report.passed
    assert re.search(word, report.headline), report


def test_only_the_learners_own_lines_are_shown_of_an_exception_in_a_thread(answer):
    thread = "    import threading\n    thread = threading.Thread(target=lambda: 1 / 0)\n    thread.start()\n"
    answer.write_text(BEGINNING + thread + "    thread.join()\n")
    assert check_in_process("remove_one_line", answer, "en").printed == "line 3: ZeroDivisionError: division by zero\n"


def test_the_traceback_of_the_checker_itself_goes_to_a_file(answer):
    answer.write_text("import labs.learn.checker as checker\ncase = checker.load\ndel checker.load\n")
    report = check_in_process("remove_one_line", answer, "en")
    assert "The checker itself failed" in report.headline
    assert "Traceback" not in str(report)
    assert "Traceback" in (answer.parent / check_process.ERROR_FILE).read_text()


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
