"""Benchmarks of models with recurrent states: what they count, against transformers' and the engine's own numbers."""

import argparse
import json
import re

import pytest
import torch
import transformers

from benchmarks import hybrids, snapshots
from benchmarks.common import QWEN3_06B, ModelShape, read_config
from benchmarks.hybrids import QWEN35_08B
from benchmarks.roofline import Rates, roofline
from nanovllm_extras.weights.checkpoint import read_model_config
from tests.extras.models.hybrid_checkpoints import make_config, set_weights_that_matter

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


# ---- GGUF files


@pytest.fixture
def dummy_gguf():
    return pytest.importorskip("benchmarks.dummy_gguf")  # it needs gguf


@pytest.mark.parametrize("name", ["tiny", "two layers of Qwen3"])
def test_gguf_files_have_all_weights_by_the_names_of_their_architecture(dummy_gguf, tiny, tmp_path, name):
    import gguf

    folder = tiny if name == "tiny" else QWEN3_06B.parent / "qwen3-2layers"
    arch = gguf.MODEL_ARCH.QWEN35 if name == "tiny" else gguf.MODEL_ARCH.QWEN3
    shape, model = ModelShape.from_folder(folder), transformers_model(folder)
    found = dummy_gguf.tensor_shapes(shape)
    known = {gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[arch]}
    for tensor in found:
        layer = tensor.split(".")[1] if tensor.startswith("blk.") else ""
        stem = tensor.removesuffix(".weight").removesuffix(".bias")
        assert stem.replace(f"blk.{layer}.", "blk.{bid}.") in known, tensor
    assert sum(torch.Size(size).numel() for size in found.values()) == sum(p.numel() for p in model.parameters())
    if name == "tiny":
        dummy_gguf.write_dummy_gguf(tmp_path / "tiny.gguf", tiny, "float32", seed=0)
        reader = gguf.GGUFReader(tmp_path / "tiny.gguf")
        fields = {key: field.contents() for key, field in reader.fields.items()}
        assert fields["general.architecture"] == "qwen35"
        assert fields["qwen35.full_attention_interval"] == 4
        assert (fields["qwen35.ssm.inner_size"], fields["qwen35.ssm.state_size"]) == (64, 16)
        assert fields["qwen35.rope.dimension_sections"] == [2, 1, 1, 0]
        assert {one.name: tuple(one.shape[::-1]) for one in reader.tensors} == found


def gguf_weights(model):
    """Yield the weights of transformers' model as converted checkpoints have them, by their GGUF names."""
    import gguf

    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        if name.endswith("norm.weight") and "linear_attn" not in name:
            weight = weight + 1
        elif name.endswith("A_log"):
            weight = -weight.exp()
        elif "conv1d" in name:
            weight = weight[:, 0]
        if "linear_attn" in name and not name.endswith("norm.weight"):
            weight = in_llama_cpps_order(name, weight, config)
        stored = names.get_name(name.replace("dt_bias", "dt_proj.bias"), try_suffixes=(".weight", ".bias"))
        yield stored, weight.contiguous().numpy()


def in_llama_cpps_order(name, weight, config):
    """Number the value heads so that consecutive ones use different key heads."""
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    order = torch.arange(value_heads).view(key_heads, -1).T.flatten()
    if name.endswith(("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight")):
        return weight[order]
    if name.endswith("out_proj.weight"):
        return weight.unflatten(1, (value_heads, -1))[:, order].flatten(1)
    value_size = value_heads * config.linear_value_head_dim
    others, values = weight[:-value_size], weight[-value_size:]  # queries and keys, if there are any
    return torch.cat([others, values.unflatten(0, (value_heads, -1))[order].flatten(0, 1)])


def test_llama_cpp_computes_what_transformers_computes(dummy_gguf, tiny, tmp_path, monkeypatch):
    """Three prompts in one batch, then single tokens. Their states are of different lengths."""
    llama_cpp = pytest.importorskip("llama_cpp")
    from benchmarks import llamacpp

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tiny)).eval()
    set_weights_that_matter(model)
    path = tmp_path / "tiny.gguf"
    dummy_gguf.write_gguf(path, tiny, "float32", gguf_weights(model))
    monkeypatch.setattr(llamacpp, "dummy_gguf", lambda *_: path)
    exact = [("type_k", llama_cpp.GGML_TYPE_F32), ("type_v", llama_cpp.GGML_TYPE_F32)]  # by default float16
    exact.append(("flash_attn_type", llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED))  # it rounds to float16
    args = argparse.Namespace(model=tiny, dtype="float32", seed=0, quantization=None, engine_option=exact)
    lens, num_steps = (5, 40, 150), 4  # llama.cpp computes chunks of 64 tokens
    prompts = [torch.randint(0, 200, (n,)).tolist() for n in lens]
    context = llamacpp.Context(args, list(lens), len(lens), 0)
    found = [[] for _ in lens]
    for step in range(1 + num_steps):
        starts = [0] * len(lens) if step == 0 else [n - num_steps + step - 1 for n in lens]
        ends = [n - num_steps + step for n in lens]
        tokens = [
            (prompts[seq][p], p, seq, True)
            for seq, (start, end) in enumerate(zip(starts, ends, strict=True))
            for p in range(start, end)
        ]
        context.decode(tokens)
        for row, (_, _, seq, _) in enumerate(tokens):
            logits = llama_cpp.llama_get_logits_ith(context.context, row)
            found[seq].append(torch.tensor(logits[: context.num_vocab]))
    for prompt, rows in zip(prompts, found, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0]  # [len, vocab_size]
        torch.testing.assert_close(torch.stack(rows), expected, rtol=0, atol=2e-4)  # of logits up to 7


def test_random_states_decay(dummy_gguf, tiny):
    """A positive `ssm_a` makes the states of a long prompt infinite."""
    factors = [weight for name, weight in dummy_gguf.random_weights(tiny, 0) if name.endswith("ssm_a")]
    assert len(factors) == 6
    assert all((weight < 0).all() for weight in factors)


def test_gguf_files_need_layers_that_attend_at_an_interval(dummy_gguf, tiny, tmp_path):
    config = read_config(tiny)
    config["layer_types"] = ["linear_attention", "full_attention", *["linear_attention"] * 6]
    (tiny / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="every n-th layer to attend"):
        dummy_gguf.write_dummy_gguf(tmp_path / "tiny.gguf", tiny, "float32", seed=0)


def test_gguf_files_need_keys_as_long_as_values(dummy_gguf, tiny, tmp_path):
    config = read_config(tiny) | {"linear_value_head_dim": 24}
    (tiny / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="linear_key_head_dim and linear_value_head_dim to be equal, got 16 and 24"):
        dummy_gguf.write_dummy_gguf(tmp_path / "tiny.gguf", tiny, "float32", seed=0)


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


def test_a_failure_of_nanovllm_is_not_hidden(run_main, monkeypatch):
    def run_undisturbed(plan, engine, workload, repeat):
        raise RuntimeError("failed")

    monkeypatch.setattr(hybrids, "run_undisturbed", run_undisturbed)
    with pytest.raises(RuntimeError, match="failed"):
        run_main(hybrids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engines", "vlmm"], "--engines must be of nanovllm, .*got vlmm"),
        (["--repeats", 0], "--repeats must be >= 1, got 0"),
    ],
)
def test_bad_options_are_refused(run_main, capsys, options, message):
    with pytest.raises(SystemExit):
        run_main(hybrids, *options)
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.slow  # starts an engine for each run
def test_engines_do_the_same_work(run_main, tiny, tmp_path):
    options = ["--model", tiny, "--num-seqs", 2, "--prompt-len", 20, "--steps", 3, "--repeats", 1]
    options += ["--quiet-timeout", 0, "--retries", 0, "--json", tmp_path / "out.json"]
    for engine in ("nanovllm", "hf"):  # the machine's rates are given, and not measured
        for arg in ("--rates", 30, 500):
            options += ["--arg", f"{engine}:{arg}"]
    run_main(hybrids, *options)
    runs = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["runs"]
    work = [(run["label"], run["requests"], run["prompt_tokens"], run["output_tokens"]) for run in runs]
    assert work == [("nanovllm", 1, 20, 1), ("hf", 1, 20, 1), ("nanovllm", 2, 64, 8), ("hf", 2, 64, 8)]
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


def test_snapshots_at_intervals_find_answers_of_conversations():
    args = argparse.Namespace(num_slots=30, rounds=2)
    without, often = [snapshots.simulate(snapshots.conversations, interval, args) for interval in (0, 1)]
    assert 0 < without["hit_rate"] < often["hit_rate"] < 1
    assert 0 < without["copied"] < often["copied"]
