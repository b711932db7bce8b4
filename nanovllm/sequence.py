"""One sequence: its token ids, how far its K and V are computed, and which blocks hold them.

A record: the `Scheduler` advances it, the `BlockManager` fills its block table, and requests end it. A sequence knows
no block arithmetic and holds no tensors.

    token_ids            [ 11  7  42  5 | 90  13 ]     prompt | output
    num_prompt_tokens      4
    num_tokens             6
    num_computed_tokens    5     K and V of the first five are in the cache; the sixth is the next step's input

A sequence has *caught up* when `num_computed_tokens == num_tokens`. The step that computes its last token draws the
next one.
"""

from dataclasses import InitVar, dataclass, field
from enum import Enum, auto
from typing import Any

from nanovllm.block_tables import BlockTable, IntArray
from nanovllm.sampling_params import SamplingParams


class SequenceStatus(Enum):
    WAITING = auto()  # owns no blocks
    RUNNING = auto()  # owns blocks, gets tokens while the budget lasts
    FINISHED = auto()


@dataclass(eq=False, slots=True)
class Sequence:
    """The state of one sequence; `prompt_token_ids` are int32 token ids, at least one.

    A request for n > 1 samples is one sequence with n - 1 `children`. The first computes the prompt. The others share
    its blocks from then on, and each draws tokens of its own.
    """

    request_id: str
    prompt_token_ids: InitVar[list[int]]
    sampling_params: SamplingParams
    eos_token_ids: InitVar[frozenset[int]] = frozenset()
    priority: int = 0
    seed: int = 0
    sample_index: int = 0
    processors: tuple[Any, ...] = ()  # what changes its logits before a draw (`processors.py`)
    readers: tuple[Any, ...] = ()  # what reads the hidden states of its prompt (`processors.py`)

    status: SequenceStatus = field(default=SequenceStatus.WAITING, init=False)
    arrival: int = field(default=0, init=False)  # number of sequences that arrived before
    order: tuple = field(default=(), init=False)  # its place in the policy's order; `set_order` sets both
    children: list["Sequence"] = field(default_factory=list, init=False)  # the other samples, until they start

    token_ids: IntArray = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_cached_tokens: int | None = field(default=None, init=False)  # of the prompt, when it was first admitted
    num_preemptions: int = field(default=0, init=False)

    # the end: `limit_growth` sets the limit, and the stop_reason for reaching it
    max_num_tokens: int = field(default=0, init=False)
    limit_reason: str | None = field(default=None, init=False)
    # every token that ends the sequence, with the stop_reason it gives (None for the model's own end tokens)
    stop_token_ids: dict[int, int | None] = field(init=False)
    finish_reason: str | None = field(default=None, init=False)  # "stop", "length" or "abort"
    stop_reason: int | str | None = field(default=None, init=False)

    is_plain_sampling: bool = field(init=False)  # greedy, or only a temperature
    reads_prompt: bool = field(init=False)  # a reader needs the hidden states of the whole prompt: nothing may be cached

    # written only by the block manager and the prefix cache
    block_table: BlockTable = field(default_factory=BlockTable, init=False)
    has_shared_tail: bool = field(default=False, init=False)  # others may own the block of its next token
    block_hashes: list[int] = field(default_factory=list, init=False)  # of its leading full blocks, computed once
    num_registered_blocks: int = field(default=0, init=False)  # leading blocks that the prefix cache knows
    parent_serial: int = field(default=0, init=False)  # the serial number (see `CachedBlock`) of the last of those

    def __post_init__(self, prompt_token_ids: list[int], eos_token_ids: frozenset[int]) -> None:
        params = self.sampling_params
        self.token_ids = IntArray(prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens = len(prompt_token_ids)
        self.stop_token_ids = {i: i for i in params.stop_token_ids or ()}
        self.stop_token_ids.update(dict.fromkeys(() if params.ignore_eos else eos_token_ids))
        self.is_plain_sampling = params.is_plain and not (self.processors or self.readers)
        self.reads_prompt = any(reader.reads_prompt for reader in self.readers)

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output. `extras/overlap.py` makes `num_tokens` count a token more, which is being drawn."""
        return self.token_ids.length

    @property
    def num_output_tokens(self) -> int:
        return self.token_ids.length - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids.view(self.num_prompt_tokens).tolist()

    @property
    def num_places(self) -> int:
        """Of `max_num_seqs`: its own, and those of its children."""
        return 1 + len(self.children)

    def append_token(self, token_id: int) -> None:
        ids = self.token_ids
        ids.append(token_id)
        if self.num_tokens < ids.length:  # with overlap, `num_tokens` has counted the token before
            self.num_tokens = ids.length

    def limit_growth(self, max_model_len: int, capacity: int) -> None:
        """End at `max_tokens`, at `max_model_len`, or with one token more than a cache of `capacity` tokens holds."""
        max_tokens = self.sampling_params.max_tokens
        wanted = max_model_len if max_tokens is None else min(max_model_len, self.num_prompt_tokens + max_tokens)
        self.max_num_tokens = min(wanted, capacity + 1)
        self.limit_reason = "kv_cache" if self.max_num_tokens < wanted else None
