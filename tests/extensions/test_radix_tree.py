"""The tree against a dict of all prefixes that are registered, in random traffic, and against the core's tokens."""

import random

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.block_manager import BlockManager
from nanovllm.extension import import_extension
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Sequence
from nanovllm_testing.engine_traffic import MODEL, SMALL, drive, random_requests
from tests.core_alone import ROOT

PATH = ROOT / "examples" / "extensions" / "radix_tree.py"
OPTIONS = {**SMALL, "num_kv_blocks": 14, "max_model_len": 48}
"""The pool is small, so that blocks are evicted."""


@pytest.fixture
def tree():
    return import_extension(PATH)


def checking(tree):
    """A tree that is compared with a dict after each change: prefix, as a tuple of token ids -> block id."""

    class Checked(tree.RadixTree):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.blocks, self.num_hits, self.num_forgotten = {}, 0, 0

        def find(self, seq):
            hits, size = super().find(seq), self.block_size
            expected = []
            for end in range(size, seq.max_cached_tokens + 1, size):
                block_id = self.blocks.get((seq.root_serial, *seq.token_ids[:end]))
                if block_id is None:
                    break
                expected.append(block_id)
            assert [hit.block_id for hit in hits] == expected
            self.num_hits += len(hits)
            return hits

        def register(self, seq, num_tokens):
            super().register(seq, num_tokens)
            for i in range(num_tokens // self.block_size):
                prefix = (seq.root_serial, *seq.token_ids[: (i + 1) * self.block_size])
                self.blocks.setdefault(prefix, seq.block_table[i])
            self.check()

        def forget(self, block_id):
            super().forget(block_id)
            gone = [prefix for prefix, one in self.blocks.items() if one == block_id]
            for prefix in gone:  # and all that begins with it
                self.blocks = {one: b for one, b in self.blocks.items() if one[: len(prefix)] != prefix}
            self.num_forgotten += len(gone)
            self.check()

        def check(self):
            assert sorted(self.nodes) == sorted(self.blocks.values())
            assert all(node.parent.children[node.cached.tokens] is node for node in self.nodes.values())

    return Checked


def test_random_traffic_has_the_cores_tokens_and_the_hits_of_a_dict(tree):
    requests = list(random_requests(random.Random(3), 60))
    expected = drive(LLM(MODEL, **OPTIONS).engine, requests, random.Random(4))
    llm = LLM(MODEL, **OPTIONS, prefix_cache_cls=checking(tree), scheduler_cls=tree.LongestPrefixFirst)
    assert drive(llm.engine, requests, random.Random(4)) == expected
    found = llm.engine.scheduler.block_manager.prefix_cache
    assert found.num_hits > 50
    assert found.num_forgotten > 50


def test_the_longest_hits_are_admitted_first(tree):
    """B shares two blocks with what ran before, C one, A none."""
    llm = LLM(MODEL, **{**OPTIONS, "max_num_seqs": 1}, extension=PATH)
    llm.generate([[*range(5, 17)]], use_tqdm=False)
    prompts = {"A": [*range(40, 52)], "B": [*range(5, 13), 99], "C": [*range(5, 9), 98]}
    for name, prompt in prompts.items():
        llm.engine.add_request(name, prompt)
    finished = []
    while llm.engine.has_unfinished_requests():
        finished += [output.request_id for output in llm.engine.step() if output.finished]
    assert finished == ["B", "C", "A"]


def test_sequences_with_other_roots_find_nothing(tree):
    llm = LLM(MODEL, **OPTIONS, extension=PATH)
    llm.generate([[*range(5, 17)]], use_tqdm=False)
    seq = Sequence("one", [*range(5, 17)], llm.engine.check_params(None))
    cache = llm.engine.scheduler.block_manager.prefix_cache
    assert len(cache.find(seq)) == 2
    seq.root_serial = 7
    assert cache.find(seq) == []


def test_a_root_goes_with_its_last_block(tree):
    """Requests with roots of their own, such as salted ones, leave no more roots than there are blocks."""
    blocks = BlockManager(8, 4, prefix_cache_cls=tree.RadixTree)
    scheduler = Scheduler(blocks, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=32)
    for root in range(100, 120):
        seq = Sequence(str(root), [*range(6)], SamplingParams(max_tokens=1))
        seq.root_serial = root
        scheduler.add(seq)
        scheduler.update(scheduler.schedule(), [9])
    cache = blocks.prefix_cache
    assert sorted(cache.roots) == sorted(node.cached.parent_serial for node in cache.nodes.values())
    assert 0 < len(cache.roots) <= 8
