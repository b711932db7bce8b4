"""Close the objects of a JSON schema: they may have only the properties that the schema names.

In JSON Schema, an object without `additionalProperties` may have any further property, so a model may invent properties
until `max_tokens`. xgrammar and vLLM close such objects. Here `additionalProperties` is added to the schema before the
schema is compiled:

    {"properties": {"a": …}}                            has `a` only
    {"type": "object"}                                  any object, since the schema names no properties
    {"allOf": [{"properties": {"a": …}},                has `a` and `b`: schemas of the same object are closed
               {"properties": {"b": …}}]}               together, as by JSON Schema's `unevaluatedProperties`

`docs/structured_outputs.md` has the whole table.
"""

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from urllib.parse import unquote

from nanovllm_extras.options.structured_params import schema_text
from nanovllm_extras.structured.neutral_keywords import Schema, remove_neutral
from nanovllm_extras.structured.property_names import replace_property_names

MAX_COST = 300_000  # names and characters that are examined: nested combinations of schemas grow fast
OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")  # keywords with a schema for each name
OF_ONE = ("additionalProperties", "items", "additionalItems")  # keywords with one schema
OF_LISTS = ("prefixItems", "items")  # keywords with a list of schemas
CHOICES = ("anyOf", "oneOf")
ELSEWHERE = ("$ref", "allOf", *CHOICES, "enum", "const")  # keywords that restrict the value of a schema without a type


class Names(NamedTuple):
    """The properties that schemas name."""

    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    is_open: bool = False
    """Whether a schema explicitly allows other properties."""


NONE = Names()


def closed_text(schema: str | Mapping[str, object]) -> str:
    """Return a schema as JSON, closed and without neutral keywords. Raises ValueError if it is not a schema."""
    parsed = json.loads(schema_text(schema))
    try:
        remove_neutral(parsed, look_up)
        replace_property_names(parsed, look_up)
        Closer(parsed).close(parsed)
        return json.dumps(parsed)
    except RecursionError:
        raise ValueError("structured_outputs.json is not a JSON schema: it is nested too deeply") from None


class Closer:
    """Closes the objects of one schema in place."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._original = json.loads(json.dumps(root))  # several times as fast as a deepcopy
        self._seen: set[int] = set()
        self._cost = 0

    def close(self, schema: object, beside: Names = NONE, path: tuple[str, ...] = ()) -> None:
        """Close the objects of a schema and of the schemas within it.

        beside: the properties that other schemas name for the same object.
        path: the references that have been replaced on the way to this schema.
        """
        if not isinstance(schema, dict) or id(schema) in self._seen:
            return
        self._seen.add(id(schema))
        if isinstance(reference := schema.get("$ref"), str):
            path = self._close_reference(schema, reference, beside, path)
        groups = groups_of(schema)
        named = [self._named(group) for group in groups]
        for i, group in enumerate(groups):
            others = self._union([beside, names_of(schema), *named[:i], *named[i + 1 :]])
            for part in group:
                self.close(part, others, path)
        self._close_own(schema, beside, self._union([*named, self._named_by_reference(schema)]))
        self._close_inner(schema)

    def _close_reference(self, schema: Schema, reference: str, beside: Names, path: tuple[str, ...]) -> tuple[str, ...]:
        """Close the target of a reference, and return the new path.

        If other schemas name properties of the same object, the reference is replaced by a copy of the target: the
        target may also be referenced elsewhere without these properties.
        """
        others = self._union([beside, names_of(schema), *map(self._named, groups_of(schema))])
        if others == NONE or reference in path:
            self.close(look_up(self._root, reference))
            return path
        target = look_up(self._original, reference)
        if target is not None:
            text = json.dumps(target)
            self._spend(len(text))
            del schema["$ref"]
            schema["allOf"] = [*listed(schema, "allOf"), json.loads(text)]
        return (*path, reference)

    def _close_own(self, schema: Schema, beside: Names, parts: Names) -> None:
        """Close the object of the schema itself. parts: the properties that the schema's own parts name for it."""
        is_given, rest = "unevaluatedProperties" in schema, schema.pop("unevaluatedProperties", False)
        if "additionalProperties" in schema:
            return
        others = parts if is_given else union([beside, parts])
        if is_given or (describes(schema) and not others.is_open):
            for keyword, names in (("properties", others.names), ("patternProperties", others.patterns)):
                own = schema.get(keyword, {})
                if names and isinstance(own, dict):  # the compiler refuses others
                    self._spend(len(names))
                    schema[keyword] = own | dict.fromkeys(sorted(names - own.keys()), True)
            schema["additionalProperties"] = rest
            if not any(keyword in schema for keyword in ELSEWHERE):
                schema.setdefault("type", "object")

    def _close_inner(self, schema: Schema) -> None:
        """Close the schemas of members and items."""
        for keyword in OF_NAMES:
            inner = schema.get(keyword)
            for one in inner.values() if isinstance(inner, dict) else ():
                self.close(one)
        for keyword in OF_ONE:
            self.close(schema.get(keyword))
        for keyword in OF_LISTS:
            for one in listed(schema, keyword):
                self.close(one)

    def _named(self, schemas: Iterable[object], path: tuple[str, ...] = ()) -> Names:
        """Return the properties that schemas, including all their parts, name for an object."""
        found = []
        for schema in schemas:
            if not isinstance(schema, dict):
                continue
            found.append(names_of(schema))
            found += [self._named(group, path) for group in groups_of(schema)]
            found.append(self._named_by_reference(schema, path))
        return self._union(found)

    def _named_by_reference(self, schema: Schema, path: tuple[str, ...] = ()) -> Names:
        reference = schema.get("$ref")
        if not isinstance(reference, str) or reference in path:
            return NONE
        return self._named([look_up(self._original, reference)], (*path, reference))

    def _union(self, several: list[Names]) -> Names:
        self._spend(sum(1 + len(one.names) + len(one.patterns) for one in several))
        return union(several)

    def _spend(self, cost: int) -> None:
        self._cost += cost
        if self._cost > MAX_COST:
            raise ValueError("structured_outputs.json combines too many schemas by allOf, anyOf, oneOf and $ref")


def union(several: Iterable[Names]) -> Names:
    """Return the properties that any of `several` names."""
    names, patterns, is_open = zip(NONE, *several, strict=True)
    return Names(frozenset().union(*names), frozenset().union(*patterns), any(is_open))


def listed(schema: Schema, keyword: str) -> list[object]:
    """Return the list of a keyword; an empty list if there is none."""
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def groups_of(schema: Schema) -> list[list[object]]:
    """Return groups of schemas for the same object. An object must match at least one schema of each group."""
    return [*([part] for part in listed(schema, "allOf")), *(listed(schema, keyword) for keyword in CHOICES)]


def describes(schema: Schema) -> bool:
    """Return whether the schema itself names properties."""
    return isinstance(schema.get("properties"), dict) or isinstance(schema.get("patternProperties"), dict)


def names_of(schema: Schema) -> Names:
    """Return the properties that the schema itself names, without its parts."""
    names, patterns = schema.get("properties"), schema.get("patternProperties")
    rest = schema.get("additionalProperties", schema.get("unevaluatedProperties", False))
    return Names(
        frozenset(names if isinstance(names, dict) else ()),
        frozenset(patterns if isinstance(patterns, dict) else ()),
        rest is not False,
    )


def look_up(root: object, reference: str) -> object:
    """Return the target of a reference such as `#/$defs/City`; None for other forms, which are left to the compiler."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    for key in unquote(reference).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(root, dict):
            root = root.get(key)
        elif isinstance(root, list) and key.isascii() and key.isdigit() and int(key) < len(root):
            root = root[int(key)]
        else:
            return None
    return root
