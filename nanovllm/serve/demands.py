"""What a request's JSON may demand of the form of an answer: a format, tools, vLLM's `structured_outputs`.

Fields of `protocol.py`; `forms.py` makes one form of them.
https://platform.openai.com/docs/guides/structured-outputs, https://platform.openai.com/docs/guides/function-calling
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

FUNCTION_NAME = r"^[a-zA-Z0-9_.\-]{1,64}$"


class Demand(BaseModel):
    """As strict about types as `protocol.StrictModel`; unknown fields pass."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class JsonSchema(Demand):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, populate_by_name=True)

    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Demand):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_together(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema must be given with the type json_schema, and with no other")
        return self


class StructuredOutputs(Demand):
    """The fields of `StructuredOutputsParams`, which checks them together."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None


class Function(Demand):
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of the arguments; None is any object."""
    strict: bool | None = None


class Tool(Demand):
    type: Literal["function"]
    function: Function


class FunctionName(Demand):
    name: str


class NamedTool(Demand):
    """A choice of one tool."""

    type: Literal["function"]
    function: FunctionName
