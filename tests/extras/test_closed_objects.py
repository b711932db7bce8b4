"""Which objects fit a schema without `additionalProperties`: those of its names, whatever combines them.

The oracle is `jsonschema`: each choice of branches is written out, and closed by `unevaluatedProperties`. The table of
docs/structured_outputs.md is tested row by row, and with schemas that frameworks send.
"""

import enum
import itertools
import json
import time
from typing import Annotated, Literal

import jsonschema
import llguidance
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from nanovllm_extras import StructuredOutputsParams
from nanovllm_extras.structured.compiler import checked, source_of
from tests.conftest import examples

TOKENIZER = llguidance.LLTokenizer("byte")


class Form:
    """What a schema accepts once it is compiled as a request's."""

    def __init__(self, schema):
        form, text, options = source_of(StructuredOutputsParams(json=schema))
        text = checked(form, text)
        self.closed = json.loads(text)
        grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=json.loads(options))
        self._matcher = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0)
        self.error = self._matcher.get_error()

    def accepts(self, value):
        """In any order of the outermost keys, because a compiled schema has one."""
        values = (
            [dict(order) for order in itertools.permutations(value.items())] if isinstance(value, dict) else [value]
        )
        return any(map(self.accepts_as_written, values))

    def accepts_as_written(self, value):
        matcher, text = self._matcher.deep_copy(), json.dumps(value)
        return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


# ---- the table

S, N = {"type": "string"}, {"type": "integer"}
A, B = {"type": "object", "properties": {"a": S}}, {"type": "object", "properties": {"b": S}}
DEFS = {"$defs": {"A": A, "B": B, "Name": S}}
REF_A, REF_B = {"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}
a, b, c, ab, abc = {"a": "x"}, {"b": "x"}, {"c": "x"}, {"a": "x", "b": "y"}, {"a": "x", "b": "y", "c": "z"}

TABLE = {
    "properties": (A, [{}, a], [b, ab, 3]),
    "properties without a type": ({"properties": {"a": S}}, [{}, a], [b, 3, "x"]),
    "no properties at all": ({"type": "object"}, [{}, a, abc], [3]),
    "metadata beside the type": ({"type": "object", "title": "T", "description": "D"}, [{}, a], [3]),
    "properties, and none of them": ({"type": "object", "properties": {}}, [{}], [a]),
    "required only": ({"type": "object", "required": ["a"]}, [a, ab], [{}, b]),
    "several types": ({"type": ["object", "null"], "properties": {"a": S}}, [{}, a, None], [b, 3]),
    "explicit true": (A | {"additionalProperties": True}, [{}, a, abc], [{"a": 1}]),
    "explicit false": (A | {"additionalProperties": False}, [{}, a], [b]),
    "a schema for the others": (A | {"additionalProperties": N}, [a, {"a": "x", "n": 1}], [b]),
    "a dictionary": ({"type": "object", "additionalProperties": S}, [{}, abc], [{"a": 1}]),
    "unevaluatedProperties: true": (A | {"unevaluatedProperties": True}, [{}, a, abc], [{"a": 1}]),
    "unevaluatedProperties: a schema": (A | {"unevaluatedProperties": N}, [a, {"a": "x", "n": 1}], [b]),
    "patternProperties": ({"type": "object", "patternProperties": {"^x": S}}, [{}, {"xy": "1"}], [a, {"x": 1}]),
    "patternProperties and properties": (A | {"patternProperties": {"^x": N}}, [a, {"a": "s", "x1": 2}], [b]),
    "nested": ({"type": "object", "properties": {"in": A, "list": {"type": "array", "items": A}}},
               [{"in": a, "list": [a, {}]}], [{"in": b}, {"list": [b]}, a]),
    "a dictionary of objects": ({"type": "object", "additionalProperties": A}, [{"k": a}], [{"k": b}]),
    "a tuple": ({"type": "array", "prefixItems": [A, B], "items": False}, [[a, b]], [[b, a]]),
    "$ref": (DEFS | REF_A, [{}, a], [b]),
    "$ref beside a description": (DEFS | REF_A | {"description": "D", "default": {}}, [{}, a], [b]),
    "$ref beside properties": (DEFS | REF_A | {"properties": {"b": N}}, [a, {"a": "x", "b": 1}], [ab, c]),
    "$ref to a property": ({"type": "object", "properties": {"p": A, "q": {"$ref": "#/properties/p"}}},
                           [{"p": a, "q": a}], [{"q": b}]),
    "$ref to a place of one's own": ({"components": {"A": A}, "$ref": "#/components/A"}, [a], [b]),
    "$ref with escapes": ({"$defs": {"x/y z": A}, "$ref": "#/$defs/x~1y%20z"}, [a], [b]),
    "$ref to itself": ({"type": "object", "properties": {"next": {"$ref": "#"}}}, [{"next": {"next": {}}}], [a]),
    "allOf of one": (DEFS | {"allOf": [REF_A], "title": "T"}, [{}, a], [b]),
    "allOf of two": ({"allOf": [A, B]}, [{}, a, ab], [c, abc]),
    "allOf of references": (DEFS | {"allOf": [REF_A, REF_B]}, [{}, a, ab], [c, abc]),
    "allOf beside properties": (A | {"allOf": [B]}, [{}, a, ab], [abc]),
    "allOf with an open part": ({"allOf": [A, B | {"additionalProperties": True}]}, [ab, abc], [{"a": 1}]),
    "allOf and unevaluatedProperties: true": ({"allOf": [A, B], "unevaluatedProperties": True}, [ab, abc], [{"b": 1}]),
    "allOf and unevaluatedProperties: false": ({"allOf": [A, B], "unevaluatedProperties": False}, [ab], [abc]),
    "anyOf": ({"anyOf": [A, B, {"type": "null"}]}, [{}, a, b, None], [ab, c]),
    "anyOf beside properties": ({"type": "object", "properties": {"c": S}, "anyOf": [A, B]},
                                [a, c, {"b": "x", "c": "z"}], [ab, abc, {"d": "x"}]),
    "anyOf of what is required": (
        {"type": "object", "properties": {"a": S, "b": S}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [a, b, ab], [{}, abc]),
    "a used definition stays alone": (
        DEFS | {"type": "object", "properties": {"p": REF_A, "q": {"allOf": [REF_A, REF_B]}}},
        [{"p": a, "q": ab}], [{"p": ab}]),
    "what is no schema": (
        {"type": "object", "properties": {"properties": {"const": {"properties": {"a": 1}}}, "required": S}},
        [{"properties": {"properties": {"a": 1}}, "required": "x"}], [{"properties": {}}]),
}  # fmt: skip


@pytest.mark.parametrize("row", TABLE)
def test_the_table(row):
    schema, fitting, others = TABLE[row]
    before = json.dumps(schema)
    form = Form(schema)
    assert not form.error, (form.error, form.closed)
    assert json.dumps(schema) == before, "the request's schema is not touched"
    assert [value for value in fitting if not form.accepts(value)] == [], form.closed
    assert [value for value in others if form.accepts(value)] == [], form.closed
    for value in fitting:
        jsonschema.validate(value, schema)


# ---- any combination

NAMES = ["a", "b", "c"]
VALUES = st.sampled_from([N, S])
OBJECTS = st.builds(
    lambda properties, required: {
        "type": "object",
        "properties": properties,
        "required": [name for name in required if name in properties],
    },
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=2),
    st.lists(st.sampled_from(NAMES), max_size=1),
)
DEFINED = st.sampled_from(["A", "B"]).map(lambda name: {"$ref": f"#/$defs/{name}"})


def combined(inner):
    parts = st.lists(inner, min_size=1, max_size=2)
    return st.one_of(
        parts.map(lambda several: {"allOf": several}),
        parts.map(lambda several: {"anyOf": several}),
        st.builds(lambda own, several: {**own, "allOf": several}, OBJECTS, parts),
        st.builds(lambda own, several: {**own, "anyOf": several}, OBJECTS, parts),
        st.builds(lambda own, reference: {**own, **reference}, OBJECTS, DEFINED),
    )


COMBINED = st.recursive(OBJECTS | DEFINED, combined, max_leaves=4)


def without_choices(schema):
    """All schemas that come of choosing one branch wherever there is an `anyOf`."""
    parts = [without_choices(part) for part in schema.get("allOf", [])]
    if "anyOf" in schema:
        parts.append([one for branch in schema["anyOf"] for one in without_choices(branch)])
    own = {key: value for key, value in schema.items() if key not in ("allOf", "anyOf")}
    for chosen in itertools.product(*parts):
        yield {**own, "allOf": list(chosen)} if chosen else own


def num_choices(schema):
    """How many `anyOf` speak of the same object at the same time."""
    beside = sum(num_choices(part) for part in schema.get("allOf", []))
    inside = max(map(num_choices, schema["anyOf"])) + 1 if "anyOf" in schema else 0
    return beside + inside


INSTANCES = [
    dict(zip(names, values, strict=True))
    for size in range(3)
    for names in itertools.combinations([*NAMES, "d"], size)
    for values in itertools.product((1, "x"), repeat=size)
]


@pytest.mark.examples
@settings(max_examples=examples(200), deadline=None)
@given(COMBINED, OBJECTS, OBJECTS)
def test_combined_objects_are_closed_together(schema, one, other):
    definitions = {"$defs": {"A": one, "B": other}}
    oracles = [
        jsonschema.Draft202012Validator(chosen | definitions | {"unevaluatedProperties": False})
        for chosen in without_choices(schema)
    ]
    form = Form(schema | definitions)
    for instance in INSTANCES:
        expected = any(oracle.is_valid(instance) for oracle in oracles)
        accepted = not form.error and form.accepts(instance)
        # A branch may have what any branch of another choice names, whichever of them is taken there.
        is_one_sided = num_choices(schema) > 1 and not expected
        assert is_one_sided or accepted == expected, (instance, form.error, form.closed)


def test_what_would_grow_without_bound_is_refused():
    pair = {"allOf": [{"$ref": "#/$defs/D1"}, {"$ref": "#/$defs/D1"}]}
    chain = {f"D{i}": json.loads(json.dumps(pair).replace("D1", f"D{i + 1}")) for i in range(100)}
    wide = {"allOf": [{"type": "object", "properties": {f"p{i}": S}} for i in range(5000)]}
    start = time.thread_time()
    for schema in (pair | {"$defs": chain | {"D100": A}}, wide):
        with pytest.raises(ValueError, match=r"structured_outputs\.json combines too many"):
            checked(*source_of(StructuredOutputsParams(json=schema))[:2])
    with pytest.raises(ValueError, match="structured_outputs.json"):
        Form('{"items":' * 5000 + "{}" + "}" * 5000)
    assert time.thread_time() - start < 20


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"allOf": [{"$ref": "#"}, A]}, {"$ref": "#/$defs/none"}])
def test_references_that_lead_nowhere_come_to_an_end(schema):
    Form(schema)


@pytest.mark.parametrize("schema", ["true", "3", '{"properties": 3, "allOf": {}, "anyOf": [1, null], "$ref": 5}'])
def test_what_is_malformed_is_left_to_the_compiler(schema):
    checked(*source_of(StructuredOutputsParams(json=schema))[:2])


# ---- what frameworks send


class Kind(str, enum.Enum):
    RED = "red"
    BLUE = "blue"


class Part(BaseModel):
    """A part."""

    size: int = Field(ge=0, le=9, description="How large it is.")
    kind: Kind = Kind.RED


class Circle(BaseModel):
    shape: Literal["circle"]
    radius: float


class Square(BaseModel):
    shape: Literal["square"]
    side: float


class Thing(BaseModel):
    name: str
    part: Part
    parts: list[Part] = []
    owner: str | None = None
    tags: dict[str, str] = {}
    drawn: Circle | Square | None = None
    shaped: Annotated[Circle | Square, Field(discriminator="shape")] | None = None
    pair: tuple[int, str] = (1, "a")


class Node(BaseModel):
    value: bool
    children: list["Node"] = []


THING = {
    "name": "x", "part": {"size": 3, "kind": "red"}, "parts": [{"size": 1, "kind": "blue"}], "owner": None,
    "tags": {"any": "tag"}, "drawn": {"shape": "square", "side": 1.5}, "shaped": {"shape": "circle", "radius": 2.5},
    "pair": [1, "b"],
}  # fmt: skip
NODE = {"value": True, "children": [{"value": False, "children": []}]}
PYDANTIC_1 = {  # as `pydantic.v1`, and LangChain with it
    "title": "Thing", "type": "object", "required": ["part"],
    "properties": {"part": {"title": "Part", "description": "d", "allOf": [{"$ref": "#/definitions/Part"}]}},
    "definitions": {"Part": {"title": "Part", "type": "object", "properties": {"size": {"type": "integer"}}}},
}  # fmt: skip
LANGCHAIN = {  # of a function's annotations, by `convert_to_openai_tool`
    "type": "object", "required": ["city"],
    "properties": {"city": {"type": "string"}, "days": {"default": 1, "type": "integer"}},
}  # fmt: skip


def openai_strict(model):
    from openai.lib._pydantic import to_strict_json_schema

    return to_strict_json_schema(model)


FRAMEWORKS = {
    "pydantic, instructor": (Thing.model_json_schema(), THING),
    "pydantic, a recursion": (Node.model_json_schema(), NODE),
    "pydantic-ai": (Part.model_json_schema() | {"additionalProperties": False}, {"size": 3, "kind": "blue"}),
    "openai": (openai_strict(Node), NODE),
    "openai's tool": (openai.pydantic_function_tool(Part)["function"]["parameters"], {"size": 3, "kind": "blue"}),
    "pydantic 1": (PYDANTIC_1, {"part": {"size": 3}}),
    "langchain": (LANGCHAIN, {"city": "Oslo", "days": 2}),
    "no arguments": ({"type": "object", "properties": {}}, {}),
}


def with_an_invention(value):
    """`value`, with one more key in one of its objects, for each of them."""
    if isinstance(value, dict):
        yield {**value, "invented": "x"}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        for changed in with_an_invention(inner) if key != "tags" else ():
            yield {**value, key: changed} if isinstance(value, dict) else [*value[:key], changed, *value[key + 1 :]]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_schemas_that_frameworks_send_are_closed_everywhere(framework):
    schema, value = FRAMEWORKS[framework]
    form = Form(schema)
    assert not form.error
    assert form.accepts_as_written(value), form.closed
    jsonschema.validate(value, schema)
    inventions = list(with_an_invention(value))
    assert inventions
    assert [one for one in inventions if form.accepts_as_written(one)] == []


@pytest.mark.parametrize(("own", "keyword"), [([], "unevaluatedProperties"), ("a", "patternProperties")])
def test_properties_that_are_not_an_object_are_refused(own, keyword):
    more = {"unevaluatedProperties": False} if keyword == "unevaluatedProperties" else {"patternProperties": {}}
    assert "properties must be an object" in Form({"properties": own, **more, "allOf": [A]}).error
