"""Faults to mend: the trace is that of the program with the fault, and what is right in another way passes."""

import pytest

from labs.learn.catalog import list_exercises
from labs.learn.checker import check_answer
from labs.learn.repair import Repair
from labs.learn.seen import replace_all
from labs.learn.texts import LANGUAGES

REPAIRS = {one.name: one for one in list_exercises() if isinstance(one, Repair)}
SYMPTOMS = {  # lines of the trace
    "full_block": "B reads slot 2: not its token 0",
    "stale_hash": "C reads slot 2: not its token 2",
    "freed_duplicate": "Block 2 is free and in the block table of B.",
    "stale_prefix": "an exception: IndexError",
}
OTHERS = {  # right in another way
    "full_block": (
        ("            self.remember(seq.token_ids[:-1], seq.block_table[-1])\n", ""),
        (
            "            seq.block_table.append(self.take())\n\n    def remember",
            "            seq.block_table.append(self.take())\n"
            "            self.remember(seq.token_ids[: -1], seq.block_table[-2])\n\n    def remember",
        ),
        ("len(seq.token_ids) > len(seq.block_table) * self.block_size", "len(seq.token_ids) % self.block_size == 1"),
    ),
    "stale_hash": (  # entries are searched for the block
        ("        self.hash_of_block: dict[int, int] = {}\n", ""),
        ("                self.hash_of_block[block_id] = key\n", ""),
        ("        if block_id in self.hash_of_block:\n", "        for key in list(self.block_of_hash):\n"),
        (
            "            del self.block_of_hash[self.hash_of_block.pop(block_id)]\n",
            "            if self.block_of_hash[key] == block_id:\n                del self.block_of_hash[key]\n",
        ),
    ),
    "freed_duplicate": (
        (
            "                self.share(kept)\n                seq.block_table[i] = kept\n"
            "                self.drop(block_id)\n",
            "                seq.block_table[i] = kept\n                self.drop(block_id)\n"
            "                self.share(kept)\n",
        ),
    ),
    "stale_prefix": (  # the number from before is made smaller
        ("            if not self.block_manager.try_admit(seq):", "            if not (self.plan(seq)):"),
        ("num_new_tokens = len(seq.token_ids) - seq.num_computed_tokens", "num_new_tokens = self.planned"),
        (
            "    def make_room",
            "    def plan(self, seq):\n        before = len(seq.token_ids) - seq.num_computed_tokens\n"
            "        fits = self.block_manager.try_admit(seq)\n"
            "        self.planned = min(before, len(seq.token_ids) - seq.num_computed_tokens)\n"
            "        return fits\n\n    def make_room",
        ),
    ),
}


@pytest.mark.parametrize("name", SYMPTOMS)
def test_the_trace_shows_the_symptom_only_with_the_fault(name):
    exercise = REPAIRS[name]
    symptom = SYMPTOMS[name]
    assert f"  {symptom}\n" in exercise.make_starter("en")
    assert "{trace}" not in "".join(exercise.make_starter(language) for language in LANGUAGES)
    assert symptom not in "\n".join(exercise.trace(exercise.solution, "en"))


@pytest.mark.parametrize("name", OTHERS)
def test_another_repair_passes(name, tmp_path):
    file = tmp_path / "answer.py"
    file.write_text(replace_all(REPAIRS[name].solution, OTHERS[name]), encoding="utf-8")
    report = check_answer(REPAIRS[name], file, "en", 20)
    assert report.passed, report


def test_each_fault_has_wrong_repairs():
    assert set(REPAIRS) == set(SYMPTOMS) == set(OTHERS)
    assert min(len(one.mistakes) for one in REPAIRS.values()) >= 4
