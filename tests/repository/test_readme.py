"""The pages are true: README's commands are CI's, code runs, quotes are in the source, and links lead to files and
headings. Both languages agree, and `docs/map.md` names every file once.
"""

import dataclasses
import re
from pathlib import Path

import pytest

from nanovllm_extras import Config
from tests.core_alone import EXTRAS, PACKAGE, ROOT, TESTING

README = (ROOT / "README.md").read_text(encoding="utf-8")
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")

RUN_COMMAND = "python3 -m venv .venv && .venv/bin/pip install -e . && .venv/bin/python example.py"
TEST_COMMAND = 'python3 -m venv .venv && .venv/bin/pip install -e ".[test]" && .venv/bin/pytest'


def test_readme_leads_with_exactly_two_commands():
    first_block = re.search(r"```(?:bash|sh)\n(.*?)```", README, re.DOTALL)
    assert first_block is not None
    assert first_block.group(1).splitlines() == [RUN_COMMAND, TEST_COMMAND]


def test_ci_runs_readme_test_command_word_for_word():
    assert TEST_COMMAND in CI.splitlines()


def test_ci_runs_all_tests_in_a_browser():
    """It names their folder, since it takes long to collect all others."""
    folder = re.search(r"pytest -m browser .*?(tests/\S+)", CI)[1]
    marked = [path for path in (ROOT / "tests").rglob("*.py") if "mark.browser" in path.read_text(encoding="utf-8")]
    others = [path for path in marked if not path.is_relative_to(ROOT / folder) and path != Path(__file__)]
    assert (len(marked) > 5, others) == (True, [])


def test_the_number_of_lines_is_the_cores():
    named = [int(number.replace(",", "")) for number in re.findall(r"about ([\d,]+) lines", README)]
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")]
    assert named == [pytest.approx(sum(lines), rel=0.1)]


# ---- code: quotes begin with a comment that names their file, all other blocks run

BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
QUOTES = [block for block in BLOCKS if block.startswith("# nanovllm/")]


def test_quoted_lines_stand_in_the_source_in_this_order():
    for first, *quoted in map(str.splitlines, QUOTES):
        source = read(re.match(r"# (\S+\.py)", first)[1])
        lines = iter([without_comment(line) for line in source.splitlines()])
        wanted = [line for line in map(without_comment, quoted) if line]
        assert [line for line in wanted if line not in lines] == []  # `in` reads on from the line found before


def without_comment(line):
    return line.partition("  # ")[0].strip()


def python_of(path):
    """The blocks of a page that are not quotes, as one program."""
    blocks = re.findall(r"```python\n(.*?)```", read(path), re.DOTALL)
    return "\n".join(block for block in blocks if not block.startswith("# nanovllm/"))


def test_the_code_of_readme_runs(capsys):
    exec(python_of("README.md"), {})
    assert "block" in capsys.readouterr().out


def test_the_code_of_using_runs(capsys):
    exec(python_of("docs/using.md"), {})
    printed = capsys.readouterr().out
    assert printed.count("EngineStats(") == 1
    assert "attention_backend=" in printed
    steps = re.findall(r"(\d+) tokens of prompts, (\d+) decodes: (.*)", printed)
    assert any(prefill != "0" != decodes for prefill, decodes, _ in steps), "a prompt is prefilled beside a decode"
    assert any("A block table is" in texts and "Paged attention stores" in texts for _, _, texts in steps)


def test_the_code_of_architecture_runs(capsys, monkeypatch, tmp_path):
    """Its first part is a file, which the second one names."""
    code = python_of("docs/architecture.md")
    file, program = code.split("scheduler_cls = ShortestFirst\n")
    (tmp_path / "short_first.py").write_text(f"{file}scheduler_cls = ShortestFirst\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    assert capsys.readouterr().out.strip() == re.search(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)[1]


PAGES = ["README.md", "README.zh.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]


def test_links_lead_to_files():
    for path in PAGES:
        targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", without_code(read(path)))
        local = [target for target in targets if not target.startswith("http")]
        assert [target for target in local if not (ROOT / path).parent.joinpath(target).exists()] == [], path
        links = re.findall(r"\[`([^`/ ]+\.py)`\]\((?!http)([^)#]+)", read(path))
        assert [link for link in links if Path(link[1]).name != link[0]] == [], path


def test_comments_name_files_that_are_there():
    """`scheduler.py`, or `parallel/messages.py`: the end of the path of a file."""
    folders = ("nanovllm", "nanovllm_extras", "nanovllm_testing", "benchmarks", "labs", "tools")
    files = [file for folder in folders for file in ROOT.glob(f"{folder}/**/*.py")]
    there = [*files, *ROOT.glob("*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("examples/**/*.py")]
    known = " ".join(f"/{file.relative_to(ROOT)}" for file in there)
    named = {(file.name, name) for file in files for name in re.findall(r"`([\w./]+\.py)`", file.read_text("utf-8"))}
    missing = [one for one in sorted(named) if f"/{one[1]} " not in f"{known} "]
    assert missing == [("requirements.py", "triton/runtime/build.py")]  # of another package


def test_both_languages_have_the_same_code_and_links():
    """Each language links the other one at its top, and leads to its own book and exercises."""
    chinese = read("README.zh.md")
    assert re.findall(r"^```.*?^```$", chinese, re.M | re.S) == re.findall(r"^```.*?^```$", README, re.M | re.S)
    levels = [re.findall(r"^(#+) ", without_code(text), re.MULTILINE) for text in (README, chinese)]
    assert levels[0] == levels[1]
    links = {text: re.findall(r"\]\(([^)]+)\)", without_code(text)) for text in (README, chinese)}
    assert links[README].count("README.zh.md") == links[chinese].count("README.md") == 1
    assert "](README.zh.md)" in README.partition("\n## ")[0]
    assert "](README.md)" in chinese.partition("\n## ")[0]
    other = {
        "README.zh.md": "README.md",
        "docs/book/README.md": "docs/book/zh/README.md",
        "docs/book/README.md#three-routes": "docs/book/zh/README.md#三条路线",
        "docs/images/request.svg": "docs/images/request.zh.svg",
        "docs/learn.md": "docs/learn.zh.md",
        "#install": "#安装",
    }
    assert sorted(links[chinese]) == sorted(other.get(link, link) for link in links[README])


def test_links_lead_to_headings():
    texts = {ROOT / path: without_code(read(path)) for path in PAGES}
    for path, text in texts.items():
        for target, anchor in re.findall(r"\]\(([^)#:]*\.md)?#([^)]*)\)", text):
            page = (path.parent / target).resolve() if target else path
            if page in texts:
                assert anchor in headings(texts[page]), f"{path.name}: {target}#{anchor}"


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


def without_code(text):
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def headings(text):
    """The anchors of a page, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in found}


def test_all_options_are_compared():
    options = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `([^`]+)` \|", options, re.MULTILINE)
    assert named == [field.name for field in dataclasses.fields(Config)]


# ---- the map

MAP = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
MAP_ROW = r"^\| \[`([^`]+)`\]\(\.\./(nanovllm|nanovllm_extras|nanovllm_testing)/\1\) \| [^|]+ \|$"
NAMED = [f"{package}/{file}" for file, package in re.findall(MAP_ROW, MAP, re.MULTILINE)]


def files_of(package):
    files = [str(path.relative_to(ROOT)) for path in package.rglob("*.py")]
    return {file for file in files if not file.endswith("__init__.py")}


def test_the_map_names_every_file_once():
    assert sorted(NAMED) == sorted(files_of(PACKAGE) | files_of(EXTRAS) | files_of(TESTING))
