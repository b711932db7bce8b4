"""Every name of the core has a use: in the core, in its public API, or as a hook that docs/architecture.md documents.

The names are those of functions, classes, methods, fields, constants and parameters, read with `ast`. A use is found by
the name only, so a name that two classes have counts as used if one of them is.
"""

import ast
import functools
import re
from typing import NamedTuple

import nanovllm
from tests.core_alone import ROOT
from tools.count_engine import Classes, read_files

Function = ast.FunctionDef
HOOKS = "## The hooks of the core"
RECORDS = "### What only others read"


class Name(NamedTuple):
    """One definition. `owner` is the class of a method or field; `function` is set for a parameter."""

    name: str
    kind: str
    owner: str
    node: ast.AST
    function: Function | None = None

    def __str__(self) -> str:
        places = [self.owner, self.function.name if self.function else "", self.name]
        return f"{self.kind} {'.'.join(filter(None, places))}"


@functools.cache
def files():
    return read_files(ROOT)


@functools.cache
def trees() -> list[ast.Module]:
    return [ast.parse(file.text) for file in files().values() if file.is_core]


def nodes():
    return [node for tree in trees() for node in ast.walk(tree)]


# ---- what is documented


@functools.cache
def documented(heading: str) -> set[tuple[str, str]]:
    """Return (class, name) for each name in the table below a heading of the page."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition(f"{heading}\n")[2]
    found, owner = set(), ""
    for line in re.split(r"\n##", page)[0].splitlines():
        if line.startswith("|"):
            first, names, *_ = line.strip("|").split("|")
            owner = ([owner] + re.findall(r"`(\w+)`", first))[-1]
            found |= {(owner, name) for name in re.findall(r"`(\w+)`", names)}
    return found


def is_public(one: Name) -> bool:
    """Return whether the name belongs to a class that `nanovllm` exports."""
    method = one.function.name if one.function else one.name
    return one.owner in nanovllm.__all__ and (method == "__init__" or not method.startswith("_"))


def is_documented(one: Name) -> bool:
    """Return whether the name is a hook or a parameter of one, or one that the page says others use."""
    names = documented(HOOKS) | documented(RECORDS)
    if one.function and (one.function.name, one.name) in names:
        return True
    method = one.function.name if one.function else one.name
    return (one.owner, method) in names or (one.function is not None and method in {name for _, name in names})


# ---- what is defined


def parameters(function: Function, owner: str) -> list[Name]:
    given = function.args
    found = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, [given.vararg, given.kwarg])]
    is_bound = owner and "staticmethod" not in map(ast.unparse, function.decorator_list)
    return [Name(one.arg, "parameter", owner, one, function) for one in found[bool(is_bound) :]]


def in_class(node: ast.ClassDef) -> list[Name]:
    found = []
    for one in node.body:
        if isinstance(one, Function):
            found += [Name(one.name, "method", node.name, one), *parameters(one, node.name)]
            counted = {id(inner.target) for inner in ast.walk(one) if isinstance(inner, ast.AugAssign)}
            found += [
                Name(inner.attr, "field", node.name, inner)
                for inner in ast.walk(one)
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and id(inner) not in counted
                if isinstance(inner.value, ast.Name) and inner.value.id == "self"
            ]
        elif isinstance(one, ast.AnnAssign | ast.Assign):
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            found += [Name(inner.id, "field", node.name, one) for inner in targets if isinstance(inner, ast.Name)]
    return found


@functools.cache
def definitions() -> list[Name]:
    found = []
    for tree in trees():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                found += [Name(node.name, "class", "", node), *in_class(node)]
            elif isinstance(node, Function):
                found += [Name(node.name, "function", "", node), *parameters(node, "")]
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)]
                found += [Name(name, "constant", "", node) for name in names]
    return [one for one in found if not one.name.startswith("__")]


# ---- what is used


@functools.cache
def read_names() -> dict[str, list[ast.AST]]:
    """Return each name that is read, as a variable, as an attribute or as the text of `getattr`, with the places."""
    found: dict[str, list[ast.AST]] = {}
    for node in nodes():
        name = getattr(node, "id", getattr(node, "attr", None))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.setdefault(node.value, []).append(node)
        elif name is not None and isinstance(node.ctx, ast.Load):
            found.setdefault(name, []).append(node)
    return found


@functools.cache
def calls() -> dict[str, list[tuple[int, set[str | None]]]]:
    """Return for each function that is called the number of positional arguments, and the names of the others.

    `partial(f, …)` and `checked(default, f, …)` are calls of `f` too. A `*` counts as many arguments.
    """
    found: dict[str, list[tuple[int, set[str | None]]]] = {}
    for node in nodes():
        if not isinstance(node, ast.Call):
            continue
        callees = [(node.func, node.args)]
        at = {"partial": 0, "checked": 1}.get(getattr(node.func, "id", ""))
        if at is not None and len(node.args) > at:
            callees.append((node.args[at], node.args[at + 1 :]))
        for callee, arguments in callees:
            name = getattr(callee, "id", getattr(callee, "attr", ""))
            count = 99 if any(isinstance(one, ast.Starred) for one in arguments) else len(arguments)
            found.setdefault(name, []).append((count, {one.arg for one in node.keywords}))
    return found


@functools.cache
def fields_as_arguments() -> set[str]:
    """Return the parameters of functions that are called with `**vars(record)`: the record's fields are read there."""
    callees = {name for name, ways in calls().items() if any(None in keywords for _, keywords in ways)}
    return {one.name for one in definitions() if one.function is not None and one.function.name in callees}


def is_given(one: Name) -> bool:
    """Return whether a parameter has no default, or a call in the core gives it."""
    function, given = one.function, one.function.args
    names = [parameter.name for parameter in parameters(function, one.owner)]
    callee = one.owner if function.name == "__init__" else function.name
    ways = calls().get(callee, [])
    if given.kwarg is not None and given.kwarg.arg == one.name:
        return any(keywords - {None, *names} for _, keywords in ways)
    optional = [parameter.arg for parameter in given.args[len(given.args) - len(given.defaults) :]]
    optional += [
        parameter.arg for parameter, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default
    ]
    at = names.index(one.name)
    return one.name not in optional or any(count > at or {one.name, None} & keywords for count, keywords in ways)


def is_used(one: Name) -> bool:
    if one.function is not None:
        body = [inner for statement in one.function.body for inner in ast.walk(statement)]
        return one.name in {inner.id for inner in body if isinstance(inner, ast.Name)} and is_given(one)
    places = read_names().get(one.name, [])
    if one.kind == "field":
        return any(not isinstance(node, ast.Name) for node in places) or one.name in fields_as_arguments()
    inside = set(map(id, ast.walk(one.node)))  # a function that only calls itself is not used
    return any(id(node) not in inside for node in places)


# ---- the tests


def test_every_name_has_a_use():
    unused = [one for one in definitions() if not (is_used(one) or is_public(one) or is_documented(one))]
    assert sorted({str(one) for one in unused}) == []


def test_the_documented_names_exist():
    found = {(one.owner, one.name) for one in definitions()} | {(one.owner, "__init__") for one in definitions()}
    assert documented(HOOKS) - found == set()
    found |= {(one.function.name, one.name) for one in definitions() if one.function}
    assert documented(RECORDS) - found == set()


def test_every_hook_is_overridden():
    """A subclass of the extras, an example, or the page overrides it. Hooks that nobody needs make code longer."""
    classes = Classes(files())
    homes = {name: (module, name) for module, name in classes.nodes if files()[module].is_core}
    pages = [ROOT / "docs" / "architecture.md", *(ROOT / "examples" / "extensions").glob("*.py")]
    page = "".join(one.read_text(encoding="utf-8") for one in pages)
    missing = set()
    for owner, name in documented(HOOKS):
        subclasses = [classes.nodes[key] for key in classes.subclasses(homes[owner])]
        members = {one.name for node in subclasses for one in in_class(node)}
        if name != "__init__" and name not in members and f"def {name}(" not in page:
            missing.add((owner, name))
    assert missing == set()


def test_what_others_read_is_not_read_in_the_core():
    """Otherwise it does not belong into this table."""
    fields = [one for one in definitions() if (one.owner, one.name) in documented(RECORDS)]
    assert [str(one) for one in fields if one.function is None and is_used(one)] == []
