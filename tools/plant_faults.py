"""Measure the power of the tests: plant faults in both packages, one at a time, and count those that tests find.

    python -m tools.plant_faults map --map ~/map                                            # 1. map tests to lines
    python -m tools.plant_faults run --map ~/map --output before.json                       # 2. plant 60 faults
    python -m tools.plant_faults run --map ~/map --against before.json --output after.json  # 3. the same, later

    python -m tools.plant_faults map --map ~/map -- tests/test_scheduler.py        # for some files: their tests,
    python -m tools.plant_faults run --map ~/map --count 20 nanovllm/scheduler.py  # and 20 faults in them

1. `map` runs the default tests once and records the lines that each test executes. With `--sweep` it runs the long
   sweep (`pytest -m slow`), whose map is optional. Arguments after `--` go to pytest, for example a folder of tests.
   Lines that only other processes execute are not in the map: servers, ranks and replicas that tests start.
2. `run` plants each fault in a copy of the working tree, and runs the tests that execute its line until one fails: the
   quickest case of each test function first. If no default test finds the fault, the tests of the sweep's map run. A
   test that hangs or ends its process has found the fault. A test that also fails without the fault does not count.
   Look at each fault that is not found: it shows a missing test, or it is equivalent to the right code.
3. `--against` plants the faults of an earlier report again and compares. Run it after a change of the tests, with a new
   map. The exit status is 1 if both runs together find fewer faults than before, or if the default run finds less than
   85 % of the faults that it found before.

The tests take about twice their time for the map. A fault that the quickest tests find takes some seconds, mostly for
imports; a fault that no test finds takes up to `--seconds`. `--jobs` plants several faults at once. Limits are seconds
of the processor's time, so on a busy machine the program takes longer and finds the same.

A fault is one changed operator, constant, sign, condition or dropped call in the body of a function. The seed chooses a
file by its number of covered lines, then a line, then a fault. `equivalent_faults.txt` beside this program lists faults
that change nothing that a test could see, each with the reason. Reports do not count them.

mutmut and cosmic-ray are not used: neither samples a few faults of a large package by a seed, runs the quickest
covering tests of two maps in order, and plants the faults of an earlier commit again.
"""

import argparse
import ast
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import multiprocessing
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("nanovllm", "nanovllm_extras")
EQUIVALENT = Path(__file__).with_name("equivalent_faults.txt")
RUNS = ("default", "sweep")
NUM_FIRST = 10  # tests that run by themselves first: they find most faults, and pytest collects few files for them
KEPT = 0.85  # share of its earlier faults that the default run must find by itself

# ---- faults


@dataclass(frozen=True)
class Fault:
    """One change of the source. `number` distinguishes equal changes of equal lines in one function."""

    path: str
    function: str
    before: str
    after: str
    number: int
    line: int = field(compare=False)
    lines: tuple[int, ...] = field(compare=False, repr=False)  # a test that executes one of these may find the fault
    span: tuple[int, int] = field(compare=False, repr=False)  # bytes of the file that `text` replaces
    text: str = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """Return the fault's identity: it stays the same if other lines of the file change."""
        repeated = f" (#{self.number + 1})" if self.number else ""
        return f"{self.path} {self.function}: {self.before} -> {self.after}{repeated}"

    @property
    def description(self) -> str:
        return f"{self.path}:{self.line} {self.before} -> {self.after}"

    def plant(self, source: bytes) -> bytes:
        return source[: self.span[0]] + self.text.encode() + source[self.span[1] :]


COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}
NOT_CHANGED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
LOGGERS = {"logger", "log", "logging", "warnings"}


def changes_of(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield the changes of one node: (the node whose text is replaced, the new text)."""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            ops = [*node.ops[:i], COMPARISONS[type(op)](), *node.ops[i + 1 :]]
            yield node, f"({ast.unparse(ast.Compare(node.left, ops, node.comparators))})"
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not is_text(node.left):
        yield node, f"({ast.unparse(ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right))})"
    elif isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS and not is_text(node.value):
        yield node, ast.unparse(ast.AugAssign(node.target, OPERATORS[type(node.op)](), node.value))
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield node, f"({ast.unparse(ast.BoolOp(other, node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        yield node, str(node.value + 1)
        yield node, f"({node.value - 1})"
    elif isinstance(node, ast.If | ast.While | ast.IfExp | ast.comprehension):
        for test in node.ifs if isinstance(node, ast.comprehension) else [node.test]:
            if not isinstance(test, ast.Compare | ast.UnaryOp):  # these have changes of their own
                yield test, f"(not {ast.unparse(ast.UnaryOp(ast.Not(), test)).removeprefix('not ')})"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
        yield node, "pass"


def is_text(node: ast.expr) -> bool:
    """Return whether `+` or `%` joins or formats text or a list: another operator would only raise TypeError."""
    is_string = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    return is_string or isinstance(node, ast.JoinedStr | ast.List | ast.ListComp | ast.Tuple)


def is_excluded(node: ast.AST) -> bool:
    """Return whether nothing in `node` is changed: errors, log messages, and code for types."""
    if isinstance(node, ast.FunctionDef):
        return node.name in ("__repr__", "__str__")
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.dump(node.test)
    if isinstance(node, ast.Call):
        root = node.func
        while isinstance(root, ast.Attribute | ast.Call):
            root = root.value if isinstance(root, ast.Attribute) else root.func
        return isinstance(root, ast.Name) and root.id in LOGGERS
    if isinstance(node, ast.Expr):
        return is_excluded(node.value)
    return isinstance(node, NOT_CHANGED)


def parts_of(node: ast.AST) -> list[ast.AST]:
    """Return the children of `node` in which faults are planted: no annotations, types, decorators and defaults."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return list(node.body)
    if isinstance(node, ast.AnnAssign):
        return [node.value] if node.value else []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in ("isinstance", "issubclass"):
            return [node.args[0]]
        if node.func.id == "cast":
            return [node.args[1]]
    return list(ast.iter_child_nodes(node))


def find_faults(path: str, source: bytes) -> list[Fault]:
    """Return every fault of a file, in the order of its lines."""
    rows = source.splitlines(keepends=True)
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row))
    found: list[Fault] = []
    numbers: dict[tuple[str, ...], int] = {}

    def visit(node: ast.AST, names: tuple[str, ...], in_function: bool, statement: ast.stmt | None) -> None:
        if is_excluded(node):
            return
        if isinstance(node, ast.stmt):
            statement = node
        if in_function and statement is not None:
            for changed, text in changes_of(node):
                add(changed, text, ".".join(names), statement)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = (*names, node.name)
            in_function = in_function or not isinstance(node, ast.ClassDef)
        for part in parts_of(node):
            visit(part, names, in_function, statement)

    def add(node: ast.expr | ast.stmt, text: str, function: str, statement: ast.stmt) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        first, last = node.lineno, node.end_lineno
        span = starts[first - 1] + node.col_offset, starts[last - 1] + node.end_col_offset
        prefix, suffix = source[starts[first - 1] : span[0]], source[span[1] : starts[last]]
        head, tail = prefix.decode(), suffix.decode().partition("  # ")[0]
        before, after = (" ".join(f"{head}{one}{tail}".split()) for one in (source[slice(*span)].decode(), text))
        key = function, before, after
        numbers[key] = numbers.get(key, -1) + 1
        lines = (*range(first, last + 1), statement.lineno)
        found.append(Fault(path, function, before, after, numbers[key], first, lines, span, text))

    visit(ast.parse(source), (), False, None)
    return sorted(found, key=lambda fault: fault.span)


# ---- the map of lines


class Covering(NamedTuple):
    """The tests that execute each line, and the seconds that each test takes, of one run of pytest."""

    seconds: dict[str, float]
    lines: dict[str, dict[int, set[str]]]

    def tests_of(self, fault: Fault) -> list[str]:
        """Return the tests that execute one of the fault's lines: the quickest case of each function, then the next."""
        lines = self.lines.get(fault.path, {})
        *own, statement = fault.lines
        tests = set[str]().union(*(lines.get(line, ()) for line in own)) or lines.get(statement, set())
        quickest = sorted(tests, key=lambda test: (self.seconds[test], test))
        num_cases: Counter[str] = Counter()
        ranks = {}
        for test in quickest:
            function = test.partition("[")[0]
            ranks[test] = num_cases[function]
            num_cases[function] += 1
        return sorted(quickest, key=lambda test: ranks[test])


def read_map(folder: Path, root: Path) -> Covering:
    """Read what the processes of one run recorded. Raises ValueError if a source file has changed since then."""
    from coverage import CoverageData

    seconds: dict[str, float] = {}
    lines: dict[str, dict[int, set[str]]] = {}
    for about_path in sorted(folder.glob("*.json")):
        about = json.loads(about_path.read_text(encoding="utf-8"))
        for path, digest in about["files"].items():
            if digest_of(root / path) != digest:
                raise ValueError(f"{path} has changed since the map in {folder} was made: make the map again")
        seconds |= about["seconds"]
        users = {name: set(tests) & about["seconds"].keys() for name, tests in about["fixtures"].items()}
        data = CoverageData(str(about_path.with_suffix(".coverage")))
        data.read()
        for path in about["files"]:
            of_file = lines.setdefault(path, {})
            for line, contexts in data.contexts_by_lineno(path).items():
                tests = {test for context in contexts for test in users.get(context, {context})}
                if tests := tests & about["seconds"].keys():
                    of_file.setdefault(line, set()).update(tests)
    return Covering(seconds, lines)


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


class Recorder:
    """A plugin of pytest: records the lines that each test executes, in each process that runs tests.

    The context of a line is the test's name, or that of a fixture that serves several tests: all of them count as
    tests of the line.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self.root = folder, root
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        self.fixtures: dict[str, list[str]] = {}
        self.coverage: Any = None
        self.name = f"{time.time_ns()}-{os.getpid()}"
        self.context = ""

    def start(self) -> None:
        from coverage import Coverage

        self.folder.mkdir(parents=True, exist_ok=True)
        data_file = str(self.folder / f"{self.name}.coverage")
        source = [str(self.root / package) for package in PACKAGES]
        self.coverage = Coverage(data_file=data_file, config_file=False, source=source, messages=False)
        self.coverage.set_option("run:relative_files", True)
        self.coverage.set_option("run:core", "ctrace")  # sys.monitoring reports a line only to the first test
        self.coverage.set_option("run:disable_warnings", ["trace-changed", "module-not-imported", "no-data-collected"])
        self.coverage.start()

    @contextlib.contextmanager
    def in_context(self, context: str) -> Iterator[None]:
        outer, self.context = self.context, context
        self.coverage.switch_context(context)
        try:
            yield
        finally:
            self.context = outer
            self.coverage.switch_context(outer)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        if self.coverage is None:
            self.start()
        elif sys.gettrace() is None:  # a test has traced by itself
            self.coverage.stop()
            self.coverage.start()
        for name in getattr(item, "fixturenames", ()):
            self.fixtures.setdefault(f"fixture {name}", []).append(item.nodeid)
        with self.in_context(item.nodeid):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        shared = fixturedef.scope != "function"
        with self.in_context(f"fixture {fixturedef.argname}" if shared else self.context):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        report = yield
        self.seconds[item.nodeid] = self.seconds.get(item.nodeid, 0.0) + report.duration
        if not report.passed:
            self.failed.add(item.nodeid)
        return report

    def pytest_sessionfinish(self) -> None:
        if self.coverage is None:  # the process that only distributes tests
            return
        self.coverage.stop()
        self.coverage.save()
        paths = sorted(self.coverage.get_data().measured_files())
        about = {
            "seconds": {test: seconds for test, seconds in self.seconds.items() if test not in self.failed},
            "fixtures": self.fixtures,
            "files": {path: digest_of(self.root / path) for path in paths},
        }
        (self.folder / f"{self.name}.json").write_text(json.dumps(about), encoding="utf-8")


# ---- the tests of one fault


class Selection:
    """A plugin of pytest: runs the tests of a list, in its order, and writes what each does to a file.

    Marks and the choice of few cases in conftest.py have no effect: all tests of the list run. SIGPROF ends the process
    when a test takes more of the processor's time than its limit.
    """

    def __init__(self, path: Path) -> None:
        about = json.loads(path.read_text(encoding="utf-8"))
        self.limits: dict[str, float] = about["limits"]
        self.seconds: float = about["seconds"]
        self.log = path.with_suffix(".log")
        self.started = 0.0

    def write(self, **about: Any) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(about) + "\n")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, None, None]:
        found = {item.nodeid: item for item in items}
        yield
        items[:] = [found[name] for name in self.limits if name in found]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.started = self.started or time.process_time()
        self.write(test=item.nodeid, outcome="started")
        signal.setitimer(signal.ITIMER_PROF, self.limits[item.nodeid])
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            if time.process_time() - self.started > self.seconds:
                item.session.shouldstop = "the time is up"
                self.write(test=item.nodeid, outcome="the time is up")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.write_failure(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.write_failure(report)
        if report.when == "teardown":
            self.write(test=report.nodeid, outcome="ended")

    def write_failure(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.failed:
            lines = str(report.longrepr).splitlines()
            reason = next((line[1:].strip() for line in lines if line.startswith("E ")), lines[-1] if lines else "")
            self.write(test=report.nodeid, outcome="failed", reason=reason[:200])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-lines", help="folder for the lines that each test executes (tools/plant_faults.py)")
    parser.addoption("--selection", help="file that names the tests to run (tools/plant_faults.py)")


def pytest_configure(config: pytest.Config) -> None:
    if folder := config.getoption("--record-lines"):
        config.pluginmanager.register(Recorder(Path(folder), config.rootpath))
    if path := config.getoption("--selection"):
        config.pluginmanager.register(Selection(Path(path)))


class Outcome(NamedTuple):
    """The result of one run of tests. `test` is the one that failed, or a file that pytest cannot collect."""

    failed: bool
    test: str = ""
    reason: str = ""
    num_run: int = 0


@dataclass
class Limits:
    """When to stop. Seconds are the processor's time, except `silence`."""

    seconds: float  # no test of a fault begins later
    hang: float  # what a test may take in addition to ten times its time in the map
    silence: float = 600  # by the clock: the longest time without a report of the process; then something waits forever


@dataclass
class Copy:
    """A copy of the working tree, in which one fault at a time is planted. Tests use its own cache folder."""

    folder: Path
    source: Path
    starts: threading.Lock  # of all copies: starts of processes, and readings of their exit status, one at a time
    tree: Path = field(init=False)

    def __post_init__(self) -> None:
        self.tree = self.folder / "tree"
        command = ["git", "-C", str(self.source), "ls-files", "-coz", "--exclude-standard"]
        for name in subprocess.run(command, capture_output=True, check=True, text=True).stdout.split("\0"):
            if name and (self.source / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self.source / name, self.tree / name)
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / PACKAGES[0]
        (self.folder / "cache").mkdir()
        if cache.exists():  # compiled kernels; a fault must not change those of the user
            shutil.copytree(cache, self.folder / "cache" / PACKAGES[0], ignore_dangling_symlinks=True)

    @contextlib.contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        path = self.tree / fault.path
        source = path.read_bytes()
        write(path, fault.plant(source))
        try:
            yield
        finally:
            write(path, source)

    def run(self, tests: Mapping[str, float], limits: Limits, run: str) -> Outcome:
        """Run tests, {name: seconds it took}, in this order up to the first that fails."""
        selection, log = self.folder / "selection.json", self.folder / "selection.log"
        log.write_text("", encoding="utf-8")
        allowed = {test: limits.hang + 10 * seconds for test, seconds in tests.items()}
        about = {"limits": allowed, "seconds": limits.seconds}
        selection.write_text(json.dumps(about), encoding="utf-8")
        files = [name for name in dict.fromkeys(map(file_of, tests)) if (self.tree / name).exists()]
        if not files:
            return Outcome(failed=False)
        arguments = ["-x", "-n0", "-p", "no:cacheprovider", "-p", "tools.plant_faults", "--rootdir", str(self.tree)]
        arguments += ["--selection", str(selection), *files]
        silence = limits.silence + 10 * max(tests.values())
        status, output = self.execute(arguments, environment(self.tree, self.folder / "cache", run), log, silence)
        entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        num_run = sum(entry["outcome"] == "started" for entry in entries)
        for entry in entries:
            if entry["outcome"] == "failed":
                name = entry["test"]
                of_name = name if name in tests else file_of(name) if file_of(name) in files else files[0]
                return Outcome(True, of_name, entry["reason"], num_run)
        hangs = status in (None, -signal.SIGPROF)
        last = entries[-1] if entries else {"test": files[0], "outcome": ""}
        if last["outcome"] == "started":
            return Outcome(
                True, last["test"], "the test hangs" if hangs else f"the process ends with {status}", num_run
            )
        if status not in (0, 5) and last["outcome"] != "the time is up":  # 5: pytest has no test of these names
            reason = (output.strip().splitlines() or ["nothing starts"])[-1][:200]
            return Outcome(True, files[0], "pytest hangs" if hangs else reason, num_run)
        return Outcome(False, num_run=num_run)

    def execute(self, arguments: list[str], env: dict[str, str], log: Path, silence: float) -> tuple[int | None, str]:
        """Run pytest, and end all its processes. Return the exit status and the output. The status is None if the
        log does not grow for `silence` seconds.
        """
        output = self.folder / "output"
        process = FORK_SERVER.Process(target=run_pytest, args=(arguments, self.tree, env, output))
        with self.starts:  # two threads that ask for the same exit status may get 255
            process.start()
        size = -1
        while not connection.wait([process.sentinel], silence) and size != log.stat().st_size:
            size = log.stat().st_size
        with self.starts:
            status = process.exitcode
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.ident or 0, signal.SIGKILL)
        process.kill()
        connection.wait([process.sentinel])
        with self.starts:
            process.join()
        return status, output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""


FORK_SERVER = multiprocessing.get_context("forkserver")  # forks a process for each fault
PRELOADED = ["torch", "transformers", "pytest"]  # what the fork server imports once, if it is installed


def run_pytest(arguments: list[str], tree: Path, env: dict[str, str], output: Path) -> None:
    """Run pytest in this process, which is the first of a new process group, with `tree` as the current folder."""
    os.setsid()
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = env["PYTHONPATH"].split(os.pathsep)
    for name in [name for name in sys.modules if name.startswith(PACKAGES)]:
        del sys.modules[name]  # a fork server that something else has started may have imported them from elsewhere
    sys.dont_write_bytecode = False  # the next fault takes the same files
    sys.argv = ["pytest", *arguments]
    sys.exit(pytest.main(arguments))


def file_of(test: str) -> str:
    return test.partition("::")[0]


def write(path: Path, source: bytes) -> None:
    """Write a source file. Python must not take the compiled file of another version with the same size and time."""
    path.write_bytes(source)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def environment(tree: Path, cache: Path | None = None, run: str = "default") -> dict[str, str]:
    """Return the environment of pytest: the packages of `tree`, and this program as a plugin."""
    unset = ("NANOVLLM_SWEEP", "PYTHONDONTWRITEBYTECODE")
    env = {name: value for name, value in os.environ.items() if name not in unset and not name.startswith("PYTEST_")}
    paths = [str(tree), str(ROOT), *env.get("PYTHONPATH", "").split(os.pathsep)]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    if cache is not None:
        env["XDG_CACHE_HOME"] = str(cache)
    if run == "sweep":
        env["NANOVLLM_SWEEP"] = "all"
    return env


# ---- reports


@dataclass
class Result:
    """What happened to one fault. `found_by` is "default", "sweep", "equivalent" or None."""

    name: str
    description: str
    found_by: str | None = None
    test: str = ""
    reason: str = ""
    num_run: dict[str, int] = field(default_factory=dict)
    num_covering: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def row(self) -> str:
        if self.found_by in RUNS:
            what = f"{self.test}: {self.reason}"
        elif self.found_by is None:
            runs = [f"{self.num_run.get(run, 0)} of {count} {run}" for run, count in self.num_covering.items()]
            what = f"tests that ran: {', '.join(runs)}"
        else:
            what = self.reason
        return f"{self.found_by or 'NOT FOUND':10} {self.description}\n{'':10} {what}"


class Trial:
    """Plants faults in copies of the tree, one copy for each job, and runs the tests that cover them."""

    def __init__(self, root: Path, maps: Mapping[str, Covering], limits: Limits, equivalent: Mapping[str, str]) -> None:
        self.root, self.maps, self.limits, self.equivalent = root, maps, limits, equivalent
        self.unsound: dict[str, set[str]] = {run: set() for run in RUNS}  # tests that fail without a fault
        self.sound: dict[str, set[str]] = {run: set() for run in RUNS}
        self.copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()

    def run(self, faults: Sequence[Fault], num_jobs: int, show: Callable[[Result], None]) -> list[Result]:
        with tempfile.TemporaryDirectory(prefix="nanovllm-faults-") as folder, ThreadPoolExecutor(num_jobs) as pool:
            starts = threading.Lock()
            for job in range(num_jobs):
                Path(folder, str(job)).mkdir()
                self.copies.put(Copy(Path(folder, str(job)), self.root, starts))
            lock = threading.Lock()

            def run(fault: Fault) -> Result:
                result = self.try_fault(fault)
                with lock:
                    show(result)
                return result

            results = dict(zip(faults, pool.map(run, faults), strict=True))
            while again := [fault for fault, result in results.items() if not self.is_sound(result, results.values())]:
                results.update(zip(again, pool.map(run, again), strict=True))
            return list(results.values())

    def try_fault(self, fault: Fault) -> Result:
        result = Result(fault.name, fault.description)
        if reason := self.equivalent.get(fault.name):
            result.found_by, result.reason = "equivalent", reason
            return result
        copy = self.copies.get()
        began = time.monotonic()
        try:
            for run, covering in self.maps.items():
                tests = covering.tests_of(fault)
                result.num_covering[run] = len(tests)
                tests = self.without_unsound(tests, run)
                result.num_run[run] = 0
                for some in (tests[:NUM_FIRST], tests[NUM_FIRST:]):
                    with copy.planted(fault):
                        outcome = copy.run({test: covering.seconds[test] for test in some}, self.limits, run)
                    result.num_run[run] += outcome.num_run
                    if outcome.failed:
                        result.found_by, result.test, result.reason = run, outcome.test, outcome.reason
                        return result
        finally:
            result.seconds = round(time.monotonic() - began, 1)
            self.copies.put(copy)
        return result

    def is_sound(self, result: Result, results: Iterable[Result]) -> bool:
        """Return whether the test that found a fault passes without it. Runs such tests of all `results` together."""
        if result.found_by not in RUNS:
            return True
        run = result.found_by
        found_by = {one.test for one in results if one.found_by == run} - self.sound[run]
        copy = self.copies.get()
        while left := {test: self.maps[run].seconds.get(test, 0.0) for test in self.without_unsound(found_by, run)}:
            outcome = copy.run(left, dataclasses.replace(self.limits, seconds=float("inf")), run)
            if not outcome.failed:
                self.sound[run] |= left.keys()
                break
            self.unsound[run].add(outcome.test)
        self.copies.put(copy)
        return result.test in self.sound[run]

    def without_unsound(self, tests: Iterable[str], run: str) -> list[str]:
        return [test for test in tests if not {test, file_of(test)} & self.unsound[run]]


def candidates(
    maps: Mapping[str, Covering], root: Path, paths: Sequence[str] = PACKAGES
) -> dict[str, dict[int, list[Fault]]]:
    """Return the faults of these files and folders that a test covers: {path: {line: faults}}."""
    found: dict[str, dict[int, list[Fault]]] = {}
    for path in sorted({path for covering in maps.values() for path in covering.lines}):
        if not any(Path(path).is_relative_to(one) for one in paths):
            continue
        for fault in find_faults(path, (root / path).read_bytes()):
            if any(covering.tests_of(fault) for covering in maps.values()):
                found.setdefault(path, {}).setdefault(fault.line, []).append(fault)
    return found


def choose(found: Mapping[str, Mapping[int, Sequence[Fault]]], count: int, seed: int) -> list[Fault]:
    """Choose faults of different lines: a file by its number of covered lines, then a line, then a fault."""
    rng = random.Random(seed)
    left = {path: sorted(lines) for path, lines in sorted(found.items())}
    chosen: list[Fault] = []
    while len(chosen) < count and any(left.values()):
        path = rng.choices(list(left), [len(lines) for lines in left.values()])[0]
        line = left[path].pop(rng.randrange(len(left[path])))
        chosen.append(rng.choice(found[path][line]))
    return chosen


def find_again(names: Iterable[str], root: Path) -> tuple[list[Fault], list[str]]:
    """Return the faults with these names in the current source, and the names whose code is gone."""
    of_file = functools.cache(lambda path: {fault.name: fault for fault in find_faults(path, read(root / path))})
    here, gone = [], []
    for name in names:
        fault = of_file(name.partition(" ")[0]).get(name)
        here += [fault] if fault else []
        gone += [] if fault else [name]
    return here, gone


def read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def read_equivalent(path: Path) -> dict[str, str]:
    """Read a list of equivalent faults: a line with the name of each, and indented lines with the reason."""
    found: dict[str, str] = {}
    name = ""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        if line[:1].isspace() and name:
            found[name] = f"{found[name]} {line.strip()}".strip()
        elif line.strip() and not line.startswith("#"):
            name = line.strip()
            found[name] = ""
    for name, reason in found.items():
        if not reason:
            raise ValueError(f"{path}: give the reason in an indented line below {name!r}")
    return found


def summary(results: Sequence[Result]) -> str:
    counted = [one for one in results if one.found_by != "equivalent"]
    found = {run: sum(one.found_by == run for one in counted) for run in RUNS}
    together = sum(found.values())
    return (
        f"{len(counted)} faults: {found['default']} found by the default run, {found['sweep']} by the sweep, "
        f"{len(counted) - together} not found; {len(results) - len(counted)} equivalent"
    )


def compare(earlier: Mapping[str, str | None], results: Sequence[Result]) -> tuple[list[str], bool]:
    """Return the lines of a comparison, and whether the tests find enough of the faults of both reports."""
    now = {one.name: one.found_by for one in results if one.found_by != "equivalent"}
    before = {name: found_by for name, found_by in earlier.items() if name in now and found_by != "equivalent"}
    lines = [f"{'':20}{'before':>8}{'now':>8}"]
    counts = {}
    for title, runs in {"default run": ("default",), "both together": RUNS}.items():
        counts[title] = [sum(one[name] in runs for name in before) for one in (before, now)]
        lines.append(f"{title:20}{counts[title][0]:8}{counts[title][1]:8}")
    kept = sum(before[name] == now[name] == "default" for name in before)
    by_default, together = counts["default run"][0], counts["both together"]
    share = kept / by_default if by_default else 1.0
    lines.append(f"of the {by_default} faults that the default run found before, it finds {kept} ({share:.0%}) now")
    lines += [f"no longer found: {name}" for name in before if before[name] and not now[name]]
    lines += [f"found now: {name}" for name in before if now[name] and not before[name]]
    return lines, together[1] >= together[0] and share >= KEPT


# ---- commands


def make_map(args: argparse.Namespace, root: Path) -> int:
    if importlib.util.find_spec("coverage") is None:
        raise SystemExit('The map needs the package coverage: pip install "nanovllm[sweep]", or pip install coverage')
    run = "sweep" if args.sweep else "default"
    folder = args.map.resolve() / run
    if folder.is_relative_to(root):
        raise SystemExit(f"--map must be outside the repository, got {args.map}")
    if folder.exists() and not args.add:
        shutil.rmtree(folder)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tools.plant_faults"]
    command += ["--record-lines", str(folder), *(["-m", "slow"] if args.sweep else []), *args.pytest]
    status = subprocess.run(command, cwd=root, env=environment(root), check=False).returncode
    covering = read_map(folder, root)
    num_lines = sum(map(len, covering.lines.values()))
    num_files = sum(map(bool, covering.lines.values()))
    print(f"{len(covering.seconds)} tests execute {num_lines} lines of {num_files} files")
    return status


def run_faults(args: argparse.Namespace, root: Path) -> int:
    maps = {run: read_map(args.map / run, root) for run in RUNS if (args.map / run).exists()}
    if "default" not in maps:
        raise SystemExit(f"{args.map} contains no map: python -m tools.plant_faults map --map {args.map}")
    earlier: dict[str, str | None] = {}
    if args.against:
        report = json.loads(args.against.read_text(encoding="utf-8"))
        earlier = {one["name"]: one["found_by"] for one in report["faults"]}
        faults, gone = find_again(earlier, root)
        for name in gone:
            print(f"no such code any more: {name}")
    else:
        faults = choose(candidates(maps, root, args.paths), args.count, args.seed)
    if args.list:
        print("\n".join(fault.name for fault in faults))
        return 0
    FORK_SERVER.set_forkserver_preload(PRELOADED)
    trial = Trial(root, maps, Limits(args.seconds, args.hang), read_equivalent(args.equivalent))
    results = trial.run(faults, args.jobs, lambda result: print(result.row, flush=True))
    print(summary(results))
    for test in sorted(set[str]().union(*trial.unsound.values())):
        print(f"fails without a fault, so it was not counted: {test}")
    if args.output:
        commit = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True).stdout
        about = {"commit": commit.strip(), "seed": args.seed, "faults": [dataclasses.asdict(one) for one in results]}
        args.output.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    if not args.against:
        return 0
    lines, is_enough = compare(earlier, results)
    print("\n".join(lines))
    return 0 if is_enough else 1


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.plant_faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    the_map = commands.add_parser("map", help="record which test executes which line")
    the_map.add_argument("--map", type=Path, required=True, metavar="DIR", help="folder outside the repository")
    the_map.add_argument("--sweep", action="store_true", help="of the long sweep instead of the default run")
    the_map.add_argument("--add", action="store_true", help="keep what DIR has, for example of other tests")
    the_map.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    run = commands.add_parser("run", help="plant faults, and run the tests that cover them")
    run.add_argument("paths", nargs="*", default=PACKAGES, help="files and folders for faults (default: both packages)")
    run.add_argument("--map", type=Path, required=True, metavar="DIR", help="what `map` has made")
    run.add_argument("--count", type=int, default=60, help="number of faults (default: 60)")
    run.add_argument("--seed", type=int, default=0, help="chooses the faults (default: 0)")
    run.add_argument("--against", type=Path, metavar="JSON", help="plant the faults of this report, and compare")
    run.add_argument("--output", type=Path, metavar="JSON", help="write a report")
    run.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    run.add_argument("--seconds", type=float, default=120, help="stop a fault's tests after this time (default: 120)")
    run.add_argument("--hang", type=float, default=60, help="a test hangs after this time and ten times its own (60)")
    run.add_argument("--jobs", type=int, default=1, help="number of faults at once (default: 1)")
    run.add_argument("--equivalent", type=Path, default=EQUIVALENT, metavar="FILE", help="list of equivalent faults")
    args = parser.parse_args(arguments)
    return make_map(args, root) if args.command == "map" else run_faults(args, root)


if __name__ == "__main__":
    sys.exit(main())
