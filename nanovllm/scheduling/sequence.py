"""One sequence: its token ids, how far its K and V are computed, and which blocks hold them.

A record: the `Scheduler` and its parts append tokens and count them as computed, the `BlockManager` fills the block
table, and a beam search forks it. It knows nothing of block arithmetic and holds no tensors.

    token_ids            [ 11  7  42  5 | 90  13 ]     prompt | output
    num_prompt_tokens      4
    num_tokens             6
    num_computed_tokens    5     K and V of the first five are in the cache; the sixth is this step's input

While a step is in flight, the token that it will bring may have its place already, as -1 - its row among that step's
tokens; see `in_flight.py`. Whoever looks at a sequence between two calls of `LLMEngine.step()` finds no such place.
"""

from collections.abc import Sequence as SequenceOf
from enum import Enum, auto

import numpy as np

from nanovllm.sampling_params import SamplingParams


class IntArray:
    """An int32 array that grows at its end in amortised O(1): the first `length` elements of `data` are in use."""

    __slots__ = ("capacity", "data", "length")

    def __init__(self, values: SequenceOf[int] = ()) -> None:
        self.length = len(values)
        self.capacity = max(16, 2 * self.length)
        self.data = np.empty(self.capacity, dtype=np.int32)
        self.data[: self.length] = values

    def append(self, value: int) -> None:
        if self.length == self.capacity:
            self.data = np.concatenate([self.data, np.empty_like(self.data)])
            self.capacity *= 2
        self.data[self.length] = value
        self.length += 1

    def clear(self) -> None:
        self.length = 0

    def view(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Elements [start, stop) as an array that shares memory; valid until the next append."""
        return self.data[start : self.length if stop is None else stop]


class SequenceStatus(Enum):
    WAITING = auto()  # owns no blocks
    RUNNING = auto()  # owns blocks, gets tokens of every step's budget
    PARKED = auto()  # a beam that has caught up, and was preempted: it owns no blocks, and needs none until it goes on
    FINISHED = auto()


class Sequence:
    """The state of one sequence; `prompt_token_ids` are int32 token ids, at least one.

    A request with n > 1 is one sequence with n - 1 `children`, which come to life when the prompt is computed: they
    share its blocks, and each goes on with a token of its own.
    """

    __slots__ = (
        "arrival",
        "bad_word_ids",
        "block_hashes",
        "block_table",
        "children",
        "finish_reason",
        "has_shared_tail",
        "host_block_ids",
        "is_plain_sampling",
        "is_beam",
        "max_num_tokens",
        "num_claims",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_registered_blocks",
        "num_tokens",
        "order",
        "parent_serial",
        "priority",
        "reads_output",
        "request_id",
        "sample_index",
        "sampling_params",
        "seed",
        "status",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        sampling_params: SamplingParams,
        eos_token_ids: frozenset[int] = frozenset(),
        priority: int = 0,
        seed: int = 0,
        sample_index: int = 0,
        bad_word_ids: SequenceOf[SequenceOf[int]] = (),
    ) -> None:
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.is_plain_sampling = sampling_params.is_plain
        self.priority = priority
        self.seed = seed
        self.sample_index = sample_index
        self.bad_word_ids = bad_word_ids  # each a word that must not appear, as tokens
        # whether the sampler has to know its newest token to choose the next one
        self.reads_output = sampling_params.reads_output or any(len(word) > 1 for word in bad_word_ids)
        self.children: list[Sequence] = []
        self.num_claims = 1  # places in max_num_seqs that it takes: itself, and children to come
        self.is_beam = False  # one candidate of `beam_search.py`, which chooses its tokens; skip at first reading
        self.status = SequenceStatus.WAITING
        self.arrival = 0  # how many came before
        self.order: tuple = ()  # its place in the policy's order; both are set by the scheduler

        self.token_ids = IntArray(prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens = len(prompt_token_ids)
        self.max_num_tokens = 0  # where its growth ends; set by the scheduler
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache; None until admitted
        self.num_preemptions = 0
        # every token that ends the sequence, with the stop_reason it gives (None for the model's own end tokens)
        eos = () if sampling_params.ignore_eos else eos_token_ids
        self.stop_token_ids: dict[int, int | None] = {i: i for i in sampling_params.stop_token_ids or ()}
        self.stop_token_ids.update(dict.fromkeys(eos))
        self.finish_reason: str | None = None  # "stop", "length" or "abort"
        self.stop_reason: int | str | None = None

        # written by the block manager and the swap space alone
        self.block_table = IntArray()
        self.has_shared_tail = False  # the block that its next token goes to may have other owners
        self.block_hashes: list[int] = []  # of the leading full blocks, each computed once in the sequence's life
        self.num_registered_blocks = 0  # how many leading blocks the prefix cache knows
        self.parent_serial = 0  # the serial number (see `CachedBlock`) of the last of those
        self.host_block_ids: list[int] = []  # where its K and V are while it is swapped out

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids.view(self.num_prompt_tokens, self.num_known_tokens).tolist()

    def append_token(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.num_tokens += 1

    def expect_token(self, row: int) -> None:
        """Give the token that a step in flight will bring its place; `row` is where that step draws it."""
        self.append_token(-1 - row)

    @property
    def num_known_tokens(self) -> int:
        """All but the one that is expected, if any."""
        return self.num_tokens - int(self.token_ids.data[self.num_tokens - 1] < 0)

    def fill_in_token(self, token_id: int) -> None:
        """The token that was expected is here."""
        self.token_ids.data[self.num_tokens - 1] = token_id

    def drop_expected_token(self) -> None:
        self.num_tokens = self.token_ids.length = self.num_known_tokens
