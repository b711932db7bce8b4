"""Several ranks serve models with recurrent states: the tokens and scores of one rank.

Each rank has its heads of every state. The ranks are threads of this process. `tests/extras/models` compares one rank
with `transformers`, and `tests/extras/test_pairs.py` has drafts, overlap, a K/V store and more beside ranks.
"""

import pytest
import torch

from nanovllm.layers.attention import TorchAttention
from nanovllm_extras import LLM, SamplingParams
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.kernels.cpu.cpu_gated_delta import CpuGatedDeltaNet
from nanovllm_extras.models.architectures import find_architecture
from nanovllm_extras.parallel import start_ranks as start
from nanovllm_extras.weights.cut import Cutter, share_of
from tests.extras.kernels.processors import need_a_compiler
from tests.extras.models.hybrid_checkpoints import MAX_TOKENS, make_config
from tests.extras.models.test_qwen3_5 import GREEDY, check_all_free, check_greedy, logprobs

POOL = {"block_size": 4, "num_kv_blocks": 120}
SWAP = {"preemption_mode": "swap", "swap_space_bytes": 1 << 20}
CPU = {"attention_backend": "cpu", "block_size": 16}
CASES = [  # (kind of model, variant, number of ranks, options). Four ranks need as many heads of keys.
    ("Qwen3_5", "plain", 2, {**POOL, **SWAP, "num_kv_blocks": 19}),
    ("Qwen3_5Moe", "plain", 2, {**CPU, "num_kv_blocks": 60, "max_num_batched_tokens": 33}),
    ("Lfm2", "biases", 2, {**POOL, "max_num_batched_tokens": 13, "state_snapshot_interval": 2}),
    pytest.param("Qwen3_5", "as many heads of keys", 4, {**CPU, **SWAP, "num_kv_blocks": 6}, marks=pytest.mark.slow),
    pytest.param("Qwen3_5", "tied", 2, {**POOL, "max_num_batched_tokens": 7}, marks=pytest.mark.slow),
    pytest.param("Lfm2", "output layer", 2, {**POOL, "num_kv_blocks": 19}, marks=pytest.mark.slow),
]
SAMPLED = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)


def make_llm(folder, **options):
    options = {"attention_backend": "torch", "max_num_seqs": 8, **options}
    return LLM(folder, dtype="float32", device="cpu", **options)


def greedy_of(llm, prompts):
    """For each prompt: its continuation, and the log-probability of each of its tokens."""
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [(output.outputs[0].token_ids, logprobs(output.outputs[0])) for output in outputs]


def samples_of(llm, prompts):
    outputs = llm.generate(prompts, SAMPLED, use_tqdm=False)
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


@pytest.mark.parametrize(("kind", "variant", "size", "options"), CASES, ids=str)
def test_ranks_give_the_tokens_of_one(all_hybrids, request, kind, variant, size, options):
    """Prompts come twice, so prefixes are found with their snapshots. Samples of a prompt are forked on all ranks."""
    is_cpu = "attention_backend" in options
    ranks = request.getfixturevalue("rank_threads" if is_cpu else "quick_ranks")
    if is_cpu:
        need_a_compiler(torch.float32)
    hybrids = all_hybrids[kind]
    folder, prompts = hybrids.make(variant)[0], hybrids.prompts()
    one = make_llm(folder, **options)
    expected, samples = greedy_of(one, prompts), samples_of(one, prompts[:2])
    with make_llm(folder, tensor_parallel_size=size, **options) as llm:
        check_greedy(llm, prompts, expected)
        check_greedy(llm, prompts[::-1], expected[::-1])
        assert samples_of(llm, prompts[:2]) == samples
        check_all_free(llm)
        stats, runner = llm.get_stats(), llm.engine.runner
        num_fast = sum(isinstance(module, CpuGatedDeltaNet) for module in runner.model.modules())
    if kind == "Lfm2":
        assert runner.layout.pool.recurrent.numel() == 0
        assert runner.layout.pool.conv.shape[3] == 64 // size
    else:
        assert num_fast == (3 if is_cpu else 0)
        assert runner.layout.pool.recurrent.shape[2:] == (4 // size, 16, 32)
        assert runner.layout.pool.conv.shape[3] == (192 if size == 2 else 256) // size
    assert stats.prefix_cache_hit_tokens > 0 or stats.num_preemptions, "few blocks are kept where preemptions are"
    assert (stats.num_preemptions > 0) == (options["num_kv_blocks"] < 30)
    assert stats.num_swaps == (stats.num_preemptions if "preemption_mode" in options else 0)
    assert [rank.wait(60) for rank in ranks] == [0] * (size - 1)


def test_all_ranks_have_as_many_slots(all_hybrids, quick_ranks, monkeypatch):
    """Each rank finds other free memory. All of them take the least, so their slots and blocks agree."""
    found, whole = [], ModelRunner.num_blocks_that_fit

    def num_blocks_that_fit(self):
        num_blocks = whole(self)
        found.append((num_blocks, self.layout.pool.num_slots, self.config.max_num_seqs))
        return num_blocks

    def free_bytes(self, runner):
        return 100_000 if runner.part.communicator.rank else 150_000

    hybrids = all_hybrids["Qwen3_5"]
    one = make_llm(hybrids.make()[0], num_kv_blocks=120)
    monkeypatch.setattr(ModelRunner, "num_blocks_that_fit", num_blocks_that_fit)
    monkeypatch.setattr(start.Device, "free_bytes", free_bytes)
    with make_llm(hybrids.make()[0], tensor_parallel_size=2, block_size=4, max_num_batched_tokens=13) as llm:
        size = llm.engine.runner.layout.pool.bytes_per_slot
        assert size == 3 * 4 * (3 * 96 + 2 * 16 * 32), "half of the heads"
        assert found == [found[0]] * 2
        assert found[0][1:] == (100_000 // 2 // size - 1, llm.engine.scheduler.max_num_seqs) == (2, 2)
        check_greedy(llm, hybrids.prompts()[:3], greedy_of(one, hybrids.prompts()[:3]))


# ---- weights


def networks(size, kind="Qwen3_5", **fields):
    """The whole network and the share of one of `size` ranks, without memory."""
    raw = {**make_config(kind, **fields).to_dict(), "architectures": [f"{kind}ForCausalLM"]}
    model_class, shape = find_architecture(raw)
    backend = TorchAttention(1, 1, 16, 16)  # nothing is computed
    with torch.device("meta"):
        return model_class(shape, backend), model_class(share_of(shape, size), backend)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_has_the_channels_of_its_heads(rank):
    """2 heads of keys of 16 channels and 4 of values of 32, on two ranks: counted by hand."""
    cuts = Cutter(rank, 2).cuts_of_checkpoint(*networks(2))
    of_qkv = [((0, 16), (32, 48), (64, 128)), ((16, 32), (48, 64), (128, 192))][rank]  # q, k, v
    expected = {
        "in_proj_qkv.weight": (0, of_qkv),
        "conv1d.weight": (0, of_qkv),
        "in_proj_z.weight": (0, ((64 * rank, 64 * rank + 64),)),
        "in_proj_a.weight": (0, ((2 * rank, 2 * rank + 2),)),
        "in_proj_b.weight": (0, ((2 * rank, 2 * rank + 2),)),
        "A_log": (0, ((2 * rank, 2 * rank + 2),)),
        "dt_bias": (0, ((2 * rank, 2 * rank + 2),)),
        "norm.weight": (0, ((0, 32),)),
        "out_proj.weight": (1, ((64 * rank, 64 * rank + 64),)),
    }
    found = {name.partition(".linear_attn.")[2]: one for name, one in cuts.items() if "layers.0.linear_attn" in name}
    assert {name: (one.dim, one.spans) for name, one in found.items()} == expected


@pytest.mark.parametrize(("kind", "fields", "size"), [
    ("Qwen3_5", {"linear_num_key_heads": 4, "linear_num_value_heads": 12, "linear_value_head_dim": 24}, 4),
    ("Qwen3_5Moe", {"tie_word_embeddings": True, "linear_conv_kernel_dim": 2}, 2),
    ("Lfm2", {"num_attention_heads": 4, "num_key_value_heads": 2, "block_auto_adjust_ff_dim": False,
              "intermediate_size": 96}, 4),
])  # fmt: skip
def test_the_parts_together_are_the_checkpoint(kind, fields, size):
    """Each value of a random checkpoint is held by one rank, or by all where the parts have the whole shape."""
    whole, share = networks(size, kind, **fields)
    all_cuts = [Cutter(rank, size).cuts_of_checkpoint(whole, share) for rank in range(size)]
    for name, first in all_cuts[0].items():
        if "self_attn" in name:  # `test_cut.py` has attention
            continue
        tensor, times = torch.randn(first.whole), torch.zeros(first.whole)
        for cuts in all_cuts:
            part, start = cuts[name].of(tensor), 0
            assert part.shape == first.part
            for begin, end in cuts[name].spans:
                held = part.narrow(first.dim, start, end - begin)
                assert torch.equal(held, tensor.narrow(first.dim, begin, end - begin)), name
                times.narrow(first.dim, begin, end - begin).add_(1)
                start += end - begin
        assert (times == (size if first.part == first.whole else 1)).all(), name


OF_THREE_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 32, "intermediate_size": 96}


@pytest.mark.parametrize(
    ("size", "kind", "fields", "message"),
    [
        (4, "Qwen3_5", {}, "4 must divide linear_num_key_heads, config.json has 2"),
        (3, "Qwen3_5", {}, "3 must divide num_attention_heads, config.json has 4"),
        # the heads of these layers do not tell the number of channels
        (3, "Lfm2", {**OF_THREE_HEADS, "block_auto_adjust_ff_dim": False},
         "3 must divide the channels of the layers' convolutions, config.json has 64"),
    ],
)  # fmt: skip
def test_what_ranks_do_not_divide_is_refused(size, kind, fields, message):
    with pytest.raises(ValueError, match=f"tensor_parallel_size {message}"):
        networks(size, kind, **fields)
