"""Two ranks give what one rank gives for every kind of request, with layers that `test_shared_passes.py` does not have.

These are layers with states and with K and V of different shapes, and drafts that a network makes. The requests are
those of `test_shared_passes.py`: log-probabilities of prompts and outputs, samples, penalties, logits processors,
structured outputs, embeddings and beams.
"""

import pytest

from nanovllm_extras import LLM
from tests.extras.models.gemma4_checkpoints import make_gemma4
from tests.extras.models.hybrid_checkpoints import HybridCheckpoints
from tests.extras.parallel.shareable import VOCAB_SIZE
from tests.extras.parallel.test_shared_passes import serve
from tests.extras.speculation.test_mtp import Heads, predicting
from tests.tiny_tokenizers import byte_level

CASES = {  # name -> (kind of model, options of two ranks)
    "states, overlap": ("Qwen3_5", {"enable_overlap": True, "num_kv_blocks": 80}),
    "states, preemption": ("Qwen3_5", {"num_kv_blocks": 30}),
    "states, mtp": ("Qwen3_5 with a head", {"num_kv_blocks": 80, "speculative_config": predicting()}),
    "states of convolutions": ("Lfm2", {"num_kv_blocks": 80, "max_num_batched_tokens": 17}),
    "shapes": ("Gemma4", {"num_kv_blocks": 200}),
    "draft model": ("qwen3", {"num_kv_blocks": 60}),
    "draft model, chunks": ("qwen3", {"num_kv_blocks": 60, "max_num_batched_tokens": 17}),
}
DEFAULT = ("states, mtp", "states of convolutions", "draft model, chunks")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory, shareable):
    def make(kind):
        if kind == "qwen3":
            return shareable.make(kind, "biases", 2)[0]
        root = tmp_path_factory.mktemp("models")
        if kind == "Gemma4":
            folder = make_gemma4(root / "gemma4", vocab_size=VOCAB_SIZE, vocab_size_per_layer_input=VOCAB_SIZE)[0]
        elif kind == "Qwen3_5 with a head":
            heads = Heads(root)
            heads.hybrids.variants = {"plain": {"vocab_size": VOCAB_SIZE}}
            folder = heads.make(is_trained=False)[0]
        else:
            hybrids = HybridCheckpoints(root, kind)
            hybrids.variants = {"plain": {"vocab_size": VOCAB_SIZE}}
            folder = hybrids.make()[0]
        byte_level().save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize(
    "case", [one if one in DEFAULT else pytest.param(one, marks=pytest.mark.slow) for one in CASES]
)
def test_ranks_give_what_one_gives(folder_of, quick_ranks, case):
    kind, options = CASES[case]
    folder, plain = (
        folder_of(kind),
        {"attention_backend": "torch", "dtype": "float32", "device": "cpu", "block_size": 4},
    )
    if "draft model" in case:
        drafting = {"model": str(folder), "num_speculative_tokens": 2, "disable_by_batch_size": 99}
        options = {**options, "speculative_config": drafting}
    expected = serve(LLM(folder, **plain), "")
    with LLM(folder, tensor_parallel_size=2, **plain, **options) as llm:
        found, stats = serve(llm, ""), llm.get_stats()
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], abs=2e-4)
    assert (stats.num_draft_tokens > 0) == ("speculative_config" in options)
    assert (stats.num_preemptions > 0) == ("preemption" in case)
    assert [rank.wait(10) for rank in quick_ranks] == [0]
