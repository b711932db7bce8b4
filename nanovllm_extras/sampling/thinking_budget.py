"""End the reasoning of an answer after `thinking_token_budget` tokens, by forcing the tag that closes it.

    budget 3     prompt … <think>\\n     answer  Let  me  see  </think>  \\n\\n  Four  .
                                                 1    2   3   forced     sampled as usual

Where reasoning begins and ends is what the reasoning parser of the answer says (`answer_parts/reasoning.py`): it begins
with the answer if the prompt ends with the first tag, otherwise behind the first tag, before which an answer may have
only white space. It ends at the second tag or, since models omit this tag there, at a tool call. The tags are not
counted. They may be several tokens, and the model may spell them with others than the tokenizer does, so the text is
searched. This is rarely needed: only the tokens right after the budget can be forced ones.

`ThinkingBudget` follows from the tokens of its sequence, and keeps nothing that a rejected draft, a preemption or a
failed step would have to take back.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nanovllm_extras.answer_parts.reasoning import REASONING_PARSERS, ReasoningParser, begins_with, find_call
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.sampling.logits_processors import ProcessorRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TAIL = 32
"""The last tokens of a prompt that are read to find out whether it ends with the first tag."""


class ThinkingTags:
    """The tags of a model's reasoning, as text and as tokens.

    Raises ValueError if the model's answers have no such tags.
    """

    def __init__(self, reasoning_parser: str, tokenizer: "PreTrainedTokenizerBase | None", vocab_size: int) -> None:
        parser = REASONING_PARSERS[reasoning_parser]
        if parser is None:
            tagged = ", ".join(name for name, kind in REASONING_PARSERS.items() if kind is not None)
            raise ValueError(
                f"thinking_token_budget needs a reasoning_parser whose reasoning ends with a tag ({tagged}), "
                f"got {reasoning_parser!r}; use max_tokens"
            )
        if tokenizer is None:
            raise ValueError("thinking_token_budget needs a tokenizer, but this model has none")
        self.parser: type[ReasoningParser] = parser
        self._tokenizer = tokenizer
        self.close_ids: list[int] = tokenizer.encode(parser.close, add_special_tokens=False)
        is_spelled = bool(self.close_ids) and max(self.close_ids) < vocab_size
        if not is_spelled or self.text_of(self.close_ids).strip() != parser.close:
            raise ValueError(
                f"thinking_token_budget needs the tag {parser.close!r} of reasoning_parser={reasoning_parser!r}, which "
                f"the tokens of this model cannot spell; use the model's own reasoning_parser, or max_tokens"
            )

    def text_of(self, token_ids: "list[int] | array[int]") -> str:
        """Return the text of tokens, with special tokens, which tags may be."""
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)  # a list for several texts
        return text

    def budget_for(self, num_tokens: int, prompt_token_ids: list[int]) -> "ThinkingBudget":
        """Return the budget of an answer that follows the prompt."""
        starts_inside = self.parser.always_starts_inside or self.parser.is_open(
            self.text_of(prompt_token_ids[-MAX_TAIL:])
        )
        return ThinkingBudget(self, num_tokens, starts_inside)


class ThinkingBudget:
    """The budget of one sequence.

    starts_inside: whether the answer begins with reasoning, though it does not begin with the first tag.
    """

    place, reads_output = 5, True

    def __init__(self, tags: ThinkingTags, num_tokens: int, starts_inside: bool) -> None:
        self.tags, self.num_tokens, self.starts_inside = tags, num_tokens, starts_inside
        # the first tokens of the answer that say where reasoning begins, and the number of them before it, or None
        self._head: tuple[array[int], int | None] | None = None

    @classmethod
    def build(cls, rows: list[ProcessorRow]) -> "ForcedTokens | None":
        forced = list(forced_tokens(rows))
        if not forced:
            return None
        row_ids, token_ids = torch.tensor(forced).unbind(1)
        return ForcedTokens(row_ids, token_ids)

    def forced_token(self, seq: Sequence, position: int) -> int | None:
        """Return the token that must be at `position` of the sequence, whose earlier tokens are known; None if any may.

        It continues the tag if the reasoning already ends with the beginning of it.
        """
        begin = None if self._is_early(seq, position) else self._find_begin(seq, position)
        if begin is None or not self._ends_at(begin, position):
            return None
        reasoning = seq.token_ids[begin:position].tolist()
        text, tags = self.tags.text_of(reasoning), self.tags
        if tags.parser.close in text or find_call(text, tags.parser.call_tags)[1]:
            return None
        longest = min(len(tags.close_ids) - 1, len(reasoning))
        fits = (n for n in range(longest, 0, -1) if reasoning[-n:] == tags.close_ids[:n])
        return tags.close_ids[next(fits, 0)]

    def may_force(self, seq: Sequence, position: int) -> bool:
        """Return whether the token at `position` may depend on the budget. The token before it may be unknown."""
        if self._is_early(seq, position):
            return False
        begin = self._find_begin(seq, position)
        return self._head is None if begin is None else self._ends_at(begin, position)

    def _is_early(self, seq: Sequence, position: int) -> bool:
        return position - seq.num_prompt_tokens < self.num_tokens

    def _ends_at(self, begin: int, position: int) -> bool:
        """Return whether the tag may be forced at `position`, if the reasoning begins at `begin`."""
        return 0 <= position - begin - self.num_tokens < len(self.tags.close_ids)

    def _find_begin(self, seq: Sequence, position: int) -> int | None:
        """Return the position of the first token of reasoning before `position`; None if there is none yet.

        `_head` is set if this is decided, and compared with the tokens when it is used: they may have been drafts.
        """
        start = seq.num_prompt_tokens
        if self._head is not None:
            head, num_before = self._head
            if seq.token_ids[start : start + len(head)] == head:
                return None if num_before is None else start + num_before
            self._head = None
        known = seq.token_ids[start:position]
        if self._begins_with_tag(known) is None:  # an answer of white space is decoded once for each token, not n times
            return start if self.starts_inside else None
        count = bisect_left(range(len(known)), True, key=lambda n: self._begins_with_tag(known[:n]) is not None)
        num_before = count if self._begins_with_tag(known[:count]) else 0 if self.starts_inside else None
        self._head = known[:count], num_before
        return None if num_before is None else start + num_before

    def _begins_with_tag(self, token_ids: "array[int]") -> bool | None:
        return begins_with(self.tags.text_of(token_ids), self.tags.parser.open)


def forced_tokens(rows: list[ProcessorRow]) -> Iterator[tuple[int, int]]:
    """Yield (row, token id) for each row whose token is forced."""
    for row, seq, position, budget in rows:
        token_id = budget.forced_token(seq, position)
        if token_id is not None:
            yield row, token_id


@dataclass(frozen=True)
class ForcedTokens:
    """The rows that may have only one token, whatever other processors have done."""

    rows: torch.Tensor  # [num_forced] int64
    token_ids: torch.Tensor  # [num_forced] int64

    def apply(self, logits: torch.Tensor, raw: torch.Tensor) -> None:
        logits[self.rows] = -torch.inf
        logits[self.rows, self.token_ids] = 0.0
