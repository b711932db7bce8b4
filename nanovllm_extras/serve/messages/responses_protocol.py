"""Define the fields of a request for a response: OpenAI's, in addition to those of every generation.

Items of the input are counted before they are parsed (`responses_input.py`), so here they are only objects.
https://platform.openai.com/docs/api-reference/responses
"""

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from nanovllm_extras.serve.messages.protocol import (
    FUNCTION_NAME,
    MAX_FORM,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    GenerationRequest,
    Name,
    StrictModel,
    Text,
    Whole,
    at_most,
    conflict,
)

MAX_METADATA = 16  # pairs of at most 64 and 512 characters: OpenAI's limits
MetadataKey = Annotated[Text, Field(max_length=64)]
MetadataValue = Annotated[Text, Field(max_length=512)]
NO_CONVERSATIONS = "there are no conversations; use previous_response_id, or send the whole conversation as input"


class FunctionTool(StrictModel):
    type: Literal["function"]
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


OtherType = Literal[
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "custom",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
]


class OtherTool(StrictModel):
    """A tool of OpenAI that cannot run here. Such tools are skipped: clients such as Codex always send them."""

    type: OtherType


InnerTool = Annotated[FunctionTool | OtherTool, Field(discriminator="type")]


class NamespaceTool(StrictModel):
    """A group of functions. Their names may be repeated in other namespaces."""

    type: Literal["namespace"]
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    tools: Annotated[list[InnerTool], Field(max_length=MAX_TOOLS, fail_fast=True)]

    @property
    def functions(self) -> list[FunctionTool]:
        """The tools that can be used."""
        return [tool for tool in self.tools if isinstance(tool, FunctionTool)]

    def usable(self) -> dict[str, object]:
        """Return the JSON of the namespace with the tools that can be used."""
        return self.model_dump() | {"tools": [tool.model_dump() for tool in self.functions]}


ResponseTool = Annotated[FunctionTool | NamespaceTool | OtherTool, Field(discriminator="type")]


def qualified(namespace: str | None, name: str) -> str:
    """Return the name of a function in the chat, where the model sees it."""
    return f"{namespace}.{name}" if namespace else name


class OfferedFunction(NamedTuple):
    """A function that the model may call."""

    namespace: str | None
    tool: FunctionTool

    @property
    def chat_name(self) -> str:
        return qualified(self.namespace, self.tool.name)

    @property
    def names(self) -> dict[str, str]:
        """The fields of an item that calls the function."""
        names = {"name": self.tool.name}
        return names if self.namespace is None else names | {"namespace": self.namespace}


class ChosenFunction(StrictModel):
    type: Literal["function"]
    name: Name


class ChosenNamespace(StrictModel):
    type: Literal["namespace"]
    name: Name


AllowedTool = Annotated[ChosenFunction | ChosenNamespace | OtherTool, Field(discriminator="type")]


class AllowedTools(StrictModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]

    def chat_names(self, offered: list[OfferedFunction]) -> list[str]:
        """Return the names in the chat of the allowed functions. offered: all functions of the request."""
        names = [tool.name for tool in self.tools if isinstance(tool, ChosenFunction)]
        namespaces = [tool.name for tool in self.tools if isinstance(tool, ChosenNamespace)]
        return names + [one.chat_name for one in offered if one.namespace in namespaces]


Include = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class TextFormat(StrictModel):
    """The `response_format` of a chat, with the fields of the schema on the same level as the type."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: Annotated[Text, Field(max_length=MAX_FORM)] | None = None
    schema_: dict[str, object] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_together(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema must be given if, and only if, the type is json_schema")
        return self


class TextOptions(StrictModel):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """No effect: open models have no such setting."""


class Reasoning(StrictModel):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """The variable `reasoning_effort` of the chat template; `none` also sets `enable_thinking` to false."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """No effect: the answer contains the whole reasoning, not a summary."""


class ResponsesRequest(GenerationRequest):
    input: Text | Annotated[list[dict[str, object]], Field(fail_fast=True)] | None = None
    """A user's message, or the items of a conversation. It may be absent if an earlier response is continued."""
    previous_response_id: Name | None = None
    """The stored response that this one continues: its input and output come before `input`."""
    instructions: Text | None = None
    """A system message before the input."""
    max_output_tokens: Whole | None = Field(None, ge=1)
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """Functions, and namespaces of functions; tools of other types are skipped."""
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: Annotated[list[Include], Field(max_length=16, fail_fast=True)] | None = None
    """Only `message.output_text.logprobs` has an effect: reasoning is sent as plain text, and no tool runs here."""
    top_logprobs: Whole | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    metadata: Annotated[dict[MetadataKey, MetadataValue] | None, at_most(MAX_METADATA)] = None
    store: bool | None = None
    """Whether the response is stored, so that later requests can continue it; true by default."""
    truncation: Literal["auto", "disabled"] | None = None
    """`auto` leaves out the oldest items of a conversation that is too long for the context."""
    chat_template_kwargs: dict[str, object] | None = None
    background: bool | None = None
    """Whether the request is answered at once, and the response is generated without a client that waits for it."""
    # accepted only with the value that has no effect
    conversation: object = None
    prompt: object = None

    @model_validator(mode="after")
    def _check_response(self) -> "ResponsesRequest":
        if self.conversation is not None:
            raise conflict("conversation", f"conversation cannot be used: {NO_CONVERSATIONS}")
        if self.previous_response_id is None and self.input in (None, []):
            raise conflict("input", "input must have a text or at least one item, unless previous_response_id is given")
        if self.background and self.store is False:
            raise conflict("background", "background cannot be used with store=false: the response is read by its id")
        if self.prompt is not None:
            raise conflict("prompt", "prompt cannot be used: there are no stored prompts; give instructions and input")
        if self.n not in (None, 1):
            raise conflict("n", "n must be 1: a response has one answer")
        if self.response_format is not None:
            raise conflict("response_format", "response_format must be given as text.format")
        choice, known = self.tool_choice, dict[str, tuple[str | None, str]]()
        for one in self.functions:
            names = one.namespace, one.tool.name
            if known.setdefault(one.chat_name, names) != names:
                raise conflict("tools", f"tools must not have two functions with the name {one.chat_name}")
        if isinstance(choice, AllowedTools) and choice.mode == "required" and not choice.chat_names(self.functions):
            raise conflict("tool_choice", "tool_choice must allow at least one tool of the type function")
        return self

    @property
    def functions(self) -> list[OfferedFunction]:
        """The functions that can be called."""
        found: list[OfferedFunction] = []
        for tool in self.tools or []:
            if isinstance(tool, FunctionTool):
                found.append(OfferedFunction(None, tool))
            elif isinstance(tool, NamespaceTool):
                found += [OfferedFunction(tool.name, one) for one in tool.functions]
        return found

    @property
    def usable_tools(self) -> list[dict[str, object]]:
        """The tools of the answer, as JSON: those that are not skipped."""
        tools = [tool for tool in self.tools or [] if not isinstance(tool, OtherTool)]
        return [tool.usable() if isinstance(tool, NamespaceTool) else tool.model_dump() for tool in tools]

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer must contain log-probabilities."""
        return "message.output_text.logprobs" in (self.include or [])
