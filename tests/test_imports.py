"""The house: which room may import which, no circle between files, and where the core chooses its extras."""

import ast
import sys

import pytest

from tests.core_alone import EXTRAS, PACKAGE

# Each room may import those before it, and itself. What users touch is open to all, but for the entrances.
ROOMS = ["scheduling", "layers", "models", "execution", "engine", "extras", "kernels", "trace", "parallel", "serve"]
USERS = ["checks", "sampling_params", "inputs", "outputs", "config"]
ENTRANCES = ["llm", "__init__", "__main__"]
AS_USERS_DO = ["extras", "serve"]  # clients and servers take the package as its users do
FORBIDDEN = {  # beyond the order: a layer sees tensors, and no sequences
    "layers": ["scheduling"],
    "models": ["scheduling"],
    "kernels": ["scheduling", "execution", "engine"],
}
# The files of the core that import an extra: each in the branch of the option that asks for it.
COMPOSITION = {
    "checks",  # options by vLLM's names
    "sampling_params",  # fields that an extra reads are checked by it
    "config",  # speculation, whose options an extra checks
    "llm",  # `embed`, `beam_search`, `get_metrics`, `trace=`
    "__main__",  # commands
    "engine.assembly",  # kernels, CUDA, overlap, policies, swap, windows
    "engine.chat",  # options of chat templates
    "engine.detokenizer",  # spaces between special tokens
    "engine.input_processor",  # processors, readers, grammars
    "execution.checkpoint",  # the hub, overrides
    "execution.weights",  # dummy weights
    "models.config",  # positions beyond the plain ones
    "models.qwen3",  # windows; other architectures are imported by name, in `models.registry`
}


def name_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
OF_EXTRAS = {name for name, path in FILES.items() if any(path.is_relative_to(one) for one in EXTRAS)}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def imported_by(nodes):
    """Modules of this package that these statements import."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            found.add(node.module)
    return {"nanovllm.__init__" if name == "nanovllm" else name for name in found} & set(FILES)


def is_for_types(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def statements(tree, in_functions):
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


def room(name):
    return name.split(".")[1]


@pytest.mark.parametrize("name", FILES)
def test_imports_run_one_way(name):
    own = room(name)
    for imported in imports_of(name):
        other = room(imported)
        if other in USERS or (name not in OF_EXTRAS and imported in OF_EXTRAS):  # the next test looks at the latter
            continue
        assert own not in USERS, f"{name}: what users touch imports nothing of {other}"
        if own in ENTRANCES or (own in AS_USERS_DO and other in ENTRANCES):
            continue
        assert other not in ENTRANCES, f"{name} imports an entrance"
        assert ROOMS.index(other) <= ROOMS.index(own), f"{own} is below {other}"
        assert other not in FORBIDDEN.get(own, []), f"{own} knows nothing of {other}"


def test_the_core_imports_extras_only_where_it_chooses_them():
    core = sorted(set(FILES) - OF_EXTRAS)
    assert {name for name in core if imports_of(name, in_functions=False) & OF_EXTRAS} == set(), "at module level"
    assert {name.removeprefix("nanovllm.") for name in core if imports_of(name) & OF_EXTRAS} == COMPOSITION


def test_an_extra_that_is_missing_is_named():
    """The first import of an extra in a file is in a `with extra(...)`, which names what has been deleted."""
    for name in sorted(set(FILES) - OF_EXTRAS):
        if imports_of(name) & OF_EXTRAS:
            calls = [ast.unparse(node.func) for node in ast.walk(TREES[name]) if isinstance(node, ast.Call)]
            assert {"extra", "import_extra"} & set(calls), name


def test_nothing_below_knows_the_server():
    """Not even what users touch: `import nanovllm` needs none of the packages of its commands."""
    for name in FILES:
        assert room(name) == "serve" or not [one for one in imports_of(name) if room(one) == "serve"], name


def test_no_circles():
    graph = {name: imports_of(name, in_functions=False) - {name} for name in FILES}
    done = set()

    def visit(name, trail):
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for imported in graph[name]:
                visit(imported, [*trail, name])
            done.add(name)

    for name in graph:
        visit(name, [])


def test_every_folder_says_what_lives_there():
    for folder in ROOMS:
        text = ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text(encoding="utf-8")))
        assert text, folder
        assert "first" in text or "begin with" in text, f"{folder}: which file to read first"


def test_scheduling_is_integers_alone():
    """No file of it imports torch."""
    for name, tree in TREES.items():
        if room(name) == "scheduling":
            assert "torch" not in {
                alias.name.split(".")[0]
                for node in ast.walk(tree)
                if isinstance(node, ast.Import | ast.ImportFrom)
                for alias in (node.names if isinstance(node, ast.Import) else [ast.alias(node.module or "")])
            }, name


# ---- labs


LABS = PACKAGE.parent / "labs"
LADDER = ["model", "rung_1_recompute", "rung_2_kv_cache", "rung_3_static_batch", "rung_4_continuous", "rung_5_paged"]


def packages_of(tree):
    """The first names of all modules that are imported; of `labs`, the first two."""
    found = set()
    for node in statements(tree, in_functions=True):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found |= {".".join(name.split(".")[: 2 if name.startswith("labs.") else 1]) for name in names}
    return found


def test_the_engine_needs_no_labs():
    assert [name for name, tree in TREES.items() if any(one.startswith("labs") for one in packages_of(tree))] == []


@pytest.mark.parametrize("name", [*LADDER, "one_file"])
def test_the_first_rungs_need_only_torch(name):
    """A reader has the whole engine before the eyes: the rung, and the network."""
    tree = ast.parse((LABS / f"{name}.py").read_text(encoding="utf-8"))
    others = packages_of(tree) - set(sys.stdlib_module_names)
    assert others <= {"torch", "safetensors", "tokenizers", "labs.model"}
