"""Fixtures of the tests of extensions."""

import inspect

import pytest

from nanovllm import LLMEngine


@pytest.fixture
def own_tables(monkeypatch):
    """Let block tables be what an extension makes of them: the invariants after each step know those of the core."""
    monkeypatch.setattr(LLMEngine, "step", inspect.unwrap(LLMEngine.step))
