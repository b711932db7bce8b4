"""A sequence with all that extras keep of it. `InputProcessor` makes sequences of this class."""

from array import array
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from nanovllm import sequence
from nanovllm_extras.records.loaded_adapter import LoadedAdapter
from nanovllm_extras.records.prefix_miss import PrefixMiss


@dataclass(eq=False, slots=True)
class Sequence(sequence.Sequence):
    """The core's sequence, whose newest tokens may not be known yet.

    `unknown_token_ids` are tokens that a step in flight samples, or drafts (`scheduling/pending.py`). `num_tokens`
    counts them, and `num_known_tokens` does not.
    """

    priority: int = 0
    processors: tuple[Any, ...] = ()  # what changes its logits before sampling (`logits_processors.py`)
    readers: tuple[Any, ...] = ()  # what reads the hidden states of its prompt (`logits_processors.py`)

    unknown_token_ids: "array[int]" = field(default_factory=partial(array, "i"), init=False)
    # of the groups of layers with a window, beside `block_table`; empty without blocks (`memory/block_manager.py`)
    window_tables: list["array[int]"] = field(default_factory=list, init=False)
    arrival: int = field(default=0, init=False)  # number of sequences that arrived before
    order: tuple[float, ...] = field(default=(), init=False)  # its place in the queues (`scheduling/ordered_queues.py`)
    num_preemptions: int = field(default=0, init=False)
    cache_salt: str | None = field(default=None, init=False)  # it shares blocks only with the same (`cache_salt.py`)
    adapter: LoadedAdapter | None = field(default=None, init=False)  # it shares blocks only with the same, as a salt
    adapter_slot: int = field(default=0, init=False)  # where the runner has it; 0 for none (`lora/slots.py`)
    block_keys: list[bytes] = field(default_factory=list, init=False)  # of its first full blocks, in the K/V store
    prefix_misses: list[PrefixMiss] | None = field(default=None, init=False)  # written by `prefix_misses.py`
    is_plain: bool = field(init=False)  # sampled only by the core, and without readers
    reads_prompt: bool = field(init=False)  # a reader needs the hidden states of the whole prompt
    # `stop_token_ids`, once the output has `min_tokens` tokens; until then `stop_token_ids` is empty
    all_stop_token_ids: dict[int, int | None] = field(init=False)

    def __post_init__(self, prompt_token_ids: list[int], eos_token_ids: frozenset[int]) -> None:
        sequence.Sequence.__post_init__(self, prompt_token_ids, eos_token_ids)
        params: Any = self.sampling_params
        self.is_plain = not (self.processors or self.readers) and params.is_plain
        self.reads_prompt = any(reader.reads_prompt for reader in self.readers)
        self.all_stop_token_ids = self.stop_token_ids
        if params.min_tokens:
            self.stop_token_ids = {}

    @property
    def num_known_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def num_registered_blocks(self) -> int:
        return len(self.cached_blocks)

    @property
    def parent_serial(self) -> int:
        """The serial number of the last block that is in the prefix cache: it identifies the tokens up to there."""
        return self.cached_blocks[-1].serial if self.cached_blocks else self.root_serial

    @property
    def max_cached_tokens(self) -> int:
        return 0 if self.reads_prompt else len(self.token_ids) - 1

    def append_token(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if self.unknown_token_ids:  # `num_tokens` has counted this token already
            del self.unknown_token_ids[0]
        else:
            self.num_tokens = len(self.token_ids)
        if self.stop_token_ids is not self.all_stop_token_ids:
            params: Any = self.sampling_params
            if self.num_output_tokens > params.min_tokens:
                self.stop_token_ids = self.all_stop_token_ids


# ---- the core types sequences as its own class; in an engine with this package, `InputProcessor` makes all of them


def own_sequences(seqs: list[sequence.Sequence]) -> list[Sequence]:
    """Return `seqs`, sequences of a step or of a queue, as sequences of this class."""
    return cast("list[Sequence]", seqs)


def own_chunks(chunks: list[tuple[sequence.Sequence, int, int]]) -> list[tuple[Sequence, int, int]]:
    """Return the chunks of a step with sequences of this class."""
    return cast("list[tuple[Sequence, int, int]]", chunks)
