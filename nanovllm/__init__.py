"""nanovllm: an LLM inference engine to read, run and measure.

These are the engine's own classes, always. `nanovllm_extras` has the same names with all options.
"""

from pathlib import Path

import nanovllm.waiting_threads  # noqa: F401, I001 (before torch is imported)
from nanovllm.config import Config
from nanovllm.engine import LLMEngine
from nanovllm.llm import LLM
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.sampling_params import SamplingParams

TINY_QWEN3 = Path(__file__).parent / "assets" / "tiny-qwen3"
"""The bundled model: a Qwen3 of 3.5 million parameters that explains how this engine works."""

__all__ = ["LLM", "TINY_QWEN3", "CompletionOutput", "Config", "LLMEngine", "RequestOutput", "SamplingParams"]
