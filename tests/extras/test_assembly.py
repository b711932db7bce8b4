"""What happens once: its parts are timed, and PyTorch draws tokens unless a kernel does."""

from nanovllm.kv_cache import KVCache
from nanovllm_extras import Config, LLMEngine
from nanovllm_extras.execution.device_setup import sample_with


def test_parts_are_timed_in_order(tiny_checkpoint):
    parts = LLMEngine(Config(tiny_checkpoint[0], device="cpu", attention_backend="torch")).parts
    seconds = parts.startup_seconds
    assert list(seconds) == ["backend", "weights", "layers", "memory", "graphs"]
    assert all(one >= 0 for one in seconds.values())
    assert sum(seconds.values()) > 0
    assert type(parts.runner.kv_cache) is KVCache, "without swap space"


def test_tokens_are_drawn_in_pytorch_with_the_backends_argmax(tiny_checkpoint):
    runner = LLMEngine(Config(tiny_checkpoint[0], device="cpu")).runner
    assert runner.draw.func is sample_with
    assert (runner.draw.args, runner.draw.keywords) == ((runner.backend.argmax,), {})
