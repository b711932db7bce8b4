"""Mistakes that learners often make are rejected, and most get the explanation that was written down for them.

Ten mistakes are planted in each exercise of chapters 1 to 9 with functions to write. The table says how many the
checker names, how many it only rejects with the first difference of the smallest run, and how many pass.
"""

import pytest

from labs.learn.catalog import find_exercise
from labs.learn.checker import check_answer
from labs.learn.exercise import Build
from labs.learn.routes import WEEKEND
from tests.labs.learn.classic_mistakes import CLASSIC

TABLE = {  # named, only rejected, passed
    "generation_loop": (10, 0, 0),
    "attend_with_cache": (10, 0, 0),
    "step_time": (8, 2, 0),
    "schedule": (9, 1, 0),
    "block_diagonal_mask": (9, 1, 0),
    "grow_table": (9, 1, 0),
    "release_blocks": (7, 3, 0),
    "admit_whole": (9, 1, 0),
    "attend_to_blocks": (5, 5, 0),
    "fork": (7, 3, 0),
    "copy_on_write": (7, 3, 0),
    "hash_chain": (8, 2, 0),
    "revive_blocks": (9, 1, 0),
    "register_blocks": (9, 1, 0),
    "chunk_limit": (8, 2, 0),
    "preempt": (9, 1, 0),
    "count_padding": (5, 5, 0),
    "merge_partials": (6, 4, 0),
    "budget_from_itl": (8, 2, 0),
    "swap": (9, 1, 0),
}
PLANTED = [(name, i) for name, all_planted in CLASSIC.items() for i in range(len(all_planted))]


def check(name, i, folder):
    exercise, planted = find_exercise(name), CLASSIC[name][i]
    file = folder / f"{name}.py"
    file.write_text(planted.apply(exercise.solution), encoding="utf-8")
    report = check_answer(exercise, file, "en", num_random=20)
    assert not report.passed, planted.feedback
    assert report.mistake == planted.named, planted.feedback


@pytest.mark.parametrize("name", CLASSIC)
def test_a_classic_mistake_gets_its_feedback(name, tmp_path):
    check(name, 0, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "i"), PLANTED)
def test_each_classic_mistake_gets_its_feedback(name, i, tmp_path):
    check(name, i, tmp_path)


def test_the_table_counts_the_planted_mistakes():
    core = {exercise.name for exercise in WEEKEND.list_exercises() if isinstance(exercise, Build)}
    assert core - {"whole_engine"} <= set(CLASSIC)  # which joins the functions of the others
    for name, all_planted in CLASSIC.items():
        num_named = sum(planted.named is not None for planted in all_planted)
        assert TABLE[name] == (num_named, len(all_planted) - num_named, 0)
        assert len(all_planted) == 10
