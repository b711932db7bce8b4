"""The whole way of a step on CUDA, on CPU: Triton's attention, layers and draws, recorded and replayed, with overlap.

Collected only where the kernels can run: under TRITON_INTERPRET=1, which `test_triton_attention.py` sets for a process
that runs this file. `recorded_operations.py` replaces CUDA's recording. On a GPU, `test_gpu.py` has the real one.
The oracles are PyTorch's layers without any of it, and `transformers`.
"""

import os
import random

import pytest

from nanovllm_extras import Config, LLMEngine, SamplingParams
from nanovllm_extras.execution.device_setup import Device
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.execution.step_graphs import CudaGraphs, graph_sizes
from nanovllm_extras.kernels.cuda.cuda_decoder_layer import TritonDecoderLayer
from nanovllm_extras.kernels.cuda.cuda_gated_delta import TritonGatedDeltaNet
from nanovllm_extras.kernels.cuda.sample import sample_tokens
from nanovllm_extras.models.gemma4_layers import Gemma4DecoderLayer
from tests.conftest import hf_greedy
from tests.extras.kv_groups.test_grouped_layers import SWAP, GroupedCheckpoints
from tests.extras.late_runner import LateRunner
from tests.extras.models.hybrid_checkpoints import HybridCheckpoints, continue_all
from tests.extras.models.test_qwen3_5_drafts import Knowing, drafting, texts_of
from tests.extras.recorded_operations import OperationRecorder
from tests.extras.test_full_engine import assert_at_rest, greedy, ids, run, tokens_of

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("on a GPU, test_gpu.py records real graphs", allow_module_level=True)

SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64}
SHAPE = {**SMALL, "num_hidden_layers": 1}
OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 3, "block_size": 16}


def make_engine(monkeypatch, folder, layer_class=TritonDecoderLayer, **options):
    """As on CUDA: fast layers, draws in Triton, graphs, overlap. layer_class: what replaces the decoder layers"""
    recorder = OperationRecorder()

    class RecordingDevice(Device):
        def choose_draw(self, default):
            return sample_tokens

        def record(self, runner):
            max_rows, max_num_blocks = runner.largest_decode
            arguments = (runner.network, runner.kv_cache.tensor, runner.draw, graph_sizes(max_rows), max_num_blocks)
            runner.step_graphs = CudaGraphs(*arguments, recorder, runner.more_inputs)
            runner.step_graphs.record_all()

    monkeypatch.setattr(ModelRunner, "make_device", lambda runner: RecordingDevice())
    options = {"enable_overlap": True, **OPTIONS, **options}
    engine = LLMEngine(Config(folder, attention_backend="triton", **options))
    layer = engine.runner.model.model.layers[0]
    assert type(getattr(layer, "linear_attn", layer)) is layer_class
    assert engine.runner.step_graphs is not None
    return engine, recorder, LateRunner(engine) if options["enable_overlap"] else None


def serve(engine, requests):
    for i, (prompt, params) in enumerate(requests):
        engine.add_request(str(i), prompt, params)
    done = tokens_of(run(engine))
    assert_at_rest(engine)
    return done


def test_greedy_tokens_are_those_of_transformers(monkeypatch, checkpoints):
    folder, model = checkpoints.make(**SHAPE)
    engine, recorder, late = make_engine(monkeypatch, folder)
    prompts = [ids(n, seed=n) for n in (3, 16, 33, 1)]
    outputs = serve(engine, [(p, SamplingParams(temperature=0, max_tokens=3 + i)) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert outputs[str(i)] == hf_greedy(model, prompt, 3 + i)
    assert recorder.num_recorded == 3
    assert recorder.num_replays >= 4
    assert late.num_expected_ids > 8


@pytest.mark.slow
def test_mixtures_of_draws_are_those_of_eager_steps(monkeypatch, checkpoints):
    """With preemption, chunks, and mixed steps."""
    folder, _ = checkpoints.make(**SMALL, num_hidden_layers=2)
    rng = random.Random(0)
    kinds = [{}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.8, "min_p": 0.01},
             {"temperature": 0}, {"logprobs": 2}, {"repetition_penalty": 1.3}]  # fmt: skip
    requests = [
        (ids(rng.randint(13, 15), seed=i), SamplingParams(**{"temperature": 1.0, "seed": i, "max_tokens": 5, **kind}))
        for i, kind in enumerate(kinds)
    ]
    plain = LLMEngine(Config(folder, attention_backend="torch", enforce_eager=True, **OPTIONS))
    engine, recorder, _ = make_engine(monkeypatch, folder, num_kv_blocks=4, max_num_batched_tokens=24)
    assert serve(engine, requests) == serve(plain, requests)
    assert recorder.num_replays >= 6
    assert engine.get_stats().num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layer_class", "options"),
    [
        ("smollm3", TritonDecoderLayer, {"num_kv_blocks": 5, **SWAP}),
        ("gemma4_31b", Gemma4DecoderLayer, {"num_kv_blocks": 60}),  # attention over views of equal blocks
    ],
    ids=str,
)
def test_groups_of_layers_give_the_tokens_of_transformers(monkeypatch, tmp_path, name, layer_class, options):
    """Each layer with the slots and block tables of its group, in eager and replayed steps."""
    grouped = GroupedCheckpoints(tmp_path)
    folder, model = grouped.of(name)
    engine, recorder, _ = make_engine(monkeypatch, folder, layer_class, **{**options, "max_model_len": 128})
    assert engine.scheduler.block_manager.num_groups > 1
    prompts = [grouped.prompts()[i][:n] for i, n in ((4, 40), (1, 7), (5, 30))]
    outputs = serve(engine, [(prompt, greedy(14)) for prompt in prompts])
    assert [outputs[str(i)] for i in range(3)] == [tokens for tokens, _ in continue_all(model, prompts, 14)]
    assert recorder.num_replays > 3
    assert engine.get_stats().num_window_blocks > 0
    assert (engine.get_stats().num_swaps > 0) == ("swap_space_bytes" in options)


@pytest.mark.slow
def test_states_with_drafts_give_the_tokens_of_transformers(monkeypatch, tmp_path):
    """Layers with states find drafts on the device, so steps with drafts are replayed by the same graphs as others."""
    pytest.importorskip("transformers.models.qwen3_5")
    hybrids, copies, replay = HybridCheckpoints(tmp_path), [], CudaGraphs.replay
    monkeypatch.setattr(CudaGraphs, "replay", lambda *args: copies.append(args[1].copies) or replay(*args))
    options = {"num_kv_blocks": 9, "max_model_len": 80, "max_num_seqs": 2, "enable_overlap": False}
    options["max_num_batched_tokens"] = 16  # which drafts may fill: as many rows are recorded
    options["speculative_config"] = drafting(Knowing(texts_of(hybrids)), 3)
    engine, recorder, _ = make_engine(monkeypatch, hybrids.make()[0], TritonGatedDeltaNet, **options)
    prompts, expected = hybrids.prompts()[2:5:2], hybrids.greedy()[2:5:2]
    for _ in range(2):
        outputs = serve(engine, [(prompt, greedy(9)) for prompt in prompts])
        assert [outputs[str(i)] for i in range(2)] == [token_ids for token_ids, _ in expected]
    stats = engine.get_stats()
    assert {moves.slots == moves.sources for moves in copies} == {True, False}
    assert stats.num_accepted_tokens > 0
    assert stats.prefix_cache_hit_tokens > 0
    assert recorder.num_replays > 5
