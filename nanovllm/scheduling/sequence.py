"""One sequence: its token ids, how far its K and V are computed, and which blocks hold them.

A record: the `Scheduler` and its parts advance it, the `BlockManager` fills its block table, and the requests in
`engine/` end it. A sequence knows no block arithmetic and holds no tensors.

    token_ids            [ 11  7  42  5 | 90  13 ]     prompt | output
    num_prompt_tokens      4
    num_tokens             6
    num_computed_tokens    5     K and V of the first five are in the cache; the sixth is the next step's input

When a step is scheduled that computes the last token of a sequence, `num_computed_tokens` advances at once, and the
token that the step will draw gets its place. The device knows that token, the host does not yet, so its place holds the
placeholder -1 - row, where row is its row among the tokens of the step:

    step scheduled       token_ids [ 11  7  42  5 | 90  13 ] -1      num_tokens 7, num_computed_tokens 6
    step has run         token_ids [ 11  7  42  5 | 90  13  63 ]     num_tokens 7, num_computed_tokens 6

So `num_computed_tokens` counts the tokens that the steps launched so far compute, and `num_tokens` includes tokens in
flight; but not the last token of a sequence, which no step computes, nor that of a beam, which its search chooses.
`num_known_tokens`, `view` and `output_token_ids` are about known tokens alone. A sequence has *caught up* when
`num_computed_tokens == num_tokens`.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto
from typing import Any

from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.block_tables import BlockTable
from nanovllm.scheduling.int_array import IntArray


class SequenceStatus(Enum):
    WAITING = auto()  # owns no blocks; queued, or it will be: a child to come, a preempted beam that has caught up
    RUNNING = auto()  # owns blocks, gets tokens while the budget lasts
    FINISHED = auto()


@dataclass(eq=False, slots=True)
class Sequence:
    """The state of one sequence; `prompt_token_ids` are int32 token ids, at least one.

    A request with n > 1 is one sequence with n - 1 `children`. They share its blocks from the step on that computes the
    last token of the prompt, and each goes on with a token of its own (`forks.py`).
    """

    request_id: str
    prompt_token_ids: InitVar[SequenceOf[int]]
    sampling_params: SamplingParams
    eos_token_ids: InitVar[frozenset[int]] = frozenset()
    priority: int = 0
    seed: int = 0
    sample_index: int = 0
    bad_word_ids: SequenceOf[SequenceOf[int]] = ()  # each a word that must not appear, as tokens
    grammar: Any = None  # what the output must fit (`execution/grammar.py`)
    pooling: str | None = None  # how hidden states of the prompt become an embedding (`execution/pooling.py`)

    status: SequenceStatus = field(default=SequenceStatus.WAITING, init=False)
    arrival: int = field(default=0, init=False)  # number of sequences that arrived before
    order: tuple = field(default=(), init=False)  # its place in the policy's order; `WaitingQueue` sets both

    token_ids: IntArray = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_cached_tokens: int | None = field(default=None, init=False)  # of the prompt, when it was first admitted
    num_preemptions: int = field(default=0, init=False)

    # the end: `limit_growth` sets the limit, and the stop_reason that reaching it gives
    max_num_tokens: int = field(default=0, init=False)
    limit_reason: str | None = field(default=None, init=False)
    # every token that ends the sequence, with the stop_reason it gives (None for the model's own end tokens)
    stop_token_ids: dict[int, int | None] = field(init=False)
    finish_reason: str | None = field(default=None, init=False)  # "stop", "length" or "abort"
    stop_reason: int | str | None = field(default=None, init=False)

    is_plain_sampling: bool = field(init=False)  # greedy, or a temperature alone
    reads_prompt: bool = field(init=False)  # the hidden states of all prompt tokens are needed: none may be cached
    reads_output: bool = field(init=False)  # the sampler has to know the newest token to choose the next one

    # several sequences of one request; skip at first reading
    children: list["Sequence"] = field(default_factory=list, init=False)
    num_places: int = field(default=1, init=False)  # of max_num_seqs: its own, and those of children to come
    is_beam: bool = field(default=False, init=False)  # one candidate of `beam_search.py`, which chooses its tokens

    # written by the block manager and its parts alone
    block_table: BlockTable = field(default_factory=BlockTable, init=False)
    has_shared_tail: bool = field(default=False, init=False)  # others may own the block of its next token
    block_hashes: list[int] = field(default_factory=list, init=False)  # of its leading full blocks, computed once
    num_registered_blocks: int = field(default=0, init=False)  # leading blocks that the prefix cache knows
    parent_serial: int = field(default=0, init=False)  # the serial number (see `CachedBlock`) of the last of those
    host_block_ids: list[int] = field(default_factory=list, init=False)  # where K and V are while swapped out

    def __post_init__(self, prompt_token_ids: SequenceOf[int], eos_token_ids: frozenset[int]) -> None:
        params = self.sampling_params
        self.token_ids = IntArray(prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens = len(prompt_token_ids)
        self.stop_token_ids = {i: i for i in params.stop_token_ids or ()}
        self.stop_token_ids.update(dict.fromkeys(() if params.ignore_eos else eos_token_ids))
        self.is_plain_sampling = params.is_plain and self.pooling is None
        self.reads_prompt = params.prompt_logprobs is not None or self.pooling == "mean"
        self.reads_output = params.reads_output or any(len(word) > 1 for word in self.bad_word_ids)

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output, without the tokens in flight."""
        return self.token_ids.length

    @property
    def num_output_tokens(self) -> int:
        return self.token_ids.length - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids.view(self.num_prompt_tokens).tolist()

    def expect_token(self, row: int) -> None:
        """Give the token that a step in flight draws in `row` a place, behind the known tokens."""
        num_tokens, ids = self.num_tokens, self.token_ids
        if num_tokens == len(ids.data):
            ids.grow()
        ids.data[num_tokens] = -1 - row
        self.num_tokens = num_tokens + 1

    def append_token(self, token_id: int) -> None:
        """The next token is known; it takes the place of its placeholder, if it has one."""
        ids = self.token_ids
        ids.append(token_id)
        if self.num_tokens < ids.length:
            self.num_tokens = ids.length

    def expect_nothing(self) -> None:
        """Forget the placeholders: no token in flight will be appended."""
        self.num_tokens = self.token_ids.length

    def note_cached_tokens(self) -> None:
        """Admitted: what is computed now was found, unless the sequence was admitted before."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = self.num_computed_tokens

    def limit_growth(self, max_model_len: int, capacity: int) -> None:
        """End at `max_tokens`, at `max_model_len`, or with one token more than a cache of `capacity` tokens holds."""
        max_tokens = self.sampling_params.max_tokens
        wanted = max_model_len if max_tokens is None else min(max_model_len, self.num_prompt_tokens + max_tokens)
        self.max_num_tokens = min(wanted, capacity + 1)
        self.limit_reason = "kv_cache" if self.max_num_tokens < wanted else None
