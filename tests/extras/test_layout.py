"""The layout: the core does not depend on any extra, no cycle between files, and how long it may get."""

import ast
import json
import sys

import pytest

from tests.core_alone import EXTRAS, PACKAGE, ROOT, core_files, run_in

MAX_FILES, MAX_LINES = 34, 2896  # of the core, docstrings included; the aim is 2,750
MAX_LINES_OF_GPU_PATH = 450
MAX_LINES_OF_FUNCTION = 40
MAX_LOADED_FILES, MAX_LOADED_LINES = 52, 5485  # of a plain run with extras present; the aim is 46 and 4,000
GPU_PATH = ("layers/attention.py", "layers/flash_attention.py", "cuda_graphs.py", "model_runner.py")
WORDS_OF_EXTRAS = ("extra", "overlap", "speculat", "swap", "penalt", "logprob", "trace", "triton", "parallel", "draft")

LOADED = """
import json, sys
from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
llm = LLM(TINY_QWEN3, attention_backend="torch", enforce_eager=True, num_kv_blocks=8)
llm.generate("What is a block table?", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "nanovllm"]
engine = llm.engine
parts = [engine.runner.model, engine.runner.model.model.layers[0].self_attn.attention, engine.runner.backend,
         engine.scheduler, engine.scheduler.block_manager, engine.scheduler.block_manager.prefix_cache,
         engine.runner.kv_cache]
print(json.dumps([sorted(module.__file__ for module in modules), [type(one).__module__ for one in parts]]))
"""


def name_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
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
    return {"nanovllm.__init__" if name == "nanovllm" else name for name in found} & set(FILES)


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


def num_lines(files):
    return sum(len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) for file in files)


# ---- the core


def test_the_core_stays_small():
    lines = {str(file): num_lines([file]) for file in core_files()}
    print(json.dumps(lines, indent=1))
    assert len(lines) <= MAX_FILES
    assert sum(lines.values()) <= MAX_LINES


def test_the_gpu_path_can_be_read():
    lines = {file: num_lines([file]) for file in GPU_PATH}
    print(json.dumps(lines, indent=1))
    assert sum(lines.values()) <= MAX_LINES_OF_GPU_PATH


def test_functions_are_short():
    lines = {
        f"{name}.{node.name}": node.end_lineno - node.lineno + 1
        for name in CORE
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.FunctionDef)
    }
    longest = sorted(lines.items(), key=lambda item: -item[1])[:10]
    print(json.dumps(longest, indent=1))
    assert longest[0][1] <= MAX_LINES_OF_FUNCTION


def test_the_core_does_not_depend_on_any_extra():
    assert [name for name in CORE if imports_of(name) & OF_EXTRAS] == ["nanovllm.__init__"]


@pytest.mark.parametrize("name", CORE)
def test_the_core_does_not_mention_any_extra(name):
    if name == "nanovllm.__init__":
        return
    text = FILES[name].read_text(encoding="utf-8").lower()
    assert [word for word in WORDS_OF_EXTRAS if word in text] == []


def test_scheduling_is_integers_only():
    """No file of it imports torch."""
    for name in ("scheduler", "block_manager", "block_tables", "prefix_cache", "sequence", "observer"):
        modules = [
            (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
            for node in ast.walk(TREES[f"nanovllm.{name}"])
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        assert not [one for one in modules if one.split(".")[0] == "torch"], name


def test_a_plain_run_is_the_cores_and_loads_little():
    """With extras present, `attention_backend="torch"` and `enforce_eager=True`."""
    loaded, modules = json.loads(run_in(ROOT, "-c", LOADED).splitlines()[-1])
    files = [PACKAGE / file for file in loaded]
    print("\n".join(f"{num_lines([file]):5d} {file.relative_to(PACKAGE)}" for file in files))
    assert not [one for one in modules if one.startswith("nanovllm_extras")]
    assert len(files) <= MAX_LOADED_FILES
    assert num_lines(files) <= MAX_LOADED_LINES


# ---- the package


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


def test_no_two_files_have_one_name():
    names = [path.name for path in FILES.values() if path.name not in ("__init__.py", "config.py")]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


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


def test_the_engine_needs_no_labs():
    assert [name for name, tree in TREES.items() if any(one.startswith("labs") for one in packages_of(tree))] == []


@pytest.mark.parametrize("name", LADDER)
def test_the_small_programs_need_only_torch(name):
    """A small program and the network are the whole engine: no other code hides in an import."""
    tree = ast.parse((LABS / f"{name}.py").read_text(encoding="utf-8"))
    others = packages_of(tree) - set(sys.stdlib_module_names)
    assert others <= {"torch", "safetensors", "tokenizers", "labs.model"}
