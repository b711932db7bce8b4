"""Benchmarks of models with recurrent states: what they count, against transformers' and the engine's own numbers."""

import argparse
import json

import pytest
import torch
import transformers

from benchmarks import hybrids, snapshots
from benchmarks.common import ModelShape
from benchmarks.hybrids import QWEN35_08B
from benchmarks.roofline import Rates, roofline
from nanovllm_extras.weights.checkpoint import read_model_config
from tests.extras.models.hybrid_checkpoints import make_config

pytest.importorskip("transformers.models.qwen3_5")


@pytest.fixture
def tiny(tmp_path):
    """A folder with the config.json of a small model, every fourth layer of which attends."""
    folder = tmp_path / "tiny-hybrid"
    folder.mkdir()
    fields = {"layer_types": None, "num_hidden_layers": 8, "tie_word_embeddings": True, "linear_value_head_dim": 16,
              "rms_norm_eps": 1e-6}  # fmt: skip
    config = make_config(**fields).to_dict() | {"architectures": ["Qwen3_5ForCausalLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def transformers_model(folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


# ---- shapes


@pytest.mark.parametrize("name", ["tiny", "0.8B"])
def test_parameters_equal_the_models(tiny, name):
    """Those of matrix products: of the layers with states, and of attention, whose queries have a gate."""
    folder = tiny if name == "tiny" else QWEN35_08B
    model, shape = transformers_model(folder), ModelShape.from_folder(folder)
    linear = [module for module in model.model.layers.modules() if isinstance(module, torch.nn.Linear)]
    assert sum(module.weight.numel() for module in linear) == shape.body_params
    assert model.lm_head.weight.numel() == shape.head_params


@pytest.mark.parametrize("name", ["tiny", "0.8B"])
def test_sizes_of_states_equal_the_engines(tiny, name):
    folder = tiny if name == "tiny" else QWEN35_08B
    shape, engines = ModelShape.from_folder(folder), read_model_config(folder)[1]
    assert shape.delta.bytes_per_sequence(2) == engines.state_shape.bytes_per_slot(torch.bfloat16)
    assert shape.delta.num_layers == engines.state_shape.num_layers
    num_attending = engines.num_hidden_layers - engines.state_shape.num_layers
    assert shape.num_attention_layers == num_attending
    assert shape.kv_values_per_token == num_attending * 2 * engines.num_key_value_heads * engines.head_dim


def test_what_qwen35_08b_reads_and_computes():
    """By hand: 18 states of 16 · 128 · 128 float32, and 6 layers with 2 · 2 · 256 keys and values per token."""
    shape = ModelShape.from_folder(QWEN35_08B)
    weights = shape.body_params + shape.head_params
    assert weights == 751_894_528
    bound = roofline(shape, [64, 64], [2, 2], 0, 2, Rates(1e9, 1e15))
    assert bound.decode_bytes == 2 * weights + 2 * (65 * 6_144 * 2 + 2 * 18 * 16 * 128 * 128 * 4)
    assert bound.decode_flops == 2 * (2 * weights + 3 * 2 * 18 * 16 * 128 * 128 + 65 * 6 * 8 * 4 * 256)
    alone = roofline(shape, [64], [1], 0, 2, Rates(1e9, 1e9))
    pairs = 64 * 65 // 2 * 6 * 8 * 4 * 256
    body = 64 * (2 * shape.body_params + 3 * 2 * 18 * 16 * 128 * 128)
    assert alone.prefill_flops == body + pairs + 2 * shape.head_params


# ---- engines


def report_of(workload, seconds, rate):
    """What `benchmarks.offline` reports. The roofline is 0.01 s for a prompt, and 0.002 s for a decode step."""
    times = {"ttft_s": {"p50": seconds}, "tpot_s": {"p50": seconds}}
    bound = {"prefill_s": 0.01, "decode_s": 0.064, "num_decode_steps": 32}
    return {"workload": "random", "roofline": bound, "output_tokens_per_second": rate, **times}


def test_engines_take_turns_and_a_missing_architecture_is_named(run_main, monkeypatch, tmp_path):
    order, seconds = [], iter([0.02, 0.04, 0.004, 0.008, 0.016, 0.005, 0.06, 0.1])

    def run_undisturbed(plan, engine, workload, repeat):
        if engine == "llamacpp":
            raise RuntimeError("Traceback …\nValueError: llama-cpp-python 0.3.1 cannot load the architecture qwen35\n")
        order.append((repeat, workload, engine))
        return {"label": engine, "repeat": repeat, **report_of(workload, next(seconds), 1.0)}

    monkeypatch.setattr(hybrids, "run_undisturbed", run_undisturbed)
    path = tmp_path / "out.json"
    options = ["--engines", "nanovllm", "hf", "llamacpp", "--num-seqs", 8, "--repeats", 2, "--json", path]
    lines = run_main(hybrids, *options)
    prefill, decode = "prefill of 512 tokens", "decode of 8 sequences"
    assert order == [
        (0, prefill, "nanovllm"), (0, prefill, "hf"), (0, decode, "nanovllm"), (0, decode, "hf"),
        (1, prefill, "hf"), (1, prefill, "nanovllm"), (1, decode, "hf"), (1, decode, "nanovllm"),
    ]  # fmt: skip
    assert lines[2] == "| prefill of 512 tokens | 12.5 (125%) | 28.0 (44%) |"
    assert lines[3] == "| decode of 8 sequences | 52.0 (26%) | 34.0 (14%) |"
    reason = "ValueError: llama-cpp-python 0.3.1 cannot load the architecture qwen35"
    assert lines[4] == f"llamacpp is not in the table: {reason}"
    assert lines[-2:] == ["| qwen3.5-0.8b | 31 | 115 | 403 |", "| qwen3-0.6b | 112 | 896 | 3,584 |"]
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["not_measured"] == {"llamacpp": reason}
    assert {run["workload"] for run in report["runs"]} == {prefill, decode}


@pytest.mark.slow  # starts an engine for each run
def test_an_engine_does_the_work(run_main, tiny, tmp_path):
    options = ["--model", tiny, "--num-seqs", 2, "--prompt-len", 20, "--steps", 3, "--repeats", 1]
    options += ["--engines", "nanovllm", "--quiet-timeout", 0, "--retries", 0, "--json", tmp_path / "out.json"]
    for arg in ("--rates", 30, 500):  # of the machine: they are given, and not measured
        options += ["--arg", f"nanovllm:{arg}"]
    run_main(hybrids, *options)
    runs = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["runs"]
    work = [(run["label"], run["requests"], run["prompt_tokens"], run["output_tokens"]) for run in runs]
    assert work == [("nanovllm", 1, 20, 1), ("nanovllm", 2, 64, 8)]
    for run in runs:
        assert run["roofline"]["num_decode_steps"] == (0 if run["workload"].startswith("prefill") else 3)


# ---- snapshots


def test_snapshots_are_measured_and_counted(run_main, tiny, tmp_path):
    options = ["--model", tiny, "--prompt-len", 70, "--steps", 2, "--repeats", 1, "--rounds", 1]
    options += ["--attention-backend", "torch"]
    lines = run_main(snapshots, *options, "--intervals", 1, 0, "--json", tmp_path / "out.json")
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    times = report["times_ms"]
    assert min(times["copy"], times["decode"], *times["prompt"].values()) > 0
    assert set(times["prompt"]) == {"1", "0"}
    assert any(line.startswith("| prompt of 70 tokens, a snapshot every 1 blocks | ") for line in lines)
    per_token = min(times["prompt"].values()) / 70
    for rows in report["workloads"].values():
        for row in rows.values():
            seconds = (row["computed"] * per_token + row["copied"] * times["copy"]) / 1e3
            assert row["seconds"] == pytest.approx(seconds)
        assert rows["1"]["copied"] > rows["0"]["copied"]


def test_hit_rates_are_what_the_workloads_allow():
    """Of 10 questions after 3 texts, only the third and later ones of each text can find its blocks and a snapshot."""
    args = argparse.Namespace(num_slots=30, rounds=1)
    found = snapshots.simulate(snapshots.common_texts, 0, args)
    texts = [500, 1700, 3000]
    total = found["computed"] / (1 - found["hit_rate"])
    most = sum(text // 16 * 16 * (4 if i == 0 else 3) for i, text in enumerate(texts))
    allowed = most - 2 * sum(text // 16 * 16 for text in texts)
    assert round(total) - found["computed"] == allowed
    assert 0 < allowed < total
