"""What is shown of the first difference: the fields that differ, marked, and never two equal lines."""

import re
from typing import NamedTuple

import pytest
from rich.console import Console

from labs import one_file
from labs.learn.answers import Raised
from labs.learn.catalog import find_exercise
from labs.learn.checker import check_answer
from labs.learn.differences import draw_difference
from labs.learn.drawing import draw_pool
from labs.learn.findings import Drawing, Report
from labs.learn.report_printing import draw_lines, print_report
from labs.learn.seen import Seen
from labs.learn.simulation import find_wrong_blocks
from labs.learn.tensors import read_tensor
from labs.learn.texts import LANGUAGES, Text

LABEL = Text("step 1", "第 1 步")


class Pool(NamedTuple):
    result: bool
    free: tuple[int, ...]

    def __repr__(self) -> str:
        return f"Pool {self.result}"


def draw(right, yours, language="en"):
    return draw_difference(Seen(LABEL, right), Seen(LABEL, yours), language)


def marked(drawing):
    return [drawing.lines[line][start:end] for line, start, end in drawing.marks]


def test_only_the_fields_that_differ_are_shown_and_their_words_marked():
    drawing = draw(Pool(True, (1, 2, 3)), Pool(True, (1, 3)))
    assert drawing.lines[0] == "→ step 1: Pool True"
    assert "afterwards these differ" in drawing.lines[1]
    assert drawing.lines[2:] == ["    free  right: [1, 2, 3]", "          yours: [1, 3]"]
    assert marked(drawing) == ["2,"] or marked(drawing) == [", 2"]


@pytest.mark.parametrize(
    ("right", "yours"),
    [
        (1, "1"),
        (True, 1.0),
        ("x" * 300, "x" * 300 + "y"),
        ([0] * 100 + [1], [0] * 100 + [2]),
        (Pool(True, (1,)), Pool(True, (2,))),
        (read_tensor(range(9), [9]), read_tensor(range(1, 10), [9])),
    ],
)
@pytest.mark.parametrize("language", LANGUAGES)
def test_two_equal_lines_are_never_shown_as_the_difference(right, yours, language):
    lines = draw(right, yours, language).lines
    values = [line.split("：" if language == "zh" else "right: ")[-1].split("yours: ")[-1] for line in lines[1:]]
    assert len(set(values)) == len(values), lines
    assert len(lines) > 1


def test_an_exception_and_its_line_are_on_lines_of_their_own():
    error = Seen(Text("in line 7: `a = b[1:]`", "第 7 行：`a = b[1:]`"), Raised("IndexError"), "IndexError: no b")
    lines = draw_difference(Seen(LABEL, 1), error, "en").lines
    assert lines == ["→ step 1", "    right: 1", "    yours: IndexError: no b", "           in line 7: `a = b[1:]`"]


def test_a_leak_is_named_although_the_plans_of_the_step_are_equal(tmp_path):
    file = tmp_path / "bug_2.py"
    exercise = find_exercise("bug_2")
    file.write_text(exercise.make_starter("en"))
    report = check_answer(exercise, file, "en", num_random=0)
    text = "\n".join(report.drawings[0].lines)
    assert "in both runs; afterwards these differ:" in text
    assert re.search(r"Block \d is neither free nor in a block table\.", text)


def test_each_block_is_free_or_owned():
    manager = one_file.BlockManager(4, 2)
    seq = one_file.Sequence([1, 2, 3], 3, 1)
    manager.try_admit(seq)
    assert not list(find_wrong_blocks(manager, {"A": seq}))
    (leaked,) = seq.block_table[-1:]
    del seq.block_table[-1]
    assert [one.en for one in find_wrong_blocks(manager, {"A": seq})] == [
        f"Block {leaked} is neither free nor in a block table."
    ]
    seq.block_table.append(next(iter(manager.free)))
    assert f"Block {seq.block_table[-1]} is free and in the block table of A." in [
        one.en for one in find_wrong_blocks(manager, {"A": seq})
    ]


def test_a_block_with_many_owners_does_not_widen_the_drawing():
    manager = one_file.BlockManager(2, 2)
    seqs = {name: one_file.Sequence([1], 1, 1) for name in ("A", "A.1", "A.2")}
    manager.try_admit(seqs["A"])
    for child in ("A.1", "A.2"):
        manager.fork(seqs["A"], seqs[child])
    lines = draw_pool(manager, seqs).split("\n")
    assert lines[:4] == [
        "block         0   1",
        "owner        ×3   ·",
        "num_owners    3   0",
        "free        1",
    ]


def test_wrapped_lines_are_indented_and_keep_their_marks():
    console = Console(width=40)
    drawing = Drawing("", ["    right: " + "word " * 10 + "end"], [[0, 61, 64]])
    rows = draw_lines(drawing, console)
    assert all(row.cell_len <= 36 for row in rows)
    assert all(row.plain.startswith(" " * 8) for row in rows[1:])
    assert [rows[-1].plain[span.start : span.end] for span in rows[-1].spans] == ["end"]


def test_a_report_is_at_most_100_columns_wide(capsys):
    report = Report(False, "word " * 50, ["word " * 50], [Drawing("title", ["word " * 50])])
    print_report(Console(width=150), find_exercise("1"), report, "en")
    assert {len(line) for line in capsys.readouterr().out.splitlines()} == {100}
