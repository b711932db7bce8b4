"""`nanovllm learn`: the learner's files and progress, and what the commands print."""

import re
import subprocess
import sys
import time
import webbrowser

import pytest

from nanovllm.extras.learn import learn_command
from nanovllm.extras.learn.folder import Folder
from nanovllm.extras.trace.recording import read_recording


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


def test_a_passed_exercise_stays_passed(learn):
    learn("start", "1")
    solve_first(learn.folder)
    learn("check", "1")
    (learn.folder / "01_remove_one_line.py").write_text("")
    assert learn("check", "1")[0] == 1
    assert "1 of " in learn("status")[1]


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


def test_the_language_is_remembered(learn):
    learn("start", "1", "--lang", "zh")
    assert "删掉" in (learn.folder / "01_remove_one_line.py").read_text(encoding="utf-8")
    assert "还有函数没有写" in learn("check", "1")[1]
    assert "not written" in learn("check", "1", "--lang", "en")[1]


@pytest.mark.parametrize(("language", "words"), [("en", "Do not write solutions"), ("zh", "不要写答案")])
def test_coding_assistants_are_asked_for_hints(learn, language, words):
    learn("start", "1", "--lang", language)
    assert words in (learn.folder / "AGENTS.md").read_text(encoding="utf-8")


def test_the_solution_is_shown(learn):
    assert "tokens.append(next_token(tokens))" in learn("show", "1")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "1"], "first run: nanovllm learn start 1"),
        (["check", "999"], "there is no exercise 999"),
        (["hint", "nothing"], "there is no exercise 'nothing'"),
        (["view", "1"], "has no run of requests to show"),
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
    assert re.search(r"bug_10\.html#step=\d+&lang=en$", opened[0])
    assert len(read_recording(learn.folder / "bug_10.jsonl")) > 2


@pytest.mark.slow
def test_watch_checks_a_file_that_is_saved(tmp_path):
    """A check in a process that is warm takes at most two seconds on an idle machine."""
    learn_command.main(["start", "1", "--folder", str(tmp_path)])
    command = [sys.executable, "-u", "-m", "nanovllm", "learn", "watch", "--folder", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        try:
            assert "Watching" in watching.stdout.readline()
            time.sleep(1)  # the watcher begins after it has said so
            solve_first(tmp_path)
            start = time.monotonic()
            while "Right" not in (line := watching.stdout.readline()):
                assert line
            assert time.monotonic() - start < 10
        finally:
            watching.terminate()
