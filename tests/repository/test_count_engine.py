"""`tools/count_engine.py`: each figure of a small source tree whose members are known, in both layouts."""

import sys

import pytest

from tools import count_engine
from tools.count_engine import ROOT, count, find_circles, find_floors

FILES = {
    "nanovllm/__init__.py": "from nanovllm.scheduler import Scheduler\n",
    "nanovllm/sequence.py": "class Sequence:\n    pass\n",
    "nanovllm/scheduler.py": """
from typing import Any, TYPE_CHECKING
from nanovllm import sequence
if TYPE_CHECKING:
    from nanovllm.kv_cache import KVCache

class Scheduler:
    finished: bool
    def add(self, seq: sequence.Sequence) -> "list[Any]": ...
    def finish(self) -> None: ...
    @property
    def size(self) -> int: ...
class Own(Scheduler):
    "in the core: does not count"
""",
    "nanovllm/kv_cache.py": """
from nanovllm.scheduler import Scheduler
class KVCache:
    def copy(self): ...
""",
    "nanovllm_extras/__init__.py": "",
    "nanovllm_extras/full_scheduler.py": """
from collections.abc import Callable
from nanovllm import Scheduler
from nanovllm_extras.swap import space
Draw = Callable[..., int]
class First(Scheduler):
    draw: Draw
    def add(self, seq):  # type: ignore[override]
        from nanovllm_extras.assembly import make
        self.draw = make
""",
    "nanovllm_extras/assembly.py": """
from functools import partial
import typing
from nanovllm import scheduler
from nanovllm_extras import full_scheduler
from nanovllm_extras.swap.space import loading
class Second(full_scheduler.First): ...
class Third(Second, scheduler.Scheduler): ...
class Not(typing.Generic): ...

def make(one, seq, x: typing.Any):
    def inner(): ...
    one.add = lambda seq: None                      # 1
    one.other, one.size = partial(make), seq.size   # 2; `size` is a property
    one.last = one.finish                           # 3
    one.thing.add: object = seq                     # 4: by its name
    setattr(one, "copy", x)                         # 5: by its name
    one.draw = x                                    # 6: a field that holds functions
    one.finished = seq.finished
    one.errcheck = inner                            # a library calls it
    one.model.register_forward_pre_hook(inner)
""",
    "nanovllm_extras/swap/__init__.py": "",
    "nanovllm_extras/swap/space.py": """
from nanovllm_extras.serve.app import serve  # type: ignore
def loading(cache_class: type[object]):
    class LoadingKVCache(cache_class): ...
    return LoadingKVCache
""",
    "nanovllm_extras/serve/__init__.py": "",
    "nanovllm_extras/serve/app.py": """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from nanovllm_extras.swap.space import loading
def serve(): ...
""",
}
PYPROJECT = """
[tool.mypy]
[[tool.mypy.overrides]]
module = ["nanovllm_extras.*", "somebody.*"]
disable_error_code = ["override", "misc"]
"""


@pytest.fixture(params=["nanovllm_extras", "nanovllm/extras"])
def figures(request, tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name.replace("nanovllm_extras", request.param)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("nanovllm_extras", request.param.replace("/", ".")), encoding="utf-8")
    pyproject = PYPROJECT.replace("nanovllm_extras", request.param.replace("/", "."))
    (tmp_path / "pyproject.toml").write_text(pyproject, encoding="utf-8")
    if request.param == "nanovllm/extras":
        (tmp_path / request.param / "learn").mkdir()
        (tmp_path / request.param / "learn" / "lab.py").write_text("from nanovllm import Scheduler\n")
    return {one.name: one for one in count(tmp_path)}


def members(figure):
    return [one.split()[0].split("/")[-1] for one in figure.members]


def test_subclasses_are_found_through_renamed_and_passed_on_names(figures):
    assert members(figures["Scheduler"]) == ["Second", "Third", "First"]
    assert members(figures["KVCache"]) == ["LoadingKVCache"]
    assert figures["subclasses"].value == 4
    assert figures["Sequence"].value == figures["LLM"].value == 0


def test_assigned_methods_and_hooks(figures):
    lines = [int(one.split()[0].rpartition(":")[2]) for one in figures["assigned-methods"].members]
    text = FILES["nanovllm_extras/assembly.py"].splitlines()
    numbered = [i for i, line in enumerate(text, 1) if "  # " in line and line.split("  # ")[1][0].isdigit()]
    assert lines == numbered
    assert members(figures["hooks"]) == [f"assembly.py:{len(text)}"]


def test_sizes(figures):
    assert figures["files"].value == 5, "all of the extras but serve/"
    counted = [name for name in FILES if name.startswith("nanovllm_extras/") and "serve" not in name]
    assert figures["lines"].value == sum(FILES[name].count("\n") for name in counted)
    assert figures["core-files"].value == 4


def test_types(figures):
    assert figures["ignores"].value == 2
    assert figures["override-ignores"].value == 1
    assert figures["any"].value == 2, "typing.Any, and a quoted annotation; an import is no use"
    assert figures["inner-imports"].value == 1
    assert figures["mypy"].value == 2, "two codes for our own modules"


def test_circles_and_floors(figures):
    assert figures["file-circles"].members == [
        "2: nanovllm.kv_cache nanovllm.scheduler",
        "2: nanovllm_extras.serve.app nanovllm_extras.swap.space",
    ]
    assert figures["file-circles-all"].value == 3
    assert figures["folder-circles"].members == ["2: nanovllm_extras/serve nanovllm_extras/swap"]
    back = [one.split(" (")[0].rpartition(".")[2] for one in figures["back-up"].members]
    assert back == ["scheduler", "full_scheduler", "app"]


def test_graphs():
    graph = {"a": ["b"], "b": ["c"], "c": ["b"], "d": [], "e": ["a", "d"]}
    assert find_circles(graph) == [["b", "c"]]
    assert find_floors(graph) == {"b": 0, "c": 0, "a": 1, "d": 0, "e": 2}


def test_the_command(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(count_engine, "count", lambda root: [count_engine.Figure("any", "uses", 2, ["here", "there"])])
    monkeypatch.setattr(sys, "argv", ["count_engine", "--list", "any"])
    count_engine.main()
    assert capsys.readouterr().out == "here\nthere\n"


@pytest.mark.slow
def test_this_repository_can_be_counted():
    """Everything that the program names is there."""
    found = {one.name: one.value for one in count(ROOT)}
    assert set(count_engine.PARTS) < set(found)
    assert 0 < found["files"] < found["lines"]
