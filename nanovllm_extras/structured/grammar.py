"""Mask the logits so that the output conforms to the grammar of its request.

Each sequence has a `Grammar`, which reads the output so far. Its mask has one bit for each token of the vocabulary. The
bit is set if the output with this token can still become a text of the grammar. End tokens are allowed when the text is
complete. Before, a stop token of the request is allowed only where no other token can come next. With the grammar
"yes" | "no" and the tokens y, e, s, n, no, <end>:

    output []         allowed y n no
    output [y]        allowed e
    output [no]       allowed <end>

A grammar is the last `Processor` of its sequence, so that no other processor can allow a token again. A thread computes
the masks during the forward pass: `build` passes the newest tokens to it, and `apply` waits for the masks when the
logits are computed.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from nanovllm.scheduler import Scheduler
from nanovllm_extras.requests.full_request import Request
from nanovllm_extras.sampling.logits_processors import ProcessorRow
from nanovllm_extras.structured.first_space import FirstSpace

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

NO_TOKEN = "no token of the vocabulary can come next"


class MaskWorker(NamedTuple):
    """Computes masks. A single thread submits the work, so that two jobs never use the same grammar at once."""

    pool: ThreadPoolExecutor  # of one thread
    executor: "LLExecutor"  # computes the masks of several grammars in parallel
    num_words: int  # 32-bit words in a mask


class Grammar:
    """The grammar of one sequence, and its state after the output that has been read.

    `error` is set if the grammar cannot continue: a limit of the library was reached, or no token of the vocabulary is
    allowed. Then the output does not conform to the grammar, and `end_failed` ends the sequence.
    """

    place, reads_output = 6, True

    def __init__(
        self,
        matcher: "LLMatcher",
        eos_token_ids: frozenset[int],
        worker: MaskWorker,
        first_space: FirstSpace | None = None,
    ) -> None:
        self.matcher = matcher
        self.first_space = first_space  # until the first token is known
        self.worker = worker
        self.num_sent = 0  # output tokens that have been passed to the worker, which reads them in order
        self.error = ""
        self._eos_token_ids = eos_token_ids

    def copy(self, keeps_first_space: bool = False) -> "Grammar":
        """Return a copy of the grammar in the same state, for another sequence, whose text may keep a first space."""
        first_space = None if keeps_first_space or self.first_space is None else self.first_space.copy()
        copied = Grammar(self.matcher.deep_copy(), self._eos_token_ids, self.worker, first_space)
        copied.num_sent, copied.error = self.num_sent, self.error
        return copied

    @classmethod
    def build(cls, rows: list[ProcessorRow]) -> "GrammarRows":
        """Start to compute the masks of the rows in the worker's thread."""
        grammars: list[Grammar] = [row.processor for row in rows]
        worker = grammars[0].worker
        new_tokens = [seq.token_ids[seq.num_prompt_tokens + one.num_sent :].tolist() for _, seq, _, one in rows]
        stop_token_ids = [frozenset(seq.all_stop_token_ids) for _, seq, _, _ in rows]
        masks = np.zeros((len(rows), worker.num_words), dtype=np.int32)
        filled = worker.pool.submit(fill_masks, worker, grammars, new_tokens, stop_token_ids, masks)
        for grammar, token_ids in zip(grammars, new_tokens, strict=True):  # so a failed step reads no token twice
            grammar.num_sent += len(token_ids)
        return GrammarRows(torch.tensor([row for row, _, _, _ in rows]), filled)

    def read(self, token_ids: list[int]) -> None:
        """Advance the grammar by the newly sampled tokens."""
        for token_id in token_ids:
            if self.first_space is not None:
                if self.first_space.begins(token_id):
                    self.matcher = self.first_space.matcher
                self.first_space = None
            has_ended = token_id in self._eos_token_ids and self.matcher.is_stopped()
            if not self.error and not has_ended and not self.matcher.consume_token(token_id):
                self.error = f"the grammar does not allow token {token_id} of the output"

    def finish_mask(self, words: np.ndarray, stop_token_ids: frozenset[int]) -> None:
        """Correct the bits of end tokens in the library's mask. words: [num_words] uint32, changed in place.

        All end tokens are allowed if the text is complete. Otherwise they are forbidden, unless the text can only
        continue with one of them: then it is allowed, and ends the sequence as any stop token does.
        """
        if not self.error and self.matcher.is_error():
            self.error = describe(self.matcher.get_error())
        if self.first_space is not None:
            words[:] = self.first_space.mask(words)
        ends = self._eos_token_ids | stop_token_ids
        if not self.error and self.matcher.is_accepting():
            set_bits(words, ends, True)
        elif not self.error:
            continuing = words.copy()
            set_bits(words, ends, False)
            if not words.any():
                words[:] = continuing
            if not words.any():
                self.error = NO_TOKEN
        if self.error:  # the request ends after this step; no end token, so that it does not end with `stop`
            words[:] = 0xFFFFFFFF
            set_bits(words, ends, False)


def describe(error: str) -> str:
    """Return the library's message without the parser's state."""
    return NO_TOKEN if error.startswith("NoExtension") else error.replace("<non-verbose/>", "").strip()


def set_bits(words: np.ndarray, token_ids: frozenset[int], value: bool) -> None:
    """Set or clear the bits of tokens in a mask. words: [num_words] uint32, changed in place."""
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
    """Read the new tokens, and return the masks of the tokens that may follow.

    masks: [num_grammars, num_words] int32, overwritten and returned.
    """
    for grammar, token_ids in zip(grammars, new_tokens, strict=True):
        grammar.read(token_ids)
    matchers = [(grammar.matcher, i) for i, grammar in enumerate(grammars)]
    worker.executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, 4 * worker.num_words, len(grammars))
    for grammar, words, stops in zip(grammars, masks.view(np.uint32), stop_token_ids, strict=True):
        grammar.finish_mask(words, stops)
    return masks


def end_failed(request: Request, scheduler: Scheduler) -> None:
    """End the samples of a request whose grammar has failed, with the reason.

    The mask of a grammar that has failed does not allow end tokens, so such an output does not end with `stop`.
    """
    for completion in request.completions:
        seq = completion.seq
        errors = [one.error for one in seq.processors if isinstance(one, Grammar) and one.error]
        if errors and seq.finish_reason is None:
            scheduler.finish(seq, "abort", f"structured_outputs: {errors[0]}")
            completion.read_tokens()


# ---- a step's rows


@dataclass(frozen=True)
class GrammarRows:
    """The rows of the logits that a grammar constrains, and their masks."""

    rows: torch.Tensor  # [num_constrained] int64
    masks: "Future[np.ndarray]"  # [num_constrained, num_words] int32

    def apply(self, logits: torch.Tensor, raw: torch.Tensor) -> None:
        """Set the logits of all tokens to -inf that the grammar does not allow.

        If earlier processors have excluded all allowed tokens of a row, the grammar overrides them: the allowed tokens
        get their raw logits.
        """
        masks = torch.from_numpy(self.masks.result()).to(logits.device)  # [num_constrained, num_words]
        is_allowed = unpack_bits(masks, logits.shape[1])  # [num_constrained, vocab_size]
        wanted = logits[self.rows].masked_fill(~is_allowed, -torch.inf)
        possible = raw[self.rows].to(wanted.dtype).masked_fill(~is_allowed, -torch.inf)
        has_none = wanted.amax(dim=-1, keepdim=True) == -torch.inf  # [num_constrained, 1]
        logits[self.rows] = torch.where(has_none, possible, wanted)


def unpack_bits(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Convert masks to booleans: [num_rows, num_words] int32, lowest bit first -> [num_rows, num_bits] bool."""
    octets = words.view(torch.uint8)  # [num_rows, 4 * num_words]
    shifts = torch.arange(8, dtype=torch.uint8, device=words.device)
    return ((octets[:, :, None] >> shifts) & 1).flatten(1)[:, :num_bits].bool()
