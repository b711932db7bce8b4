"""Constrain outputs whose first space is not shown: SentencePiece's tokenizers, such as Llama 2's, remove it.

Such a tokenizer writes "Hello" as "▁Hello", and its decoder removes the first space of a text. So the text of an output
after the prompt `<s>` has one space less than its tokens. Text in the prompt before the output keeps the space:

    prompt        output             text
    <s>           ▁Hello             "Hello"
    <s>           ▁ ▁Hello           " Hello"
    <s> Say       ▁Hello             " Hello"

The grammar of the tokens then differs from the grammar of the text. An output is allowed if it is a space followed by a
text of the form, or a text of the form that does not begin with a space. The first token decides which of the two
matchers reads the output.
"""

import json
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.requests.full_detokenizer import TokenDecoder
from nanovllm_extras.requests.full_request import make_detokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher


class FirstSpace(NamedTuple):
    """What constrains an output that begins with a space that is not shown."""

    matcher: "LLMatcher"
    """The library's matcher of a space followed by a text of the form, in its initial state."""
    starts: np.ndarray
    """The mask of the tokens that begin with a space: [num_words] uint32."""

    def copy(self) -> "FirstSpace":
        return FirstSpace(self.matcher.deep_copy(), self.starts)

    def begins(self, token_id: int) -> bool:
        """Return whether the token begins with a space."""
        return bool(self.starts[token_id // 32] >> np.uint32(token_id % 32) & 1)

    def mask(self, words: np.ndarray) -> np.ndarray:
        """Return the mask of an output's first token. words: of the matcher that does not begin with a space."""
        return (words & ~self.starts) | np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint32)


def after_space(grammar: str) -> str:
    """Return the library's grammar of a space followed by a text of `grammar`."""
    grammars = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    outer = {"name": "output", "lark_grammar": 'start: " " @form'}
    return json.dumps({"grammars": [outer, grammars[0] | {"name": "form"}, *grammars[1:]]})


def hides_first_space(decoder: TokenDecoder, probe: list[int], params: SamplingParams, prompt: list[int]) -> bool:
    """Return whether the text of an output after `prompt` has one space less than its tokens.

    probe: the tokens of " a"
    """
    plain = SamplingParams(
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )
    detokenizer = make_detokenizer(decoder, plain, prompt)
    assert detokenizer is not None
    detokenizer.extend(probe)
    detokenizer.finish()
    return detokenizer.text(True) == "a"
