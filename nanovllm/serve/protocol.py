"""What a request's JSON may hold: OpenAI's fields, and those that vLLM adds. Strict about types; unknown fields pass.

Here stands what is wrong in any engine. `sampling.py` makes `SamplingParams` of these fields, which check the rest.
https://platform.openai.com/docs/api-reference
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from nanovllm.serve.demands import NamedTool, ResponseFormat, StructuredOutputs, Tool

MAX_STOP_STRINGS = 64
MAX_TOP_LOGPROBS = 20  # of each token


def check_text(text: str) -> str:
    """JSON can hold half of a surrogate pair (`"\\ud800"`), which is no text: no encoding has it."""
    text.encode()
    return text


Text = Annotated[str, AfterValidator(check_text)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[Text], Field(fail_fast=True)]


class StrictModel(BaseModel):
    """`"5"` is no number and `1` no boolean; NaN and Infinity, which Python's JSON would take, are none either."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    """Whether a last chunk brings the usage."""
    continuous_usage_stats: bool | None = None
    """Whether every chunk does."""


class GenerationRequest(StrictModel):
    """What requests for completions and for chat completions have in common. None is the default."""

    model: Text | None = None
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Text | Annotated[Texts, Field(max_length=MAX_STOP_STRINGS)] | None = None
    logit_bias: Annotated[dict[Text, float], Field(max_length=1024)] | None = None
    response_format: ResponseFormat | None = None
    # vLLM's additions
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=1024)] | None = None
    bad_words: Annotated[Texts, Field(max_length=1024)] | None = None
    allowed_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    # known, and only taken at the value that asks for nothing
    use_beam_search: Literal[False] | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _check_together(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of must be n: completions are not ranked here")
        return self


class CompletionRequest(GenerationRequest):
    prompt: Text | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    """One text, several, the token ids of one prompt, or of several."""
    max_tokens: int | None = Field(None, ge=0)
    """0 is allowed with `echo`, to score a prompt."""
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    """Whether the prompt is part of the text."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens to a text; true by default."""
    suffix: Literal[""] | None = None
    """Known, and only taken if it asks for nothing."""

    @model_validator(mode="after")
    def _check_max_tokens(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1 without echo")
        return self


class TextPart(StrictModel):
    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """Other fields of a message, such as `name`, are for the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Text = Field(min_length=1)
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = None


class ChatCompletionRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: int | None = Field(None, ge=1)
    """Older name of `max_completion_tokens`."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """None goes on until the model ends, or its context does."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """None is `auto` where there are tools."""
    parallel_tool_calls: bool | None = None
    """False: one call at most."""
    # vLLM's additions
    add_generation_prompt: bool | None = None
    """Whether the assistant's turn is opened after the messages; true by default."""
    continue_final_message: bool | None = None
    """Whether the last message is left open, to be continued."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, such as `enable_thinking`."""

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatCompletionRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("tool_choice needs tools")
        if isinstance(self.tool_choice, NamedTool):
            name, known = self.tool_choice.function.name, [tool.function.name for tool in self.tools or []]
            if name not in known:
                raise ValueError(f"tool_choice must name one of the tools {', '.join(known)}, got {name}")
        return self


class TokenizeRequest(StrictModel):
    """Either a prompt, or messages."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_source(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(StrictModel):
    model: Text | None = None
    tokens: TokenIds
