"""Parse the tool calls of Llama 3 and 4: an answer that begins with a JSON object is one or several calls.

    {"name": "get_weather", "parameters": {"city": "Oslo"}}; {"name": …}

Llama may write `<|python_tag|>` first.
"""

import re

from nanovllm_extras.serve.parsers.json_call import JsonCall
from nanovllm_extras.serve.parsers.tool_parser import Spelling, ToolParser

TAG = "<|python_tag|>"
BEGINNING = re.compile(rf"(\s*)((?:{re.escape(TAG)}\s*)?)(?=\{{)")


class LlamaJson(ToolParser):
    """The format of Llama 3 and 4."""

    open, close = TAG, ";"
    spelling = Spelling('{"name": "NAME", "parameters": ', "}", "; ")
    has_special_tokens = True

    def new_call(self) -> JsonCall:
        return JsonCall()

    def find_tag(self, text: str) -> tuple[int, str] | None:
        """Return the position and the text of the tag, which may be empty, if the answer begins with an object."""
        found = None if self.has_text else BEGINNING.match(text)
        return None if found is None else (found.end(1), found[2])

    def num_undecided(self, text: str) -> int:
        beginning = text.strip()
        may_begin = not self.has_text and (TAG.startswith(beginning) or beginning == TAG)
        return len(text) if may_begin else 0
