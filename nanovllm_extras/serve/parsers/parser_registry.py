"""Map the names of parsers, which are vLLM's, to their classes, and choose the parsers of an answer."""

from typing import TYPE_CHECKING, NamedTuple

from nanovllm_extras.answer_parts.reasoning import REASONING_PARSERS, ReasoningParser
from nanovllm_extras.serve.parsers.deepseek_calls import DeepSeekV3, DeepSeekV31
from nanovllm_extras.serve.parsers.gemma4_calls import Gemma4
from nanovllm_extras.serve.parsers.hermes import Hermes
from nanovllm_extras.serve.parsers.llama_json import LlamaJson
from nanovllm_extras.serve.parsers.qwen_xml import QwenXml
from nanovllm_extras.serve.parsers.tool_parser import ToolParser

if TYPE_CHECKING:  # needs pydantic, and a command line does not
    from nanovllm_extras.serve.messages.protocol import ChatCompletionRequest

# None, here and in `REASONING_PARSERS`: `harmony.py` parses reasoning, calls and content together
TOOL_PARSERS: dict[str, type[ToolParser] | None] = {
    "hermes": Hermes,
    "qwen3_coder": QwenXml,
    "qwen3_xml": QwenXml,
    "llama3_json": LlamaJson,
    "llama4_json": LlamaJson,
    "deepseek_v3": DeepSeekV3,
    "deepseek_v31": DeepSeekV31,
    "gemma4": Gemma4,
    "openai": None,
}


class Parsers(NamedTuple):
    """The parsers for the served model."""

    tools: type[ToolParser] = Hermes
    reasoning: type[ReasoningParser] = ReasoningParser
    is_harmony: bool = False
    """Whether `harmony.py` parses the answers, except for forced calls."""

    def for_request(self, body: "ChatCompletionRequest") -> type[ToolParser]:
        """Return the parser of tool calls.

        If calls are forced by a grammar and the model's own format cannot be forced, they have the format of Hermes.
        """
        return Hermes if is_forced(body) and self.tools.spelling is None else self.tools

    def reasoning_of(self, body: "ChatCompletionRequest", prompt: str) -> ReasoningParser:
        """Return the parser of the reasoning. The end of the prompt says whether the answer begins with reasoning.

        A form constrains the answer from its first character, so such an answer has no reasoning. A grammar or an
        expression of the request may describe reasoning.
        """
        form = body.structured_outputs
        if body.must_call or has_format(body) or (form is not None and form.grammar is None and form.regex is None):
            return ReasoningParser()
        kind = ReasoningParser if form is not None and self.reasoning.always_starts_inside else self.reasoning
        return kind(self.reasoning.is_open(prompt), self.tools.within_reasoning if body.told_tools else None)

    def keeps_special_tokens(self, body: "ChatCompletionRequest") -> bool:
        """Return whether the parsers need the special tokens in the text of the answer."""
        return self.reasoning.has_special_tokens or (bool(body.told_tools) and self.tools.has_special_tokens)


def has_format(body: "ChatCompletionRequest") -> bool:
    """Return whether the request has a `response_format` other than text."""
    return body.response_format is not None and body.response_format.type != "text"


def is_forced(body: "ChatCompletionRequest") -> bool:
    """Return whether a grammar of the server describes the calls of the answer."""
    return body.must_call or (bool(body.told_tools) and has_format(body))


def parsers_named(tool_call_parser: str, reasoning_parser: str) -> Parsers:
    """Return the parsers with these names. One of Harmony's names is enough. Raises KeyError for an unknown name."""
    tools, reasoning = TOOL_PARSERS[tool_call_parser], REASONING_PARSERS[reasoning_parser]
    return Parsers(tools or Hermes, reasoning or ReasoningParser, is_harmony=tools is None or reasoning is None)
