"""A learner's file lists the attributes and methods that its answer can use."""

import ast

import pytest

from labs.learn.catalog import list_exercises
from labs.learn.exercise import Build, find_functions
from labs.learn.texts import LANGUAGES

BUILDS = {one.name: one for one in list_exercises() if isinstance(one, Build) and one.names}


@pytest.mark.parametrize("name", BUILDS)
def test_a_file_has_every_attribute_that_the_solution_uses(name):
    exercise = BUILDS[name]
    functions = dict(find_functions(exercise.solution))
    used = {
        (node.value.id, node.attr)
        for hole in exercise.holes
        for node in ast.walk(functions[hole])
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    written = {hole.split(".")[-1] for hole in exercise.holes}
    owners = {"self", "seq", "parent", "child", "blocks"}
    names = {f"{owner}.{attribute}" for owner, attribute in used if owner in owners and attribute not in written}
    assert names
    for language in LANGUAGES:
        file = exercise.make_starter(language)  # its header lists them, or its code has them
        assert {one for one in names if one not in file} == set()
