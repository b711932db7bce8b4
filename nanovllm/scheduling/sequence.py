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

So `num_tokens` counts the tokens that steps in flight will bring, and `num_computed_tokens` those that the steps
launched so far compute; `num_known_tokens`, `view` and `output_token_ids` are about known tokens alone.
"""

from collections.abc import Sequence as SequenceOf
from enum import Enum, auto

from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.block_tables import BlockTable
from nanovllm.scheduling.int_array import IntArray


class SequenceStatus(Enum):
    WAITING = auto()  # owns no blocks
    RUNNING = auto()  # owns blocks, gets tokens of every step's budget
    FINISHED = auto()


class Sequence:
    """The state of one sequence; `prompt_token_ids` are int32 token ids, at least one.

    A request with n > 1 is one sequence with n - 1 `children`. They share its blocks from the step on that computes the
    last token of the prompt, and each goes on with a token of its own (`forks.py`).
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
        "is_beam",
        "is_plain_sampling",
        "limit_reason",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_places",
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
        self.priority = priority
        self.status = SequenceStatus.WAITING
        self.arrival = 0  # number of sequences that arrived before
        self.order: tuple = ()  # its place in the policy's order; `WaitingQueue` sets both

        self.token_ids = IntArray(prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache; None until admitted
        self.num_preemptions = 0

        # the end: `limit_growth` sets the limit, and the stop_reason that reaching it gives
        self.max_num_tokens = 0
        self.limit_reason: str | None = None
        # every token that ends the sequence, with the stop_reason it gives (None for the model's own end tokens)
        eos = () if sampling_params.ignore_eos else eos_token_ids
        self.stop_token_ids: dict[int, int | None] = {i: i for i in sampling_params.stop_token_ids or ()}
        self.stop_token_ids.update(dict.fromkeys(eos))
        self.finish_reason: str | None = None  # "stop", "length" or "abort"
        self.stop_reason: int | str | None = None

        # what the sampler reads
        self.sampling_params = sampling_params
        self.is_plain_sampling = sampling_params.is_plain
        self.seed = seed
        self.sample_index = sample_index
        self.bad_word_ids = bad_word_ids  # each a word that must not appear, as tokens
        # whether the sampler has to know the newest token to choose the next one
        self.reads_output = sampling_params.reads_output or any(len(word) > 1 for word in bad_word_ids)

        # several sequences of one request; skip at first reading
        self.children: list[Sequence] = []
        self.num_places = 1  # of max_num_seqs that it takes: its own, and those of children to come
        self.is_beam = False  # one candidate of `beam_search.py`, which chooses its tokens

        # written by the block manager and its parts alone
        self.block_table = BlockTable()
        self.has_shared_tail = False  # the block that its next token goes to may have other owners
        self.block_hashes: list[int] = []  # of the leading full blocks, each computed once in the sequence's life
        self.num_registered_blocks = 0  # leading blocks that the prefix cache knows
        self.parent_serial = 0  # the serial number (see `CachedBlock`) of the last of those
        self.host_block_ids: list[int] = []  # where its K and V are while it is swapped out

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output, without the tokens that steps in flight will bring."""
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
        """The steps in flight will bring no token: forget the placeholders."""
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
