"""`nanovllm learn`: the learner's files and progress, and what the commands print."""

import os
import re
import runpy
import select
import signal
import subprocess
import sys
import time
import webbrowser
from pathlib import Path

import pytest
from rich.cells import cell_len

from labs.learn import learn_command
from labs.learn.catalog import CHAPTERS
from labs.learn.folder import Folder
from labs.learn.routes import AFTERNOON, CORE
from nanovllm_extras.trace.recording import read_recording


@pytest.fixture
def learn(tmp_path, capsys):
    """A function that runs a command in a new folder and returns its status and output."""
    folder = tmp_path / "answers"

    def run(*arguments):
        status = learn_command.main([*arguments, "--folder", str(folder)])
        out, err = capsys.readouterr()
        return status, out + err

    run.folder = folder
    return run


def solve_first(folder):
    file = folder / "01_remove_one_line.py"
    file.write_text(re.sub(r" *raise NotImplementedError.*\n", "", file.read_text()))


def test_the_first_exercise_passes_by_removing_one_line(learn):
    status, out = learn("start", "1")
    assert status == 0
    assert "01_remove_one_line.py" in out
    status, out = learn("check", "1")
    assert status == 1
    assert "not written yet" in out
    solve_first(learn.folder)
    status, out = learn("check", "remove_one_line")
    assert status == 0
    assert "Right" in out
    assert "Next: nanovllm learn start 2" in out
    status, out = learn("list")
    assert "✓" in out
    assert "1 of " in out
    assert Folder(learn.folder).count(learn_command.find_exercise("1"), "checks") == 2


def test_no_file_of_the_learner_is_overwritten(learn):
    learn("start", "1")
    file = learn.folder / "01_remove_one_line.py"
    file.write_text("mine")
    status, out = learn("start", "1")
    assert status == 0
    assert "was not changed" in out
    assert file.read_text() == "mine"
    for number in (1, 2):
        file.write_text(f"mine {number}")
        learn("reset", "1")
        assert (learn.folder / f"01_remove_one_line.{number}.old").read_text() == f"mine {number}"
        assert "raise NotImplementedError" in file.read_text()


def test_a_file_keeps_its_name_if_numbers_change(learn):
    learn("start", "1")
    (learn.folder / "01_remove_one_line.py").rename(learn.folder / "07_remove_one_line.py")
    assert "07_remove_one_line.py exists" in learn("start", "1")[1].replace("\n", "")
    assert learn("check", "1")[0] == 1
    assert [file.name for file in learn.folder.glob("*.py")] == ["07_remove_one_line.py"]


def test_hints_get_stronger_and_are_counted(learn):
    hints = [learn("hint", "1")[1] for _ in range(4)]
    exercise = learn_command.find_exercise("1")
    for i, text in enumerate((*exercise.hints, exercise.hints[-1])):
        assert text.en in hints[i]
    assert Folder(learn.folder).count(exercise, "hints") == 3


def test_a_file_that_continues_a_program_runs_by_itself(learn, monkeypatch, capsys):
    """As a script, in a folder from which Python does not find `labs`."""
    learn("start", "grow_table")
    (file,) = learn.folder.glob("*_grow_table.py")
    with file.open("a", encoding="utf-8") as more:
        more.write("print(Blocks(num_blocks=3, block_size=2).num_blocks_for(5))")
    monkeypatch.chdir(learn.folder)
    root = Path(learn_command.__file__).parents[2]
    monkeypatch.setattr(sys, "path", [one for one in sys.path if Path(one).resolve() not in (root, learn.folder)])
    for name in [name for name in sys.modules if name.split(".")[0] == "labs"]:
        monkeypatch.delitem(sys.modules, name)
    runpy.run_path(str(file), run_name="__main__")
    assert capsys.readouterr().out.split() == ["3"]


def test_the_language_is_remembered(learn):
    learn("start", "1", "--lang", "zh")
    assert "删掉" in (learn.folder / "01_remove_one_line.py").read_text(encoding="utf-8")
    assert "还有函数没有写" in learn("check", "1")[1]
    assert "not written" in learn("check", "1", "--lang", "en")[1]


def test_the_solution_is_shown(learn):
    assert "tokens.append(next_token(tokens))" in learn("show", "1")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "1"], "first run: nanovllm learn start 1"),
        (["check", "999"], "there is no exercise 999"),
        (["hint", "nothing"], "there is no exercise 'nothing'"),
        (["view", "1"], "remove_one_line has no run of requests to show; these exercises have: full_block, "),
        (["view", "bug_1"], "the last check of bug_1 found no run that failed"),
    ],
)
def test_bad_arguments_are_explained(learn, arguments, message):
    status, out = learn(*arguments)
    assert status == 2
    assert message in out.replace("\n", "")


def test_a_damaged_progress_file_is_named(learn):
    learn("start", "1")
    learn("hint", "1")
    (learn.folder / "progress.ini").write_text("no section")
    status, out = learn("list")
    assert status == 2
    assert "progress.ini cannot be read" in out


def test_a_failing_run_opens_in_the_viewer(learn, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    learn("start", "bug_10")
    status, out = learn("check", "bug_10")
    assert status == 1
    assert "nanovllm learn view bug_10" in out
    assert learn("view", "bug_10")[0] == 0
    address = re.fullmatch(r"file://(.*/)bug_10\.html#step=\d+&lang=en", opened[0])
    assert address
    assert len(read_recording(Path(address[1]) / "bug_10.jsonl")) > 2
    assert Path(address[1]) == (learn.folder / "views").resolve(), "no temporary folder is left behind"


def test_next_follows_the_exercise_that_was_passed(learn):
    """First the core's exercises, then all others."""
    learn("start", "3")
    assert "Next: nanovllm learn start 5 (" in predict(learn, 114_688)
    folder = Folder(learn.folder)
    for name in CORE[2:]:
        folder.write(name, passed="yes")
    assert "Next: nanovllm learn start 2 (" in predict(learn, 114_688)
    folder.write(CORE[0], passed="yes")
    assert "Next: nanovllm learn start 4 (" in predict(learn, 114_688)
    for exercise in learn_command.list_exercises():
        folder.write(exercise.name, passed="yes")
    assert "Next" not in predict(learn, 114_688)


def test_where_one_is_on_a_route(learn):
    """The core is the route by default. A route that is chosen is remembered."""
    folder = Folder(learn.folder)
    for name in CORE[:5]:
        folder.write(name, passed="yes")
    folder.write("stop_strings", passed="yes")
    out = learn()[1]
    assert "5 of 16, next: grow_table (route: a weekend)" in out
    assert "Next: nanovllm learn start 11 (" in out
    assert re.findall(r"^ +\d+ [ ✓…] (\w+) ", out, re.MULTILINE) == list(CORE)
    assert "3 of 6, next: grow_table (route: an afternoon)" in learn("--route", "afternoon")[1]
    assert "3 of 6" in learn()[1]
    assert "已完成 3 / 6，下一个：grow_table（路线：一个下午）" in learn("--lang", "zh")[1]
    assert "已通过 6 / " in learn("--all")[1]
    for name in CORE[5:8]:
        folder.write(name, passed="yes")
    out = learn("--lang", "en")[1]
    assert "6 of 6, all done (route: an afternoon)" in out
    assert "Next: nanovllm learn start 14 (" in out, "the core comes before all others"
    assert "which is not in the route" in out


def test_after_the_last_exercise_of_a_route_check_and_status_suggest_the_same(learn):
    folder = Folder(learn.folder)
    learn("--route", "afternoon")
    for name in AFTERNOON.names:
        folder.write(name, passed="yes")
    learn("start", "3")
    expected = "Next: nanovllm learn start 5 (Attention with a KV cache), which is not in the route"
    assert expected in predict(learn, 114_688)
    assert expected in learn()[1]


def test_a_short_status_without_an_action(learn):
    learn("start", "8")
    learn("hint", "8")
    status, out = learn()
    assert status == 0
    assert "   8 … schedule " in out
    assert "0 of 16, next: schedule" in out, "what is started comes first"
    assert "Hints read: 1" in out
    assert "Next: nanovllm learn check 8 (" in out
    (learn.folder / "08_schedule.py").rename(learn.folder / "05_fork.py")
    assert "Next: nanovllm learn check 16 (" in learn("status")[1]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_list_has_one_line_for_each_exercise(learn, monkeypatch, language):
    monkeypatch.setenv("COLUMNS", "120")
    exercises = learn_command.list_exercises()
    lines = learn("list", "--lang", language)[1].splitlines()
    for number, exercise in enumerate(exercises, 1):
        (line,) = [line for line in lines if line.split()[:2] == [str(number), exercise.name]]
        assert line.endswith(exercise.title.show(language))
    chapters = [line for line in lines if re.match(r"\d+\. ", line)]
    assert chapters == [CHAPTERS[name].show(language) for name in sorted({one.chapter for one in exercises})]
    assert max(map(cell_len, lines)) <= 80


def test_chapters_have_the_titles_of_the_book():
    book = Path(__file__).parents[3] / "docs" / "book"
    for name, title in CHAPTERS.items():
        for folder, text in ((book, title.en), (book / "zh", title.zh)):
            assert (folder / f"{name}.md").read_text(encoding="utf-8").split("\n")[0] == f"# {text}"


def test_numbers_and_paths_are_not_coloured(learn, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" not in learn("start", "1")[1]


def predict(learn, answer):
    """Check a prediction, and return what is printed, on one line."""
    (learn.folder / "03_predict_kv_bytes.py").write_text(f"ANSWER = {answer}\n")
    return " ".join(learn("check", "predict_kv_bytes")[1].replace("│", " ").split())


def test_a_number_is_shown_only_at_the_third_miss(learn):
    learn("start", "predict_kv_bytes")
    for answer in (12.5, 10**9):
        out = predict(learn, answer)
        assert "114,688" not in out
        assert ("too small" if answer == 12.5 else "too large") in out
        assert "First prediction: 12.5 bytes" in out
    assert "It is 114,688 bytes." in predict(learn, 7)
    out = predict(learn, 114_688)
    assert "Right, after the number was shown." in out
    assert "A good prediction" not in out
    assert "First prediction: 12.5 bytes" in out


def test_what_is_not_a_number_is_not_counted_as_a_check(learn):
    learn("start", "predict_kv_bytes")
    for answer, word in (("None", "Set ANSWER"), ("'112 KiB'", "without the unit"), ("float('nan')", "Set ANSWER")):
        assert word in predict(learn, answer)
    exercise = learn_command.find_exercise("predict_kv_bytes")
    assert Folder(learn.folder).count(exercise, "checks") == 0
    assert Folder(learn.folder).first_prediction(exercise) is None


@pytest.mark.slow
def test_watch_checks_a_file_that_is_saved(tmp_path):
    """A check in a process that is warm takes at most two seconds on an idle machine.

    The watcher begins after it has said so, so the file is saved again if nothing has come.
    """
    learn_command.main(["start", "1", "--folder", str(tmp_path)])
    command = [sys.executable, "-u", "-m", "nanovllm_extras", "learn", "watch", "--folder", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None

        def read_until(word, wait_s):
            said = b""
            while word not in said and select.select([watching.stdout], [], [], wait_s)[0]:
                more = os.read(watching.stdout.fileno(), 1 << 16)
                assert more, watching.stderr.read()
                said += more
            return word in said

        try:
            assert read_until(b"Watching", 120)
            time.sleep(1)
            for _ in range(6):
                solve_first(tmp_path)
                if read_until(b"Right", 10):
                    break
            else:
                raise AssertionError("the file has not been checked")
            watching.send_signal(signal.SIGINT)
            assert watching.wait(60) == 0
            assert not watching.stderr.read()
        finally:
            watching.terminate()
