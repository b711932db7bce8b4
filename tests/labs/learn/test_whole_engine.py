"""The learner's own functions are put together into the engine in one file."""

import pytest

from labs.learn.catalog import find_exercise, list_exercises
from labs.learn.checker import check_answer
from labs.learn.exercise import Build
from labs.learn.folder import Folder
from labs.learn.texts import LANGUAGES

PARTS = [one for one in list_exercises() if isinstance(one, Build) and one.engine_parts]
WHOLE = find_exercise("whole_engine")


@pytest.fixture
def folder(tmp_path):
    """A folder in which all exercises that are part of the engine are solved."""
    folder = Folder(tmp_path)
    for exercise in PARTS:
        folder.start(exercise, "en")
        folder.file_of(exercise).write_text(exercise.solution, encoding="utf-8")
    return folder


def check(folder, num_random=0):
    assert isinstance(WHOLE, Build)
    folder.reset(WHOLE, "en")
    return check_answer(WHOLE, folder.file_of(WHOLE), "en", num_random)


def test_solved_exercises_together_are_the_whole_engine(folder):
    assert len(PARTS) >= 6
    report = check(folder)
    assert report.passed, report
    assert "NotImplementedError" not in folder.file_of(WHOLE).read_text(encoding="utf-8")


@pytest.mark.parametrize("language", LANGUAGES)
def test_exercises_that_are_not_done_are_named(folder, language):
    """Whether its file was never started, or the function in it is not written."""
    first, second = PARTS[:2]
    folder.file_of(first).unlink()
    folder.reset(second, "en")
    folder.reset(WHOLE, language)
    report = WHOLE.check(folder.file_of(WHOLE), language)
    assert not report.passed
    assert {one.name for one in PARTS if one.name in report.headline} == {first.name, second.name}


@pytest.mark.slow
@pytest.mark.parametrize("exercise", PARTS, ids=lambda exercise: exercise.name)
def test_a_mistake_in_one_part_is_a_mistake_of_the_engine(exercise, folder):
    """Mistakes of an exercise are noticed here too, except those that the engine's own calls rule out."""
    noticed = 0
    for mistake in exercise.mistakes:
        folder.file_of(exercise).write_text(mistake.apply(exercise.solution), encoding="utf-8")
        noticed += not check(folder).passed
    assert noticed >= 2


@pytest.mark.parametrize("text", ["def broken(:\n", "x = 1\n", ""])
def test_a_file_without_the_function_counts_as_missing(text, folder):
    folder.file_of(PARTS[0]).write_text(text, encoding="utf-8")
    assert not check(folder).passed
