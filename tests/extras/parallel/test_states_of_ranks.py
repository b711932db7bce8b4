"""Several ranks serve models with recurrent states: the tokens of `transformers` in float32, and those of one rank.

Each rank has its heads of every state. The ranks are threads of this process. By default two cases run, and compare
with one rank only; the sweep (`pytest -m slow`) takes all.
"""

import pytest
import torch
from safetensors import safe_open

from nanovllm.layers.attention import TorchAttention
from nanovllm_extras import LLM, Config, SamplingParams
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.kernels.cpu.cpu_gated_delta import CpuGatedDeltaNet
from nanovllm_extras.models.architectures import find_architecture
from nanovllm_extras.models.gated_delta import GatedDeltaNet
from nanovllm_extras.parallel import joined
from nanovllm_extras.parallel import start_ranks as start
from nanovllm_extras.weights import cut
from nanovllm_extras.weights.cut import Cutter, read_part, share_of
from tests.extras.failing_request import isolating_engine, serve_beside_a_failing_one
from tests.extras.kernels.processors import need_a_compiler
from tests.extras.late_runner import LateRunner
from tests.extras.models.hybrid_checkpoints import MAX_TOKENS, HybridCheckpoints, make_config
from tests.extras.models.test_qwen3_5 import GREEDY, check_all_free, check_greedy, logprobs
from tests.extras.models.test_qwen3_5_drafts import Knowing, drafting, texts_of

pytest.importorskip("transformers.models.qwen3_5_moe")
SWAP = {"preemption_mode": "swap", "swap_space_bytes": 1 << 20}
ENGINES = {
    "one token at a time": {"max_num_batched_tokens": 1, "block_size": 4, "num_kv_blocks": 120},
    "budget of 7": {"max_num_batched_tokens": 7, "block_size": 1, "num_kv_blocks": 400},
    "chunks": {"max_num_batched_tokens": 13, "block_size": 4, "num_kv_blocks": 120, "state_snapshot_interval": 2},
    "preemption": {"max_num_batched_tokens": 64, "block_size": 4, "num_kv_blocks": 19},
    "swap": {"max_num_batched_tokens": 64, "block_size": 4, "num_kv_blocks": 19, **SWAP},
    "cpu": {"attention_backend": "cpu", "max_num_batched_tokens": 33, "block_size": 16, "num_kv_blocks": 60},
    "cpu, swap": {
        "attention_backend": "cpu",
        "max_num_batched_tokens": 64,
        "block_size": 16,
        "num_kv_blocks": 6,
        **SWAP,
    },
}
KINDS = ("Qwen3_5", "Qwen3_5Moe", "Lfm2")
VARIANTS = (("plain", 2), ("tied", 2), ("biases", 2), ("as many heads of keys", 4))
LFM2_VARIANTS = (("plain", 2), ("output layer", 2), ("biases", 2), ("narrow convolution", 2))  # states of convolutions
DEFAULT_CASES = [("Qwen3_5", "plain", 2, "swap"), ("Qwen3_5Moe", "plain", 2, "cpu"), ("Lfm2", "biases", 2, "chunks")]
SAMPLED = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)


def cases():
    """(kind of model, variant, number of ranks, engine). Four ranks need as many heads of keys."""
    for kind in KINDS:
        for variant, size in LFM2_VARIANTS if kind == "Lfm2" else VARIANTS:
            engines = list(ENGINES) if (kind, variant) == ("Qwen3_5", "plain") else list(ENGINES)[1::2]
            for engine in engines if variant in ("plain", "as many heads of keys") else ("chunks",):
                case = (kind, variant, size, engine)
                yield pytest.param(*case, marks=[] if case in DEFAULT_CASES else [pytest.mark.slow])


@pytest.fixture(scope="module")
def all_hybrids(tmp_path_factory):
    return {kind: HybridCheckpoints(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture
def hybrids(all_hybrids):
    return all_hybrids["Qwen3_5"]


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


@pytest.mark.parametrize(("kind", "variant", "size", "engine"), list(cases()))
@pytest.mark.thinned
def test_ranks_give_the_tokens_of_transformers_and_of_one(all_hybrids, request, kind, variant, size, engine):
    """Prompts come twice, so prefixes are found with their snapshots. Samples of a prompt are forked on all ranks."""
    is_cpu = engine.startswith("cpu")
    ranks = request.getfixturevalue("rank_threads" if is_cpu else "quick_ranks")
    if is_cpu:
        need_a_compiler(torch.float32)
    hybrids, options = all_hybrids[kind], ENGINES[engine]
    num, folder = 3 if engine == "one token at a time" else 6, hybrids.make(variant)[0]
    prompts, one = hybrids.prompts()[:num], make_llm(folder, **options)
    is_default = (kind, variant, size, engine) in DEFAULT_CASES
    expected = greedy_of(one, prompts) if is_default else hybrids.greedy(variant)[:num]
    samples = samples_of(one, prompts[:4])
    with make_llm(folder, tensor_parallel_size=size, **options) as llm:
        check_greedy(llm, prompts, expected)
        check_greedy(llm, prompts[::-1], expected[::-1])
        assert samples_of(llm, prompts[:4]) == samples
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
    assert stats.num_swaps == (stats.num_preemptions if "swap" in engine else 0)
    assert [rank.wait(10) for rank in ranks] == [0] * (size - 1)


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=pytest.mark.slow)])
def test_ranks_keep_the_state_after_the_accepted_drafts(hybrids, quick_ranks, backend):
    """Each row of a draft reads and writes the slots that rank 0 names, on all ranks."""
    options = {"block_size": 16 if backend == "cpu" else 4, "num_kv_blocks": 120, "attention_backend": backend}
    knowing = drafting(Knowing(texts_of(hybrids), share_right=0.7))
    with make_llm(hybrids.make()[0], tensor_parallel_size=2, speculative_config=knowing, **options) as llm:
        check_greedy(llm, hybrids.prompts(), hybrids.greedy())
        check_greedy(llm, hybrids.prompts()[::-1], hybrids.greedy()[::-1])
        stats = llm.get_stats()
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
        check_all_free(llm)


def test_all_ranks_have_as_many_slots(hybrids, quick_ranks, monkeypatch):
    """Each rank finds other free memory. All of them take the least, so their slots and blocks agree."""
    found, whole = [], ModelRunner.num_blocks_that_fit

    def num_blocks_that_fit(self):
        num_blocks = whole(self)
        found.append((num_blocks, self.layout.pool.num_slots, self.config.max_num_seqs))
        return num_blocks

    def free_bytes(self, runner):
        return 100_000 if runner.part.communicator.rank else 150_000

    one = make_llm(hybrids.make()[0], num_kv_blocks=120)
    monkeypatch.setattr(ModelRunner, "num_blocks_that_fit", num_blocks_that_fit)
    monkeypatch.setattr(start.Device, "free_bytes", free_bytes)
    with make_llm(hybrids.make()[0], tensor_parallel_size=2, block_size=4, max_num_batched_tokens=13) as llm:
        size = llm.engine.runner.layout.pool.bytes_per_slot
        assert size == 3 * 4 * (3 * 96 + 2 * 16 * 32), "half of the heads"
        assert found == [found[0]] * 2
        assert found[0][1:] == (100_000 // 2 // size - 1, llm.engine.scheduler.max_num_seqs) == (2, 2)
        check_greedy(llm, hybrids.prompts()[:3], greedy_of(one, hybrids.prompts()[:3]))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_ranks_quantise_their_own_weights(hybrids, rank_threads, backend):
    """A rank has other groups of inputs than the whole layer, so only scores of the first tokens are compared."""
    options = {"attention_backend": backend, "block_size": 16, "num_kv_blocks": 60, "quantization": "int8"}
    found = []
    for size in (1, 2):
        with make_llm(hybrids.make()[0], tensor_parallel_size=size, **options) as llm:
            found.append([scores[0] for _, scores in greedy_of(llm, hybrids.prompts())])
    assert found[1] == pytest.approx(found[0], abs=0.3)
    exact = [scores[0] for _, scores in hybrids.greedy()]
    assert found[1] == pytest.approx(exact, abs=0.3)


def test_a_request_that_fails_does_not_change_the_states_of_others(hybrids, quick_ranks):
    """The step runs again on all ranks, from the states that each of them has kept."""
    config = Config(model=hybrids.make()[0], device="cpu", dtype="float32", attention_backend="torch", block_size=4,
                    num_kv_blocks=120, max_num_seqs=8, max_num_batched_tokens=16, tensor_parallel_size=2)  # fmt: skip
    engine, prompts = isolating_engine(config), hybrids.prompts()[:4]

    expected = greedy_of(make_llm(hybrids.make()[0], num_kv_blocks=120), prompts)
    tokens = serve_beside_a_failing_one(engine, prompts, GREEDY)
    assert tokens == [token_ids for token_ids, _ in expected]


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
    ("Qwen3_5", {}, 2),
    ("Qwen3_5", {"linear_num_key_heads": 4, "linear_num_value_heads": 12, "linear_value_head_dim": 24}, 4),
    ("Qwen3_5Moe", {"tie_word_embeddings": True, "linear_conv_kernel_dim": 2}, 2),
    ("Lfm2", {}, 2),
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


def test_a_rank_reads_its_part_of_a_file(hybrids):
    """The layer of each rank holds the rows of the file, put together in the order that its forward pass expects."""
    folder, model = hybrids.make()
    whole, share = networks(2)
    name = "model.layers.0.linear_attn.in_proj_qkv.weight"
    q, k, v = model.model.layers[0].linear_attn.in_proj_qkv.weight.split((32, 32, 128))
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for rank in range(2):
            part = read_part(Cutter(rank, 2).cuts_of_checkpoint(whole, share), file, name)
            assert torch.equal(part, torch.cat([one.chunk(2)[rank] for one in (q, k, v)]))


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 4}, "tensor_parallel_size 4 must divide linear_num_key_heads, config.json has 2"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size 3 must divide num_attention_heads, config.json has 4"),
    ],
)  # fmt: skip
def test_what_ranks_do_not_do_is_refused_before_one_starts(hybrids, monkeypatch, options, message):
    def refuse(*_):
        raise AssertionError("a rank was started")

    monkeypatch.setattr(start, "start_peers", refuse)
    with pytest.raises(ValueError, match=message):
        make_llm(hybrids.make()[0], **options)


def test_channels_that_ranks_do_not_divide():
    """The heads of these layers do not tell the number of channels."""
    message = "tensor_parallel_size 3 must divide the channels of the layers' convolutions, config.json has 64"
    with pytest.raises(ValueError, match=message):
        networks(3, "Lfm2", num_attention_heads=3, num_key_value_heads=3, head_dim=32, intermediate_size=96,
                 block_auto_adjust_ff_dim=False)  # fmt: skip


def test_overlap_on_all_ranks(hybrids, quick_ranks):
    """Only rank 0 knows the newest tokens."""
    prompts, one = hybrids.prompts()[:4], make_llm(hybrids.make()[0], block_size=4, num_kv_blocks=120)
    expected = greedy_of(one, prompts)
    options = {"num_kv_blocks": 40, "block_size": 4, "enable_overlap": True, "state_snapshot_interval": 2}
    with make_llm(hybrids.make()[0], tensor_parallel_size=2, **options) as llm:
        late = LateRunner(llm.engine)
        check_greedy(llm, prompts, expected)
        check_greedy(llm, prompts[::-1], expected[::-1])
        assert late.num_expected_ids > 10


# ---- planted faults


def channels_of_another_rank(monkeypatch):
    """The rows of q, k and v are cut as one piece."""
    monkeypatch.setattr(cut, "stacked_in", lambda network, parent, name, *default: list(default))


def decays_of_the_first_rank(monkeypatch):
    right = Cutter.cut

    def wrong(self, layer, share, name, *arguments):
        found = right(self, layer, share, name, *arguments)
        return found._replace(spans=((0, found.part[0]),)) if name == "A_log" else found

    monkeypatch.setattr(Cutter, "cut", wrong)


def no_sum_after_the_layer(monkeypatch):
    monkeypatch.setattr(joined, "HALVES", ("self_attn", "mlp"))


def states_of_other_slots_on_rank_1(monkeypatch):
    right = ModelRunner.run

    def run(self, batch, is_replayed=None):
        if self.part.communicator.rank:
            batch.copies.slots = batch.copies.sources = [1] * len(batch.copies.slots)
        return right(self, batch, is_replayed)

    monkeypatch.setattr(ModelRunner, "run", run)


def no_copies_of_states_on_rank_1(monkeypatch):
    right = ModelRunner.run

    def run(self, batch, is_replayed=None):
        if self.part.communicator.rank:
            batch.copies.state_copies = []
        return right(self, batch, is_replayed)

    monkeypatch.setattr(ModelRunner, "run", run)


FAULTS = [channels_of_another_rank, decays_of_the_first_rank, no_sum_after_the_layer, states_of_other_slots_on_rank_1,
          no_copies_of_states_on_rank_1]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_changes_tokens(hybrids, quick_ranks, plant, monkeypatch):
    plant(monkeypatch)
    expected = [token_ids for token_ids, _ in hybrids.greedy()]
    with make_llm(hybrids.make()[0], tensor_parallel_size=2, **ENGINES["swap"]) as llm:
        found = [[one.outputs[0].token_ids for one in llm.generate(hybrids.prompts(), GREEDY, use_tqdm=False)]
                 for _ in range(2)]  # fmt: skip
    assert found != [expected] * 2


def test_the_network_has_the_layers_that_are_cut():
    whole, share = networks(2)
    layers = [[one for one in network.modules() if isinstance(one, GatedDeltaNet)] for network in (whole, share)]
    assert [(one.num_key_heads, one.num_heads) for one in (layers[0][0], layers[1][0])] == [(2, 4), (1, 2)]
