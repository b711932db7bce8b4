"""Replace `propertyNames` in JSON schemas by `properties` and `patternProperties`, which the compiler knows.

zod writes it for records whose keys are an enum, and pydantic for dicts whose keys are a `Literal` or an `Enum`:

    {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": V}
        {"properties": {"a": V, "b": V}, "additionalProperties": false}
    {"propertyNames": {"pattern": "^x"}, "additionalProperties": V}
        {"patternProperties": {"^x": V}, "additionalProperties": false}

Both mean the same. Other forms of `propertyNames` stay in the schema, and the compiler refuses them by name.
"""

import json
from collections.abc import Callable

from nanovllm_extras.structured.neutral_keywords import ANNOTATIONS, LookUp, Schema, schemas_within

MAX_REFERENCES = 20  # that follow each other, from `propertyNames` to an enum
MAX_COPIED = 200  # characters of a schema that is copied for each name; a longer one is referenced


def replace_property_names(root: object, look_up: LookUp) -> None:
    """Replace `propertyNames` in a schema and its inner schemas, in place, where this is possible.

    `look_up` returns the target of a reference, or None.
    """
    for schema in schemas_within(root, look_up):
        own = schema.get("properties", {})
        if "propertyNames" in schema and isinstance(own, dict) and can_be_replaced(schema):
            names = find_names(schema["propertyNames"], lambda reference: look_up(root, reference))
            pattern = find_pattern(schema["propertyNames"])
            if names is not None:
                replace_by_properties(schema, names, own, root)
            elif pattern is not None and "properties" not in schema:
                replace_by_pattern(schema, pattern)


def can_be_replaced(schema: Schema) -> bool:
    """Return whether every property is described by `properties` or else by `additionalProperties`."""
    return "unevaluatedProperties" not in schema and not schema.get("patternProperties")


def replace_by_properties(schema: Schema, names: list[str], own: Schema, root: object) -> None:
    """Describe each allowed name. Names in `own`, the schema's `properties`, that are not allowed get no place."""
    del schema["propertyNames"]
    rest = schema.get("additionalProperties", True)
    if isinstance(rest, dict) and len(json.dumps(rest)) > MAX_COPIED and set(names) - own.keys():
        rest = add_definition(root, rest)
    schema["properties"] = {name: own.get(name, rest) for name in names}
    schema["additionalProperties"] = False


def replace_by_pattern(schema: Schema, pattern: str) -> None:
    del schema["propertyNames"]
    schema["patternProperties"] = {pattern: schema.get("additionalProperties", True)}
    schema["additionalProperties"] = False


def add_definition(root: object, schema: Schema) -> Schema:
    """Move a schema to the definitions, and return a reference to it. A copy for each name could be too long."""
    definitions = root.setdefault("$defs", {}) if isinstance(root, dict) else None
    if not isinstance(definitions, dict):
        return schema
    name = f"valuesOfRecord{len(definitions)}"
    while name in definitions:
        name += "_"
    definitions[name] = schema
    return {"$ref": f"#/$defs/{name}"}


def find_names(schema: object, look_up: Callable[[str], object], depth: int = 0) -> list[str] | None:
    """Return the strings that conform to a schema with an enum, or None if the schema has another form."""
    if not isinstance(schema, dict) or depth > MAX_REFERENCES:
        return None
    rest = {keyword: value for keyword, value in schema.items() if keyword not in ANNOTATIONS}
    types = rest.pop("type", "string")
    if len(rest) != 1 or (types != "string" and not (isinstance(types, list) and "string" in types)):
        return None
    ((keyword, value),) = rest.items()
    if keyword == "$ref" and isinstance(value, str):
        return find_names(look_up(value), look_up, depth + 1)
    if keyword in ("anyOf", "oneOf") and isinstance(value, list):
        parts = [find_names(one, look_up, depth + 1) for one in value]
        names = [name for part in parts for name in part or ()]
        is_unique = keyword == "anyOf" or len(set(names)) == len(names)
        return None if None in parts or not is_unique else list(dict.fromkeys(names))
    if keyword == "const":
        value = [value]
    elif keyword != "enum" or not isinstance(value, list):
        return None
    return list(dict.fromkeys(name for name in value if isinstance(name, str)))


def find_pattern(schema: object) -> str | None:
    """Return the expression for the strings that conform to a schema, or None if the schema has another form."""
    if not isinstance(schema, dict) or schema.get("type", "string") != "string":
        return None
    rest = schema.keys() - {"type", *ANNOTATIONS}
    if rest == {"pattern"} and isinstance(schema["pattern"], str):
        return str(schema["pattern"])
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if rest and rest <= {"minLength", "maxLength"} and type(least) is int and (most == "" or type(most) is int):
        return rf"^[\s\S]{{{least},{most}}}$"
    return None
