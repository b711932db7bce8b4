"""Mistakes that change no token in any of these runs, and are noticed only because each step is compared."""

from collections.abc import Callable
from functools import cache
from types import ModuleType

import pytest

from labs.learn.answers import load
from labs.learn.given import read_program
from labs.learn.simulation import EXAMPLES, Parts, Request, Simulation, Traffic

CASES = (
    *EXAMPLES,
    Traffic(7, 2, 8, (Request((0, 1, 1, 0, 1), 5), Request((0, 1, 1, 0, 1, 1), 6))),  # one prompt, computed twice
    Traffic(6, 2, 9, (Request((1, 2), 5), Request((0, 1), 5), Request((2, 2), 5), Request((1, 1, 1, 1), 2))),
    Traffic(5, 2, 6, (Request((1, 2, 0, 1), 4), Request((0, 1), 5), Request((2, 2, 0), 2))),
    Traffic(9, 4, 8, (Request((1, 2, 0), 5, n=3),)),  # the prompt's block is partly filled: two copies
    Traffic(4, 4, 8, (Request((1, 2, 0, 1), 4, n=2), Request((0, 1), 5))),
    Traffic(3, 4, 8, (Request((1, 2, 0, 1, 1), 3, n=3),)),  # no free block for a copy
    Traffic(6, 2, 3, (Request((1, 2, 0, 1, 2, 0), 2), Request((1, 2, 0, 1, 2, 2), 3, arrival=1))),
    Traffic(8, 4, 16, (Request((0, 1, 2, 0), 3), Request((0, 1, 2, 0), 3, arrival=4))),  # a whole prompt is cached
    Traffic(6, 2, 2, (Request((1, 2), 6), Request((0, 1, 2, 0, 1, 2, 1, 1), 1))),  # preempted within its prompt
)
KEEP = "                self.block_of_hash[block_hash], self.hash_of_block[block_id] = block_id, block_hash\n"
MISTAKES = {
    "the victim goes to the end of the queue": ("self.waiting.appendleft(last)", "self.waiting.append(last)"),
    "admission after a preemption": (" and self.num_preemptions == preemptions_before", ""),
    "the first block is freed first": ("reversed(seq.block_table)", "seq.block_table"),
    "the whole prompt is found": (
        "(len(seq.token_ids) - 1) // self.block_size",
        "len(seq.token_ids) // self.block_size",
    ),
    "all hits are subtracted": ("len(self.free) - num_free_hits", "len(self.free) - len(hits)"),
    "found tokens are computed again": (
        "seq.num_computed_tokens = len(hits) * self.block_size",
        "seq.num_computed_tokens = 0",
    ),
    "the copied block keeps its owner": ("                self.num_owners[source] -= 1\n", ""),
    "the newest free block is taken": ("next(iter(self.free))", "next(reversed(self.free))"),
    "a continued block is not registered": (
        "range(num_before // self",
        "range(num_before // self.block_size + 1 if num_before % self.block_size else num_before // self",
    ),
    "the second equal block replaces the first": (
        f"            if block_hash not in self.block_of_hash:\n{KEEP}",
        KEEP[4:],
    ),
    "a shared block is freed": (
        "            if not self.num_owners[block_id]:\n                self",
        "            self",
    ),
    "a table keeps released blocks": ("        seq.block_table = []\n", ""),
    "decodes cost no budget": (
        "                budget -= num_new_tokens\n        # after",
        "        # after",
    ),
    "preemptions are not counted": ("            self.num_preemptions += 1\n", ""),
    "samples are served last": ("self.running[place:place] = children", "self.running += children"),
}


@cache
def right() -> ModuleType:
    return load(read_program("one_file"), "one_file")


def observe(module: ModuleType, case: Traffic) -> tuple[list, dict]:
    """Return the steps of a run, with the exception that ended it, and the texts at the end."""
    simulation = Simulation(Parts(module.Sequence, module.BlockManager, module.Scheduler), case)
    steps: list = []
    try:
        steps.extend(seen.value for seen in simulation.run(has_drawings=False))
    except Exception as error:
        steps.append(type(error))
    return steps, {name: seq.token_ids for name, seq in simulation.seqs.items()}


def make_wrong(old: str, new: str) -> ModuleType:
    source = read_program("one_file")
    assert source.count(old) == 1, old
    return load(source.replace(old, new), "one_file with a mistake")


def compare(wrong: ModuleType, look: Callable[[tuple[list, dict]], object]) -> bool:
    """Return whether `look` sees a difference in a case."""
    return any(look(observe(right(), case)) != look(observe(wrong, case)) for case in CASES)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_that_changes_no_token_is_noticed(name):
    wrong = make_wrong(*MISTAKES[name])
    assert compare(wrong, lambda run: run[0])
    assert not compare(wrong, lambda run: run[1])


def test_the_right_program_reads_no_wrong_slot_and_loses_no_block():
    for case in CASES:
        steps, _ = observe(right(), case)
        assert not any(step.wrong_slots or step.wrong_blocks for step in steps)
        assert not steps[-1].waiting
