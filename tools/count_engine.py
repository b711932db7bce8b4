"""Count what the engine of the two packages is made of: subclasses, assigned methods, hooks, lines, import circles.

    python -m tools.count_engine                       # a table
    python -m tools.count_engine --list ModelRunner    # the members that a row counts
    python -m tools.count_engine --ref dce9036e        # another commit
    python -m tools.count_engine --against dce9036e    # that commit and the working tree, side by side

The program parses the source with `ast` and imports none of it. Before commit b658ae9d the second package was the
folder `nanovllm/extras`; its files are counted under the names that they have now.
"""

import argparse
import ast
import io
import re
import subprocess
import tarfile
import tempfile
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CORE, EXTRAS = "nanovllm", "nanovllm_extras"

PARTS = {  # the classes of the core that an engine is made of -> the module that defines each
    "ModelRunner": "model_runner",
    "Scheduler": "scheduler",
    "BlockManager": "block_manager",
    "PrefixCache": "prefix_cache",
    "KVCache": "kv_cache",
    "CudaGraphs": "cuda_graphs",
    "Observer": "observer",
    "Detokenizer": "detokenizer",
    "LLM": "llm",
    "LLMEngine": "engine",
    "Sequence": "sequence",
    "Request": "request",
    "Config": "config",
    "SamplingParams": "sampling_params",
}

NOT_THE_ENGINE = {  # every other file of nanovllm_extras composes the engine; older names follow the newer ones
    "programs that use an engine, and their clients": (
        *("cli/", "serve/", "terminal/", "trace/", "bench/", "__main__.py"),
        *("machine/printing.py", "machine/event_loop.py", "machine/event_stream.py", "options/argument_types.py"),
        *("commands.py", "argument_types.py", "printing.py", "event_loop.py", "event_stream.py"),
    ),
    "networks, weights, and code that computes": (
        *("models/", "weights/", "quantization/", "kernels/", "plugins/", "self_check/", "assets/"),
        *("bundled.py", "hub.py", "checkpoint.py", "checkpoint_options.py", "headless.py", "end_tokens.py"),
        *("weights.py", "fp8_kv.py", "int8_kv.py"),
    ),
    "what a request may contain or ask for": (
        *("structured/", "answer_parts/", "beam_search/", "embedding/", "vllm/"),
        *("options/request_params.py", "options/structured_params.py", "options/token_limits.py"),
        *("options/chat_options.py", "options/surrogates.py", "options/vllm_options.py", "options/vllm_tables.py"),
        *("requests/stop_options.py", "requests/special_tokens.py", "requests/prompt_forms.py"),
        *("requests/prompt_truncation.py", "requests/prompt_logprobs.py", "engine/llm_methods.py"),
        *("sampling/logits.py", "sampling/logits_processors.py", "sampling/logprobs.py"),
        *("request_params.py", "token_limits.py", "stop_options.py", "special_tokens.py", "surrogates.py"),
        *("llm_methods.py", "prompt_forms.py", "prompt_truncation.py", "prompt_logprobs.py", "chat_options.py"),
        *("logits.py", "logits_processors.py", "logprobs.py"),
    ),
    "the machine and the process": (
        *("machine/machine_limits.py", "machine/torch_defaults.py", "machine/dead.py", "machine/forks.py"),
        *("machine/own_process.py", "machine/call_kernels.py"),
        *("machine_limits.py", "torch_defaults.py", "dead.py", "forks.py"),
    ),
}


@dataclass(eq=False)
class File:
    """One source file. `path` is relative to the root, and `module` is its name for imports."""

    path: str
    module: str
    text: str

    @cached_property
    def nodes_with_kind(self) -> list[tuple[ast.AST, str]]:
        """Every node, with the kind of an import at its place: "module", "types" (TYPE_CHECKING) or "function"."""
        return list(walk_with_kind(ast.parse(self.text)))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return [node for node, _ in self.nodes_with_kind]

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def is_core(self) -> bool:
        return self.path.startswith(f"{CORE}/")

    def place(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 0)}"


class Import(NamedTuple):
    """One file imports another. `kind` says where: "module", "types" (TYPE_CHECKING) or "function"."""

    source: str
    target: str
    kind: str


class Figure(NamedTuple):
    """One row of the table. `value` is the number of `members`, unless members have sizes."""

    name: str
    meaning: str
    value: int
    members: list[str]


Class = tuple[str, str]
"""(module, name)"""
Graph = Mapping[str, Iterable[str]]


# ---- files


def read_files(root: Path) -> dict[str, File]:
    """Return the files of both packages by module name."""
    found = {}
    for path in sorted((root / CORE).rglob("*.py")) + sorted((root / EXTRAS).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        if name.startswith(f"{CORE}/extras/"):
            name = name.replace(f"{CORE}/extras/", f"{EXTRAS}/", 1)
            if name.startswith(f"{EXTRAS}/learn/"):  # labs/ now
                continue
        text = re.sub(rf"\b{CORE}\.extras\b", EXTRAS, text)
        module = name.removesuffix(".py").replace("/", ".")
        if module not in (f"{CORE}.__init__", f"{EXTRAS}.__init__"):  # a folder's own file has the folder's name
            module = module.removesuffix(".__init__")
        found[module] = File(name, module, text)
    return found


@contextmanager
def checkout(ref: str | None) -> Iterator[Path]:
    """Give the folder with the files of a commit, or of the working tree if `ref` is None."""
    if ref is None:
        yield ROOT
        return
    command = ["git", "-C", str(ROOT), "archive", ref, CORE, "pyproject.toml"]
    has_extras = subprocess.run(
        ["git", "-C", str(ROOT), "cat-file", "-e", f"{ref}:{EXTRAS}"], capture_output=True, check=False
    )
    command += [EXTRAS] * (has_extras.returncode == 0)
    archive = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            wanted = [one for one in files if one.name.endswith((".py", ".toml"))]
            for one in wanted:
                target = Path(folder, one.name)
                target.parent.mkdir(parents=True, exist_ok=True)
                content = files.extractfile(one)
                assert content is not None
                target.write_bytes(content.read())
        yield Path(folder)


# ---- imports


def walk_with_kind(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield every node below a module, in order of the text for nodes of one block, with its kind (see `File`)."""
    todo: list[tuple[ast.AST, str]] = [(node, "module") for node in tree.body]
    while todo:
        node, kind = todo.pop()
        yield node, kind
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo += [(one, "types") for one in node.body] + [(one, kind) for one in node.orelse]
            continue
        inner = "function" if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) else kind
        todo += [(child, inner) for child in ast.iter_child_nodes(node)]


def modules_of(node: ast.AST, files: Mapping[str, File]) -> set[str]:
    """Return the modules of both packages that an import statement imports."""
    if isinstance(node, ast.Import):
        names = {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module:
        inner = {f"{node.module}.{alias.name}" for alias in node.names}
        names = inner if inner <= files.keys() else inner | {node.module}
    else:
        return set()
    return {f"{name}.__init__" if name in (CORE, EXTRAS) else name for name in names} & files.keys()


def find_imports(files: Mapping[str, File]) -> list[Import]:
    """Return all imports between two files, each once for each kind."""
    found = {
        Import(file.module, target, kind)
        for file in files.values()
        for node, kind in file.nodes_with_kind
        for target in modules_of(node, files)
        if target != file.module
    }
    return sorted(found)


def graph_of(nodes: Iterable[str], pairs: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {node: set() for node in nodes}
    for source, target in pairs:
        if source != target:
            graph[source].add(target)
    return graph


def find_components(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components (Tarjan 1972), each after those that it points to."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            found.append(sorted(stack[stack.index(name) :]))
            del stack[stack.index(name) :]

    for name in graph:
        if name not in index:
            visit(name)
    return found


def find_circles(graph: Graph) -> list[list[str]]:
    """Return the components with more than one member, sorted."""
    return sorted(one for one in find_components(graph) if len(one) > 1)


def find_floors(graph: Graph) -> dict[str, int]:
    """Return each file's floor: the longest path of imports below it. Files of one circle are on the same floor."""
    floors: dict[str, int] = {}
    for component in find_components(graph):
        below = {other for name in component for other in graph[name]} - set(component)
        floors.update(dict.fromkeys(component, 1 + max((floors[other] for other in below), default=-1)))
    return floors


def import_figures(files: Mapping[str, File]) -> list[Figure]:
    imports = find_imports(files)
    folders = {file.module: file.folder for file in files.values()}

    def circles(of: str, kinds: tuple[str, ...], name: str, meaning: str) -> Figure:
        pairs = [(one.source, one.target) for one in imports if one.kind in kinds]
        if of == "folders":
            pairs = [(folders[source], folders[target]) for source, target in pairs]
        found = find_circles(graph_of(folders.values() if of == "folders" else files, pairs))
        return Figure(name, meaning, len(found), [f"{len(one)}: {' '.join(one)}" for one in found])

    # What a package exports lies below it, also if it is imported only when somebody uses it.
    at_once = [one for one in imports if one.kind == "module" or files[one.source].path.endswith("__init__.py")]
    floors = find_floors(graph_of(files, [one[:2] for one in at_once]))
    back = sorted({one for one in imports if floors[one.target] >= floors[one.source] and one not in at_once})
    arrows = [f"{one.source} ({floors[one.source]}) -> {one.target} ({floors[one.target]}), {one.kind}" for one in back]
    outer, inner = ("module", "types"), ("module", "types", "function")
    return [
        circles("folders", outer, "folder-circles", "circles between folders, TYPE_CHECKING included"),
        circles("folders", inner, "folder-circles-all", "the same with imports in functions"),
        circles("files", outer, "file-circles", "circles between files, TYPE_CHECKING included"),
        circles("files", inner, "file-circles-all", "the same with imports in functions"),
        Figure("floors", "floors of files", 1 + max(floors.values()), floor_members(floors)),
        Figure("back-up", "imports that run back up, in functions or for types", len(arrows), arrows),
    ]


def floor_members(floors: Mapping[str, int]) -> list[str]:
    return [f"{floor:2} {name}" for name, floor in sorted(floors.items(), key=lambda one: (one[1], one[0]))]


# ---- classes


class Classes:
    """All classes of the files, and which of them derive from which."""

    def __init__(self, files: Mapping[str, File]) -> None:
        self.files = files
        self.nodes: dict[Class, ast.ClassDef] = {}
        self.names: dict[str, dict[str, Class]] = {}  # of each module: local name -> (module, name) of what it imports
        for module, file in files.items():
            names = self.names[module] = {}
            for node in file.nodes:
                if isinstance(node, ast.ClassDef):
                    self.nodes[module, node.name] = node
                elif isinstance(node, ast.ImportFrom) and node.module:
                    source = f"{node.module}.__init__" if node.module in (CORE, EXTRAS) else node.module
                    names.update({alias.asname or alias.name: (source, alias.name) for alias in node.names})
        self.bases = {key: self.bases_of(key) for key in self.nodes}

    def bases_of(self, key: Class) -> list[Class]:
        """Return the bases of a class that are classes of these files.

        A class that a function makes of a class it is given, `class LoadingKVCache(cache_class)`, derives from what
        the parameter's annotation names, `type[KVCache]`. If that is `Any`, it derives from the part in its own name.
        """
        bases = self.nodes[key].bases
        found: list[Class | None] = [self.resolve(key[0], base) for base in bases]
        if found == [None] and isinstance(bases[0], ast.Name) and self.is_parameter(key[0], bases[0].id):
            found = [(f"{CORE}.{module}", name) for name, module in PARTS.items() if key[1].endswith(name)]
        return [one for one in found if one is not None]

    def resolve(self, module: str, node: ast.expr) -> Class | None:
        if isinstance(node, ast.Subscript):
            return self.resolve(module, node.value)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            holder = self.names[module].get(node.value.id)  # from nanovllm import engine; engine.LLMEngine
            if holder is None:
                return None
            return self.follow(f"{holder[0].removesuffix('.__init__')}.{holder[1]}", node.attr)
        if isinstance(node, ast.Name):
            return self.follow(module, node.id) or self.of_parameter(module, node.id)
        return None

    def follow(self, module: str, name: str) -> Class | None:
        """Return the class that a module defines or imports by this name."""
        seen = set()
        while (module, name) not in self.nodes:
            if module not in self.names or name not in self.names[module] or (module, name) in seen:
                return None
            seen.add((module, name))
            module, name = self.names[module][name]
        return module, name

    def of_parameter(self, module: str, name: str) -> Class | None:
        for node in self.files[module].nodes:
            if isinstance(node, ast.FunctionDef):
                for one in node.args.args:
                    if one.arg == name and isinstance(one.annotation, ast.Subscript):
                        return self.resolve(module, one.annotation.slice)
        return None

    def is_parameter(self, module: str, name: str) -> bool:
        return any(isinstance(node, ast.arg) and node.arg == name for node in self.files[module].nodes)

    def subclasses(self, root: Class) -> list[Class]:
        """Return the direct and indirect subclasses of `root` that are not in the core."""
        found, todo = set(), [root]
        while todo:
            parent = todo.pop()
            for key, bases in self.bases.items():
                if parent in bases and key not in found:
                    found.add(key)
                    todo.append(key)
        return sorted(key for key in found if not self.files[key[0]].is_core)

    def figures(self) -> list[Figure]:
        rows = []
        for name, module in PARTS.items():
            found = self.subclasses((f"{CORE}.{module}", name))
            members = [f"{key[1]}  {self.files[key[0]].place(self.nodes[key])}" for key in found]
            rows.append(Figure(name, f"subclasses of {name} outside the core", len(members), members))
        total = [f"{row.name}: {member}" for row in rows for member in row.members]
        return [*rows, Figure("subclasses", "all of these", len(total), total)]


# ---- methods that are assigned, and hooks

OF_LIBRARIES = ("errcheck",)  # what a library offers for assignment: a function of ctypes calls it


def callable_attributes(files: Mapping[str, File]) -> set[str]:
    """Return the names of attributes that hold functions.

    These are the names of methods, unless a class also has data or a property of that name, and the names of fields
    that are annotated as `Callable`, or to which a class assigns functions.
    """
    methods: set[str] = set()
    fields: set[str] = set()
    data: set[str] = set()
    is_callable_type = re.compile(rf"\b({'|'.join(['Callable', *callable_aliases(files)])})\b")
    for file in files.values():
        functions = functions_of(file)
        for node in file.nodes:
            if isinstance(node, ast.ClassDef):
                for one in node.body:
                    if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
                        is_property = "property" in " ".join(map(ast.unparse, one.decorator_list))
                        (data if is_property else methods).add(one.name)
                    elif isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                        (fields if is_callable_type.search(ast.unparse(one.annotation)) else data).add(one.target.id)
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                annotation = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
                is_annotated = is_callable_type.search(annotation) is not None
                for target, value in assigned_pairs(node):
                    if isinstance(target, ast.Attribute) and is_own(target.value):
                        is_callable = is_annotated or is_function(value, functions)
                        (fields if is_callable else data).add(target.attr)
    return (methods - data) | fields


def callable_aliases(files: Mapping[str, File]) -> set[str]:
    """Return the names that modules give to types of functions: `Draw = Callable[..., Tensor]`."""
    return {
        node.targets[0].id
        for file in files.values()
        for node in file.nodes
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Subscript)
        if getattr(node.value.value, "id", "") == "Callable"
    }


def is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def functions_of(file: File) -> set[str]:
    """Return the names of the functions that a file defines outside classes."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    methods = {id(one) for node in file.nodes if isinstance(node, ast.ClassDef) for one in node.body}
    return {node.name for node in file.nodes if isinstance(node, kinds) and id(node) not in methods}


def is_function(value: ast.expr, functions: set[str]) -> bool:
    """Return whether an expression is a lambda, a `partial`, or the name of one of `functions`."""
    if isinstance(value, ast.Call):
        return ast.unparse(value.func) in ("partial", "functools.partial")
    return isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in functions)


def assigned_pairs(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield (target, value) of each single assignment of a statement. `a, b = c, d` are two."""
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
            elif isinstance(target, ast.Tuple):
                yield from ((one, node.value) for one in target.elts)
            else:
                yield target, node.value
    elif isinstance(node, ast.Call) and ast.dump(node.func).partition("setattr")[1]:
        holder, name, value = [*node.args, None, None, None][:3]
        if isinstance(holder, ast.expr) and isinstance(name, ast.expr) and value is not None:
            attribute = name.value if isinstance(name, ast.Constant) else "*"
            yield ast.Attribute(value=holder, attr=str(attribute), ctx=ast.Store()), value


def assigned_methods(files: Mapping[str, File]) -> list[str]:
    """Return where code assigns a function to an attribute of an object that is not its own.

    The attribute holds functions (`callable_attributes`), or the value is a function or a bound method.
    """
    names = callable_attributes(files)
    found = []
    for file in files.values():
        functions = functions_of(file)
        for node in file.nodes:
            for target, value in assigned_pairs(node):
                if not isinstance(target, ast.Attribute) or is_own(target.value) or target.attr in OF_LIBRARIES:
                    continue
                is_bound = isinstance(value, ast.Attribute) and value.attr in names
                if target.attr in names or is_bound or is_function(value, functions):
                    text = f"{file.place(node)} {ast.unparse(target)} = {ast.unparse(value)}"
                    found.append((file.path, getattr(node, "lineno", 0), text))
    return [text for _, _, text in sorted(found)]


def forward_hooks(files: Mapping[str, File]) -> list[str]:
    """Return where modules of PyTorch get hooks."""
    return [
        f"{file.place(node)} {ast.unparse(node)}"
        for file in files.values()
        for node in file.nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and re.fullmatch(r"register_\w*(forward|backward)\w*hook", node.func.attr)
    ]


# ---- lines and comments


def is_engine(path: str) -> bool:
    """Return whether a file of nanovllm_extras composes the engine."""
    inner = path.removeprefix(f"{EXTRAS}/")
    left_out = {name for names in NOT_THE_ENGINE.values() for name in names}
    return inner not in left_out and f"{inner.partition('/')[0]}/" not in left_out


def size_figures(files: Mapping[str, File]) -> list[Figure]:
    engine = [file for file in files.values() if not file.is_core and is_engine(file.path)]
    core = [file for file in files.values() if file.is_core]
    lines = {file.path: file.text.count("\n") for file in files.values()}

    def rows(name: str, where: str, some: list[File]) -> list[Figure]:
        members = [f"{lines[file.path]:5} {file.path}" for file in some]
        total = sum(lines[file.path] for file in some)
        return [
            Figure(f"{name}files", f"files {where}", len(some), members),
            Figure(f"{name}lines", f"lines {where}", total, members),
        ]

    return rows("", "that compose the engine in the extras", engine) + rows("core-", "of the core", core)


def comments(file: File) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each comment, of files that have a `type: ignore`."""
    if not re.search(r"type:\s*ignore", file.text):
        return
    for token in tokenize.generate_tokens(io.StringIO(file.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def typing_figures(files: Mapping[str, File]) -> list[Figure]:
    ignores = [
        f"{file.path}:{line} {text}"
        for file in files.values()
        for line, text in comments(file)
        if re.search(r"#\s*type:\s*ignore", text)
    ]
    overrides = [one for one in ignores if re.search(r"ignore\[[^]]*override", one)]
    uses = [
        file.place(node)
        for file in files.values()
        for node in file.nodes
        if (isinstance(node, ast.Name) and node.id == "Any")
        or (isinstance(node, ast.Attribute) and node.attr == "Any")
        or (isinstance(node, ast.Constant) and is_annotation_with_any(node.value))
    ]
    inner = [
        f"{file.place(node)} {ast.unparse(node)}"
        for file in files.values()
        for node, kind in file.nodes_with_kind
        if kind == "function" and isinstance(node, ast.Import | ast.ImportFrom)
    ]
    return [
        Figure("ignores", "comments `type: ignore`", len(ignores), ignores),
        Figure("override-ignores", "of these, for overridden methods", len(overrides), overrides),
        Figure("any", "uses of `Any`", len(uses), uses),
        Figure("inner-imports", "imports inside functions", len(inner), inner),
    ]


def is_annotation_with_any(text: object) -> bool:
    """Return whether a string is a quoted annotation such as "Callable[[Any], Any]"."""
    is_short = isinstance(text, str) and "Any" in text and "[" in text
    return is_short and re.fullmatch(r"[\w.\[\], |]*\bAny\b[\w.\[\], |]*", str(text)) is not None


def mypy_figure(root: Path) -> Figure:
    """Count the pairs of a pattern of our own modules and a code of an error that mypy does not report there."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10; mypy needs it too
        import tomli as tomllib  # type: ignore[import-not-found, no-redef]

    options = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    members = []
    for override in [{"module": "*", **options}, *options.get("overrides", [])]:
        modules = [override["module"]] if isinstance(override["module"], str) else override["module"]
        own = [name for name in modules if name == "*" or (root / name.split(".")[0]).is_dir() or name == "labs.*"]
        members += [f"{name}: {code}" for name in own for code in override.get("disable_error_code", [])]
    return Figure("mypy", "codes that mypy is told to ignore, one for each pattern of modules", len(members), members)


# ---- the table


def count(root: Path) -> list[Figure]:
    """Return all figures of the packages in `root`."""
    files = read_files(root)
    assigned, hooks = assigned_methods(files), forward_hooks(files)
    return [
        *Classes(files).figures(),
        Figure("assigned-methods", "methods assigned on other objects", len(assigned), assigned),
        Figure("hooks", "forward hooks", len(hooks), hooks),
        *size_figures(files),
        *typing_figures(files),
        mypy_figure(root),
        *import_figures(files),
    ]


def count_ref(ref: str | None) -> dict[str, Figure]:
    with checkout(ref) as root:
        return {figure.name: figure for figure in count(root)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", metavar="NAME", help="print the members of one row")
    parser.add_argument("--ref", help="count this commit instead of the working tree")
    parser.add_argument("--against", metavar="REF", help="print the figures of this commit in front")
    args = parser.parse_args()
    figures = count_ref(args.ref)
    if args.list is not None:
        if args.list not in figures:
            parser.error(f"--list must be one of {', '.join(figures)}, got {args.list!r}")
        print(*figures[args.list].members, sep="\n")
        return
    columns = {args.ref or "now": figures}
    if args.against is not None:
        columns = {args.against: count_ref(args.against), **columns}
    print(f"{'':18}" + "".join(f"{name:>10}" for name in columns))
    for name, figure in figures.items():
        values = "".join(f"{of_column[name].value:>10}" for of_column in columns.values())
        print(f"{name:18}{values}  {figure.meaning}")


if __name__ == "__main__":
    main()
