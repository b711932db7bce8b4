"""Drafts by look-up, against a search that compares tokens one by one."""

import random

import pytest

from nanovllm_extras import SamplingParams
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.speculation.ngram import NGrams


def propose(tokens, count, shortest, longest):
    seq = Sequence("a", tokens, SamplingParams())
    return NGrams(shortest, longest).propose([(seq, count)])[0]


def expected(tokens, count, shortest, longest):
    """The last earlier place of the longest run; then token by token, each looked up `period` places before."""
    for length in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[len(tokens) - length :]:
                grown, period = list(tokens), len(tokens) - end
                for _ in range(count):
                    grown.append(grown[-period])
                return grown[len(tokens) :]
    return []


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([7, 8, 9, 1, 7, 8], [9, 1, 7]),
        ([7, 8, 9, 7, 8, 5, 7, 8], [5, 7, 8]),  # the last place
        ([6, 7, 8, 9, 7, 8, 5, 6, 7, 8], [9, 7, 8]),  # the longest run
        ([5, 5, 5], [5, 5, 5]),  # the place overlaps with the newest tokens
        ([1, 2, 3, 4], []),
        ([4], []),
    ],
)
def test_what_followed(tokens, drafts):
    assert propose(tokens, 3, 2, 3) == drafts


def test_random_texts():
    """Ids whose bytes look like those of others, so that a search in bytes finds halves of tokens."""
    rng = random.Random(0)
    for _ in range(1500):
        ids = rng.choice([[0, 1], [0, 1, 256, 65536], [257, 65793, 16843009], list(range(9))])
        tokens = rng.choices(ids, k=rng.randint(1, 24))
        shortest = rng.randint(1, 3)
        arguments = tokens, rng.randint(1, 6), shortest, shortest + rng.randint(0, 3)
        assert propose(*arguments) == expected(*arguments), arguments
