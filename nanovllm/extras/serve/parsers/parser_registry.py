"""Map the names of parsers, which are vLLM's, to their classes, and choose the parsers of an answer."""

from typing import NamedTuple

from nanovllm.extras.serve.parsers.deepseek_calls import DeepSeekV3, DeepSeekV31
from nanovllm.extras.serve.parsers.hermes import Hermes
from nanovllm.extras.serve.parsers.llama_json import LlamaJson
from nanovllm.extras.serve.parsers.qwen_xml import QwenXml
from nanovllm.extras.serve.parsers.reasoning import DeepSeekR1, ReasoningParser
from nanovllm.extras.serve.parsers.tool_parser import ToolParser
from nanovllm.extras.serve.protocol import ChatCompletionRequest

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": Hermes,
    "qwen3_coder": QwenXml,
    "qwen3_xml": QwenXml,
    "llama3_json": LlamaJson,
    "llama4_json": LlamaJson,
    "deepseek_v3": DeepSeekV3,
    "deepseek_v31": DeepSeekV31,
}
REASONING_PARSERS: dict[str, type[ReasoningParser]] = {
    "qwen3": ReasoningParser,
    "deepseek_v3": ReasoningParser,
    "deepseek_r1": DeepSeekR1,
}


class Parsers(NamedTuple):
    """The parsers for the served model."""

    tools: type[ToolParser] = Hermes
    reasoning: type[ReasoningParser] = ReasoningParser

    def for_request(self, body: ChatCompletionRequest) -> type[ToolParser]:
        """Return the parser of tool calls.

        If calls are forced by a grammar and the model's own format cannot be forced, they have the format of Hermes.
        """
        is_forced = body.must_call or (bool(body.told_tools) and has_format(body))
        return Hermes if is_forced and self.tools.spelling is None else self.tools

    def reasoning_of(self, body: ChatCompletionRequest, starts_inside: bool) -> ReasoningParser:
        """Return the parser of the reasoning.

        A grammar constrains the answer from its first character, so a constrained answer does not begin with reasoning.
        """
        if body.must_call or has_format(body) or body.structured_outputs is not None:
            return ReasoningParser(starts_inside)
        return self.reasoning(starts_inside)


def has_format(body: ChatCompletionRequest) -> bool:
    """Return whether the request has a `response_format` other than text."""
    return body.response_format is not None and body.response_format.type != "text"


def parsers_named(tool_call_parser: str, reasoning_parser: str) -> Parsers:
    """Return the parsers with these names. Raises KeyError for an unknown name."""
    return Parsers(TOOL_PARSERS[tool_call_parser], REASONING_PARSERS[reasoning_parser])
