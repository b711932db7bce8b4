"""Define the fields of a request's JSON: OpenAI's and vLLM's. Types are strict; unknown fields are logged and ignored.

These models refuse values that no engine accepts. `sampling.py` converts the fields to `SamplingParams`, which check
the rest. https://platform.openai.com/docs/api-reference
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096
MAX_TOKEN_IDS = 1024  # of stop_token_ids, and of logit_bias
MAX_BAD_WORDS = 256  # the engine encodes each of them twice, between two steps
MAX_BAD_WORD_CHARS = 128
MAX_EXTRA_ARGS = 64
MAX_NAME_CHARS = 1024
MAX_CHOICES_OF_FORM = 4096
MAX_FORM = 2**16  # characters of a schema, expression or grammar, which needs far more memory when it is parsed
MAX_TOP_LOGPROBS = 20  # for each token
MAX_TOOLS = 512
MAX_DOCUMENTS = 1024
CONFLICT = "conflict"  # the type, in pydantic's errors, of a conflict between several fields
BOTH_ENDS = "continue_final_message and add_generation_prompt exclude each other"
FUNCTION_NAME = r"^[a-zA-Z0-9_.\-]{1,64}$"
QUALIFIED_NAME = r"^[a-zA-Z0-9_.\-]{1,129}$"  # a function's name after that of its namespace and a dot


def check_text(text: str) -> str:
    """Return `text`. Raises ValueError if it has a lone surrogate (`"\\ud800"`): JSON allows it, UTF-8 does not."""
    if not text.isascii():
        text.encode()
    return text


def check_extra_arg(value: object) -> object:
    """Return `value`. Raises ValueError unless it is a number, a text, a boolean, or a list of numbers and texts."""
    parts = value if isinstance(value, list) else [value]
    if len(parts) > MAX_TOKEN_IDS or not all(isinstance(one, bool | int | float | str) for one in parts):
        raise ValueError(f"must be a number, a text, a boolean, or a list of at most {MAX_TOKEN_IDS} of them")
    for one in parts:
        if isinstance(one, str):
            check_text(one)
            if len(one) > MAX_NAME_CHARS:
                raise ValueError(f"a text must have at most {MAX_NAME_CHARS} characters, got {len(one)}")
        elif isinstance(one, float) and not math.isfinite(one):
            raise ValueError(f"a number must be finite, got {one}")
    return value


def at_most(most: int) -> BeforeValidator:
    """Return a validator that refuses a dict with more than `most` items before pydantic checks the items.

    Otherwise pydantic would create an error for each invalid item of a dict, and for each unknown field.
    """

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"at most {most} fields are allowed, got {len(value)}")
        return value

    return BeforeValidator(check)


def conflict(field: str, message: str) -> PydanticCustomError:
    """Return the error for fields that cannot be combined. field: the name of the field in the client's error."""
    return PydanticCustomError(CONFLICT, "{message}", {"field": field, "message": message})


def whole(value: object) -> object:
    """Return 5 for 5.0: clients whose language has only one kind of number write integers like this."""
    return int(value) if type(value) is float and value.is_integer() else value


def whole_ids(value: object) -> object:
    """Return a list of integers for one in which some are written as 5.0. This is fast if none is."""
    return [whole(one) for one in value] if type(value) is list and float in set(map(type, value)) else value


Whole = Annotated[int, BeforeValidator(whole)]
"""The type of every field that is an integer."""
Text = Annotated[str, AfterValidator(check_text)]
Name = Annotated[Text, Field(max_length=MAX_NAME_CHARS)]
Salt = Annotated[Text, Field(min_length=1, max_length=MAX_NAME_CHARS)]
Form = Annotated[str, Field(max_length=MAX_FORM)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True), BeforeValidator(whole_ids)]
Texts = Annotated[list[Text], Field(fail_fast=True)]
StopString = Annotated[Text, Field(max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
ExtraArg = Annotated[Any, AfterValidator(check_extra_arg)]
BadWord = Annotated[Text, Field(max_length=MAX_BAD_WORD_CHARS)]


class StrictModel(BaseModel):
    """A model that refuses `"5"` for a number, `1` for a boolean, and NaN and Infinity, which Python's JSON accepts."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class ErrorDetail(BaseModel):
    """One error, in OpenAI's format."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of an error response."""

    error: ErrorDetail


class StreamOptions(StrictModel):
    """What a stream contains besides the tokens."""

    include_usage: bool | None = None
    """Whether the last chunk contains the usage."""
    continuous_usage_stats: bool | None = None
    """Whether every chunk contains the usage."""


class JsonSchema(StrictModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, populate_by_name=True)

    name: Name | None = None
    schema_: dict[str, object] = Field(alias="schema")
    strict: bool | None = None
    """No effect: the answer always fits the schema."""


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_together(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema must be given if, and only if, the type is json_schema")
        return self


class StructuredOutputs(StrictModel):
    """The fields of `StructuredOutputsParams`, which checks their combination."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    json_: Form | dict[str, object] | None = Field(None, alias="json")
    regex: Form | None = None
    choice: Annotated[list[Form], Field(max_length=MAX_CHOICES_OF_FORM, fail_fast=True)] | None = None
    grammar: Form | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: Name | None = None
    # accepted only with the value that has no effect
    structural_tag: None = None
    disable_fallback: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None


class Function(StrictModel):
    """A function that the model may call."""

    name: str = Field(pattern=QUALIFIED_NAME)
    description: str | None = None
    parameters: dict[str, object] | None = None
    """A JSON schema of the arguments. None: the function has no arguments."""
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"]
    function: Function


class FunctionName(StrictModel):
    name: Name


class NamedTool(StrictModel):
    """The value of `tool_choice` that requires one tool."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(StrictModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class ToolsChoice(StrictModel):
    """The value of `tool_choice` that selects some tools. The chat template shows only these to the model."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class GenerationRequest(StrictModel):
    """The common fields of requests for completions and for chat completions. None means the default."""

    model: Name | None = None
    n: Whole | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: Whole | None = Field(None, ge=-(2**63), lt=2**64)
    stop: StopString | StopStrings | None = None
    logit_bias: Annotated[dict[Name, float] | None, at_most(MAX_TOKEN_IDS)] = None
    response_format: ResponseFormat | None = None
    # vLLM's additions
    top_k: Whole | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    min_tokens: Whole | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_TOKEN_IDS)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    allowed_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Whole | None = Field(None, ge=-1)
    """The number of tokens of the prompt's end to keep; -1 keeps as many as leave space for the output."""
    structured_outputs: Annotated[StructuredOutputs | None, at_most(len(StructuredOutputs.model_fields))] = None
    priority: Whole | None = Field(None, ge=-(2**31), lt=2**31)
    cache_salt: Salt | None = None
    """A secret: only requests with the same salt share cached blocks."""
    vllm_xargs: Annotated[dict[Name, ExtraArg] | None, at_most(MAX_EXTRA_ARGS)] = None
    """Fields that the engine's extension declares (`SamplingParams.extra_args`)."""
    # this server's own
    return_prefix_misses: bool | None = None
    """Whether the answer says why prompt tokens were not in the prefix cache."""
    # accepted only with the value that has no effect
    use_beam_search: Literal[False] | None = None
    best_of: Whole | None = None

    @model_validator(mode="after")
    def _check_together(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise conflict("stream_options", "stream_options needs stream to be true")
        if self.best_of not in (None, self.n or 1):
            raise conflict("best_of", "best_of must be equal to n: completions are not ranked")
        return self


class CompletionRequest(GenerationRequest):
    prompt: Text | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    """One text or several texts, or the token ids of one prompt or of several prompts."""
    max_tokens: Whole | None = Field(None, ge=0)
    """The maximum number of tokens to generate. 0 is allowed with `echo`, to score a prompt."""
    logprobs: Whole | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    """Whether the text of the answer begins with the prompt."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens to a text; true by default."""
    suffix: Text | None = None
    """Accepted only if it is empty."""
    thinking_token_budget: Whole | None = Field(None, ge=-1)
    """As in a chat."""
    return_token_ids: bool | None = None
    """Whether each choice contains the token ids of its text and of its prompt, as in vLLM."""

    @model_validator(mode="after")
    def _check_max_tokens(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise conflict("max_tokens", "max_tokens must be at least 1 without echo")
        if self.suffix:
            raise conflict("suffix", "suffix is not supported: these models continue a text, they do not fill a gap")
        return self


class ContentPart(StrictModel):
    """A part of a message's content. `own_text` is its text."""

    type: str
    text: Text | None = None
    refusal: Text | None = None

    @model_validator(mode="after")
    def _check_own_text(self) -> "ContentPart":
        if self.own_text is None:
            name = "refusal" if self.type == "refusal" else "text"
            raise ValueError(f"a part of the type {self.type} must have a text in its field {name}")
        return self

    @property
    def own_text(self) -> str | None:
        return self.refusal if self.type == "refusal" else self.text


class ChatPart(ContentPart):
    type: Literal["text", "refusal"]


def check_refusals(role: str, content: str | Sequence[ContentPart] | None) -> None:
    """Raise ValueError if a message has refusals, and is not an answer of the assistant."""
    for i, part in enumerate([] if role == "assistant" or isinstance(content, str | None) else content):
        if part.type == "refusal":
            raise ValueError(f"content.{i}.type: only the role 'assistant' may have a refusal, got {role!r}")


class Message(BaseModel):
    """A message of a conversation. Other fields, such as `name`, are passed to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Text = Field(min_length=1, max_length=MAX_NAME_CHARS)
    content: Text | Annotated[list[ChatPart], Field(fail_fast=True)] | None = None
    refusal: Text | None = None
    """A refusal of the assistant, which replaces its content."""

    @model_validator(mode="after")
    def _check_parts(self) -> "Message":
        check_refusals(self.role, self.content)
        return self


class ToolFields(StrictModel):
    """The fields of the tools that a conversation may use."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | ToolsChoice | None = None
    """Whether the answer may or must call tools. None is `auto` if there are tools."""

    @model_validator(mode="after")
    def _check_tool_choice(self) -> "ToolFields":
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise conflict("tool_choice", "tool_choice needs tools of the type function")
        known = [tool.function.name for tool in self.tools or []]
        for name in self._chosen_names():
            if name not in known:
                message = f"tool_choice must name one of the tools {', '.join(known)}, got {name}"
                raise conflict("tool_choice", message)
        return self

    def _chosen_names(self) -> list[str]:
        if isinstance(self.tool_choice, NamedTool):
            return [self.tool_choice.function.name]
        if isinstance(self.tool_choice, ToolsChoice):
            return [one.function.name for one in self.tool_choice.allowed_tools.tools]
        return []

    @property
    def told_tools(self) -> list[Tool]:
        """The tools that the chat template gets: all, none for `none`, or the allowed tools."""
        if self.tool_choice == "none":
            return []
        names = self._chosen_names() if isinstance(self.tool_choice, ToolsChoice) else None
        return [tool for tool in self.tools or [] if names is None or tool.function.name in names]

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that the answer may call."""
        names = self._chosen_names()
        return [tool for tool in self.told_tools if not names or tool.function.name in names]

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a tool call."""
        if isinstance(self.tool_choice, ToolsChoice):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)


class ConversationFields(ToolFields):
    """The fields that change the prompt of a conversation."""

    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the start of the assistant's answer; true by default."""
    continue_final_message: bool | None = None
    """Whether the answer continues the last message."""
    chat_template_kwargs: dict[str, object] | None = None
    """Variables for the chat template, such as `enable_thinking`."""
    reasoning_effort: Name | None = None
    """The variable of the chat template of this name; `none` also sets `enable_thinking` to false."""
    documents: Annotated[list[dict[str, object]], Field(max_length=MAX_DOCUMENTS, fail_fast=True)] | None = None
    """Texts to answer from, for chat templates that have a place for them."""

    @model_validator(mode="after")
    def _check_ends(self) -> "ConversationFields":
        if self.continue_final_message and self.add_generation_prompt:
            raise conflict("continue_final_message", BOTH_ENDS)
        return self


class ChatCompletionRequest(GenerationRequest, ConversationFields):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Whole | None = Field(None, ge=1)
    """The older name of `max_completion_tokens`."""
    max_completion_tokens: Whole | None = Field(None, ge=1)
    """The maximum number of tokens to generate. None: until the model ends its answer, or the context is full."""
    logprobs: bool | None = None
    top_logprobs: Whole | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    parallel_tool_calls: bool | None = None
    """False allows at most one call."""
    thinking_token_budget: Whole | None = Field(None, ge=-1)
    """Tokens of reasoning after which it is ended, as in vLLM; -1 sets no limit."""
    return_token_ids: bool | None = None
    """Whether the answer contains the token ids of the prompt, and each choice those of its text, as in vLLM."""

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatCompletionRequest":
        if self.top_logprobs and not self.logprobs:
            raise conflict("top_logprobs", "top_logprobs needs logprobs to be true")
        return self

    @property
    def has_one_call(self) -> bool:
        """Whether the answer may have at most one call."""
        return self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedTool)


class TokenizeRequest(ConversationFields):
    """A request to tokenize either a prompt or messages."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_source(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise conflict("prompt", "give either prompt or messages")
        return self


class DetokenizeRequest(StrictModel):
    """A request for the text of token ids."""

    model: Name | None = None
    tokens: TokenIds


class SlotRequest(ConversationFields):
    """A request to save a prompt or messages in a slot, or to restore a slot."""

    model: Name | None = None
    prompt: Text | TokenIds | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    cache_salt: Salt | None = None
