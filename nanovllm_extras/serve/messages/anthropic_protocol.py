"""Define the fields of a request for a message: Anthropic's, in addition to those of every generation.

Fields without a meaning here, such as `metadata`, `cache_control` and `service_tier`, are not defined: like every
unknown field they are accepted and ignored. https://docs.anthropic.com/en/api/messages
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from nanovllm_extras.serve.messages.protocol import (
    MAX_TOOLS,
    GenerationRequest,
    Name,
    StopStrings,
    StrictModel,
    Text,
    Whole,
    conflict,
)

TOOL_NAME = r"^[a-zA-Z0-9_\-]{1,128}$"


class AnthropicErrorDetail(StrictModel):
    type: str
    message: str


class AnthropicErrorBody(StrictModel):
    """The body of an error response."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None


# ---- blocks


class TextBlock(StrictModel):
    type: Literal["text"]
    text: Text


class ThinkingBlock(StrictModel):
    """Reasoning of an earlier answer. Its signature is not checked: the conversation may begin on another server."""

    type: Literal["thinking"]
    thinking: Text


class RedactedThinkingBlock(StrictModel):
    """Encrypted reasoning of another server, which the model does not see."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(StrictModel):
    type: Literal["tool_use"]
    id: Name
    name: str = Field(pattern=TOOL_NAME)
    input: dict[str, object]


class OtherBlock(StrictModel):
    """A block that the served model cannot read, or that belongs to a tool of Anthropic. It is refused by its name."""

    type: Literal[
        "bash_code_execution_tool_result",
        "browser_state",
        "code_execution_tool_result",
        "container_upload",
        "document",
        "image",
        "search_result",
        "server_tool_use",
        "text_editor_code_execution_tool_result",
        "tool_reference",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    ]

    @model_validator(mode="after")
    def _refuse(self) -> "OtherBlock":
        raise ValueError(f"blocks of the type {self.type} are not supported; give text")


ResultBlock = Annotated[TextBlock | OtherBlock, Field(discriminator="type")]


class ToolResultBlock(StrictModel):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: Text | Annotated[list[ResultBlock], Field(fail_fast=True)] | None = None
    is_error: bool | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock | OtherBlock,
    Field(discriminator="type"),
]
BLOCKS_OF = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""Role -> types of the blocks of its messages."""


class InputMessage(StrictModel):
    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], Field(fail_fast=True)]

    @model_validator(mode="after")
    def _check_blocks(self) -> "InputMessage":
        allowed = BLOCKS_OF[self.role]
        for i, block in enumerate(self.blocks):
            if block.type not in allowed:
                told = ", ".join(allowed)
                message = f"content.{i}.type: a message of the role {self.role!r} may have {told}, got {block.type}"
                raise ValueError(message)
        return self

    @property
    def blocks(self) -> list[Block]:
        """The content as blocks."""
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


# ---- tools and formats


class ClientTool(StrictModel):
    """A tool that the client runs."""

    type: Text | None = None
    """`custom`, or missing; tools that Anthropic defines are refused."""
    name: str = Field(pattern=TOOL_NAME)
    description: Text | None = None
    input_schema: dict[str, object]
    strict: bool | None = None
    """No effect: forced calls always fit the schema."""

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, given: object) -> object:
        kind = given.get("type") if isinstance(given, dict) else None
        if kind not in (None, "custom"):
            raise ValueError(f"tools of the type {kind} are not supported; give a name and an input_schema")
        return given


class ToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None
    """Whether the answer may have at most one call."""

    @model_validator(mode="after")
    def _check_name(self) -> "ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name must be given if, and only if, the type is tool")
        return self


class Thinking(StrictModel):
    type: Literal["enabled", "adaptive", "disabled"]
    """The variable `enable_thinking` of the chat template: false for `disabled`, and if the field is missing."""
    budget_tokens: Whole | None = Field(None, ge=1)
    """Tokens of reasoning after which it is ended, if the type is `enabled`."""

    @model_validator(mode="after")
    def _check_budget(self) -> "Thinking":
        if self.type == "enabled" and self.budget_tokens is None:
            raise ValueError("budget_tokens must be given if the type is enabled")
        return self


class OutputFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: dict[str, object] = Field(alias="schema")


class OutputConfig(StrictModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """The variable `reasoning_effort` of the chat template."""
    format: OutputFormat | None = None


# ---- requests


class Conversation(StrictModel):
    """The fields that change the prompt."""

    messages: Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    """If the last message is the assistant's, the answer continues it."""
    system: Text | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[ClientTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # this server's own
    chat_template_kwargs: dict[str, object] | None = None
    """Variables for the chat template. They override those of `thinking`."""


class CountTokensRequest(Conversation):
    """A request to count the tokens of a prompt."""

    model: Name | None = None


class MessagesRequest(GenerationRequest, Conversation):
    max_tokens: Whole = Field(ge=1)
    stop_sequences: StopStrings | None = None
    thread: object = None
    """A conversation that is stored on the server. Refused, so that clients send the whole conversation."""
    # accepted only if they are empty
    container: object = None
    mcp_servers: list[object] | None = None

    @model_validator(mode="after")
    def _check_message(self) -> "MessagesRequest":
        if self.n not in (None, 1):
            raise conflict("n", "n must be 1: there is one message")
        if self.stop is not None:
            raise conflict("stop", "stop must be given as stop_sequences")
        if self.response_format is not None:
            raise conflict("response_format", "response_format must be given as output_config.format")
        if self.container is not None:
            raise conflict("container", "container is not supported: no code is executed on this server")
        if self.mcp_servers:
            raise conflict("mcp_servers", "mcp_servers is not supported: the client must call the tools")
        return self
