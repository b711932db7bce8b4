"""Two ranks store and load recurrent states: the tokens of `transformers`, even if one rank has lost its share."""

import pytest

from tests.extras.models.test_qwen3_5 import make_llm
from tests.extras.models.test_stored_states import in_folder, serve_each
from tests.extras.parallel.test_store_of_ranks import share_of_rank_1

TWO = {"tensor_parallel_size": 2}


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
