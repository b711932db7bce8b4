"""`AdapterSlots`: which adapters run. There are `max_loras` slots, and each adapter with running sequences has one.

A waiting sequence is held back while all slots have running adapters and its own is none of them. Sequences behind it
may run meanwhile, but not forever: once it has been held back in `PATIENCE` steps, they wait too. An adapter without
running sequences keeps its slot until another one needs it, the least recently used first.
"""

from typing import Any

from nanovllm_extras.records.full_sequence import Sequence

PATIENCE = 64
"""Steps in which others may pass the first sequence that is held back."""


class AdapterSlots:
    """The slots 1 … num_slots. Integers only: the runner puts an adapter's matrices into the slot."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.slot_of: dict[int, int] = {}
        """Number of an adapter -> its slot, the least recently used adapter first."""
        self._held: Sequence | None = None  # the first sequence that was held back in the newest step
        self._num_steps = 0  # in which it was

    def find_held(self, waiting: list[Any], running: list[Any]) -> list[Any]:
        """Return the waiting sequences that must not be admitted in this step."""
        chosen = {seq.adapter.number for seq in running if seq.adapter is not None}
        held: list[Any] = []
        for place, seq in enumerate(waiting):
            number = None if seq.adapter is None else seq.adapter.number
            if number is None or number in chosen:
                continue
            if len(chosen) < self.num_slots:
                chosen.add(number)
                continue
            if not held:
                self._num_steps = self._num_steps + 1 if seq is self._held else 1
                self._held = seq
                if self._num_steps > PATIENCE:
                    return [*waiting[place:]]
            held.append(seq)
        return held

    def assign(self, seq: Sequence, running: list[Any]) -> None:
        """Give an admitted sequence, and its children, the slot of their adapter. running: includes `seq`"""
        if seq.adapter is None:
            return
        number = seq.adapter.number
        slot = self.slot_of.pop(number, None)
        if slot is None:
            slot = self._take(running)
        self.slot_of[number] = slot  # it is the most recently used one now
        for one in (seq, *seq.children):
            one.adapter_slot = slot  # type: ignore[attr-defined]

    def _take(self, running: list[Any]) -> int:
        """Return a slot that no running sequence needs, in which no adapter stays."""
        if len(self.slot_of) < self.num_slots:
            return next(slot for slot in range(1, self.num_slots + 1) if slot not in self.slot_of.values())
        in_use = {seq.adapter.number for seq in running if seq.adapter is not None}
        oldest = next(number for number in self.slot_of if number not in in_use)
        return self.slot_of.pop(oldest)
