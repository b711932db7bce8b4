"""Structured output: which tokens may come next, so that the output fits what its request demands.

Each sequence has a `Grammar`, which reads the output so far. Its mask has one bit for each token of the vocabulary: set
where the output with this token can still become a text of the grammar. End tokens are allowed exactly where the text
is complete. With the grammar "yes" | "no" and the tokens y, e, s, n, no, <end>:

    output []         allowed y n no
    output [y]        allowed e
    output [no]       allowed <end>

A grammar is the last `Processor` of its sequence, so that no other processor lets a token in again. Masks are computed by a
thread beside the forward pass: `build` hands the newest tokens over, and `apply` waits for the masks when the logits
are there.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.extras.logits_processors import ProcessorRow

NO_TOKEN = "no token of the vocabulary can come next"


class MaskWorker(NamedTuple):
    """Where masks are computed. One thread hands the work out, so that no two jobs touch the same grammar."""

    pool: ThreadPoolExecutor  # of one thread
    executor: Any  # llguidance's: computes the masks of several grammars in parallel
    num_words: int  # 32-bit words in a mask


class Grammar:
    """What the output of one sequence must fit, and how much of the output has been read.

    `error` is not empty once the grammar cannot go on: a limit of the library, or no token of the vocabulary fits. Then
    the output will not fit, and the request ends the sequence.
    """

    place, reads_output = 5, True

    def __init__(self, matcher: Any, eos_token_ids: frozenset[int], worker: MaskWorker) -> None:
        self.matcher = matcher
        self.worker = worker
        self.num_sent = 0  # output tokens that have been handed to the worker, which reads them in order
        self.error = ""
        self._eos_token_ids = eos_token_ids

    def copy(self) -> "Grammar":
        """The same grammar at the same place, for another sequence."""
        copied = Grammar(self.matcher.deep_copy(), self._eos_token_ids, self.worker)
        copied.num_sent, copied.error = self.num_sent, self.error
        return copied

    @classmethod
    def build(cls, rows: list[ProcessorRow]) -> "GrammarRows":
        """Have the masks of the rows computed, while the caller goes on."""
        grammars: list[Grammar] = [row.processor for row in rows]
        worker = grammars[0].worker
        new_tokens = [seq.token_ids.view(seq.num_prompt_tokens + one.num_sent).tolist() for _, seq, _, one in rows]
        stop_token_ids = [frozenset(seq.all_stop_token_ids) for _, seq, _, _ in rows]
        masks = np.zeros((len(rows), worker.num_words), dtype=np.int32)
        filled = worker.pool.submit(fill_masks, worker, grammars, new_tokens, stop_token_ids, masks)
        for grammar, token_ids in zip(grammars, new_tokens, strict=True):  # a step that fails reads nothing twice
            grammar.num_sent += len(token_ids)
        return GrammarRows(torch.tensor([row for row, _, _, _ in rows]), filled)

    def read(self, token_ids: list[int]) -> None:
        """Go on by the newest tokens of the output."""
        for token_id in token_ids:
            has_ended = token_id in self._eos_token_ids and self.matcher.is_stopped()
            if not self.error and not has_ended and not self.matcher.consume_token(token_id):
                self.error = f"the output does not fit at token {token_id}"

    def finish_mask(self, words: np.ndarray, stop_token_ids: frozenset[int]) -> None:
        """words: [num_words] uint32, the library's mask: let end tokens in exactly where the text is complete."""
        if not self.error and self.matcher.is_error():
            self.error = describe(self.matcher.get_error())
        is_complete = not self.error and self.matcher.is_accepting()
        set_bits(words, self._eos_token_ids | stop_token_ids, is_complete)
        if not self.error and not words.any():
            self.error = NO_TOKEN
        if self.error:  # the request ends after this step, in whatever token: but not as if it were complete
            words[:] = 0xFFFFFFFF
            set_bits(words, self._eos_token_ids | stop_token_ids, False)


def describe(error: str) -> str:
    """The library's message, without the parser's state."""
    return NO_TOKEN if error.startswith("NoExtension") else error.replace("<non-verbose/>", "").strip()


def set_bits(words: np.ndarray, token_ids: frozenset[int], value: bool) -> None:
    for token_id in token_ids:
        bit = np.uint32(1 << (token_id % 32))
        words[token_id // 32] = words[token_id // 32] | bit if value else words[token_id // 32] & ~bit


def fill_masks(
    worker: MaskWorker,
    grammars: list[Grammar],
    new_tokens: list[list[int]],
    stop_token_ids: list[frozenset[int]],
    masks: np.ndarray,
) -> np.ndarray:
    """masks: [num_grammars, num_words] int32, overwritten and returned: the tokens that may follow the new tokens"""
    for grammar, token_ids in zip(grammars, new_tokens, strict=True):
        grammar.read(token_ids)
    matchers = [(grammar.matcher, i) for i, grammar in enumerate(grammars)]
    worker.executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, 4 * worker.num_words, len(grammars))
    for grammar, words, stops in zip(grammars, masks.view(np.uint32), stop_token_ids, strict=True):
        grammar.finish_mask(words, stops)
    return masks


# ---- a step's rows


@dataclass(frozen=True)
class GrammarRows:
    """Rows of the logits whose tokens must fit a grammar."""

    rows: torch.Tensor  # [num_constrained] int64
    masks: "Future[np.ndarray]"  # [num_constrained, num_words] int32

    def apply(self, logits: torch.Tensor, raw: torch.Tensor) -> None:
        """-inf for all tokens that do not fit.

        Where earlier processors leave no token that fits, they give way: the tokens that fit keep their raw logits.
        """
        masks = torch.from_numpy(self.masks.result()).to(logits.device)  # [num_constrained, num_words]
        is_allowed = unpack_bits(masks, logits.shape[1])  # [num_constrained, vocab_size]
        wanted = logits[self.rows].masked_fill(~is_allowed, -torch.inf)
        possible = raw[self.rows].to(wanted.dtype).masked_fill(~is_allowed, -torch.inf)
        has_none = wanted.amax(dim=-1, keepdim=True) == -torch.inf  # [num_constrained, 1]
        logits[self.rows] = torch.where(has_none, possible, wanted)


def unpack_bits(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """words: [num_rows, num_words] int32, the lowest bit first -> [num_rows, num_bits] bool"""
    octets = words.view(torch.uint8)  # [num_rows, 4 * num_words]
    shifts = torch.arange(8, dtype=torch.uint8, device=words.device)
    return ((octets[:, :, None] >> shifts) & 1).flatten(1)[:, :num_bits].bool()
