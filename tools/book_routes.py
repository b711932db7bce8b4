"""Print the steps of a route through the book, with a box and a time for each. `tools/book.py` puts them into pages.

The times are a stated model, the same for each step:

    a chapter     200 words a minute, and 10 minutes for its predictions and its three questions
    a prediction  its task at the same speed, and 5 minutes
    a function    its task, 4 minutes, and 2 for each line of the solution
    another kind  its task, and 15 minutes: a bug to find, a policy, the whole engine

Commands are counted apart: the page says how long they took on one machine. A time is rounded to 5 minutes.
"""

import ast
import re
from pathlib import Path

from labs.learn.catalog import CHAPTERS
from labs.learn.exercise import Build, Exercise, find_functions
from labs.learn.predict import Predict
from labs.learn.routes import ROUTES, Route
from labs.learn.texts import Language, Text

BOOK = Path(__file__).parents[1] / "docs" / "book"
WORDS_A_MINUTE = 200
CHAPTER_MINUTES = 10
PREDICT_MINUTES = 5
FIRST_MINUTES, LINE_MINUTES = 4, 2  # of an exercise that asks for functions
OTHER_MINUTES = 15


def list_steps(name: str, language: Language) -> str:
    """Return the steps of the route as a list of boxes below a line with the sum of their times."""
    route = ROUTES[name]
    exercises = route.list_exercises()
    lines = [total(route).show(language), ""]
    for chapter in route.chapters:
        title, minutes = CHAPTERS[chapter].show(language), round_to_five(chapter_minutes(chapter))
        read, unit = Text("Read", "读").show(language), Text("min", "分钟").show(language)
        lines.append(f"- [ ] {read} [{title}]({chapter}.md): {minutes} {unit}")
        before: list[str] = []  # the commands
        after: list[str] = []
        for one in exercises:
            if one.chapter == chapter:
                start = f"`nanovllm learn start {one.name}`"
                minutes = round_to_five(exercise_minutes(one))
                box = f"  - [ ] {start}: {one.title.show(language)}, {minutes} {unit}"
                (before if begins_before_commands(one) else after).append(box)
        lines += [*before, *(f"  - [ ] `{command}`" for command in commands_of(chapter)), *after]
    return "\n".join(lines)


def total(route: Route) -> Text:
    exercises = route.list_exercises()
    reading = sum(round_to_five(chapter_minutes(one)) for one in route.chapters)
    writing = sum(round_to_five(exercise_minutes(one)) for one in exercises)
    hours = (reading + writing) / 60
    return Text(
        f"{len(route.chapters)} chapters take {reading / 60:.1f} hours, and {len(exercises)} exercises "
        f"{writing / 60:.1f}: **{hours:.1f} hours** together, without pauses.",
        f"{len(route.chapters)} 章要 {reading / 60:.1f} 小时，{len(exercises)} 个练习要 {writing / 60:.1f} 小时，"
        f"一共 **{hours:.1f} 小时**，不含休息。",
    )


def chapter_minutes(chapter: str) -> float:
    """Return the time for the English page, which both languages give."""
    words = (BOOK / f"{chapter}.md").read_text(encoding="utf-8").split()
    return len(words) / WORDS_A_MINUTE + CHAPTER_MINUTES


def exercise_minutes(exercise: Exercise) -> float:
    minutes = len(exercise.task.en.split()) / WORDS_A_MINUTE
    if isinstance(exercise, Predict):
        return minutes + PREDICT_MINUTES
    if isinstance(exercise, Build) and exercise.holes:
        return minutes + FIRST_MINUTES + LINE_MINUTES * num_lines(exercise)
    return minutes + OTHER_MINUTES


def num_lines(exercise: Build) -> int:
    """Return how many lines the solution has in the functions to write, without docstrings."""
    functions = dict(find_functions(exercise.solution.strip("\n")))
    found = 0
    for name in exercise.holes:
        body = functions[name].body
        first = body[1] if ast.get_docstring(functions[name]) is not None and len(body) > 1 else body[0]
        found += (body[-1].end_lineno or 0) - first.lineno + 1
    return found


def begins_before_commands(exercise: Exercise) -> bool:
    """Return whether the chapter starts the exercise before its section "Measure", whose commands print the answer."""
    page = (BOOK / f"{exercise.chapter}.md").read_text(encoding="utf-8")
    return f"nanovllm learn start {exercise.name}" in page.partition("\n## Measure\n")[0]


def commands_of(chapter: str) -> list[str]:
    """Return the commands of the chapter's section "Measure"."""
    measure = (BOOK / f"{chapter}.md").read_text(encoding="utf-8").partition("\n## Measure\n")[2].partition("\n## ")[0]
    blocks = "".join(re.findall(r"^```bash\n(.*?)^```", measure, re.DOTALL | re.MULTILINE)).replace("\\\n", " ")
    lines = [re.sub(r"(^|\s)#.*| {2,}", " ", line).strip() for line in blocks.splitlines()]
    return [line for line in lines if line.startswith(("python -m ", "nanovllm "))]


def round_to_five(minutes: float) -> int:
    return max(5, round(minutes / 5) * 5)
