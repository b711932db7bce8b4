"""Find the reasoning in the answers of an engine in this process. A server does this for its clients."""

from typing import TYPE_CHECKING, Any

from nanovllm.prompts import ChatPrompt
from nanovllm_extras.answer_parts.events import Content, Reasoning
from nanovllm_extras.answer_parts.harmony import Harmony, find_end_tokens
from nanovllm_extras.answer_parts.reasoning import REASONING_PARSERS, ReasoningParser
from nanovllm_extras.answer_parts.token_bytes import TokenBytes
from nanovllm_extras.requests.lazy_outputs import CompletionOutput
from nanovllm_extras.terminal.chat_history import TaggedText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ReasoningReader:
    """Reads one growing answer.

    parser: a name of `REASONING_PARSERS`. prompt: its text and its token ids.
    """

    def __init__(self, parser: str, tokenizer: "PreTrainedTokenizerBase | None", prompt: ChatPrompt) -> None:
        kind = REASONING_PARSERS[parser]
        self._parser: Harmony | ReasoningParser = (
            Harmony(TokenBytes(tokenizer), prompt["prompt_token_ids"])
            if kind is None
            else kind(kind.is_open(prompt["prompt"]))
        )
        self._tagged = TaggedText()
        self._num_chars = self._num_tokens = 0

    def read(self, completion: CompletionOutput) -> str:
        """Return the whole answer up to now, with the reasoning between `<think>` tags."""
        text, is_last = completion.text[self._num_chars :], completion.finish_reason is not None
        if isinstance(self._parser, Harmony):
            for event in self._parser.feed(text, completion.token_ids[self._num_tokens :], is_last):
                if isinstance(event, Reasoning | Content):  # there are no calls without tools
                    self._tagged.add(event.text, isinstance(event, Reasoning))
        else:
            for reasoning, content in [self._parser.feed(text), *([self._parser.finish()] if is_last else [])]:
                self._tagged.add(reasoning, is_reasoning=True)
                self._tagged.add(content, is_reasoning=False)
        self._num_chars, self._num_tokens = len(completion.text), len(completion.token_ids)
        return self._tagged.text


def sampling_fields(parser: str, tokenizer: "PreTrainedTokenizerBase | None") -> dict[str, Any]:
    """Return the fields of `SamplingParams` that a parser needs."""
    kind = REASONING_PARSERS[parser]
    if kind is None:
        return {"stop_token_ids": sorted(find_end_tokens(tokenizer))}
    return {"skip_special_tokens": False} if kind.has_special_tokens else {}
