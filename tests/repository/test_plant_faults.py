"""`tools/plant_faults.py`: which faults it plants, and what it says of the tests that should find them."""

import ast
import subprocess
import textwrap
import threading

import pytest

from tools.plant_faults import (
    EQUIVALENT,
    ROOT,
    Copy,
    Covering,
    Limits,
    Result,
    Trial,
    choose,
    compare,
    find_again,
    find_faults,
    main,
    read_equivalent,
    read_map,
    summary,
)

CHANGES = {  # a statement -> what its line becomes, one fault each
    "a < b": ["(a <= b)"],
    "a >= b": ["(a > b)"],
    "a is not b": ["(a is b)"],
    "a < b in c": ["(a <= b in c)", "(a < b not in c)"],
    "a + b": ["(a - b)"],
    "c * a // b": ["(c * a * b)", "(c + a) // b"],
    "a[-b]": ["a[(b)]"],
    "not a": ["(a)"],
    "a and b": ["(a or b)"],
    "a = 1": ["a = 2", "a = (0)"],
    "a += b": ["a -= b"],
    "a(b)": ["pass"],
    "await a(b)": ["pass"],
    "b if a else c": ["b if (not a) else c"],
    "[a for a in b if c]": ["[a for a in b if (not c)]"],
    "if a: b": ["if (not a): b"],
    "while a or b: c": ["while (a and b): c", "while (not (a or b)): c"],
    "if a < b: c": ["if (a <= b): c"],
    "def inner(a: int = 1) -> 2: return a < b": ["def inner(a: int = 1) -> 2: return (a <= b)"],
    'x = "ä" * a  # 1 + 1': [],  # formats or repeats a text
    "x = 'ä', a < b  # 1 + 1": ["x = 'ä', (a <= b)"],
    "x = a * 'ä' < b": ["x = (a * 'ä' <= b)", "x = (a + 'ä') < b"],
}


def in_function(statement):
    return f"async def f(a, b, c):\n    {statement}\n".encode()


@pytest.mark.parametrize("statement", CHANGES)
def test_the_faults_of_a_statement(statement):
    source = in_function(statement)
    faults = find_faults("x.py", source)
    assert sorted(fault.after for fault in faults) == sorted(CHANGES[statement])
    for fault in faults:
        assert fault.before == statement.partition("  #")[0]
        assert fault.plant(source).decode().splitlines()[1].partition("  #")[0].strip() == fault.after


@pytest.mark.parametrize(
    "statement",
    [
        '"""2 > 1"""',
        "x: Literal[1]",
        "raise ValueError(1 + 1)",
        "assert a < 1",
        "logger.info(a + 1)",
        "logging.getLogger(a).warning(1)",
        'x = f"{a + 1}"',
        "isinstance(a, b | c)[b]",
        "x = cast(b | c, a)",
        "if TYPE_CHECKING: a = 1",
        "def __repr__(self): return 1",
        "def inner(a=1): pass",
        "@cache(1)\n    def inner(a): pass",
        "import a",
    ],
)
def test_what_no_test_should_see_stays_as_it_is(statement):
    assert not find_faults("x.py", in_function(statement))


def test_code_outside_functions_stays_as_it_is():
    assert not find_faults("x.py", b"A = 1\nclass B:\n    c = A + 1\n    print(c)\n")


@pytest.mark.parametrize("path", ["nanovllm/scheduler.py", "nanovllm/layers/attention.py", "nanovllm/loader.py"])
def test_faults_of_real_code_are_programs_with_names_of_their_own(path):
    source = (ROOT / path).read_bytes()
    faults = find_faults(path, source)
    assert len({fault.name for fault in faults}) == len(faults) > 30
    unchanged = ast.dump(ast.parse(source))
    assert all(ast.dump(ast.parse(fault.plant(source))) != unchanged for fault in faults[::7])


def test_the_seed_chooses_faults_of_different_lines():
    source = "".join(f"def f{i}(a):\n    return a < {i}\n" for i in range(50)).encode()
    found = {}
    for path in ("a.py", "b.py"):
        for fault in find_faults(path, source):
            found.setdefault(path, {}).setdefault(fault.line, []).append(fault)
    chosen = choose(found, 40, seed=1)
    assert chosen == choose(found, 40, seed=1) != choose(found, 40, seed=2)
    assert len({(fault.path, fault.line) for fault in chosen}) == 40
    assert len(choose(found, 1000, seed=1)) == 100


def test_a_case_of_each_function_runs_before_a_second_one():
    [fault] = find_faults("x.py", in_function("a < b"))
    seconds = {"f[1]": 0.3, "f[2]": 0.1, "f[3]": 0.2, "g": 5.0, "h[1]": 0.4, "elsewhere": 0.0}
    covering = Covering(seconds, {"x.py": {2: set(seconds) - {"elsewhere"}, 1: {"elsewhere"}}})
    assert covering.tests_of(fault) == ["f[2]", "h[1]", "g", "f[3]", "f[1]"]


def test_a_fault_is_found_again_when_its_lines_move(tmp_path):
    source = b"def f(a):\n    return a < 1\ndef g(a):\n    a(1)\n    a(1)\n"
    (tmp_path / "x.py").write_bytes(b"B = 3\n" + source.replace(b"a < 1", b"a < 5"))
    faults = find_faults("x.py", source)
    here, gone = find_again([fault.name for fault in faults], tmp_path)
    assert [fault.line for fault in here] == [fault.line + 1 for fault in faults if fault.function == "g"]
    assert gone == [fault.name for fault in faults if fault.function == "f"]
    assert len({fault.name for fault in here}) == 6  # both calls, dropped, with 2 and with 0


def test_equivalent_faults_are_faults_of_the_source(tmp_path):
    assert find_again(read_equivalent(EQUIVALENT), ROOT)[1] == []
    (tmp_path / "list").write_text("# all\n\nx.py f: a -> b\n  because\n  of this\ny.py f: a -> b\n")
    with pytest.raises(ValueError, match="give the reason .* 'y.py f: a -> b'"):
        read_equivalent(tmp_path / "list")


@pytest.mark.parametrize(
    ("now", "is_enough"),
    [
        (["default"] * 7 + [None], True),
        (["default"] * 6 + ["sweep", None], True),  # 6 of 7 by itself
        (["default"] * 5 + ["sweep", "sweep", None], False),  # 5 of 7
        (["default"] * 6 + [None, None], False),  # together fewer
        (["default"] * 6 + [None, "default"], True),
        (["default"] * 6 + [None, "equivalent"], False),
    ],
)
def test_a_comparison(now, is_enough):
    earlier = {f"{i}": "default" if i < 7 else None for i in range(8)} | {"gone": "default"}
    results = [Result(f"{i}", "", found_by) for i, found_by in enumerate(now)]
    assert compare(earlier, results)[1] == is_enough


# ---- a small repository

FILES = {
    "pyproject.toml": """
        [tool.pytest.ini_options]
        addopts = ["-q", "-m not slow", "--disable-plugin-autoload", "-p", "xdist"]
        markers = ["slow"]
    """,
    "nanovllm/__init__.py": "",
    "nanovllm/lines.py": """
        import sys
        def tested(a):
            return a + 1
        def untested(a):
            return a - 2
        def in_the_sweep(a):
            return a * 3
        def hangs(a):
            while a > 0:
                a -= 4
        def ends(a):
            if a and sys.flags:
                sys.exit = sys.exit
            else:
                __import__("os")._exit(3)
        def shared(a):
            return a / 5
        def unsound(a):
            return a % 6
        def waits(a):
            if a: __import__("threading").Event().wait()
    """,
    "tests/test_lines.py": """
        import os, pytest
        from nanovllm import lines
        def test_that_fails_in_a_copy():
            lines.unsound(1)
            assert "XDG_CACHE_HOME" not in os.environ
        def test_tested(): assert lines.tested(1) == 2
        def test_untested(): lines.untested(1)
        def test_in_the_sweep(): lines.in_the_sweep(1)
        @pytest.mark.slow
        def test_slow(): assert lines.in_the_sweep(7) == 21
        def test_hangs(): lines.hangs(4)
        def test_ends(): lines.ends(1)
        @pytest.fixture(scope="module")
        def value(): return lines.shared(10)
        def test_first(value): pass
        def test_second(value): assert value == 2
        def test_waits(): lines.waits(0)
    """,
}
EXPECTED = {  # a changed line -> what finds it
    "return (a - 1)": ("default", "test_tested", "assert 0 == 2"),
    "return (a + 2)": (None, "", ""),
    "return (a + 3)": ("sweep", "test_slow", "assert 10 == 21"),
    "a += 4": ("default", "test_hangs", "the test hangs"),
    "if (not (a and sys.flags)):": ("default", "test_ends", "the process ends with 3"),
    "return (a * 5)": ("default", "test_second", "assert 50 == 2"),
    "return (a // 6)": (None, "", ""),
    "return a - 3": ("equivalent", "", "nobody reads it"),
}


@pytest.mark.slow  # pytest starts fifteen times
def test_a_small_repository(tmp_path, monkeypatch, capfd):
    pytest.importorskip("coverage")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    root = tmp_path / "repository"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(textwrap.dedent(text).lstrip())
    subprocess.run(["git", "init", "-q", root], check=True)
    folder = tmp_path / "map"
    assert main(["map", "--map", str(folder)], root) == 0
    assert main(["map", "--map", str(folder), "--sweep", "--", "tests/test_lines.py"], root) == 0
    assert "9 tests execute" in capfd.readouterr().out

    maps = {run: read_map(folder / run, root) for run in ("default", "sweep")}
    faults = find_faults("nanovllm/lines.py", (root / "nanovllm/lines.py").read_bytes())
    chosen = [fault for fault in faults if fault.after in EXPECTED]
    [equivalent] = [fault.name for fault in chosen if fault.after == "return a - 3"]
    shown = []
    trial = Trial(root, maps, Limits(seconds=60, hang=1), {equivalent: "nobody reads it"})
    results = trial.run(chosen, 2, shown.append)
    outcomes = [(one.found_by, one.test.rpartition("::")[2], one.reason) for one in results]
    assert {fault.after: outcome for fault, outcome in zip(chosen, outcomes, strict=True)} == EXPECTED
    assert trial.unsound["default"] == {"tests/test_lines.py::test_that_fails_in_a_copy"}
    assert summary(results) == "7 faults: 4 found by the default run, 1 by the sweep, 2 not found; 1 equivalent"

    (tmp_path / "copy").mkdir()
    copy = Copy(tmp_path / "copy", root, threading.Lock())
    [fault] = [fault for fault in faults if fault.after == 'if (not a): __import__("threading").Event().wait()']
    with copy.planted(fault):
        outcome = copy.run({"tests/test_lines.py::test_waits": 0.0}, Limits(seconds=60, hang=60, silence=5), "default")
    assert outcome.failed
    assert "hangs" in outcome.reason

    (root / "nanovllm/lines.py").write_text("")
    with pytest.raises(ValueError, match="nanovllm/lines.py has changed .* make the map again"):
        read_map(folder / "default", root)
