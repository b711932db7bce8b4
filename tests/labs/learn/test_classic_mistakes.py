"""Classic mistakes in the engine in one file. Each is noticed, also if it never changes a token."""

from types import SimpleNamespace

import pytest

from labs.learn.answers import load
from labs.learn.catalog import find_exercise
from labs.learn.checker import Comparison, find_failing_case
from labs.learn.exercise import Build, Mistake
from labs.learn.exercises.find_the_bug import EXERCISES as BUGS
from labs.learn.exercises.whole_engine import QUESTIONS
from labs.learn.texts import Text

ADMIT = "            self.running.append(self.waiting.popleft())\n"
MISTAKES = {
    # in the order of the file
    "a partial block's hash without its parent": [("repr((seq.block_hashes[-1:], tokens))", "repr(tokens)")],
    "a hash of the position too": [
        ("repr((seq.block_hashes[-1:], tokens))", "repr((len(seq.block_hashes[-1:]), tokens))")
    ],
    "hits are not removed from the free blocks": [
        ("            self.free.pop(block_id, None)\n", "            pass\n")
    ],
    "hits get no owner": [
        (
            "            self.free.pop(block_id, None)\n            self.num_owners[block_id] += 1\n",
            "            self.free.pop(block_id, None)\n",
        )
    ],
    "hits count as not computed": [
        ("seq.num_computed_tokens = len(hits) * self.block_size", "seq.num_computed_tokens = 0")
    ],
    "half of the blocks on failure": [
        (
            "        if num_new > len(self.free) - num_free_hits:\n            return False\n",
            "        if num_new > len(self.free) - num_free_hits:\n            self.free and self.take()\n           "
            " return False\n",
        )
    ],
    "growing when the last block is full": [
        (
            "self.num_blocks_for(len(seq.token_ids)) > len(seq.block_table):\n            if not",
            "self.num_blocks_for(len(seq.token_ids) + 1) > len(seq.block_table):\n            if not",
        )
    ],
    "copying a block with one owner": [
        ("self.num_owners[seq.block_table[i]] > 1", "self.num_owners[seq.block_table[i]] > 0")
    ],
    "a copied block keeps its owner": [("                self.num_owners[source] -= 1\n", "")],
    "a copy that is not made": [("                self.copies.append((source, block_id))\n", "")],
    "a child with the parent's own list": [
        ("child.block_table = parent.block_table.copy()", "child.block_table = parent.block_table")
    ],
    "a child that computes the prompt again": [
        ("        child.num_computed_tokens = parent.num_computed_tokens\n", "")
    ],
    "the block freed last is taken first": [
        ("block_id = next(iter(self.free))", "block_id = next(reversed(self.free))")
    ],
    "the second of two equal blocks is kept": [("if block_hash not in self.block_of_hash:", "if True:")],
    "blocks are registered one step late": [
        (
            "range(num_before // self.block_size, seq.num_computed_tokens",
            "range(num_before // self.block_size, num_before",
        )
    ],
    "a free block stays owned": [
        (
            "                self.free[block_id] = None\n",
            "                self.free.setdefault(block_id) if block_id % 3 else None\n",
        )
    ],
    "the table is kept after release": [("        seq.block_table = []\n", "        pass\n")],
    "the budget is not spent by decodes": [
        (
            "                chunks.append((seq, num_new_tokens))\n                budget -= num_new_tokens\n",
            "                chunks.append((seq, num_new_tokens))\n                budget -= num_new_tokens - 1\n",
        )
    ],
    "the budget is not spent by admissions": [
        (
            "            chunks.append((seq, num_new_tokens))\n            budget -= num_new_tokens\n        return",
            "            chunks.append((seq, num_new_tokens))\n        return",
        )
    ],
    "one admission in each step": [
        ("            budget -= num_new_tokens\n        return chunks", "            break\n        return chunks")
    ],
    "admission after a preemption": [
        (
            "while budget and self.waiting and self.num_preemptions == preemptions_before:",
            "while budget and self.waiting:",
        )
    ],
    "the newest waiting sequence first": [
        ("seq = self.waiting[0]", "seq = self.waiting[-1]"),
        (ADMIT, ADMIT.replace("popleft", "pop")),
    ],
    "the victim at the queue's end": [("self.waiting.appendleft(last)", "self.waiting.append(last)")],
    "the oldest sequence is the victim": [("last = self.running.pop()", "last = self.running.pop(0)")],
    "a victim keeps its blocks' place": [
        (
            "            self.block_manager.release(last)\n",
            "            self.block_manager.release(last)\n            last.block_hashes = []\n            "
            "last.token_ids = last.token_ids[: last.num_prompt_tokens]\n",
        )
    ],
    "children at the end of the queue": [("place = self.running.index(parent) + 1", "place = len(self.running)")],
    "a finished sequence keeps its blocks": [
        (
            "        self.running.remove(seq)\n        self.block_manager.release(seq)\n",
            "        self.running.remove(seq)\n",
        )
    ],
}
IN_THE_ENGINE = {  # seen with the bundled model only
    "a mask from 0": [
        (
            "torch.arange(seq_len) <= positions[:, None, :, None]",
            "torch.arange(seq_len) <= positions[:, None, :, None] - positions.min()",
        )
    ],
    "a mask without the own token": [
        (
            "torch.arange(seq_len) <= positions[:, None, :, None]",
            "torch.arange(seq_len) < positions[:, None, :, None].clamp(min=1)",
        )
    ],
    "positions from the chunk's start": [
        (
            "                positions.append(position)\n",
            "                positions.append(position - seq.num_computed_tokens)\n",
        )
    ],
    "the offset is missing in the slot": [
        ("block_id * self.block_size + position % self.block_size", "block_id * self.block_size")
    ],
    "the first token of a chunk is sampled": [
        ("hidden[torch.tensor(ends) - 1]", "hidden[torch.tensor([0, *ends[:-1]])]")
    ],
    "equal first tokens": [("token_ids, strict=False)", "token_ids[:1] * 9, strict=False)")],
    "no copies": [
        ("            self.kv_cache[:, :, destination] = self.kv_cache[:, :, source]\n", "            pass\n")
    ],
}


def engine() -> Build:
    exercise = find_exercise("whole_engine")
    assert isinstance(exercise, Build)
    return exercise


def compare(replace: list[tuple[str, str]]) -> Comparison:
    exercise = engine()
    mistake = Mistake(Text("", ""), Text("", ""), tuple(replace))
    return Comparison(exercise, load(mistake.apply(exercise.solution), "mistake"))


def test_the_list_is_long_enough_and_the_right_engine_passes():
    assert len(MISTAKES) + len(IN_THE_ENGINE) + len(BUGS) >= 25
    assert find_failing_case(compare([]), num_random=30) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_scheduler_or_block_manager_is_noticed(name):
    comparison = compare(MISTAKES[name])
    comparison.exercise = SimpleNamespace(**{**vars(engine()), "examples": engine().examples[:-1]})  # type: ignore
    assert find_failing_case(comparison, num_random=150) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_THE_ENGINE)
def test_a_mistake_in_a_step_is_noticed(name):
    assert compare(IN_THE_ENGINE[name]).first_difference(QUESTIONS) is not None
