"""Create the prompts of a load, with given lengths and random tokens.

The parameters have the names and meanings of vLLM's `--dataset-name random` and `prefix_repetition`. Token ids are
drawn below a small bound, so that every model has them; the cost of a request does not depend on its tokens. No
tokenizer is needed. For a chat, each id is replaced by a common English word, which is one token for most tokenizers.
With `--tokenizer`, the text has exactly as many tokens as there are ids.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body"
)


MAX_ROUNDS = 8  # the tokens of a cut text may differ from the tokens that it was cut from


@dataclass(frozen=True)
class Work:
    """One request: its prompt, and the maximum number of tokens to generate."""

    prompt_token_ids: list[int]
    output_len: int

    @property
    def text(self) -> str:
        """A text with a word for each token id. Prompts that begin with the same ids begin with the same words."""
        words = WORDS.split()
        return " ".join(words[token_id % len(words)] for token_id in self.prompt_token_ids)

    def text_for(self, tokenizer: "PreTrainedTokenizerBase | None") -> str:
        """Return `text`, changed so that it has as many of the tokenizer's tokens as there are token ids.

        Without a tokenizer, return `text` unchanged.
        """
        text, num_tokens = self.text, len(self.prompt_token_ids)
        if tokenizer is None:
            return text
        for _ in range(MAX_ROUNDS):
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            if len(token_ids) == num_tokens:
                break
            if len(token_ids) > num_tokens:
                text = str(tokenizer.decode(token_ids[:num_tokens]))
            else:
                text += " a" * (num_tokens - len(token_ids))
        return text


def make_random(
    num_prompts: int,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    vocab_size: int = 1000,
    seed: int = 0,
) -> list[Work]:
    """Return requests with random prompts that share a prefix.

    Lengths are uniform in [len × (1 − range_ratio), len × (1 + range_ratio)], without the prefix.
    """
    rng = np.random.default_rng(seed)
    prefix = draw(rng, prefix_len, vocab_size)
    input_lens = draw_lengths(rng, num_prompts, input_len, range_ratio)
    output_lens = draw_lengths(rng, num_prompts, output_len, range_ratio)
    return [Work(prefix + draw(rng, n, vocab_size), m) for n, m in zip(input_lens, output_lens, strict=True)]


def make_prefix_repetition(
    num_prompts: int,
    prefix_len: int,
    suffix_len: int,
    num_prefixes: int,
    output_len: int,
    vocab_size: int = 1000,
    seed: int = 0,
) -> list[Work]:
    """Return requests in random order, each with one of `num_prefixes` prefixes, and its own suffix.

    All prefixes occur equally often (± 1).
    """
    rng = np.random.default_rng(seed)
    prefixes = [draw(rng, prefix_len, vocab_size) for _ in range(num_prefixes)]
    works = [
        Work(prefixes[i % num_prefixes] + draw(rng, suffix_len, vocab_size), output_len) for i in range(num_prompts)
    ]
    return [works[i] for i in rng.permutation(num_prompts)]


def draw(rng: np.random.Generator, num_tokens: int, vocab_size: int) -> list[int]:
    """Return random token ids."""
    return rng.integers(0, vocab_size, num_tokens).tolist()


def draw_lengths(rng: np.random.Generator, count: int, length: int, range_ratio: float) -> list[int]:
    """Return random lengths of at least 1."""
    low, high = int(length * (1 - range_ratio)), int(length * (1 + range_ratio))
    return rng.integers(max(1, low), max(1, high) + 1, count).tolist()
