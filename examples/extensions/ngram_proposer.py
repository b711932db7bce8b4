"""Speculative decoding without a draft model: what followed the newest tokens the last time they occurred?

Prompt lookup decoding (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding): summaries, quotations and
edited code repeat their prompts. The longest n-gram that ends the sequence and has occurred before decides; the tokens
after its last occurrence are the drafts:

    tokens    the key of a block is the key of        the newest three, "the key of", have occurred before
    drafts                                 a block    is what followed them

The engine computes all drafts in one step, keeps those that are what it samples, and drops the rest. So outputs are
those without drafts, and wrong ones cost time only. Each proposal reads the whole sequence: about 75 µs for 1,000
tokens and 650 µs for 10,000, on one core. The engine of nanovllm_extras is needed. Its own method `ngram` is faster.

    nanovllm serve MODEL --extension examples/extensions/ngram_proposer.py
    LLM(model, extension="examples/extensions/ngram_proposer.py", speculative_config={"num_speculative_tokens": 6})
"""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

LONGEST, SHORTEST = 4, 2  # n-grams


class NGramProposer:
    def __init__(self, runner) -> None:
        """Make the proposer of an engine, which does not use the model runner."""

    def propose(self, wanted):
        """Return drafts for each (sequence, most drafts): tokens that may follow the sequence, possibly none."""
        return [look_up(np.array(seq.token_ids), count) for seq, count in wanted]


def look_up(tokens: np.ndarray, count: int) -> list[int]:
    """Return up to `count` tokens that followed the last earlier occurrence of the end of `tokens`: [num_tokens]"""
    for n in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        windows = sliding_window_view(tokens[:-1], n)  # [num_tokens - n, n]: all n-grams but the one at the end
        (places,) = (windows == tokens[-n:]).all(axis=1).nonzero()
        if len(places):
            start = places[-1] + n
            return tokens[start : start + count].tolist()
    return []


proposer_cls = NGramProposer
