"""Print reports, lists and solutions with Rich."""

from configparser import ConfigParser

from rich.console import Console, Group
from rich.markdown import Markdown
from rich.padding import Padding
from rich.panel import Panel
from rich.syntax import Syntax
from rich.text import Text as RichText

from labs.learn.catalog import CHAPTERS
from labs.learn.exercise import Exercise
from labs.learn.findings import Drawing, Report
from labs.learn.folder import Folder, number_of
from labs.learn.routes import Route
from labs.learn.texts import Language, Text

MAX_WIDTH = 100  # of a report
NUM_PRINTED = 10  # lines that the learner's code has printed


def print_report(console: Console, exercise: Exercise, report: Report, language: Language) -> None:
    """Print the result of a check: the headline, the explanation, and what was drawn."""
    style = "green" if report.passed else "red"
    parts: list[object] = [RichText(report.headline, style=f"bold {style}")]
    parts += [Padding(Markdown(paragraph), (1, 0, 0, 0)) for paragraph in report.paragraphs]
    for drawing in report.drawings:
        parts.append(RichText("\n" + drawing.title, style="bold"))
        if drawing.lines:
            parts += draw_lines(drawing, console)
    if report.printed:
        parts.append(
            RichText(
                "\n" + Text("Your code printed in this run", "你的代码在这次运行中打印了").show(language), style="bold"
            )
        )
        parts += draw_lines(Drawing("", cut_printed(report.printed, language)), console)
    if report.traffic is not None:
        look = Text("Step by step in the browser, as nanovllm runs it:", "在浏览器里逐步查看 nanovllm 的同一次运行：")
        parts.append(RichText(f"\n{look.show(language)}\n  nanovllm learn view {exercise.name}"))
    title = exercise.title.show(language)
    panel = Panel(Group(*parts), title=title, title_align="left", border_style=style, width=panel_width(console))  # type: ignore[arg-type]
    console.print(panel, highlight=False)


def cut_printed(printed: str, language: Language) -> list[str]:
    """Return the last lines that were printed: those before the first difference."""
    lines = printed.rstrip("\n").expandtabs().split("\n")
    left_out = len(lines) - NUM_PRINTED
    if left_out <= 0:
        return lines
    more = Text(f"({left_out} lines before these)", f"（前面还有 {left_out} 行）")
    return [more.show(language), *lines[-NUM_PRINTED:]]


def panel_width(console: Console) -> int:
    return min(console.width, MAX_WIDTH)


def draw_lines(drawing: Drawing, console: Console) -> list[RichText]:
    """Return the lines of a drawing with its marks. A line that is too long continues further to the right."""
    found: list[RichText] = []
    for i, line in enumerate(drawing.lines):
        text = RichText(line)
        for _, start, end in (mark for mark in drawing.marks if mark[0] == i):
            text.stylize("bold red", start, end)
        indent = len(line) - len(line.lstrip()) + 4
        width = panel_width(console) - 4
        rows = [text] if text.cell_len <= width else list(text.wrap(console, width - indent))
        for row in rows[1:]:
            row.pad_left(indent)
        found += rows
    return found


def print_list(console: Console, exercises: list[Exercise], folder: Folder, language: Language) -> None:
    """Print the exercises of each chapter, one per line, and what the learner has done."""
    progress = folder.read()
    print_lines(console, exercises, folder, language)
    legend = Text(
        "✓ passed, … started. Begin one with: nanovllm learn start NUMBER",
        "✓ 已通过，… 已开始。开始一个练习：nanovllm learn start 编号",
    )
    console.print("\n" + legend.show(language), markup=False, soft_wrap=True)
    console.print(count_passed(exercises, progress).show(language))


def print_lines(console: Console, exercises: list[Exercise], folder: Folder, language: Language) -> None:
    """Print the title of each chapter and a line for each of its exercises: number, state, name and title."""
    progress = folder.read()
    width = max(len(one.name) for one in exercises)
    chapter = ""
    for exercise in exercises:
        if exercise.chapter != chapter:
            chapter = exercise.chapter
            console.print(RichText("\n" + CHAPTERS[chapter].show(language), style="bold"))
        title = exercise.title.show(language)
        state = state_of(exercise, folder, progress)
        line = RichText(f"  {number_of(exercise):2} ") + state + f" {exercise.name:<{width}}  {title}"
        console.print(line, soft_wrap=True)


def state_of(exercise: Exercise, folder: Folder, progress: ConfigParser) -> RichText:
    """Return one character: passed, started, or neither."""
    if progress.get(exercise.name, "passed", fallback="no") == "yes":
        return RichText("✓", "green")
    return RichText("…", "yellow") if folder.file_of(exercise).exists() else RichText(" ")


def num_passed(exercises: list[Exercise], progress: ConfigParser) -> int:
    return sum(progress.get(one.name, "passed", fallback="no") == "yes" for one in exercises)


def count_passed(exercises: list[Exercise], progress: ConfigParser) -> Text:
    passed = num_passed(exercises, progress)
    return Text(f"{passed} of {len(exercises)} passed", f"已通过 {passed} / {len(exercises)}")


def print_status(
    console: Console, route: Route, following: Exercise | None, folder: Folder, language: Language
) -> None:
    """Print the exercises of a route, and how far the learner is: "7 of 16, next: share_blocks".

    following: the exercise to do next; None if all of the route are passed
    """
    exercises = route.list_exercises()
    progress = folder.read()
    print_lines(console, exercises, folder, language)
    passed, title = num_passed(exercises, progress), route.title
    where = Text(f"\n{passed} of {len(exercises)}", f"\n已完成 {passed} / {len(exercises)}")
    after = Text("all done", "全部完成")
    if following is not None:
        after = Text(f"next: {following.name}", f"下一个：{following.name}")
    of_route = Text(f" (route: {title.en})", f"（路线：{title.zh}）")
    line = Text(f"{where.en}, {after.en}{of_route.en}", f"{where.zh}，{after.zh}{of_route.zh}")
    console.print(line.show(language), markup=False, soft_wrap=True)
    hints = sum(folder.count(one, "hints") for one in exercises)
    if hints:
        console.print(Text(f"Hints read: {hints}", f"看过的提示：{hints}").show(language))


def print_solution(console: Console, exercise: Exercise) -> None:
    console.print(Syntax(exercise.solution.strip("\n"), "python", word_wrap=True))
