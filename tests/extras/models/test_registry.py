"""Which network is taken for a config.json, and what is imported for it: no architecture but the one that is needed."""

import json
import subprocess
import sys

import pytest

from nanovllm_extras.models.architectures import find_architecture
from nanovllm_extras.weights.checkpoint import read_model_config

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_the_core_imports_no_other_architecture_and_no_extra():
    """Nor do the kernels after it, which do not import triton either."""
    find = f"from nanovllm.plugins import find_architecture; find_architecture({SHAPE}).read_config({SHAPE})"
    kernels = "import nanovllm_extras.kernels.cpu.cpu_attention"
    listed = "print(*(name for name in sys.modules if name.startswith('nanovllm.models.')))"
    groups = ("nanovllm_extras.models.", "nanovllm_extras.kernels.cuda.", "triton")
    others = f"print(*(name for name in sys.modules if name.startswith({groups})))"
    code = f"import sys; {find}; {listed}; {kernels}; {listed}; {others}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not run.stderr
    models, also_after_kernels, extras = run.stdout.splitlines()
    core = {"qwen3"}
    assert {name.removeprefix("nanovllm.models.") for name in models.split()} == core
    assert {name.removeprefix("nanovllm.models.") for name in also_after_kernels.split()} == core
    assert {name.removeprefix("nanovllm_extras.models.") for name in extras.split()} <= {
        "gated_mlp",
        "groups",
        "masking",
        "network_config",
        "rope",
    }


@pytest.mark.parametrize(
    ("changed", "file"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "llama"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "deepseek"),
    ],
    ids=str,
)
def test_a_file_is_imported_when_a_config_asks_for_it(monkeypatch, changed, file):
    monkeypatch.setitem(sys.modules, f"nanovllm_extras.models.{file}", None)  # as if the file were not there
    with pytest.raises(ImportError, match=f"nanovllm_extras.models.{file}"):
        find_architecture({**SHAPE, **changed})


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": None},
        {"layer_types": ["full_attention"] * 3, "use_sliding_window": False, "sliding_window": 8},
    ],
    ids=str,
)
def test_a_plain_config_needs_no_extra(monkeypatch, tmp_path, changed):
    for file in ("rope_types", "qwen3_variants", "architectures", "masking"):
        monkeypatch.setitem(sys.modules, f"nanovllm_extras.models.{file}", None)
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, **changed}))
    model_class, shape = read_model_config(tmp_path)
    assert model_class.__module__ == "nanovllm.models.qwen3"
    assert shape.attention_options == ()
