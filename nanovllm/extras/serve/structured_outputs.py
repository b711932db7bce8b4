"""From a request's fields to one `StructuredOutputsParams`, which the engine then forces upon the answer.

    response_format, structured_outputs     the form itself
    tool_choice "required", or a name       calls of these tools, as `parsers/` read them
    tools, and a response_format            either such calls, or the format

A form that cannot be compiled is a 400 that names the field and gives the reason.
"""

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from nanovllm.extras.full_engine import LLMEngine
from nanovllm.extras.serve.errors import APIError, refuse
from nanovllm.extras.serve.parsers.hermes import Hermes
from nanovllm.extras.serve.parsers.parser_registry import Parsers
from nanovllm.extras.serve.parsers.tool_parser import Spelling
from nanovllm.extras.serve.protocol import MAX_FORM, ChatCompletionRequest, Function, GenerationRequest, ResponseFormat
from nanovllm.extras.structured.closed_objects import closed_text
from nanovllm.extras.structured.compiler import JSON_OPTIONS
from nanovllm.extras.structured.structured_params import StructuredOutputsParams

SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
"""How arguments are spelled: as by Python's `json.dumps`, because models have learned that."""


async def compile_structured_outputs(
    run: Callable[..., Awaitable[Any]], engine: LLMEngine, body: GenerationRequest, parsers: Parsers
) -> StructuredOutputsParams | None:
    """The form of the answer, compiled in a thread by `Workers.run`; None if any text will do."""
    _, must_call = callable_functions(body)
    if body.structured_outputs is None and body.response_format is None and not must_call:
        return None
    form: StructuredOutputsParams | None = await run(lambda check: compile_form(engine, body, parsers), is_long=True)
    return form


def compile_form(engine: LLMEngine, body: GenerationRequest, parsers: Parsers) -> StructuredOutputsParams | None:
    field, params = params_of(body, parsers)
    if params is not None:
        check_form(field, params)
        try:
            engine.input_processor.grammars.compile(params)
        except ValueError as error:
            message = str(error).removeprefix("structured_outputs.").removeprefix("structured_outputs ")
            raise APIError(400, f"{field}: {message}", field) from error
    return params


def check_form(field: str, params: StructuredOutputsParams) -> None:
    """The size of what is compiled. Compiled, it can be 500 times as large."""
    check_chars(field, [params.json, params.regex, params.grammar, *(params.choice or ())])


def check_chars(field: str, forms: Iterable[str | Mapping[str, Any] | None]) -> None:
    """Texts and schemas together."""
    texts = [form if isinstance(form, str) else json.dumps(form) for form in forms if form is not None]
    num_chars = sum(map(len, texts))
    if num_chars > MAX_FORM:
        raise APIError(400, f"{field}: a form may have {MAX_FORM} characters, got {num_chars}", field)


def params_of(body: GenerationRequest, parsers: Parsers) -> tuple[str, StructuredOutputsParams | None]:
    """The field that asks for a form, and the form. Raises APIError 400 for fields that exclude each other."""
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
        check_chars("tools", [*(one.parameters for one in functions), schema])  # before much is made of them
        grammar = call_grammar(functions, spelling, body.has_one_call, None if is_call else schema)
        return "tools", StructuredOutputsParams(grammar=grammar)
    return "response_format", None if schema is None else StructuredOutputsParams(json=schema)


def own_params(body: GenerationRequest) -> StructuredOutputsParams | None:
    if body.structured_outputs is None:
        return None
    with refuse("structured_outputs"):
        return StructuredOutputsParams(**body.structured_outputs.model_dump(by_alias=True))


def schema_of(response_format: ResponseFormat) -> dict[str, Any] | None:
    """None for plain text."""
    if response_format.json_schema is not None:
        return response_format.json_schema.schema_
    return {"type": "object"} if response_format.type == "json_object" else None


def callable_functions(body: GenerationRequest) -> tuple[list[Function], bool]:
    """The functions that the answer may call, and whether it must call one."""
    if not isinstance(body, ChatCompletionRequest):
        return [], False
    return [tool.function for tool in body.callable_tools], body.must_call


def call_grammar(functions: Iterable[Function], spelling: Spelling, is_one: bool, schema: dict[str, Any] | None) -> str:
    """One call of the functions or several, in Lark's syntax; or, with a schema, JSON that fits it.

    The schema of each function's arguments is a document of its own, so its references find their definitions.
    """
    calls = [spell_call(one, spelling) for one in functions]
    begin, between, end = (
        json.dumps(text, ensure_ascii=False) for text in (spelling.begin, spelling.between, spelling.end)
    )
    lines = ["start: calls" + (" | answer" if schema is not None else "")]
    lines += [f"calls: {begin} call {end}" if is_one else f"calls: {begin} call ({between} call)* {end}"]
    lines += ["call: " + " | ".join(f"call{i}" for i in range(len(calls)))]
    lines += [f"call{i}: {call}" for i, call in enumerate(calls)]
    lines += [f"answer: {spell(schema, JSON_OPTIONS)}"] if schema is not None else []
    return "\n".join(lines)


def spell_call(function: Function, spelling: Spelling) -> str:
    """What a call of the function looks like."""
    head = json.dumps(spelling.head.replace("NAME", function.name), ensure_ascii=False)
    arguments = spell(function.parameters or {"type": "object"}, SPACED)
    return f"{head} {arguments} {json.dumps(spelling.tail, ensure_ascii=False)}"


def spell(schema: dict[str, Any], options: Mapping[str, Any]) -> str:
    """A schema within a grammar, with closed objects."""
    try:
        checked = json.loads(closed_text(schema))
    except ValueError as error:
        raise APIError(400, f"tools: {str(error).removeprefix('structured_outputs.json ')}", "tools") from error
    return "%json " + json.dumps(checked | {"x-guidance": options}, ensure_ascii=False)
