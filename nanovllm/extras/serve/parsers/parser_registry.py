"""The names of parsers, which are vLLM's, and the parser of one answer."""

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
    """How the served model writes."""

    tools: type[ToolParser] = Hermes
    reasoning: type[ReasoningParser] = ReasoningParser

    def for_request(self, body: ChatCompletionRequest) -> type[ToolParser]:
        """Calls that are forced are in Hermes' form where the model's own cannot be."""
        is_forced = body.must_call or (bool(body.told_tools) and has_format(body))
        return Hermes if is_forced and self.tools.spelling is None else self.tools

    def reasoning_of(self, body: ChatCompletionRequest, starts_inside: bool) -> ReasoningParser:
        """A form holds from the first character on, so an answer with a form begins with no thoughts."""
        if body.must_call or has_format(body) or body.structured_outputs is not None:
            return ReasoningParser(starts_inside)
        return self.reasoning(starts_inside)


def has_format(body: ChatCompletionRequest) -> bool:
    return body.response_format is not None and body.response_format.type != "text"


def parsers_named(tool_call_parser: str, reasoning_parser: str) -> Parsers:
    """By names, which must be known."""
    return Parsers(TOOL_PARSERS[tool_call_parser], REASONING_PARSERS[reasoning_parser])
