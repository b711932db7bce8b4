"""Three routes through the book and its exercises. `docs/book/route_….md` are their pages, and a test compares them.

The weekend's exercises are the core: `whole_engine` puts exactly these functions together, and `nanovllm learn` shows
them if no other route is chosen.
"""

from dataclasses import dataclass

from labs.learn.catalog import CHAPTERS, find_exercise, list_exercises
from labs.learn.exercise import Exercise
from labs.learn.texts import Text


@dataclass(frozen=True)
class Route:
    """Chapters to read and exercises to do, both in the order of the book."""

    name: str
    title: Text
    chapters: tuple[str, ...]
    """Pages of the book."""
    names: tuple[str, ...]
    """Of the exercises. Empty: all of them."""

    def list_exercises(self) -> list[Exercise]:
        return [find_exercise(name) for name in self.names] or list_exercises()


PAGES = tuple(CHAPTERS)
AFTERNOON = Route(
    "afternoon",
    Text("an afternoon", "一个下午"),
    (PAGES[0], PAGES[1], PAGES[3], PAGES[4]),
    ("generation_loop", "predict_kv_bytes", "schedule", "grow_table", "release_blocks", "admit_whole"),
)
WEEKEND = Route(
    "weekend",
    Text("a weekend", "一个周末"),
    PAGES[:9],
    (
        "generation_loop",
        "predict_kv_bytes",
        "attend_with_cache",
        "schedule",
        "block_diagonal_mask",
        "grow_table",
        "release_blocks",
        "admit_whole",
        "attend_to_blocks",
        "fork",
        "copy_on_write",
        "hash_chain",
        "revive_blocks",
        "register_blocks",
        "preempt",
        "whole_engine",
    ),
)
EVERYTHING = Route("everything", Text("everything", "全部"), PAGES, ())
ROUTES = {route.name: route for route in (AFTERNOON, WEEKEND, EVERYTHING)}
CORE = WEEKEND.names
"""The names of the sixteen core exercises."""
