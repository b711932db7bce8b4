"""Define the items of a response's input: which are read, which are ignored, and how they are stored.

https://platform.openai.com/docs/api-reference/responses/create#responses-create-input
"""

import json
from typing import Annotated, Literal

from pydantic import Field, model_validator

from nanovllm_extras.serve.messages.protocol import ContentPart, Name, StrictModel, Text, check_refusals

ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
"""Type of an item -> what its ids begin with."""
STATUSES = ("in_progress", "completed", "incomplete")


class InputText(StrictModel):
    type: Literal["input_text", "output_text", "text"]
    text: Text


class StoredFields(StrictModel):
    """The common fields of items."""

    id: Name | None = None
    status: Name | None = None

    def stored(self, item_id: str) -> dict[str, object]:
        """Return the JSON of the item, as it is stored and returned. item_id: its id if it has none."""
        status = self.status if self.status in STATUSES else "completed"
        return {"id": self.id or item_id, "status": status, **self.parts()}

    def parts(self) -> dict[str, object]:
        """Return the item's own fields, as OpenAI's server returns them."""
        raise NotImplementedError


class MessagePart(ContentPart):
    type: Literal["input_text", "output_text", "text", "refusal"]


class MessageItem(StoredFields):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Annotated[list[MessagePart], Field(fail_fast=True)]

    @model_validator(mode="after")
    def _check_parts(self) -> "MessageItem":
        check_refusals(self.role, self.content)
        return self

    def parts(self) -> dict[str, object]:
        given = [MessagePart(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        return {"type": self.type, "role": self.role, "content": [self._part(one) for one in given]}

    def _part(self, part: MessagePart) -> dict[str, object]:
        if part.type == "refusal":
            return {"type": "refusal", "refusal": part.refusal}
        if self.role == "assistant":
            return {"type": "output_text", "text": part.text, "annotations": []}
        return {"type": "input_text", "text": part.text}


class CallItem(StoredFields):
    type: Literal["function_call"]
    call_id: Name
    name: Name
    namespace: Name | None = None
    arguments: Text

    def parts(self) -> dict[str, object]:
        names = {"name": self.name} if self.namespace is None else {"name": self.name, "namespace": self.namespace}
        return {"type": self.type, "call_id": self.call_id, **names, "arguments": self.arguments}


class CustomCallItem(StoredFields):
    """A call of a tool whose input is a text. Such tools are not offered here, but a history may have their calls."""

    type: Literal["custom_tool_call"]
    call_id: Name
    name: Name
    namespace: Name | None = None
    input: Text

    @property
    def arguments(self) -> str:
        """The input as JSON, because chat templates write the arguments of calls as JSON."""
        return json.dumps({"input": self.input}, ensure_ascii=False)

    def parts(self) -> dict[str, object]:
        names = {"name": self.name} if self.namespace is None else {"name": self.name, "namespace": self.namespace}
        return {"type": self.type, "call_id": self.call_id, **names, "input": self.input}


class CallOutputItem(StoredFields):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Name
    output: Text | Annotated[list[InputText], Field(fail_fast=True)]

    def parts(self) -> dict[str, object]:
        output: object = self.output
        if not isinstance(self.output, str):
            output = [{"type": "input_text", "text": part.text} for part in self.output]
        return {"type": self.type, "call_id": self.call_id, "output": output}


class ReasoningText(StrictModel):
    type: Literal["reasoning_text"]
    text: Text


class SummaryText(StrictModel):
    type: Literal["summary_text"]
    text: Text


class ReasoningItem(StoredFields):
    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText | SummaryText], Field(fail_fast=True)] | None = None
    summary: Annotated[list[SummaryText], Field(fail_fast=True)] | None = None

    @property
    def text(self) -> str:
        """The reasoning, or its summary if there is only that. Encrypted reasoning cannot be read."""
        return "".join(part.text for part in self.content or self.summary or [])

    def parts(self) -> dict[str, object]:
        content = [{"type": "reasoning_text", "text": part.text} for part in self.content or []]
        summary = [{"type": "summary_text", "text": part.text} for part in self.summary or []]
        return {"type": self.type, "summary": summary, "content": content}


Item = MessageItem | CallItem | CustomCallItem | CallOutputItem | ReasoningItem
ITEMS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}
IGNORED_ITEMS = {
    "additional_tools",
    "apply_patch_call",
    "apply_patch_call_output",
    "code_interpreter_call",
    "compaction",
    "compaction_trigger",
    "computer_call",
    "computer_call_output",
    "configuration_update",
    "file_search_call",
    "image_generation_call",
    "local_shell_call",
    "local_shell_call_output",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "program",
    "program_output",
    "shell_call",
    "shell_call_output",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
}
"""Types of items that only OpenAI's server can read. They are left out of the prompt, and are not stored."""
REFERENCE = "item_reference"
