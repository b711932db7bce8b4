"""The layout: the engine does not depend on the second package, which does not depend on labs; no import cycles."""

import ast
import sys

import pytest

from tests.core_alone import EXTRAS, PACKAGE


def name_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


FILES = {name_of(path): path for folder in (PACKAGE, EXTRAS) for path in sorted(folder.rglob("*.py"))}
OF_EXTRAS = {name for name, path in FILES.items() if path.is_relative_to(EXTRAS)}
CORE = sorted(set(FILES) - OF_EXTRAS)
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def imported_by(nodes):
    """Modules of this package that these statements import."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "imports are absolute"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names
            if not names <= set(FILES):  # otherwise only submodules of a folder: its own file does not count
                found.add(node.module)
    packages = ("nanovllm", "nanovllm_extras")
    return {f"{name}.__init__" if name in packages else name for name in found} & set(FILES)


def is_for_types(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def statements(tree, in_functions=True):
    """All statements of a module, without those that only a type checker sees; with or without those in functions."""
    todo = list(tree.body)
    while todo:
        node = todo.pop()
        yield node
        if is_for_types(node):
            todo += node.orelse
        elif in_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            todo += ast.iter_child_nodes(node)


def imports_of(name, in_functions=True):
    return imported_by(statements(TREES[name], in_functions))


# ---- the core


def test_the_core_does_not_depend_on_any_extra():
    assert [name for name in CORE if imports_of(name) & OF_EXTRAS] == []


def test_scheduling_is_integers_only():
    """No file of it imports torch."""
    for name in ("scheduler", "block_manager", "block_tables", "prefix_cache", "sequence", "observer"):
        modules = [
            (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
            for node in ast.walk(TREES[f"nanovllm.{name}"])
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        assert not [one for one in modules if one.split(".")[0] == "torch"], name


# ---- both packages


def find_cycles(graph):
    """The strongly connected components with more than one file (Tarjan 1972)."""
    index, low, stack, found = {}, {}, [], []

    def visit(name):
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            component = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(component) > 1:
                found.append(sorted(component))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def test_no_cycles_imports_in_functions_included():
    assert find_cycles({name: imports_of(name) - {name} for name in FILES}) == []


def test_cycles_are_found():
    assert find_cycles({"a": ["b"], "b": ["c"], "c": ["b"], "d": []}) == [["b", "c"]]


def test_nothing_below_imports_the_server():
    """Not even what users touch: `import nanovllm` needs none of the packages of its commands."""
    for name in FILES:
        is_server = name.startswith("nanovllm_extras.serve")
        assert is_server or not [one for one in imports_of(name) if one.startswith("nanovllm_extras.serve")], name


# ---- labs


LABS = PACKAGE.parent / "labs"
LADDER = ["model", "recompute", "cached", "static_batch", "continuous", "paged"]
LADDER += ["on_demand", "mixed_batches", "prefix_cache", "one_file"]


def packages_of(tree):
    """The first names of all modules that are imported; of `labs`, the first two."""
    found = set()
    for node in statements(tree, in_functions=True):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found |= {".".join(name.split(".")[: 2 if name.startswith("labs.") else 1]) for name in names}
    return found


def test_the_packages_need_no_labs():
    assert [name for name, tree in TREES.items() if any(one.startswith("labs") for one in packages_of(tree))] == []


@pytest.mark.parametrize("name", LADDER)
def test_the_small_programs_need_only_torch(name):
    """A small program and the network are the whole engine: no other code hides in an import."""
    tree = ast.parse((LABS / f"{name}.py").read_text(encoding="utf-8"))
    others = packages_of(tree) - set(sys.stdlib_module_names)
    assert others <= {"torch", "safetensors", "tokenizers", "labs.model"}
