"""The prompts of a load: their lengths are given, their tokens are random.

Names and meaning of the parameters are those of vLLM's `--dataset-name random` and `prefix_repetition`. Token ids are
drawn below a small bound, so every model has them: the cost of a request does not depend on which tokens it has. No
tokenizer is needed. For a chat, each id stands for a common English word, which most tokenizers take as one token; with
`--tokenizer` the text has exactly as many tokens as there are ids.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body"
)


MAX_ROUNDS = 8  # a text that is cut is not always encoded as it was


@dataclass(frozen=True)
class Work:
    """One request: its prompt, and the most tokens that it may generate."""

    prompt_token_ids: list[int]
    output_len: int

    @property
    def text(self) -> str:
        """A word for each token id; prompts that begin with the same ids begin with the same words."""
        words = WORDS.split()
        return " ".join(words[token_id % len(words)] for token_id in self.prompt_token_ids)

    def text_for(self, tokenizer: Any) -> str:
        """`text`, with as many of the tokenizer's tokens as there are token ids; without a tokenizer, as it is."""
        text, num_tokens = self.text, len(self.prompt_token_ids)
        for _ in range(MAX_ROUNDS if tokenizer is not None else 0):
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            if len(token_ids) == num_tokens:
                break
            if len(token_ids) > num_tokens:
                text = tokenizer.decode(token_ids[:num_tokens])
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
    """Lengths are uniform in [len × (1 − range_ratio), len × (1 + range_ratio)]; all prompts share a prefix."""
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
    """Each prompt is one of `num_prefixes` prefixes, all equally often (± 1), and a suffix of its own; shuffled."""
    rng = np.random.default_rng(seed)
    prefixes = [draw(rng, prefix_len, vocab_size) for _ in range(num_prefixes)]
    works = [
        Work(prefixes[i % num_prefixes] + draw(rng, suffix_len, vocab_size), output_len) for i in range(num_prompts)
    ]
    return [works[i] for i in rng.permutation(num_prompts)]


def draw(rng: np.random.Generator, num_tokens: int, vocab_size: int) -> list[int]:
    return rng.integers(0, vocab_size, num_tokens).tolist()


def draw_lengths(rng: np.random.Generator, count: int, length: int, range_ratio: float) -> list[int]:
    low, high = int(length * (1 - range_ratio)), int(length * (1 + range_ratio))
    return rng.integers(max(1, low), max(1, high) + 1, count).tolist()
