"""Print reports, lists and solutions with Rich."""

from rich.console import Console, Group
from rich.markdown import Markdown
from rich.padding import Padding
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text as RichText

from nanovllm.extras.learn.exercise import Exercise
from nanovllm.extras.learn.findings import Drawing, Report
from nanovllm.extras.learn.folder import Folder
from nanovllm.extras.learn.texts import Language, Text

MAX_WIDTH = 100  # of a report


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
        parts.append(RichText("\n" + Text("Your code printed", "你的代码打印了").show(language), style="bold"))
        parts.append(RichText(report.printed.rstrip("\n")))
    if report.traffic is not None:
        look = Text("Step by step in the browser, as nanovllm runs it:", "在浏览器里逐步查看 nanovllm 的同一次运行：")
        parts.append(RichText(f"\n{look.show(language)}\n  nanovllm learn view {exercise.name}"))
    title = exercise.title.show(language)
    panel = Panel(Group(*parts), title=title, title_align="left", border_style=style, width=panel_width(console))  # type: ignore[arg-type]
    console.print(panel, highlight=False)


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
    """Print a table of the exercises and of what the learner has done."""
    table = Table()
    names = (Text("exercise", "练习"), Text("name", "名称"), Text("chapter", "章节"), Text("hints", "提示"))
    for name in ("", "", *(name.show(language) for name in names)):
        table.add_column(name)
    for number, exercise in enumerate(exercises, 1):
        state = RichText("✓", "green") if folder.has_passed(exercise) else RichText("")
        if not state and folder.file_of(exercise).exists():
            state = RichText("…", "yellow")
        hints = str(folder.count(exercise, "hints") or "")
        table.add_row(str(number), state, exercise.title.show(language), exercise.name, exercise.chapter, hints)
    console.print(table)
    passed = sum(folder.has_passed(one) for one in exercises)
    text = Text(f"{passed} of {len(exercises)} passed", f"已通过 {passed} / {len(exercises)}")
    console.print(text.show(language))


def print_solution(console: Console, exercise: Exercise) -> None:
    console.print(Syntax(exercise.solution.strip("\n"), "python", word_wrap=True))
