"""Convert a request's fields to one `StructuredOutputsParams`, which constrains the answer.

    response_format, structured_outputs     the form itself
    tool_choice "required", or a name       calls of these tools, in the format that `parsers/` parse
    tools, and a response_format            either such calls, or the format

A form that cannot be compiled is answered with status 400, the name of the field and the reason.
"""

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, NoReturn

from nanovllm_extras.engine.full_engine import LLMEngine
from nanovllm_extras.options.structured_params import StructuredOutputsParams
from nanovllm_extras.serve.errors import APIError, refuse
from nanovllm_extras.serve.messages.protocol import (
    MAX_FORM,
    ChatCompletionRequest,
    Function,
    GenerationRequest,
    ResponseFormat,
)
from nanovllm_extras.serve.parsers.hermes import Hermes
from nanovllm_extras.serve.parsers.parser_registry import Parsers
from nanovllm_extras.serve.parsers.tool_parser import Spelling
from nanovllm_extras.structured.closed_objects import closed_text
from nanovllm_extras.structured.compiler import JSON_OPTIONS

SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
"""The format of arguments: that of Python's `json.dumps`, because models were trained with it."""

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
ANNOTATIONS = {"type", "title", "description", "required", "$schema", "$id", "$comment"}
"""Keywords that a schema may have without describing any argument."""


async def compile_structured_outputs(
    run: Callable[..., Awaitable[Any]], engine: LLMEngine, body: GenerationRequest, parsers: Parsers
) -> StructuredOutputsParams | None:
    """Compile the form of the answer in a thread and return it; None if the answer is not constrained.

    run: `Workers.run` for the request.
    """
    _, must_call = callable_functions(body)
    if body.structured_outputs is None and body.response_format is None and not must_call:
        return None
    form: StructuredOutputsParams | None = await run(lambda check: compile_form(engine, body, parsers), is_long=True)
    return form


def compile_form(engine: LLMEngine, body: GenerationRequest, parsers: Parsers) -> StructuredOutputsParams | None:
    """Compile the form of the answer and return it. Raises APIError 400 if it cannot be compiled."""
    field, params = params_of(body, parsers)
    if params is not None:
        check_form(field, params)
        try:
            engine.input_processor.grammars.compile(params)
        except ValueError as error:
            if field == "tools":
                find_fault(engine, body, parsers)
            raise_refusal(field, error)
    return params


def find_fault(engine: LLMEngine, body: GenerationRequest, parsers: Parsers) -> None:
    """Raise APIError 400 for the first tool, or the response format, that cannot be compiled by itself."""
    assert isinstance(body, ChatCompletionRequest)
    spelling = parsers.for_request(body).spelling or Hermes.spelling
    for function in callable_functions(body)[0]:
        grammar = StructuredOutputsParams(grammar=call_grammar([function], spelling, True, None))
        try:
            engine.input_processor.grammars.compile(grammar)
        except ValueError as error:
            raise_refusal("tools", error, f"function {function.name!r}: ")
    schema = None if body.response_format is None else schema_of(body.response_format)
    if schema is not None:
        try:
            engine.input_processor.grammars.compile(StructuredOutputsParams(json=schema))
        except ValueError as error:
            raise_refusal("response_format", error)


def raise_refusal(field: str, error: ValueError, where: str = "") -> NoReturn:
    """Raise APIError 400 for a form of `field` that the compiler refuses with `error`."""
    message = str(error).removeprefix("structured_outputs.").removeprefix("structured_outputs ")
    raise APIError(400, f"{field}: {where}{message}", field) from error


def check_form(field: str, params: StructuredOutputsParams) -> None:
    """Raise APIError 400 if a form is too large: a compiled form can be 500 times as large."""
    check_chars(field, [params.json, params.regex, params.grammar, *(params.choice or ())])


def check_chars(field: str, forms: Iterable[str | Mapping[str, object] | None]) -> None:
    """Raise APIError 400 if texts and schemas together have more than `MAX_FORM` characters."""
    texts = [form if isinstance(form, str) else json.dumps(form) for form in forms if form is not None]
    num_chars = sum(map(len, texts))
    if num_chars > MAX_FORM:
        raise APIError(400, f"{field}: a form may have {MAX_FORM} characters, got {num_chars}", field)


def params_of(body: GenerationRequest, parsers: Parsers) -> tuple[str, StructuredOutputsParams | None]:
    """Return the field that constrains the answer, and its form. Raises APIError 400 if fields exclude each other."""
    own = own_params(body)
    schema = None if body.response_format is None else schema_of(body.response_format)
    functions, is_call = callable_functions(body)
    if own is not None and (schema is not None or is_call):
        raise APIError(
            400, "structured_outputs excludes response_format and a required tool_choice", "structured_outputs"
        )
    if own is not None:
        return "structured_outputs", own
    if is_call or (functions and schema is not None):
        assert isinstance(body, ChatCompletionRequest)
        spelling = parsers.for_request(body).spelling or Hermes.spelling
        check_chars("tools", [*(one.parameters for one in functions), schema])  # before they need much memory
        grammar = call_grammar(functions, spelling, body.has_one_call, None if is_call else schema)
        return "tools", StructuredOutputsParams(grammar=grammar)
    return "response_format", None if schema is None else StructuredOutputsParams(json=schema)


def own_params(body: GenerationRequest) -> StructuredOutputsParams | None:
    """Return the parameters of the field `structured_outputs`; None if it is missing."""
    if body.structured_outputs is None:
        return None
    with refuse("structured_outputs"):
        return StructuredOutputsParams(**body.structured_outputs.model_dump(by_alias=True, exclude_none=True))


def schema_of(response_format: ResponseFormat) -> dict[str, object] | None:
    """Return the JSON schema of a `response_format`; None for plain text."""
    if response_format.json_schema is not None:
        return response_format.json_schema.schema_
    return {"type": "object"} if response_format.type == "json_object" else None


def callable_functions(body: GenerationRequest) -> tuple[list[Function], bool]:
    """Return the functions that the answer may call, and whether it must call one of them."""
    if not isinstance(body, ChatCompletionRequest):
        return [], False
    return [tool.function for tool in body.callable_tools], body.must_call


def call_grammar(
    functions: Iterable[Function], spelling: Spelling, is_one: bool, schema: dict[str, object] | None
) -> str:
    """Return a grammar in Lark's syntax for one or several calls of the functions.

    is_one: whether to allow only one call.
    schema: if given, the grammar also allows JSON that conforms to it, instead of calls.

    The schema of each function's arguments is embedded as a separate document, so that its references resolve.
    """
    calls = [spell_call(one, spelling) for one in functions]
    begin, between, end = (
        json.dumps(text, ensure_ascii=False) for text in (spelling.begin, spelling.between, spelling.end)
    )
    lines = ["start: calls" + (" | answer" if schema is not None else "")]
    lines += [f"calls: {begin} call {end}" if is_one else f"calls: {begin} call ({between} call)* {end}"]
    lines += ["call: " + " | ".join(f"call{i}" for i in range(len(calls)))]
    lines += [f"call{i}: {call}" for i, call in enumerate(calls)]
    lines += (
        [f"answer: {spell(schema, JSON_OPTIONS, 'response_format', 'response_format')}"] if schema is not None else []
    )
    return "\n".join(lines)


def spell_call(function: Function, spelling: Spelling) -> str:
    """Return the rule of the grammar for a call of the function."""
    head = json.dumps(spelling.head.replace("NAME", function.name), ensure_ascii=False)
    arguments = spell(arguments_schema(function), SPACED, f"tools: function {function.name!r}", "tools")
    return f"{head} {arguments} {json.dumps(spelling.tail, ensure_ascii=False)}"


def arguments_schema(function: Function) -> dict[str, object]:
    """Return the schema of the function's arguments.

    A function has only the parameters that its schema describes. If it describes none (for example, `parameters` is
    omitted), the arguments are an empty object: in an open object, a model may invent keys until `max_tokens`.
    """
    schema = function.parameters or {}
    is_empty = schema.get("type", "object") == "object" and not schema.get("required") and schema.keys() <= ANNOTATIONS
    return NO_ARGUMENTS if is_empty else schema


def spell(schema: dict[str, object], options: Mapping[str, object], what: str, field: str) -> str:
    """Return the rule of the grammar for a JSON schema, with its objects closed (`closed_objects.py`).

    `what` names the schema in an error, and `field` is the request's field that has it.
    """
    try:
        checked = json.loads(closed_text(schema))
    except ValueError as error:
        raise APIError(400, f"{what}: {str(error).removeprefix('structured_outputs.json ')}", field) from error
    return "%json " + json.dumps(checked | {"x-guidance": options}, ensure_ascii=False)
