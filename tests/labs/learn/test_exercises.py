"""Each exercise: unsolved it fails, a right answer passes, and each known mistake fails with its own explanation."""

import ast
import io
import re
from pathlib import Path
from tokenize import COMMENT, generate_tokens

import pytest

from labs.learn.answers import load
from labs.learn.catalog import find_exercise, list_exercises
from labs.learn.checker import check_answer
from labs.learn.chinese_contracts import COMMENTS, DOCSTRINGS
from labs.learn.exercise import Build, Exercise
from labs.learn.exercises.whole_engine import WholeEngine
from labs.learn.find_bug import FindBug
from labs.learn.findings import Report
from labs.learn.predict import Predict
from labs.learn.texts import LANGUAGES, Text

OTHER_ANSWERS = Path(__file__).parent / "other_answers"
BOOK = Path(__file__).parents[3] / "docs" / "book"
EXERCISES = {exercise.name: exercise for exercise in list_exercises()}
BUILDS = {name: one for name, one in EXERCISES.items() if isinstance(one, Build)}
MISTAKES = [
    pytest.param(name, i, id=f"{name}-{mistake.name.en}")
    for name, one in BUILDS.items()
    for i, mistake in enumerate(one.mistakes)
]


def check(exercise: Exercise, source: str, folder: Path, num_random: int = 10) -> Report:
    file = folder / f"{exercise.name}.py"
    file.write_text(source, encoding="utf-8")
    if isinstance(exercise, Build):
        return check_answer(exercise, file, "en", num_random)
    return exercise.check(file, "en")


@pytest.mark.parametrize("name", EXERCISES)
def test_unsolved_fails_and_the_solution_passes(name, tmp_path):
    exercise = EXERCISES[name]
    unsolved = check(exercise, exercise.make_starter("en"), tmp_path, num_random=0)
    assert not unsolved.passed
    assert "cannot be loaded" not in unsolved.headline
    solved = check(exercise, exercise.solution, tmp_path)
    assert solved.passed, solved


def test_names_are_unique_and_numbers_find_the_same_exercises():
    names = [exercise.name for exercise in list_exercises()]
    assert len(set(names)) == len(names)
    assert [find_exercise(str(i + 1)).name for i in range(len(names))] == names
    with pytest.raises(ValueError, match="there is no exercise 0"):
        find_exercise("0")


@pytest.mark.parametrize("name", EXERCISES)
def test_texts_are_there_in_both_languages(name):
    exercise = EXERCISES[name]
    texts = [exercise.title, exercise.task, *exercise.hints]
    texts += [text for mistake in getattr(exercise, "mistakes", ()) for text in (mistake.name, mistake.why)]
    for text in texts:
        assert isinstance(text, Text)
        assert text.en.strip()
        assert text.zh.strip()
        assert text.en != text.zh
    assert (BOOK / f"{exercise.chapter}.md").exists()
    assert exercise.make_starter("en") != exercise.make_starter("zh")


WRITTEN = [name for name, one in EXERCISES.items() if not isinstance(one, FindBug | WholeEngine | Predict)]


@pytest.mark.parametrize("name", WRITTEN)
def test_contracts_are_chinese_and_the_code_is_the_same(name):
    """What a function promises is in its docstring, and often not in the task."""
    english, chinese = (EXERCISES[name].make_starter(language) for language in LANGUAGES)
    texts = [*docstrings(chinese), *comments(chinese)]
    assert len(texts) == len([*docstrings(english), *comments(english)]) > 1
    assert [text for text in texts if not re.search("[\u4e00-\u9fff]", text)] == []
    assert without_docstrings(chinese) == without_docstrings(english)


def test_each_translation_is_used():
    starters = [EXERCISES[name].make_starter("en") for name in WRITTEN]
    assert {text for starter in starters for text in docstrings(starter)} == set(DOCSTRINGS)
    assert {text.removeprefix("# ") for starter in starters for text in comments(starter)} == set(COMMENTS)


def docstrings(source: str) -> list[str]:
    """Of functions and classes."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [text for node in nodes if (text := ast.get_docstring(node))]


def comments(source: str) -> list[str]:
    return [token.string for token in generate_tokens(io.StringIO(source).readline) if token.type == COMMENT]


def without_docstrings(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "i"), MISTAKES)
def test_each_mistake_is_found_and_explained(name, i, tmp_path):
    """The planted cases suffice, so that a machine which is too slow for all random ones finds it, too."""
    exercise = BUILDS[name]
    mistake = exercise.mistakes[i]
    report = check(exercise, mistake.apply(exercise.solution), tmp_path, num_random=0)
    assert not report.passed
    assert report.mistake == mistake.name.en
    assert mistake.why.en in report.paragraphs


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, one in EXERCISES.items() if isinstance(one, Predict)])
def test_each_wrong_number_is_explained(name, tmp_path):
    exercise = EXERCISES[name]
    assert isinstance(exercise, Predict)
    for wrong in exercise.mistakes:
        report = check(exercise, f"ANSWER = {wrong.value!r}", tmp_path)
        assert report.mistake == wrong.name.en
        assert wrong.why.en in report.paragraphs


def test_there_are_six_mistakes_and_another_right_answer():
    builds = {name: len(one.mistakes) for name, one in BUILDS.items() if type(one) is Build}
    assert min(builds.values()) >= 6
    assert {file.stem for file in OTHER_ANSWERS.glob("*.py")} >= set(builds)


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(OTHER_ANSWERS.glob("*.py")), ids=lambda file: file.stem)
def test_a_right_answer_that_is_built_differently_passes(file, tmp_path):
    report = check(EXERCISES[file.stem], file.read_text(encoding="utf-8"), tmp_path, num_random=50)
    assert report.passed, report


def test_an_answer_is_a_module_of_its_own():
    module = load("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n", "some file.py")
    assert module.A(1).x == 1
