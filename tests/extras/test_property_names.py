"""`propertyNames` with an enum, a constant, an expression or a length is enforced. jsonschema is the oracle."""

import enum
import itertools
import time
from typing import Literal

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from tests.conftest import examples
from tests.extras.test_closed_objects import Form

NAMES = ["a", "ab", "b", "c d"]
INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
LONG = {"type": "object", "properties": {f"long name {i}": TEXT for i in range(20)}}  # too long to be copied
INSTANCES = [
    dict(zip(names, values, strict=True))
    for size in range(3)
    for names in itertools.combinations(NAMES, size)
    for values in itertools.product((1, "x"), repeat=size)
]
ENUMS = st.lists(st.sampled_from([*NAMES, 1, None]), min_size=1, max_size=3).map(lambda names: {"enum": names})
KEYS = st.one_of(
    ENUMS,
    ENUMS.map(lambda one: {"type": "string", **one, "description": "A key."}),
    st.sampled_from(NAMES).map(lambda name: {"type": "string", "const": name}),
    st.lists(st.sampled_from(NAMES), min_size=1, unique=True).map(
        lambda names: {"anyOf": [{"const": name} for name in names]}
    ),
    st.sampled_from(NAMES).map(lambda name: {"oneOf": [{"const": name}, {"enum": [name + name]}]}),
    st.just({"$ref": "#/$defs/Key"}),
)
FORMS = st.sampled_from([{"pattern": "^a"}, {"pattern": "b"}, {"minLength": 2}, {"type": "string", "maxLength": 1},
                         {"minLength": 1, "maxLength": 1}])  # fmt: skip
VALUES = st.sampled_from([INTEGER, TEXT, LONG, {"anyOf": [INTEGER, LONG]}])
RECORDS = st.one_of(
    st.builds(
        lambda keys, rest, own, required: {
            "type": "object", "propertyNames": keys, "required": required,
            **({} if rest is None else {"additionalProperties": rest}), **({"properties": own} if own else {}),
        },
        KEYS, VALUES | st.booleans() | st.none(), st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=2),
        st.lists(st.sampled_from(NAMES), max_size=1),
    ),
    st.builds(lambda keys, rest: {"type": "object", "propertyNames": keys, "additionalProperties": rest},
              FORMS, VALUES),
)  # fmt: skip
SCHEMAS = st.one_of(
    RECORDS,
    st.builds(lambda one, other: {"anyOf": [one, other]}, RECORDS, RECORDS),
    RECORDS.map(lambda one: {"allOf": [one]}),
    RECORDS.map(lambda one: {"$ref": "#/$defs/Record", "$defs": {"Record": one}}),
)


@pytest.mark.examples
@settings(max_examples=examples(100), deadline=None)
@given(SCHEMAS, ENUMS)
def test_records_have_the_keys_that_the_schema_allows(schema, key):
    schema = {**schema, "$defs": {**schema.get("$defs", {}), "Key": key}}
    oracle, form = jsonschema.Draft202012Validator(schema), Form(schema)
    for instance in INSTANCES:
        accepted = not form.error and form.accepts(instance)
        assert accepted == oracle.is_valid(instance), (instance, form.error, form.closed)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Palette(BaseModel):
    shares: dict[Color, float]
    names: dict[Literal["short", "long"], str]


# what zod 4.1 writes for `z.record(z.enum(["red", "blue"]), z.number())`, and for `z.partialRecord`
ZOD = {"type": "object", "propertyNames": {"type": "string", "enum": ["red", "blue"]},
       "additionalProperties": {"type": "number"}}  # fmt: skip


def test_schemas_of_pydantic_and_zod():
    form = Form(Palette.model_json_schema())
    assert not form.error
    assert form.accepts({"shares": {"red": 0.5}, "names": {"short": "r", "long": "red"}})
    assert form.accepts({"shares": {}, "names": {}})
    assert not form.accepts({"shares": {"green": 0.5}, "names": {}})
    assert not form.accepts({"shares": {}, "names": {"other": "r"}})
    whole, partial = Form({**ZOD, "required": ["red", "blue"]}), Form(ZOD)
    assert whole.accepts({"red": 1, "blue": 2})
    assert not whole.accepts({"red": 1})
    assert partial.accepts({"red": 1})
    assert not partial.accepts({"red": 1, "green": 2})


@pytest.mark.parametrize(
    "keys",
    [{"type": "number"}, {"not": {"const": "a"}}, {"pattern": "^a", "minLength": 2}, {"pattern": "^a", "enum": ["a"]},
     {"$ref": "#/$defs/Self"}, {"$ref": "#/$defs/Nothing"}, {"oneOf": [{"enum": ["a"]}, {"enum": ["a"]}]}, False, 5],
    ids=str,
)  # fmt: skip
def test_other_forms_are_refused_by_name(keys):
    form = Form({"type": "object", "propertyNames": keys, "$defs": {"Self": {"$ref": "#/$defs/Self"}}})
    assert "propertyNames" in form.error


def test_keys_that_match_nothing_in_the_schema_are_refused_too():
    """An expression for names beside named properties, or with unevaluated ones, cannot be converted."""
    pattern = {"type": "object", "propertyNames": {"pattern": "^a"}}
    for more in ({"properties": {"b": TEXT}}, {"patternProperties": {"b": TEXT}}, {"unevaluatedProperties": TEXT}):
        assert "propertyNames" in Form(pattern | more).error


def test_records_within_records_do_not_grow():
    """The values of each would be copied for every key: 20^8 copies."""
    schema = INTEGER
    for _ in range(8):
        schema = {"type": "object", "propertyNames": {"enum": [f"name {i}" for i in range(20)]},
                  "additionalProperties": schema}  # fmt: skip
    start = time.perf_counter()
    form = Form(schema)
    assert not form.error
    assert form.accepts({"name 1": {"name 2": {}, "name 3": {"name 19": {"name 4": {}}}}})
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("definitions", [[], 5, None, "a"])
def test_a_long_schema_is_copied_if_definitions_are_not_an_object(definitions):
    schema = {"$defs": definitions, "type": "object", "propertyNames": {"enum": ["a", "b"]}}
    form = Form(schema | {"additionalProperties": LONG})
    assert form.accepts({"a": {"long name 0": "x"}, "b": {}})
    assert not form.accepts({"c": {}})
