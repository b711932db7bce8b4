"""The routes: their exercises and their pages are in the book's order, and nothing shows a later answer."""

import ast
import re
from pathlib import Path

import pytest

from labs.learn import learn_options
from labs.learn.catalog import CHAPTERS, find_exercise, list_exercises
from labs.learn.exercise import Build, find_functions
from labs.learn.exercises.whole_engine import find_parts
from labs.learn.predict import Predict
from labs.learn.routes import AFTERNOON, CORE, ROUTES, WEEKEND

ROOT = Path(__file__).parents[3]
BOOK = ROOT / "docs" / "book"
EXERCISES = list_exercises()
NAMES = [one.name for one in EXERCISES]


def test_exercises_are_numbered_in_the_order_of_the_book():
    assert [one.chapter for one in EXERCISES] == sorted(one.chapter for one in EXERCISES)
    listed = []
    for chapter in CHAPTERS:
        built = (BOOK / f"{chapter}.md").read_text(encoding="utf-8").partition("\n## Build it\n")[2]
        listed += re.findall(r"^- `nanovllm learn start (\w+)`", built, re.MULTILINE)
    assert listed == NAMES


def test_the_core_is_what_the_whole_engine_is_made_of():
    assert len(CORE) == 16
    assert CORE[-1] == "whole_engine"
    assert {name for name, _ in find_parts().values()} <= set(CORE)
    assert set(AFTERNOON.names) < set(CORE)
    for name in ("grow_table", "release_blocks", "admit_whole"):
        assert name in AFTERNOON.names


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("folder", ["", "zh"])
def test_a_page_has_the_steps_of_its_route(name, folder):
    """The page is read here, and not made again: chapters and exercises exist, and are in the book's order."""
    page = (BOOK / folder / f"route_{name}.md").read_text(encoding="utf-8")
    boxes = re.findall(r"^ *- \[ \] (.*)$", page, re.MULTILINE)
    chapters = [found[1] for box in boxes if (found := re.search(r"\]\((\d\d_\w+)\.md\)", box))]
    started = [found[1] for box in boxes if (found := re.match(r"`nanovllm learn start (\w+)`", box))]
    assert chapters == list(ROUTES[name].chapters) == sorted(chapters)
    assert started == [one.name for one in ROUTES[name].list_exercises()] == sorted(started, key=NAMES.index)
    assert {find_exercise(one).chapter for one in started} <= set(chapters)
    commands = [found[1].replace(".", "/") for box in boxes if (found := re.match(r"`python -m ([\w.]+)", box))]
    assert len(commands) >= len(chapters)
    assert [
        one for one in commands if not any((ROOT / f"{one}{end}").exists() for end in (".py", "/__main__.py"))
    ] == []
    times = [int(found[1]) for box in boxes if (found := re.search(r"(\d+) (?:min|分钟)$", box))]
    steps = times[: len(chapters) + len(started)]  # after them, the extensions
    assert f"**{sum(steps) / 60:.1f} " in page


def test_the_option_offers_all_routes():
    assert tuple(ROUTES) == learn_options.ROUTES


def test_the_weekend_continues_the_afternoon():
    assert set(AFTERNOON.chapters) < set(WEEKEND.chapters)
    assert WEEKEND.chapters == tuple(CHAPTERS)[:9]


def significant_lines(source: str) -> list[str]:
    """Return lines without their spaces. Short ones are everywhere, and say nothing."""
    lines = [re.sub(r"\s+|#.*", "", line) for line in source.split("\n")]
    return [line for line in lines if len(line) > 22]


def solutions(exercise: Build) -> dict[str, list[str]]:
    """Return function to write -> the lines of its body."""
    source = exercise.solution.strip("\n")
    functions = dict(find_functions(source))
    found = {}
    for name in exercise.holes:
        body = functions[name].body
        first = 1 if ast.get_docstring(functions[name]) is not None and len(body) > 1 else 0
        texts = [ast.get_source_segment(source, node) or "" for node in body[first:]]
        found[name] = [line for text in texts for line in significant_lines(text)]
    return found


def test_no_file_shows_the_solution_of_a_later_exercise():
    for i, one in enumerate(EXERCISES):
        shown = set(significant_lines(one.make_starter("en")))
        for later in EXERCISES[i + 1 :]:
            if isinstance(later, Build):
                for function, lines in solutions(later).items():
                    known = [line for line in lines if line in shown]
                    assert len(known) < 2 or len(known) <= len(lines) / 2, (one.name, later.name, function, known)


def test_no_page_shows_the_solution_of_a_later_exercise():
    """In its own chapter, a solution is folded, below the command that starts the exercise."""
    for chapter in CHAPTERS:
        text = (BOOK / f"{chapter}.md").read_text(encoding="utf-8")
        for one in EXERCISES:
            if isinstance(one, Build) and one.chapter >= chapter:
                seen = text
                if one.chapter == chapter:
                    before, command, after = text.partition(f"`nanovllm learn start {one.name}`")
                    seen = before + re.sub(r"<details>.*?</details>", "", command + after, flags=re.DOTALL)
                shown = set(significant_lines(seen))
                for function, lines in solutions(one).items():
                    known = [line for line in lines if line in shown]
                    assert not lines or len(known) < max(1, len(lines) / 2), (chapter, one.name, function, known)


@pytest.mark.parametrize("folder", ["", "zh"])
@pytest.mark.parametrize("name", [one.name for one in EXERCISES if isinstance(one, Predict)])
def test_a_number_is_predicted_before_a_page_shows_it(name, folder):
    """Its own chapter names the exercise first. No chapter before has the number, if it is one that stands out."""
    exercise = find_exercise(name)
    assert isinstance(exercise, Predict)
    right = exercise.measure()
    if right < 100:
        pytest.skip("small numbers are everywhere")
    number = re.compile(rf"(?<![\d,.]){round(right):,}(?![\d,])")
    for chapter in CHAPTERS:
        if chapter == exercise.chapter or (chapter < exercise.chapter and right > 1000):
            text = (BOOK / folder / f"{chapter}.md").read_text(encoding="utf-8")
            before = text.partition(f"nanovllm learn start {name}")[0] if chapter == exercise.chapter else text
            assert not number.search(before), (chapter, number.pattern)
