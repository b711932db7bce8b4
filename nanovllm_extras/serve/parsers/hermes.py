"""Parse the tool calls of Hermes, Qwen2.5, Qwen3 and others: a call is JSON between tags.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

from nanovllm_extras.serve.parsers.json_call import JsonCall
from nanovllm_extras.serve.parsers.tool_parser import Spelling, ToolParser


class Hermes(ToolParser):
    """The format of Hermes."""

    open, close = "<tool_call>", "</tool_call>"
    spelling = Spelling('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "\n")

    def new_call(self) -> JsonCall:
        return JsonCall()
