"""An answer with two known mistakes gets both explanations."""

import pytest

from labs.learn.catalog import find_exercise
from labs.learn.check_process import check_in_process
from labs.learn.checker import check_answer
from labs.learn.seen import Mistake, combine
from labs.learn.texts import Text

PAIRS = {
    "grow_table": ("A block too early", "A full pool is not noticed"),
    "copy_on_write": ("A copy for the only owner", "The old block keeps its owner"),
    "preempt": ("The victim goes to the end of the queue", "Admission after a preemption"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_two_mistakes_at_once_are_both_named(name, tmp_path):
    exercise = find_exercise(name)
    mistakes = [mistake for mistake in exercise.mistakes if mistake.name.en in PAIRS[name]]
    file = tmp_path / f"{name}.py"
    file.write_text(combine(*mistakes, exercise.solution))
    report = check_answer(exercise, file, "en", num_random=20)
    assert report.mistake == " + ".join(PAIRS[name])
    assert {one.why.en for one in mistakes} < set(report.paragraphs)


def test_mistakes_at_the_same_place_are_not_combined():
    one, other, third = (Mistake(Text("", ""), Text("", ""), ((old, new),)) for old, new in ("ab", "ac", "bc"))
    assert combine(one, other, "a + b") is None
    assert combine(one, third, "a + b") is None
    assert combine(one, Mistake(one.name, one.why, (("+", "-"),)), "a + b") == "b - b"


def test_a_pair_of_mistakes_without_an_end_is_given_up(tmp_path):
    """The loop of this answer ends; with other mistakes it does not, and takes all memory that a check may have."""
    exercise = find_exercise("generation_loop")
    by_name = {mistake.name.en: mistake for mistake in exercise.mistakes}
    source = combine(by_name["One token too many"], by_name["The model sees only the newest token"], exercise.solution)
    file = tmp_path / "generation_loop.py"
    file.write_text(source)
    report = check_in_process(exercise.name, file, "en")
    assert report.headline == "Not yet right."
