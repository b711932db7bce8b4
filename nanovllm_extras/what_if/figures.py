"""What is counted of a run: steps, waste of the pool, hits, preemptions, and the times of tokens."""

from array import array
from typing import TYPE_CHECKING, Any

from nanovllm.observer import Stats
from nanovllm.sequence import Sequence
from nanovllm_extras.records.full_observer import count_empty_slots
from nanovllm_extras.what_if.known_sequence import KnownSequence

if TYPE_CHECKING:
    from nanovllm.block_manager import BlockManager
    from nanovllm.scheduler import Step

PERCENTILES = (50, 99)


class Figures(Stats):
    """The engine's own counters, and those that only a simulation needs. All sums: nothing grows with the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.slot_steps = 0
        """Slots of owned blocks, summed over the steps."""
        self.empty_slot_steps = 0
        self.ttft_s: array[float] = array("d")
        self.tpot_s: array[float] = array("d")
        self.num_refused = 0
        """Requests that this pool, `max_model_len` or `max_num_seqs` can never serve."""
        self.num_cut = 0
        """Answers that are shorter than they were: the pool or `max_model_len` ends them."""
        self.num_unknown = 0
        """Answers that an abort, the recording's pool or its end has cut: how they would go on is not known."""
        self.time_s = 0.0
        """From the first arrival to the last token."""
        self.now_s = 0.0
        self._num_seqs = 0

    def begin(self, now_s: float) -> None:
        """Set the time of what is observed from now on."""
        self.now_s = now_s

    def on_start(self, blocks: "BlockManager") -> None:
        """An engine begins with `blocks`."""

    def end_step(self, seconds: float) -> None:
        """A step of this length has ended."""

    def number(self, seq: Sequence) -> int:
        """Return the number of a sequence, as a recording has it: its place in the order in which they appear."""
        assert isinstance(seq, KnownSequence)
        if not seq.number:
            self._num_seqs += 1
            seq.number = self._num_seqs
        return seq.number

    def on_add(self, seq: Sequence) -> None:
        super().on_add(seq)
        self.number(seq)

    def on_fork(self, parent: Sequence, child: Sequence) -> None:
        self.number(child)

    def on_finish(self, seq: Sequence) -> None:
        self.number(seq)

    def on_schedule(self, step: "Step", running: list[Sequence], blocks: "BlockManager") -> None:
        super().on_schedule(step, running, blocks)
        self.slot_steps += blocks.num_used_blocks * blocks.block_size
        self.empty_slot_steps += count_empty_slots(running, blocks.block_size)

    def describe(self, has_times: bool = True) -> dict[str, Any]:
        """Return the figures by name; None for a time that is not known."""
        described: dict[str, Any] = {
            "requests": self.num_requests,
            "steps": self.steps,
            "scheduled_tokens": self.scheduled_tokens,
            "tokens_per_step": self.scheduled_tokens / self.steps if self.steps else 0.0,
            "waste": self.empty_slot_steps / self.slot_steps if self.slot_steps else 0.0,
            "hit_rate": self.prefix_cache_hit_rate,
            "preemptions": self.num_preemptions,
            "peak_blocks": self.peak_used_blocks,
            "refused_requests": self.num_refused,
            "cut_answers": self.num_cut,
            "unknown_answers": self.num_unknown,
        }
        for name, values in (("ttft", self.ttft_s), ("tpot", self.tpot_s)):
            ordered = sorted(values) if has_times else []
            for percent in PERCENTILES:
                described[f"{name}_p{percent}_s"] = percentile(ordered, percent) if ordered else None
        described["time_s"] = self.time_s if has_times else None
        return described


def percentile(ordered: "list[float]", percent: float) -> float:
    """Return a percentile of sorted values, interpolated between the two nearest ones as by `numpy.percentile`.

    Of 1, 2, 4 the 75th is 3: half way between the second and the third value.
    """
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
