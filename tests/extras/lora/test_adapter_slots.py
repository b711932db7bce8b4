"""Which adapters run: at most as many as there are slots, the least recently used gives way, and nobody waits forever.

The oracle of the order of use is a list of the adapters that were admitted.
"""

import random
from dataclasses import dataclass, field

from nanovllm_extras.lora.slots import PATIENCE, AdapterSlots
from nanovllm_extras.records.loaded_adapter import LoadedAdapter


@dataclass(eq=False)
class Seq:
    """As much of a sequence as slots need."""

    adapter: LoadedAdapter | None
    children: list = field(default_factory=list)
    adapter_slot: int = 0


def seq_of(number):
    return Seq(LoadedAdapter(number, str(number), "") if number else None)


def test_random_traffic_never_gives_a_row_the_slot_of_another_adapter():
    rng, slots = random.Random(0), AdapterSlots(3)
    waiting, running, used = [], [], []
    for _ in range(2000):
        if rng.random() < 0.5:
            waiting.append(seq_of(rng.randrange(7)))
        for seq in [one for one in running if rng.random() < 0.3]:
            running.remove(seq)
        held, before = slots.find_held(waiting, running), dict(slots.slot_of)
        for seq in [one for one in waiting if one not in held][: rng.randrange(4)]:
            waiting.remove(seq)
            running.append(seq)
            slots.assign(seq, running)
            if seq.adapter is not None:
                used.append(seq.adapter.number)
        in_use = {seq.adapter.number: seq.adapter_slot for seq in running if seq.adapter}
        assert len(set(in_use.values())) == len(in_use) <= 3
        assert all(slots.slot_of[number] == slot for number, slot in in_use.items())
        assert all(seq.adapter_slot == 0 for seq in running if seq.adapter is None)
        for gone in before.keys() - slots.slot_of.keys():  # it was used before all idle ones that stay
            idle = before.keys() & slots.slot_of.keys() - in_use.keys()
            last = {number: max((i for i, one in enumerate(used) if one == number), default=-1) for number in before}
            assert all(last[gone] < last[one] for one in idle)
    assert len(used) > 500


def test_a_held_sequence_is_passed_only_so_often():
    slots, held = AdapterSlots(1), seq_of(2)
    running, num_steps = [seq_of(1)], 0
    while other := [one for one in (held, seq_of(1), seq_of(0)) if one not in slots.find_held([held, one], running)]:
        num_steps += 1
        assert held not in other
        assert num_steps < 10 * PATIENCE
    assert slots.find_held([held, seq_of(0)], []) == [], "once the others have finished, it runs"


def test_children_get_the_slot_of_their_parent():
    slots, parent = AdapterSlots(2), seq_of(5)
    parent.children = [seq_of(5), seq_of(5)]
    slots.assign(parent, [parent])
    assert [one.adapter_slot for one in (parent, *parent.children)] == [1, 1, 1]
