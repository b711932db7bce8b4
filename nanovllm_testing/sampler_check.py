"""Check a sampler: a function with the arguments of `sample_tokens`."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nanovllm_testing.sampling_rows import HISTORY, VOCAB_SIZE, Rows, random_logits, shown
from nanovllm_testing.violation import Violation

Sampler = Callable[..., Tensor]

DISTRIBUTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.1},
]
LEAST_P_VALUE = 1e-6  # below it, a right sampler would fail in one of 100,000 runs of this command


class SamplerRows(Rows):
    """Rows for a sampler of one's own."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def draw(self, raw: Tensor, batch: Any) -> Tensor:
        token_ids = self.sampler(raw, **vars(batch), argmax=lambda logits: logits.argmax(dim=-1))
        if tuple(token_ids.shape) != (len(raw),) or token_ids.dtype != torch.int64:
            raise Violation(
                f"a sampler must return one int64 token for each of {len(raw)} rows, but returned "
                f"{tuple(token_ids.shape)} {token_ids.dtype}"
            )
        if bool((token_ids < 0).any() or (token_ids >= raw.shape[1]).any()):
            raise Violation(
                f"a sampler must return tokens from 0 to {raw.shape[1] - 1}, but returned {token_ids.tolist()}"
            )
        return token_ids


def checks_of(sampler: Sampler, seed: int, is_exact: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield (what is checked, the check), which raises if it fails. Not exact: other distributions are allowed."""
    rows = SamplerRows(sampler)
    yield "greedy rows get the most likely token", lambda: check_greedy(rows, seed)
    yield "a row does not depend on the other rows", rows.assert_a_row_is_drawn_the_same_whatever_its_neighbours_want
    if is_exact:
        for i, fields in enumerate(DISTRIBUTIONS):
            yield f"draws follow softmax with {shown(fields)}", distribution_check(rows, seed + i, fields)


def distribution_check(rows: SamplerRows, kind: int, fields: dict[str, Any]) -> Callable[[], None]:
    def check() -> None:
        rows.assert_frequencies_follow_the_distribution(kind, fields, LEAST_P_VALUE)

    return check


def check_greedy(rows: SamplerRows, seed: int) -> None:
    """Raise unless rows of temperature 0 get the most likely token, in batches with and without other rows."""
    for temperatures in ([0.0] * 12, [0.0, 1.0, 0.3] * 4):
        seqs = [rows.sequence(*HISTORY, seed=i, temperature=one) for i, one in enumerate(temperatures)]
        raw = random_logits(len(seqs), seed=seed)
        found = rows.draw(raw.clone(), rows.sampling_of(seqs)).tolist()
        for i, one in enumerate(temperatures):
            right = int(raw[i].argmax())
            if one == 0 and found[i] != right:
                raise Violation(
                    f"row {i} has temperature 0, so it must get its most likely token of {VOCAB_SIZE}, {right}, but "
                    f"gets {found[i]}. The temperatures of the batch are {temperatures}"
                )
