"""`labs.calculators.kv_bytes` prints what engines really allocate, and what it prints adds up."""

import json
import sys

import pytest
import torch
import transformers

from benchmarks.common import QWEN3_06B, ModelShape
from labs.calculators import kv_bytes
from nanovllm_extras import LLM
from nanovllm_extras.kernels.cpu.cpu_attention import CpuAttention
from tests.extras.models.architectures import ARCHITECTURES

KINDS = {  # architecture, variant, what kv_bytes calls its attention
    "MHA": ("llama", "MHA", "MHA"),
    "GQA": ("qwen3_moe", "plain", "GQA of 2"),
    "MQA": ("mixtral", "MQA", "MQA"),
    "MLA": ("deepseek_v2", "plain", "MLA of 32 + 16"),
    "MLA of V3": ("deepseek_v3", "plain", "MLA of 32 + 16"),
    "window": ("mistral", "short window", "GQA of 2, window of 9"),
    "windows in some layers": ("gemma3", "plain", "GQA of 2"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A config.json of each kind, without weights"""
    root, made = tmp_path_factory.mktemp("shapes"), {}
    for kind, (name, variant, _) in KINDS.items():
        one = ARCHITECTURES[name]
        fields = {key: value for key, value in {**one.shape, **one.variants[variant]}.items() if value is not None}
        config = one.config_class(**fields, architectures=[one.class_name])
        made[kind] = root / kind.replace(" ", "-")
        config.save_pretrained(made[kind])
    return made


def run_main(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["kv_bytes", *map(str, arguments)])
    kv_bytes.main()
    return capsys.readouterr().out


STORED = [("torch", "float32"), ("torch", "fp8"), ("cpu", "bfloat16")]


@pytest.mark.parametrize(("kind", "backend", "dtype"), [(kind, *STORED[i % 3]) for i, kind in enumerate(KINDS)])
def test_it_prints_what_an_engine_allocates(folders, monkeypatch, capsys, kind, backend, dtype):
    if backend == "cpu" and CpuAttention.why_not(torch.device("cpu"), torch.bfloat16, 32, 16) is not None:
        pytest.skip("the compiled backend does not run here")
    printed = run_main(monkeypatch, capsys, "--model", folders[kind], "--dtype", dtype, "--json")
    row = json.loads(printed)[0]
    model_dtype = {"dtype": "bfloat16", "kv_cache_dtype": "fp8"} if dtype == "fp8" else {"dtype": dtype}
    options = {"attention_backend": backend, "num_kv_blocks": 6, "block_size": 16, "load_format": "dummy"}
    options["disable_hybrid_kv_cache_manager"] = True  # one block for all layers, as it is counted
    llm = LLM(folders[kind], device="cpu", **options, **model_dtype)
    cache = llm.engine.runner.kv_cache
    assert cache.tensor.nbytes == 7 * 16 * row["bytes_per_token"]  # with the null block
    assert cache.bytes_per_block == 16 * row["bytes_per_token"]
    bytes_per_value = {"float32": 4, "bfloat16": 2, "fp8": 1}[dtype]
    assert ModelShape.from_folder(folders[kind]).kv_values_per_token * bytes_per_value == row["bytes_per_token"]
    assert row["attention"] == KINDS[kind][2]


def test_windows_bound_a_sequence_only_where_all_layers_have_one(folders):
    some, all_ = (kv_bytes.shape_of_model(str(folders[kind])) for kind in ("windows in some layers", "window"))
    assert (some.window, all_.window) == (None, 9)
    assert all_.values_of_sequence(1000) == all_.values_of_sequence(9) == 9 * all_.values_per_token
    assert some.values_of_sequence(1000) == 1000 * some.values_per_token


@pytest.mark.parametrize("shape", kv_bytes.PUBLISHED, ids=lambda shape: shape.name)
def test_variants_are_counted_from_the_parts_of_a_layer(shape):
    """MHA, GQA, MQA: K and V of the K and V heads; MLA: a latent and one rotated key. In bfloat16."""
    rows = {row["attention"].partition(",")[0]: row for row in kv_bytes.rows_of(shape, 2)}
    mha = shape.num_layers * shape.num_heads * shape.head_values * 2
    assert rows["MHA"]["bytes_per_token"] == mha
    assert rows["MQA"]["bytes_per_token"] == mha // shape.num_heads
    assert rows["MLA of 512 + 64"]["bytes_per_token"] == shape.num_layers * 576 * 2
    for row in rows.values():
        assert row["share_of_mha"] == row["bytes_per_token"] / mha


def test_it_prints_a_table(monkeypatch, capsys):
    lines = run_main(monkeypatch, capsys, "--model", QWEN3_06B).splitlines()
    assert lines[2].startswith("| qwen3-0.6b | GQA of 8 | 114,688 | 50.0% | 448 MiB |")  # README's 112 KiB for a token
    assert len({line.count("|") for line in lines}) == 1
    published = run_main(monkeypatch, capsys).splitlines()
    assert len(published) == 2 + len(kv_bytes.PUBLISHED)


def test_a_shape_that_is_on_no_disk_equals_the_config_of_one(monkeypatch, capsys, tmp_path):
    sizes = ("--layers", 3, "--heads", 8, "--kv-heads", 4, "--head-dim", 16)
    config = transformers.Qwen3Config(
        num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, head_dim=16,
        architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    on_disk = json.loads(run_main(monkeypatch, capsys, "--model", tmp_path, "--json"))
    by_shape = json.loads(run_main(monkeypatch, capsys, *sizes, "--json"))
    assert [{**row, "model": ""} for row in on_disk] == [{**row, "model": ""} for row in by_shape]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layers", 3), "--layers, --heads and --head-dim"),
        (("--layers", 3, "--heads", 8, "--head-dim", 16, "--kv-heads", 3), "multiple of --kv-heads, got 8 and 3"),
        (("--layers", 0, "--heads", 8, "--head-dim", 16), "must be >= 1"),
        (("--layers", 3, "--heads", 8, "--head-dim", 16, "--latent-rank", 64), "go together"),
        (("--model", "nowhere"), "'nowhere' is not a folder and not available from the hub"),
    ],
)
def test_bad_arguments_are_refused(hub_cache, monkeypatch, capsys, arguments, message):
    with pytest.raises(SystemExit):
        run_main(monkeypatch, capsys, *arguments)
    assert message in capsys.readouterr().err
