"""Remove keywords of a JSON schema that constrain nothing, and that the compiler would refuse by their names.

Generators of schemas write them everywhere: zod has `propertyNames: {"type": "string"}` in every record, and other
libraries have `uniqueItems: false`. `format` is an annotation in JSON Schema: a format that the compiler does not know
is ignored, as in xgrammar and therefore in vLLM. An `$id` that is not a URI, such as griptape's `Output Format`, names
nothing that a reference could mean. A keyword with an effect stays, so that it is compiled or refused.
"""

import re
from collections.abc import Callable, Iterator

Schema = dict[str, object]
"""A JSON schema that is an object. Other schemas are True, False and, until they are compiled, any JSON."""
LookUp = Callable[[object, str], object]
"""Returns the target of a reference in a root schema, or None."""

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
"""The formats that the compiler enforces."""
ANNOTATIONS = ("title", "description", "$comment", "default", "examples", "deprecated", "readOnly", "writeOnly", "$id")
URI = re.compile(r"(?:[\w\-.~:/?#\[\]@!$&'()*+,;=]|%[0-9A-Fa-f]{2})*", re.ASCII)
OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
OF_ONE = ("additionalProperties", "unevaluatedProperties", "propertyNames", "items", "additionalItems",
          "unevaluatedItems", "contains", "not", "if", "then", "else")  # fmt: skip
OF_LISTS = ("prefixItems", "items", "allOf", "anyOf", "oneOf")


def remove_neutral(root: object, look_up: LookUp) -> None:
    """Remove neutral keywords from a schema, its inner schemas, and what its references lead to, in place.

    `look_up` returns the target of a reference, or None.
    """
    for schema in schemas_within(root, look_up):
        for keyword in [keyword for keyword in schema if is_neutral_keyword(keyword, schema)]:
            del schema[keyword]


def schemas_within(root: object, look_up: LookUp) -> Iterator[Schema]:
    """Yield a schema, its inner schemas, and what its references lead to. Each may be changed when it is yielded."""
    seen: set[int] = set()
    todo = [root]
    while todo:
        schema = todo.pop()
        if isinstance(schema, dict) and id(schema) not in seen:
            seen.add(id(schema))
            yield schema
            todo += inner_schemas(schema)
            if isinstance(reference := schema.get("$ref"), str):
                todo.append(look_up(root, reference))


def inner_schemas(schema: Schema) -> Iterator[object]:
    """Yield the schemas within a schema. Values of `const`, `enum` or `default` are not schemas."""
    for keyword in OF_NAMES:
        if isinstance(inner := schema.get(keyword), dict):
            yield from inner.values()
    for keyword in OF_LISTS:
        if isinstance(inner := schema.get(keyword), list):
            yield from inner
    yield from (schema.get(keyword) for keyword in OF_ONE)


def is_neutral_keyword(keyword: str, schema: Schema) -> bool:
    """Return whether the schema means the same without this keyword and the other neutral ones."""
    value = schema[keyword]
    if keyword == "format":
        return isinstance(value, str) and value not in FORMATS
    if keyword == "$id":
        return isinstance(value, str) and not URI.fullmatch(value)
    if keyword in ("uniqueItems", "not"):
        return value is False
    if keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        return isinstance(value, dict) and all(one == [] or allows_all(one) for one in value.values())
    if keyword == "propertyNames":
        return allows_all_strings(value)
    if keyword in ("unevaluatedItems", "additionalItems"):
        return allows_all(value)
    if keyword in ("contains", "minContains", "maxContains"):
        return "contains" not in schema or (schema.get("minContains") == 0 and "maxContains" not in schema)
    if keyword in ("if", "then", "else"):
        branches = [schema[name] for name in ("then", "else") if name in schema]
        return "if" not in schema or all(map(allows_all, branches))
    return keyword == "$dynamicAnchor" and "$dynamicRef" not in schema


def allows_all(schema: object) -> bool:
    """Return whether every value conforms to the schema."""
    return schema is True or (isinstance(schema, dict) and not set(schema) - set(ANNOTATIONS))


def allows_all_strings(schema: object) -> bool:
    """Return whether every string conforms to the schema: names of properties are strings."""
    if not isinstance(schema, dict):
        return schema is True
    types = schema.get("type", "string")
    rest = {keyword: value for keyword, value in schema.items() if keyword != "type"}
    return (types == "string" or (isinstance(types, list) and "string" in types)) and allows_all(rest)
