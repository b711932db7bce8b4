"""`from nanovllm import …`: the package exports the core's own classes, and its command asks the bundled model.

`tests/extras/test_exported_names.py` has the names of extras.
"""

import sys

import pytest

import nanovllm
from nanovllm.__main__ import main

EXPORTED = {
    "LLM": "llm",
    "CompletionOutput": "request",
    "Config": "config",
    "LLMEngine": "engine",
    "RequestOutput": "request",
    "SamplingParams": "sampling_params",
}
"""Name -> module that has it."""


def test_the_cores_own_classes_are_exported():
    """`tests/extras/test_served_by_the_engine.py` shows that nothing else is loaded."""
    values = [value for value in vars(nanovllm).values() if isinstance(value, type)]
    found = {value.__name__: value.__module__ for value in values}
    assert found == {name: f"nanovllm.{module}" for name, module in EXPORTED.items()}
    assert nanovllm.TINY_QWEN3.name == "tiny-qwen3"
    with pytest.raises(AttributeError, match="module 'nanovllm' has no attribute 'NoSuchName'"):
        nanovllm.NoSuchName  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'EngineArgs' from 'nanovllm'"):
        from nanovllm import EngineArgs  # noqa: F401


def test_options_of_the_extras_are_refused():
    with pytest.raises(TypeError, match="tensor_parallel_size"):
        nanovllm.Config("a-model", tensor_parallel_size=2)
    with pytest.raises(TypeError, match="min_tokens"):
        nanovllm.SamplingParams(min_tokens=1)


def test_the_command_asks_the_bundled_model(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["nanovllm", "What is 27 + 58?"])
    assert main() == 0
    assert capsys.readouterr().out == "27 + 58 = 85.\n"


def test_a_command_of_the_other_package_is_named(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["nanovllm", "serve"])
    with pytest.raises(SystemExit):
        main()
    assert "got 'serve'" in (says := capsys.readouterr().err)
    assert "python -m nanovllm_extras" in says
