"""The house: which folder may import which, and no circle between files."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "nanovllm"

# Each room may import those before it, and itself; what users touch is open to all, but for the entrances.
ROOMS = ["scheduling", "layers", "models", "kernels", "execution", "engine", "trace", "serve"]
USERS = ["checks", "vllm_options", "vllm_tables", "structured_outputs", "sampling_params", "pooling_params"]
USERS += ["inputs", "outputs", "config"]
ENTRANCES = ["llm", "__init__", "__main__"]
WINGS = ["serve"]  # above the engine; they may use the package as its users do
FORBIDDEN = {  # beyond the order: wings that know nothing of each other
    "scheduling": [],
    "layers": ["scheduling"],
    "models": ["scheduling"],
    "kernels": ["scheduling"],
}


def name_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(path):
    """Modules of this package that the file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            found.add(node.module)
    return {"nanovllm.__init__" if name == "nanovllm" else name for name in found} & set(FILES)


def room(name):
    parts = name.split(".")
    return parts[1]


@pytest.mark.parametrize("name", FILES)
def test_imports_run_one_way(name):
    own = room(name)
    for imported in imports_of(FILES[name]):
        other = room(imported)
        if other in USERS:
            continue
        assert own not in USERS, f"{name}: what users touch imports nothing of {other}"
        if own in ENTRANCES:
            continue
        if own in WINGS and other in ("llm", "__init__"):
            continue
        assert other not in ENTRANCES, f"{name} imports an entrance"
        assert ROOMS.index(other) <= ROOMS.index(own), f"{own} is below {other}"
        assert other not in FORBIDDEN.get(own, []), f"{own} knows nothing of {other}"


def test_nothing_below_knows_the_server():
    """Not even what users touch: `import nanovllm` needs none of the extra's packages."""
    for name, path in FILES.items():
        assert room(name) == "serve" or not [one for one in imports_of(path) if room(one) == "serve"], name


def test_no_circles():
    graph = {name: imports_of(path) - {name} for name, path in FILES.items()}
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
        assert "first" in text, f"{folder}: which file to read first"


def test_scheduling_is_integers_alone():
    """No file of it imports torch. (`sampling_params` does, for the type of a logits processor.)"""
    for name, path in FILES.items():
        if room(name) == "scheduling":
            assert "torch" not in {
                alias.name.split(".")[0]
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                if isinstance(node, ast.Import | ast.ImportFrom)
                for alias in (node.names if isinstance(node, ast.Import) else [ast.alias(node.module or "")])
            }, name
