"""Keywords of JSON schemas that constrain nothing are removed, and no others. jsonschema is the oracle."""

import json

import jsonschema
import pytest

from nanovllm_extras.structured.closed_objects import closed_text
from nanovllm_extras.structured.neutral_keywords import FORMATS, remove_neutral

RECORD = {"type": "object", "additionalProperties": {"type": "number"}}
LIST = {"type": "array", "items": {"type": "string"}}
NEUTRAL = [  # a schema, and keywords that change nothing
    (RECORD, {"propertyNames": {"type": "string"}}),
    (RECORD, {"propertyNames": {"type": ["string", "null"], "description": "a name"}}),
    (RECORD, {"propertyNames": {}}),
    (RECORD, {"propertyNames": True}),
    (RECORD, {"dependentRequired": {"a": []}, "dependentSchemas": {"a": {}}}),
    ({"$schema": "http://json-schema.org/draft-07/schema#", **RECORD}, {"dependencies": {"a": [], "b": True}}),
    (LIST, {"uniqueItems": False}),
    (LIST, {"contains": {"type": "number"}, "minContains": 0}),
    (LIST, {"minContains": 3, "maxContains": 1}),
    (LIST, {"unevaluatedItems": True}),
    ({"type": "string"}, {"not": False}),
    ({"type": "string"}, {"then": {"minLength": 9}, "else": False}),
    ({"type": "string"}, {"if": {"minLength": 1}}),
    ({"type": "string"}, {"if": {"minLength": 1}, "then": {}, "else": {"title": "any"}}),
    ({"type": "string"}, {"$dynamicAnchor": "here"}),
    ({"type": "string", "maxLength": 3}, {"format": "an-own-one"}),
    *((RECORD, {"$id": name}) for name in ("Output Format", "Größe", "List<City>", "a%zz")),
]
KEPT = [
    {"propertyNames": {"type": "string", "pattern": "^a"}},
    {"propertyNames": {"enum": ["a"]}},
    {"propertyNames": {"type": "number"}},
    {"propertyNames": False},
    {"uniqueItems": True},
    {"contains": {"type": "number"}},
    {"contains": True, "minContains": 0, "maxContains": 1},
    {"not": {}},
    {"if": {"type": "string"}, "then": {}, "else": False},
    {"dependentRequired": {"a": ["b"]}},
    {"unevaluatedItems": False},
    {"const": {"format": "foo", "uniqueItems": False}},
    {"enum": [{"format": "foo"}], "default": {"not": False}},
    {"properties": {"format": {"type": "string"}, "not": True, "uniqueItems": False, "if": {"const": 1}}},
    {"$defs": {"format": {"type": "string"}}},
    *({"format": name} for name in FORMATS),
    {"format": 3},
    *({"$id": name} for name in ("City", "https://example.com/a%20b.json?x=1#", "urn:uuid:1-2", "")),
]
VALUES = [{}, {"a": 1}, {"a": 1, "b": 2}, {"a": "x"}, [], ["x"], ["x", "x"], ["x", 1], "", "x", "xxxx", 1, None, True]
# what zod 4 and pydantic write that the compiler does not know
OF_GENERATORS = [
    "cuid", "cuid2", "ulid", "xid", "ksuid", "nanoid", "emoji", "base64", "base64url", "cidrv4", "cidrv6", "e164",
    "jwt", "guid", "mac", "json-string", "lowercase", "uri-reference", "regex", "int64", "double", "binary", "password",
    "path", "file-path", "directory-path", "color", "ipvanyaddress", "ipv4network", "uuid4", "multi-host-uri",
]  # fmt: skip


def removed(schema):
    copy = json.loads(json.dumps(schema))
    remove_neutral(copy, lambda root, reference: root.get("odd"))
    return copy


def test_neutral_keywords_are_removed_and_change_nothing():
    for schema, keywords in NEUTRAL:
        check_removed(schema, keywords)


def check_removed(schema, keywords):
    whole = {**schema, **keywords}
    validator = jsonschema.validators.validator_for(whole, default=jsonschema.Draft202012Validator)
    for value in VALUES:
        assert validator(whole).is_valid(value) == validator(schema).is_valid(value), value
    assert removed(whole) == schema
    places = (
        {"properties": {"a": whole}},
        {"anyOf": [{"type": "null"}, whole]},
        {"items": {"prefixItems": [whole], "items": whole}},
        {"$defs": {"A": whole}},
        {"additionalProperties": {"allOf": [whole]}},
        {"$ref": "#/odd", "odd": whole},
    )
    for place in places:
        assert removed(place) == json.loads(json.dumps(place).replace(json.dumps(whole), json.dumps(schema)))


def test_keywords_with_an_effect_and_values_stay():
    assert [schema for schema in KEPT if removed(schema) != schema] == []


def test_all_schemas_compile(with_tokenizer):
    from transformers import AutoTokenizer

    from nanovllm_extras.structured.compiler import GrammarCompiler

    compiler = GrammarCompiler(AutoTokenizer.from_pretrained(with_tokenizer), 300, frozenset({0}))
    for schema, keywords in NEUTRAL:
        compiler.compile({"json": {**schema, **keywords}})
    for name in (*FORMATS, *OF_GENERATORS):
        compiler.compile({"json": {"type": "object", "properties": {"a": {"type": "string", "format": name}}}})
    for schema in KEPT[2:11]:
        with pytest.raises(ValueError, match="Unimplemented"):
            compiler.compile({"json": schema})


def test_a_schema_that_contains_itself_comes_to_an_end():
    text = closed_text({"$ref": "#", "properties": {"a": {"$ref": "#", "format": "foo"}}})
    assert "format" not in text
