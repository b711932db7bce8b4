"""Two ranks store and load recurrent states: the tokens of `transformers`, even if one rank has lost its share."""

import pytest

from tests.extras.models.hybrid_checkpoints import HybridCheckpoints
from tests.extras.models.test_qwen3_5 import make_llm
from tests.extras.models.test_stored_states import MEMORY, SMALL, check_loaded, in_folder, serve_each
from tests.extras.parallel.test_store_of_ranks import share_of_rank_1

TWO = {"tensor_parallel_size": 2}
VARIANTS = {
    "plain": ("Qwen3_5", {}),
    "overlap": ("Qwen3_5", {"enable_overlap": True}),
    "swap, chunks": ("Qwen3_5", {"preemption_mode": "swap", "swap_space_bytes": 1 << 20, "max_num_batched_tokens": 13}),
    "convolutions": ("Lfm2", {"state_snapshot_interval": 2}),
    "experts": ("Qwen3_5Moe", {}),
}
DEFAULT = ("overlap", "convolutions")


@pytest.fixture(scope="module")
def all_hybrids(tmp_path_factory):
    kinds = {kind for kind, _ in VARIANTS.values()}
    return {kind: HybridCheckpoints(tmp_path_factory.mktemp(kind), kind) for kind in kinds}


@pytest.mark.parametrize(
    "name", [one if one in DEFAULT else pytest.param(one, marks=pytest.mark.slow) for one in VARIANTS]
)
def test_tokens_are_those_of_transformers_after_eviction(all_hybrids, quick_ranks, name):
    kind, options = VARIANTS[name]
    with make_llm(all_hybrids[kind].make()[0], **{**SMALL, **options}, **MEMORY, **TWO) as llm:
        check_loaded(llm, serve_each(llm, all_hybrids[kind]))


@pytest.mark.parametrize("what", ["state", "block"])
def test_a_snapshot_or_block_that_one_rank_has_lost_is_computed_again(all_hybrids, quick_ranks, tmp_path, what):
    hybrids, folder = all_hybrids["Qwen3_5"], tmp_path / "blocks"
    options = {"kv_transfer_config": in_folder(folder), "block_size": 4, "num_kv_blocks": 120, **TWO}
    with make_llm(hybrids.make()[0], **options) as llm:
        serve_each(llm, hybrids, order=(3,))
    sizes = {path: path.stat().st_size for path in share_of_rank_1(folder)}
    size = {"state": max, "block": min}[what](sizes.values())
    lost = [path for path in sizes if sizes[path] == size]
    assert 0 < len(lost) < len(sizes)
    for path in lost[:1] if what == "state" else lost:
        path.unlink()
    with make_llm(hybrids.make()[0], **options) as llm:
        assert serve_each(llm, hybrids, order=(3,)).num_loaded_states == 0
        assert len(share_of_rank_1(folder)) == len(sizes), "it is saved again"
    with make_llm(hybrids.make()[0], **options) as llm:
        assert serve_each(llm, hybrids, order=(3,)).num_loaded_states == 1
