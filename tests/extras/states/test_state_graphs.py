"""CUDA graphs of models with recurrent states, as far as they go without a GPU.

`recorded_operations.py` and `test_core_graphs.py` replace CUDA's recording: graphs of whole steps, and the core's of
the forward pass. The oracle are the tokens of `transformers`.

Broken by hand, and seen here: padding that writes to slot 1; slots of an older batch; states that are always read, or
never; a step with drafts that is replayed by PyTorch's layers; offsets that the host reads in a step of decodes.
"""

import random
from types import SimpleNamespace

import pytest
import torch

from nanovllm_extras import Config, SamplingParams
from nanovllm_extras.execution.chooser import Chooser
from nanovllm_extras.execution.forward_graphs import ForwardGraphs
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.execution.graph_inputs import MoreInputs, needs_rounds
from nanovllm_extras.execution.input_buffer import InputBuffer
from nanovllm_extras.execution.layout import Layout
from nanovllm_extras.execution.step_graphs import CudaGraphs, DecodeInputs, graph_sizes, measure_graph_bytes
from nanovllm_extras.kernels.cuda.flash_backend import FlashAttention
from nanovllm_extras.machine.own_process import SelfCheckError
from nanovllm_extras.memory.slots import NULL_SLOT
from nanovllm_extras.models.architectures import find_architecture
from nanovllm_extras.models.layer_inputs import StateMetadata
from nanovllm_extras.records.moves import Moves
from nanovllm_extras.sampling.runner_hooks import ArrivingTokens
from nanovllm_extras.self_check.state_check import StateCheck
from nanovllm_extras.self_check.stored_results import StoredResult
from tests.extras.cuda import test_core_graphs, test_graphs
from tests.extras.cuda.conftest import FakeCuda
from tests.extras.cuda.test_core_graphs import recorded  # noqa: F401 (a fixture)
from tests.extras.cuda.test_host_waits import (  # flash_attn and kernels are fixtures
    META,
    DeviceCheck,
    DeviceRecorder,
    KernelStandIn,
    OneCopy,
    flash_attn,  # noqa: F401
    kernels,  # noqa: F401
)
from tests.extras.failing_request import FailingError, isolating_engine
from tests.extras.models.hybrid_checkpoints import MAX_TOKENS, make_config
from tests.extras.models.test_qwen3_5_drafts import Knowing, drafting, texts_of
from tests.extras.speculation.test_mtp import check_draws, predicting, record_draws
from tests.extras.test_full_engine import greedy, run, tokens_of

CPU = torch.device("cpu")
POOL = {"block_size": 4, "num_kv_blocks": 120}
SWAP = {"preemption_mode": "swap", "swap_space_bytes": 1 << 20}
CASES = [  # (kind of model, options)
    ("Qwen3_5", {**POOL, "enable_overlap": True, "state_snapshot_interval": 2}),
    pytest.param("Lfm2", {**POOL, "num_kv_blocks": 19}, marks=pytest.mark.slow),
    pytest.param("Qwen3_5", {**POOL, **SWAP, "enable_overlap": True, "num_kv_blocks": 19}, marks=pytest.mark.slow),
]


def fill_with_garbage(engine):
    """In all blocks and slots but the null ones. A state that nobody has written is NaN, and would show."""
    engine.runner.kv_cache.tensor[:, :, 1:] = 50.0
    for states in engine.runner.layout.pool.states:
        states[:, 1:] = torch.nan


def check_tokens(engine, hybrids, num_prompts=None):
    """Two rounds, so that prompts find snapshots: requests come two by two, then together. They end one by one."""
    fill_with_garbage(engine)
    slots_in_use = set()
    watch_slots(engine, slots_in_use)
    prompts, all_ids = hybrids.prompts()[:num_prompts], [token_ids for token_ids, _ in hybrids.greedy()]
    is_tight = engine.parts.num_kv_blocks < 30  # long outputs are preempted
    lens = [MAX_TOKENS - (0 if is_tight else 3 * (i % 3)) for i in range(len(prompts))]  # of outputs
    expected = {str(i): all_ids[i][:length] for i, length in enumerate(lens)}
    for every in (2, 9):
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, greedy(lens[i]))
            if i % every == 1:
                engine.step()
        assert tokens_of(run(engine)) == expected
    pool = engine.runner.layout.pool
    for states in pool.states:
        written = {slot for slot in range(1, pool.num_slots + 1) if not states[:, slot].isnan().any()}
        assert written <= slots_in_use, "padding writes to the null slot only"
        assert states[:, NULL_SLOT].isfinite().all()


def watch_slots(engine, slots_in_use):
    """Note all slots that steps name, or copy to."""
    before = engine.runner.transfers.before

    def copy_and_note(moves):
        if isinstance(moves, Moves):
            slots_in_use.update(moves.slots, [destination for _, destination in moves.state_copies])
        before(moves)

    engine.runner.transfers.before = copy_and_note


# ---- what is sent


def decode_batch(num_seqs, seed, drafts=False):
    """Decodes of sequences of random lengths and slots; some begin. With drafts, every third row is one."""
    rng = random.Random(seed)
    batch = test_graphs.decode_batch(num_seqs, 4, rng.choice([1, 3, 36]), seed, temperature=0)
    slots = rng.sample(range(1, 40), num_seqs)
    sources = [slots[i - 1] if drafts and i % 3 == 2 else slot for i, slot in enumerate(slots)]
    batch.__dict__["copies"] = Moves(slots=slots, sources=sources)
    return batch


def inputs_of_states(has_drafts):
    return MoreInputs(has_states=True, has_drafts=has_drafts)


def check_rows(metadata, batch, num_seqs):
    moves = batch.copies
    assert type(metadata) is StateMetadata
    assert metadata.state_slots.dtype == metadata.state_sources.dtype == torch.int64
    assert metadata.is_first.dtype == torch.bool
    assert metadata.state_slots.tolist()[:num_seqs] == moves.slots
    assert metadata.state_sources.tolist()[:num_seqs] == moves.sources
    assert torch.equal(metadata.is_first[:num_seqs], batch.metadata.seq_lens == 1)
    assert (metadata.state_slots[num_seqs:] == NULL_SLOT).all()
    assert metadata.is_first[num_seqs:].all(), "padding reads no state"


BATCHES = [(13, 13), (3, 5), (1, 1), (5, 5), (2, 13), (12, 13)]


@pytest.mark.parametrize("has_drafts", [False, True])
def test_slots_arrive_in_their_places(has_drafts):
    inputs = DecodeInputs(13, 9, CPU, inputs_of_states(has_drafts))
    static = {size: inputs.batch(size).metadata for size in (1, 5, 13)}  # as a graph keeps them
    assert all((len(metadata.rounds) > 0) == has_drafts for metadata in static.values())
    for seed, (num_seqs, size) in enumerate(BATCHES):
        batch = decode_batch(num_seqs, seed, has_drafts)
        inputs.fill(batch, size)
        check_rows(static[size], batch, num_seqs)
        assert torch.equal(static[size].slot_mapping[:num_seqs], batch.metadata.slot_mapping)
        width = batch.metadata.block_tables.shape[1]
        assert torch.equal(static[size].block_tables[:num_seqs, :width], batch.metadata.block_tables)


def test_steps_with_drafts_are_replayed_only_where_the_device_finds_them():
    plain, drafted = decode_batch(5, 0), decode_batch(5, 0, drafts=True)
    assert [inputs_of_states(False).can_replay(batch) for batch in (plain, drafted)] == [True, False]
    assert [inputs_of_states(True).can_replay(batch) for batch in (plain, drafted)] == [True, True]


# ---- what is computed


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_replayed_steps_give_the_tokens_of_transformers(all_hybrids, monkeypatch, kind, options):
    hybrids = all_hybrids[kind]
    folder, _ = hybrids.make()
    _, replaying = test_graphs.make_engines(monkeypatch, folder, max_num_seqs=5, **options)
    assert needs_rounds(replaying.runner.model)
    addresses = [states.data_ptr() for states in replaying.runner.layout.pool.states]
    check_tokens(replaying, hybrids)
    stats = replaying.get_stats()
    assert replaying.recorder.num_recorded == 4  # 1, 2, 4, 5
    assert replaying.recorder.num_replays > 5
    assert (stats.num_preemptions > 0) == (options["num_kv_blocks"] < 30)
    assert stats.num_swaps == (stats.num_preemptions if "preemption_mode" in options else 0)
    assert stats.prefix_cache_hit_tokens > 0 or stats.num_preemptions, "few blocks are kept where preemptions are"
    assert [states.data_ptr() for states in replaying.runner.layout.pool.states] == addresses


def test_replayed_forward_passes_give_the_tokens_of_transformers(all_hybrids, monkeypatch, recorded):  # noqa: F811
    hybrids, options = all_hybrids["Qwen3_5"], {**POOL, "enable_overlap": False, "max_num_batched_tokens": 13}
    replaying = test_core_graphs.make_engine(monkeypatch, hybrids.make()[0], True, max_num_seqs=5, **options)
    assert type(replaying.runner.graphs) is ForwardGraphs
    check_tokens(replaying, hybrids)
    assert [size for size, _ in recorded] == [5, 4, 2, 1]
    assert sum(graph.num_replays for _, graph in recorded) > 5
    assert sum(graph.num_replays > 0 for _, graph in recorded) > 1, "sizes"


def test_a_first_step_that_fails_ahead_of_its_time_changes_no_token(all_hybrids, monkeypatch):
    """The step is launched while the tokens of others are unknown: replayed again, it needs them, and not its own."""
    hybrids, init = all_hybrids["Qwen3_5"], ArrivingTokens.__init__

    def copy(self, sampled):
        init(self, sampled._replace(token_ids=sampled.token_ids.clone()))  # as a copy from the device to the host

    monkeypatch.setattr(ArrivingTokens, "__init__", copy)
    monkeypatch.setattr(test_graphs, "LLMEngine", isolating_engine)
    options = {**POOL, "enable_overlap": True, "late": False}
    _, replaying = test_graphs.make_engines(monkeypatch, hybrids.make()[0], **options)

    def fail(output_token_ids, logits):
        raise FailingError

    for i, prompt in enumerate(hybrids.prompts()[:3]):
        replaying.add_request(str(i), prompt, greedy(MAX_TOKENS))
    outputs, is_added = {}, False
    while replaying.has_unfinished_requests():
        outputs |= {one.request_id: one.outputs[0].token_ids for one in replaying.step().outputs}
        if not is_added and all(len(outputs.get(str(i), ())) > 2 for i in range(3)):
            is_added = True
            params = SamplingParams(temperature=0, max_tokens=9, logits_processors=[fail])
            replaying.add_request("bad", [7], params)
    assert isinstance(replaying.faults.take_failures()["bad"], FailingError)
    assert [outputs[str(i)] for i in range(3)] == [token_ids for token_ids, _ in hybrids.greedy()[:3]]
    assert replaying.recorder.num_replays > 3


# ---- drafts


def test_layers_of_pytorch_compute_drafts_eagerly(all_hybrids, monkeypatch):
    """Other steps are replayed. `test_graph_kernels.py` has layers that find drafts on the device."""
    hybrids, replayed = all_hybrids["Qwen3_5"], []
    texts = texts_of(hybrids)
    replay = CudaGraphs.replay
    monkeypatch.setattr(CudaGraphs, "replay", lambda *args: replayed.append(args[1]) or replay(*args))
    options = {**POOL, "speculative_config": drafting(Knowing(texts))}
    _, replaying = test_graphs.make_engines(monkeypatch, hybrids.make()[0], max_num_seqs=5, **options)
    check_tokens(replaying, hybrids, 4)
    stats = replaying.get_stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert replayed
    assert all(batch.copies.slots == batch.copies.sources for batch in replayed)


def test_the_head_for_drafts_runs_behind_replayed_forward_passes(heads, monkeypatch, recorded):  # noqa: F811
    """Steps of the model without drafts are replayed. The head reads the hidden states that they return."""
    folder, model, head = heads.make(is_trained=False)
    options = {**POOL, "speculative_config": predicting(), "max_num_seqs": 5}
    replaying = test_core_graphs.make_engine(monkeypatch, folder, True, **options)
    draws = record_draws(replaying)
    check_tokens(replaying, heads.hybrids, 4)
    assert sum(graph.num_replays for _, graph in recorded) > 5
    check_draws(model, head, draws)


def test_graphs_of_whole_steps_have_no_head():
    """Where other models have them, only the forward pass of the model is recorded."""

    config = Config("model", speculative_config=predicting())
    layout = Layout(config, shape_of("Qwen3_5")[1], torch.float32, CPU)
    runner = SimpleNamespace(config=config, shape=layout.shape, layout=layout, device=torch.device("cuda"),
                             why_no_steps=layout.why_no_steps, slowest_backend=None,
                             max_num_batched_tokens=9, max_rows=3)  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        found = SimpleNamespace(replayed="step", note=", with CUDA graphs")
        patch.setattr("nanovllm_extras.execution.cuda_startup.CudaDevice", lambda *_, **__: found)
        device = Chooser().make_device(runner)
    assert device.replayed == "forward"
    assert device.note == ", with CUDA graphs of the forward pass only (without the head)"


# ---- the start


def test_graphs_are_measured_before_the_pool_has_slots(all_hybrids, monkeypatch):
    """As in the profile of the memory: there are only the null block and the null slot."""
    engine, _ = test_graphs.make_engines(monkeypatch, all_hybrids["Qwen3_5"].make()[0], **POOL)
    runner, cuda = engine.runner, FakeCuda(monkeypatch)
    runner.kv_cache.allocate(0)
    runner.layout.pool.num_slots = 0
    runner.layout.pool.allocate()
    arguments = (runner.network, runner.kv_cache.tensor, lambda logits, *_: logits.argmax(-1), 20, 32)
    expected = (107 << 20) + (len(graph_sizes(20)) - 1) * (7 << 20)
    assert measure_graph_bytes(*arguments, runner.more_inputs) == expected
    assert all(states.isfinite().all() for states in runner.layout.pool.states)
    assert cuda.events


# ---- on PyTorch's `meta` device, whose tensors have no data that the host could read


@pytest.fixture
def delta_kernels(kernels, monkeypatch):  # noqa: F811
    """Stand-ins of the kernels of Gated DeltaNet."""
    from nanovllm_extras.kernels.cuda import delta_chunks, delta_kernels

    found = {}
    for module in (delta_chunks, delta_kernels):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            found[name] = KernelStandIn(getattr(module, name))
            monkeypatch.setattr(module, name, found[name])
    return found


def shape_of(kind):
    return find_architecture({**make_config(kind).to_dict(), "architectures": [f"{kind}ForCausalLM"]})


def make_runner_on_meta(kind, has_kernels):
    model_class, shape = shape_of(kind)
    runner, buffer = ModelRunner.__new__(ModelRunner), InputBuffer(META, 1 << 20)
    backend = FlashAttention(shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, 16)
    with META:
        runner.model = model_class(shape, backend).to(torch.bfloat16)
    runner.model.model.rotary(torch.zeros(1, dtype=torch.int32, device=META), torch.bfloat16)  # moves its table
    if has_kernels:
        backend.make_fast(runner.model, 128)
    runner.config, runner.graphs, runner.device_setup = Config("model"), None, OneCopy(buffer)
    runner.layout = Layout(runner.config, shape, torch.bfloat16, META)
    [runner.kv_cache] = runner.layout.make_kv_caches((backend,))
    runner.kv_cache.allocate(9)
    runner.layout.pool.num_slots = 40
    runner.layout.pool.allocate()
    return runner, buffer


@pytest.mark.triton
@pytest.mark.parametrize(("kind", "has_kernels"), [("Qwen3_5", True), ("Lfm2", False)])
@torch.inference_mode()
def test_decodes_wait_for_nothing(flash_attn, delta_kernels, kind, has_kernels):  # noqa: F811
    """A recorded step does not read from the host. An eager one is one copy, which has the slots too."""
    from nanovllm_extras.kernels.cuda.sample import sample_tokens

    runner, buffer = make_runner_on_meta(kind, has_kernels)
    arguments = (runner.network, runner.kv_cache.tensor, sample_tokens, [1, 2, 5], 9, DeviceRecorder())
    CudaGraphs(*arguments, runner.more_inputs).record_all()
    for num_seqs in (1, 5):
        with DeviceCheck(buffer) as check:
            hidden = runner.forward(runner.send_batch(decode_batch(num_seqs, num_seqs)))
        assert check.num_copies == 1
        assert hidden.shape == (num_seqs, 64)
    has_launches = has_kernels and kind == "Qwen3_5"
    launches = {name: kernel.num_launches for name, kernel in delta_kernels.items() if kernel.num_launches}
    of_decodes = ("causal_conv_kernel", "gated_delta_kernel", "gated_norm_kernel")
    assert launches == (dict.fromkeys(of_decodes, 3 * 5) if has_launches else {})  # of three layers
    assert needs_rounds(runner.model) != has_launches


# ---- the self-check


def check_graphs(engine):
    StateCheck(engine.runner, StoredResult(engine.runner), None).compare_graphs()


def write_padding_to_slot_1(inputs, values):
    inputs.padding = {**inputs.padding, "state_slots": 1}
    return values


def read_other_slots(inputs, values):
    return {**values, "state_sources": values["state_sources"].roll(1)}


def read_no_state(inputs, values):
    return {**values, "is_first": torch.ones_like(values["is_first"])}


def test_the_self_check_finds_faults_in_graphs(all_hybrids, monkeypatch):
    folder, _ = all_hybrids["Qwen3_5"].make()
    _, engine = test_graphs.make_engines(monkeypatch, folder, late=False, **POOL)
    check_graphs(engine)
    assert engine.recorder.num_replays >= 6
    values_of = MoreInputs.values_of
    for fault in (read_other_slots, read_no_state, write_padding_to_slot_1):  # the last one stays
        monkeypatch.setattr(
            MoreInputs, "values_of", lambda self, batch, fault=fault: fault(self, values_of(self, batch))
        )
        with pytest.raises(SelfCheckError, match="wrong result: decodes by a CUDA graph: "):
            check_graphs(engine)
