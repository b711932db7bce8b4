"""The core imports no architecture but Qwen3, and no extra. A deleted file is named when a config asks for it."""

import subprocess
import sys

import pytest

from nanovllm import checks
from nanovllm.extras.models.architectures import find_architecture

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CORE = {"config", "decoder", "qwen3", "registry"}


def test_the_core_imports_no_other_architecture_and_no_extra():
    """Neither by a config nor, after that, by the kernels, which do not import triton either."""
    find = f"from nanovllm.models.registry import find_architecture; find_architecture({SHAPE})"
    kernels = "import nanovllm.extras.kernels.cpu.cpu_attention"
    listed = "print(*(name for name in sys.modules if name.startswith('nanovllm.models.')))"
    others = "print(*(name for name in sys.modules if name.startswith(('nanovllm.extras.', 'triton'))))"
    code = f"import sys, nanovllm; {others}; {find}; {listed}; {kernels}; {listed}; {others}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not run.stderr
    extras, *models, also_after_kernels = run.stdout.splitlines()
    assert (extras, also_after_kernels) == ("", "")
    for line, files in zip(models, [CORE, {*CORE, "masking"}], strict=True):
        assert {name.removeprefix("nanovllm.models.") for name in line.split()} == files


@pytest.mark.parametrize(
    ("changed", "file"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "llama"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "deepseek"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_types"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_types"),
        ({"use_sliding_window": True}, "windows"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "windows"),
    ],
    ids=str,
)
def test_a_file_that_is_not_there_is_named(monkeypatch, tmp_path, changed, file):
    monkeypatch.setitem(sys.modules, f"nanovllm.models.{file}", None)  # as if the file were not there
    monkeypatch.setattr(checks, "__file__", str(tmp_path / "checks.py"))
    with pytest.raises(checks.MissingExtra, match=f"is an extra, and nanovllm/models/{file}.py is not there"):
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
def test_a_plain_config_needs_no_extra(monkeypatch, changed):
    for file in ("rope_types", "windows", "masking"):
        monkeypatch.setitem(sys.modules, f"nanovllm.models.{file}", None)
    assert find_architecture({**SHAPE, **changed})[1].attention_options == ()
