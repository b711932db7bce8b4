"""One sequence: its token ids, how far its K and V are computed, and which blocks hold them.

A sequence is a record. The `Scheduler` advances it, and the `BlockManager` fills its block table. It holds no tensors.

    token_ids            [ 11  7  42  5 | 90  13 ]     prompt | output
    num_prompt_tokens      4
    num_tokens             6
    num_computed_tokens    5     K and V of the first five are in the cache; the sixth is the next step's input

`schedule` adds the tokens of a step to `num_computed_tokens` before its forward pass runs.

A sequence has *caught up* when `num_computed_tokens == num_tokens`. The step that computes its last token samples the
next one.
"""

from array import array
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import NamedTuple

from nanovllm.sampling_params import SamplingParams


class CachedBlock(NamedTuple):
    """The contents of a full block in the prefix cache.

    The hash finds it; `parent_serial` and `tokens` prove that it is the right one. A serial number is given once and
    never again, so the serial number of a parent identifies the whole prefix before the block. Two prefixes are never
    mistaken for each other, even if their hashes are equal.
    """

    block_id: int
    block_hash: int
    serial: int
    parent_serial: int
    tokens: bytes


@dataclass(eq=False, slots=True)
class Sequence:
    """The state of one sequence. `eos_token_ids` are the model's own end-of-sequence tokens.

    A request for n > 1 samples is one sequence with n - 1 `children`. The first computes the prompt. The others share
    its blocks from then on, and each samples its own tokens.
    """

    request_id: str
    prompt_token_ids: InitVar[list[int]]
    sampling_params: SamplingParams
    eos_token_ids: InitVar[frozenset[int]] = frozenset()
    seed: int = 0
    sample_index: int = 0

    root_serial: int = field(default=0, init=False)  # parent of the first block: only equal roots share blocks
    children: list["Sequence"] = field(default_factory=list, init=False)  # the other samples, until they start

    token_ids: "array[int]" = field(init=False)  # int32, as the block table
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_cached_tokens: int | None = field(default=None, init=False)  # of the prompt, when it was first admitted

    max_num_tokens: int = field(default=0, init=False)  # the sequence ends here; `Scheduler.add` sets this and the next
    limit_reason: str | None = field(default=None, init=False)  # the stop_reason for reaching `max_num_tokens`
    # every token that ends the sequence, with the stop_reason it gives (None for the model's own end tokens)
    stop_token_ids: dict[int, int | None] = field(init=False)
    finish_reason: str | None = field(default=None, init=False)  # "stop", "length" or "abort"
    stop_reason: int | str | None = field(default=None, init=False)

    # written only by the block manager and the prefix cache
    block_table: "array[int]" = field(default_factory=partial(array, "i"), init=False)
    has_shared_tail: bool = field(default=False, init=False)  # others may own the block of its next token
    cached_blocks: list[CachedBlock] = field(default_factory=list, init=False)  # its first full blocks, as found later

    def __post_init__(self, prompt_token_ids: list[int], eos_token_ids: frozenset[int]) -> None:
        params = self.sampling_params
        self.token_ids = array("i", prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens = len(prompt_token_ids)
        self.stop_token_ids = {i: i for i in params.stop_token_ids or ()}
        self.stop_token_ids.update(dict.fromkeys(() if params.ignore_eos else eos_token_ids))

    @property
    def max_cached_tokens(self) -> int:
        """Tokens whose K and V may come from the prefix cache.

        The last token is always computed, because the step needs its logits.
        """
        return self.num_tokens - 1

    def append_token(self, token_id: int) -> None:
        """Append a sampled token. The step that computes it allocates its block (`BlockManager.try_allocate`)."""
        self.token_ids.append(token_id)
        self.num_tokens = len(self.token_ids)
