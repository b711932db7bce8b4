"""The layout: the engine does not depend on the second package, which does not depend on labs; no import cycles."""

import ast
import functools
import re
import sys

import pytest

from tests.core_alone import PACKAGE, TESTING
from tools.count_engine import Classes, find_circles, find_imports, graph_of, read_files, walk_with_kind


@functools.cache  # not when pytest only collects
def files():
    return read_files(PACKAGE.parent)


def of_core():
    return [file for file in files().values() if file.is_core]


@functools.cache
def imports():
    """Of each file, the files that it imports, without those that only a type checker sees."""
    return graph_of(files(), [one[:2] for one in find_imports(files()) if one.kind != "types"])


def test_imports_are_absolute():
    assert [file.place(node) for file in files().values() for node in file.nodes if getattr(node, "level", 0)] == []


# ---- the core


def test_the_core_does_not_depend_on_any_extra():
    assert [one.path for one in of_core() if any(not files()[name].is_core for name in imports()[one.module])] == []


def test_scheduling_is_integers_only():
    """Its files import the standard library, xxhash, and each other: no arrays of numpy, no tensors."""
    scheduling = ("scheduler", "block_manager", "prefix_cache", "sequence", "observer", "sampling_params", "checks")
    own = [f"nanovllm.{name}" for name in scheduling]
    for name in own:
        for node in files()[name].nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
                for module in modules:
                    is_known = module in own or module.split(".")[0] in {*sys.stdlib_module_names, "xxhash"}
                    assert is_known, f"{name} imports {module}"


# ---- both packages


def test_no_cycles_imports_in_functions_included():
    assert find_circles(imports()) == []


def test_every_module_that_is_imported_exists():
    """mypy takes what it cannot find for a library without types."""
    known = {module.removesuffix(".__init__") for module in files()}
    for file in files().values():
        for node in file.nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in known:
                assert node.module in known, file.place(node)


def test_a_folder_imports_from_those_above_it_in_the_architecture():
    """The table of docs/architecture.md is in this order; a type checker's imports count too."""
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("### The folders")[2].partition("###")[0]
    rows = [
        re.findall(r"\(\.\./(nanovllm_extras/[\w/]+)\)", line) for line in table.splitlines() if line.startswith("|")
    ]
    row_of = {folder: i for i, row in enumerate(rows) for folder in row}
    extras = {module: file for module, file in files().items() if not file.is_core}
    tops = {module: "/".join(file.folder.split("/")[:2]) for module, file in extras.items()}
    assert set(tops.values()) - {"nanovllm_extras"} == set(row_of)
    pairs = [(one.source, one.target) for one in find_imports(files()) if {one.source, one.target} <= extras.keys()]
    row_of["nanovllm_extras"] = len(rows) - 1.5  # `full_llm.py`, which programs import
    assert [pair for pair in pairs if "__" not in pair[0] and row_of[tops[pair[1]]] > row_of[tops[pair[0]]]] == []
    folders = [tuple(extras[one].folder for one in pair) for pair in pairs]
    assert find_circles(graph_of({file.folder for file in extras.values()}, folders)) == []


def test_a_feature_is_no_subclass():
    """The front has one class of each kind, made of parts. `Config` has `EngineArgs`, a dataclass as vLLM's."""
    rows = {row.name: row.members for row in Classes(files()).figures()}
    for name in ("LLMEngine", "Request", "Detokenizer"):
        assert len(rows[name]) == 1, rows[name]


def test_nothing_below_imports_the_server():
    """Not even what users touch: `import nanovllm` needs none of the packages of its commands."""
    for name in files():
        is_server = name.startswith("nanovllm_extras.serve")
        assert is_server or not [one for one in imports()[name] if one.startswith("nanovllm_extras.serve")], name


def test_networks_do_not_depend_on_how_their_layers_memory_is_kept():
    """They read records (`models/layer_inputs.py`), which `execution/` fills in."""
    engine = ("execution", "memory", "scheduling")
    for name in files():
        used = [one for one in imports()[name] if one.startswith(tuple(f"nanovllm_extras.{part}" for part in engine))]
        assert not name.startswith("nanovllm_extras.models.") or used == [], name
    assert imports()["nanovllm_extras.models.layer_inputs"] == {"nanovllm.layers.attention"}


# ---- labs


LABS = PACKAGE.parent / "labs"
LADDER = ["model", "recompute", "cached", "static_batch", "continuous", "paged"]
LADDER += ["on_demand", "mixed_batches", "prefix_cache", "one_file"]


def packages_of(nodes):
    """The first names of all modules that are imported; of `labs`, the first two."""
    found = set()
    for node in nodes:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found |= {".".join(name.split(".")[: 2 if name.startswith("labs.") else 1]) for name in names}
    return found


def test_the_packages_need_no_labs():
    users = [name for name, file in files().items() if any(one.startswith("labs") for one in packages_of(file.nodes))]
    assert users == []


@pytest.mark.parametrize("name", LADDER)
def test_the_small_programs_need_only_torch(name):
    """A small program and the network are the whole engine: no other code hides in an import."""
    tree = ast.parse((LABS / f"{name}.py").read_text(encoding="utf-8"))
    others = packages_of(node for node, _ in walk_with_kind(tree)) - set(sys.stdlib_module_names)
    assert others <= {"torch", "safetensors", "tokenizers", "labs.model"}


# ---- the package for tests


def test_the_package_for_tests_needs_only_the_core():
    allowed = {"nanovllm", "nanovllm_testing", "numpy", "torch", "hypothesis", *sys.stdlib_module_names}
    for path in TESTING.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert packages_of(node for node, _ in walk_with_kind(tree)) <= allowed, path.name


def test_the_packages_do_not_need_the_package_for_tests():
    """`nanovllm test` imports its module by name, as every command."""
    assert [name for name, file in files().items() if "nanovllm_testing" in packages_of(file.nodes)] == []


# ---- calls


PRIVATE_OF_PYTHON = ("os._exit", "ProcessGroupGloo._Options", "self._open()._allgather_base")
NAMED_TUPLE = ("_replace", "_asdict")


def test_no_private_method_of_another_object_is_called():
    """Only those of named tuples, and of libraries that have no other way. A copy may call its own."""
    allowed = {"self", "cls", "super()", "copied", "parts"}
    called = [
        file.place(node)
        for file in files().values()
        for node in file.nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr.startswith("_")
        and not node.func.attr.startswith("__")
        and node.func.attr not in NAMED_TUPLE
        and ast.unparse(node.func) not in PRIVATE_OF_PYTHON
        and ast.unparse(node.func.value) not in allowed
    ]
    assert called == []


def test_no_refusal_is_ignored():
    """A method `try_…` returns False if it has changed nothing."""
    ignored = [
        file.place(node)
        for file in files().values()
        for node in file.nodes
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).rpartition(".")[2].lstrip("_").startswith("try_")
    ]
    assert ignored == []
