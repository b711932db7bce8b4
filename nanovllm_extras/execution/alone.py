"""One rank, which computes all by itself. `parallel/` has the classes for several.

`Alone` is what tells other ranks of each step, and `Whole` is the part of the network that is loaded.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nanovllm.batch import Batch
from nanovllm_extras.machine.dead import EngineDeadError
from nanovllm_extras.models.network_config import NetworkConfig

if TYPE_CHECKING:
    from nanovllm_extras.records.tier import Chain
    from nanovllm_extras.sampling.logits_processors import ReaderResult


class Alone:
    """One rank, which tells nobody what it computes."""

    readings: "tuple[ReaderResult, ...]" = ()
    """What each step reads last."""

    def step(
        self, batch: Batch, has_logits: bool = True, is_replayed: bool = False, previous: Tensor | None = None
    ) -> AbstractContextManager[None]:
        """Return the context in which a batch, on the host, is computed and sampled.

        has_logits: whether the logits of its samples are computed; is_replayed: whether a CUDA graph computes it;
        previous: [num_tokens, hidden_size], if only the model's head computes it, the hidden states before its tokens
        """
        return nullcontext()

    def end_forward(self) -> None:
        """Note that the model has run."""

    def logits(self, hidden: Tensor) -> AbstractContextManager[None]:
        """Return the context in which logits are computed. hidden: [num_rows, hidden_size]"""
        return nullcontext()

    def tiers_of_all(self, tiers: "Chain", bytes_per_state: int) -> "Chain":
        """Return the tiers of all ranks, for those of this one (`kv_store/`). bytes_per_state: of a snapshot, or 0"""
        return tiers

    def command(self, order: list[Any], answer: Callable[[], int]) -> int:
        """Send a command, which JSON can hold, to all ranks; this one answers by `answer`. Returns the least answer."""
        return answer()

    def stop(self) -> None:
        """Stop the other ranks."""

    def tell_failure(self, call: Callable[[EngineDeadError], None]) -> None:
        """Have `call` called, in any thread, when another rank has failed."""


class Whole:
    """All of the network."""

    rank, num_ranks = 0, 1

    def share_of(self, shape: NetworkConfig) -> NetworkConfig:
        """Return the network that this rank computes. shape: of the whole network"""
        return shape

    def load_network(self, runner: Any) -> Any:
        """Return this rank's network on the device, with its weights."""
        return runner.load_network()

    def wrap(self, device: Any, vocab_size: int) -> Any:
        """Return a `Device` that adds to `device` where the ranks meet."""
        return device
