"""The memory tier against a plain model of it, chains of tiers, and the names of blocks."""

import errno
import json
import random
import shutil
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm_extras.kv_store.keys import digest_model, make_root_key, names_of
from nanovllm_extras.kv_store.memory_tier import MemoryTier
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.records.tier import BlockName, Chain, Tier
from tests.conftest import examples

SIZE = 8  # bytes of a block


def name(i, tokens=b"t"):
    return BlockName(bytes([i]) * 32, tokens)


def data(i):
    return np.full(SIZE, i, dtype=np.uint8)


def load(tier, block):
    out = np.zeros(SIZE, dtype=np.uint8)
    return out.tolist() if tier.load(block, out) else None


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["save", "match", "load", "failed"]), st.integers(0, 5)), max_size=40))
def test_memory_tier_is_a_bounded_dict_that_evicts_the_least_recently_used(calls):
    tier, model = MemoryTier(3 * SIZE + 1), OrderedDict()
    for call, i in calls:
        if call == "save":
            tier.save(name(i), saved := data(i))
            saved[:] = 99  # the tier has a copy
            if i not in model and len(model) == 3:
                model.popitem(last=False)
            model.setdefault(i, data(i).tolist())
        elif call == "match":
            names = [name((i + j) % 6) for j in range(4)]
            found = next((j for j in range(4) if (i + j) % 6 not in model), 4)
            assert tier.match(names) == found
            for j in reversed(range(found)):
                model.move_to_end((i + j) % 6)
        elif call == "load":
            assert load(tier, name(i)) == model.get(i)
        else:
            tier.failed(name(i))
            model.pop(i, None)
        assert tier.num_bytes == SIZE * len(model) == SIZE * len(tier) <= tier.max_bytes


def test_a_collision_of_keys_is_a_miss():
    tier = MemoryTier(100)
    tier.save(name(1, b"tokens"), data(1))
    assert tier.match([name(1, b"others")]) == 0
    assert load(tier, name(1, b"others")) is None
    assert (tier.stats.hits, tier.stats.misses) == (0, 1)


def test_a_block_of_another_size_is_not_loaded():
    tier = MemoryTier(100)
    tier.save(name(1), data(1))
    assert not tier.load(name(1), np.zeros(SIZE - 1, dtype=np.uint8))


def test_a_block_larger_than_the_tier_is_not_kept():
    tier = MemoryTier(SIZE - 1)
    tier.save(name(1), data(1))
    assert (len(tier), tier.num_bytes, tier.stats.evictions) == (0, 0, 0)


class Raising(Tier):
    name = "raising"

    def match(self, blocks):
        raise OSError("match")

    load = save = failed = finished = close = lambda self, *_: Raising.match(self, ())


def test_a_chain_finds_blocks_in_different_tiers_and_saves_slow_ones_to_the_faster():
    fast, slow = MemoryTier(100), MemoryTier(100)
    slow.name = "slow"
    for i, tier in ((0, fast), (1, slow), (2, slow), (3, fast)):
        tier.save(name(i), data(i))
    chain = Chain([fast, slow])
    assert chain.match([name(i) for i in range(6)]) == 4
    assert [load(chain, name(i)) for i in range(5)] == [data(i).tolist() for i in range(4)] + [None]
    assert fast.match([name(i) for i in range(4)]) == 4


def test_a_tier_that_raises_is_passed_over(caplog):
    good = MemoryTier(100)
    chain = Chain([Raising(), good, Raising()])
    chain.save(name(1), data(1))
    chain.finished()
    assert chain.match([name(1), name(2)]) == 1
    assert load(chain, name(1)) == data(1).tolist()
    chain.failed(name(1))
    assert chain.match([name(1)]) == 0
    chain.close()
    assert [tier.stats.failures for tier in chain.tiers] == [9, 0, 6]
    assert len(caplog.records) == 2, "one for each tier"


def test_each_cause_has_a_line_of_its_own(caplog):
    """Of each tier, also if the tier itself has counted failures before."""
    errors = [OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "damaged"), ValueError("no such block"), KeyError(1)]

    class Failing(MemoryTier):
        def save(self, block, data):
            raise self.error

    chain = Chain([Failing(100), Failing(100)])
    chain.tiers[0].stats.failures = 7
    for error in errors * 2:
        for tier in chain.tiers:
            tier.error = error
        chain.save(name(1), data(1))
    assert [record.args[-1] for record in caplog.records] == [error for error in errors for _ in range(2)]
    assert [tier.stats.failures for tier in chain.tiers] == [7 + 8, 8]


def test_a_chain_believes_no_number_beyond_what_it_asked():
    liar = MemoryTier(100)
    liar.match = lambda blocks: 99
    assert Chain([liar]).match([name(1), name(2)]) == 2
    liar.match = lambda blocks: -3
    assert Chain([liar]).match([name(1)]) == 0


# ---- names


def seq_of(token_ids):
    return Sequence("a", token_ids, SamplingParams())


def test_names_are_equal_exactly_if_the_prefixes_are():
    rng = random.Random(0)
    by_name = {}
    for _ in range(60):
        tokens = [rng.randint(0, 1) for _ in range(12)]
        for i, block in enumerate(names_of(seq_of(tokens), 0, 3, bytes(32), 4)):
            prefix = tuple(tokens[: 4 * (i + 1)])
            assert by_name.setdefault(block.key, prefix) == prefix
            assert block.tokens == np.array(prefix[-4:], dtype="<i4").tobytes()
    assert len(set(by_name.values())) == len(by_name)


def test_names_do_not_depend_on_when_they_are_asked_for():
    tokens = list(range(20))
    at_once = names_of(seq_of(tokens), 0, 5, bytes(32), 4)
    seq = seq_of(tokens)
    assert [*names_of(seq, 2, 3, bytes(32), 4), *names_of(seq, 3, 5, bytes(32), 4)] == at_once[2:]
    assert names_of(seq, 0, 2, bytes(32), 4) == at_once[:2]


def test_another_root_gives_other_keys():
    one, two = (names_of(seq_of([1, 2]), 0, 1, make_root_key({"dtype": d}), 2)[0] for d in ("a", "b"))
    assert one.key != two.key
    assert one.tokens == two.tokens


INDEX = "model.safetensors.index.json"
PARTS = {"a": "shards/1.safetensors", "b": "shards/deep/2.safetensors"}  # tensor -> file
CHECKPOINTS = {  # load_format, the files that are read, and others
    "one file": ("auto", ["model.safetensors"], [INDEX, "other.safetensors", "tokenizer.json"]),
    "several files": ("safetensors", ["1.safetensors", "2.safetensors"], ["deep/3.safetensors", "notes.txt"]),
    "an index": ("auto", [INDEX, *PARTS.values()], ["1.safetensors", "shards/old.safetensors"]),
    "GGUF": ("gguf", ["model-Q8_0.gguf"], ["model.safetensors", INDEX]),
    "none": ("dummy", [], ["model.safetensors", "x.gguf"]),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_digest_depends_on_all_files_that_are_read_and_no_others(tmp_path, name):
    load_format, read, others = CHECKPOINTS[name]
    for file in ["config.json", *read, *others]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(json.dumps({"weight_map": PARTS}) if file == INDEX else file)
    copy = shutil.copytree(tmp_path, tmp_path / "copy")
    first = digest_model(tmp_path, load_format)
    assert digest_model(copy, load_format) == first
    for file in ["config.json", *read, *others]:
        old = (tmp_path / file).read_text()
        # as long as before, and with the same files
        new = json.dumps({"weight_map": dict(zip("ba", PARTS.values(), strict=True))}) if file == INDEX else old[::-1]
        assert len(new) == len(old)
        (tmp_path / file).write_text(new)
        assert (digest_model(tmp_path, load_format) == first) == (file in others), file
        (tmp_path / file).write_text(old)
        assert digest_model(tmp_path, load_format) == first
