"""The exercises in their order."""

from importlib import import_module

from nanovllm.extras.learn.exercise import Exercise

MODULES = (
    "remove_one_line",
    "generation_loop",
    "attend_with_cache",
    "predict_numbers",
    "step_time",
    "schedule",
    "count_padding",
    "block_diagonal_mask",
    "grow_table",
    "release_blocks",
    "admit_whole",
    "attend_to_blocks",
    "merge_partials",
    "fork",
    "copy_on_write",
    "hash_chain",
    "revive_blocks",
    "register_blocks",
    "chunk_limit",
    "budget_from_itl",
    "preempt",
    "swap",
    "my_policy",
    "top_p",
    "draw_token",
    "streaming_detokenizer",
    "stop_strings",
    "placeholders",
    "graph_padding",
    "prefix_router",
    "hand_over",
    "predict_hand_over",
    "verify_draft",
    "rejection_sampling",
    "predict_speculation",
    "find_the_bug",
    "whole_engine",
)
"""Modules of `exercises/`. Each has a tuple `EXERCISES`."""


def list_exercises() -> list[Exercise]:
    """Return all exercises in their order."""
    found: list[Exercise] = []
    for name in MODULES:
        found += import_module(f"nanovllm.extras.learn.exercises.{name}").EXERCISES
    return found


def find_exercise(which: str) -> Exercise:
    """Return the exercise with this name or number, counted from 1. ValueError if no exercise has it."""
    exercises = list_exercises()
    if which.isdecimal():
        if 1 <= int(which) <= len(exercises):
            return exercises[int(which) - 1]
        raise ValueError(f"there is no exercise {which}; the numbers are 1 to {len(exercises)}")
    for exercise in exercises:
        if exercise.name == which:
            return exercise
    raise ValueError(f"there is no exercise {which!r}; `nanovllm learn list` shows their names")
