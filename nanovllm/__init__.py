"""nanovllm: an LLM inference engine to read, run and measure.

These are the engine's own classes, always. `nanovllm_extras` has the same names with all options.
"""

import nanovllm.waiting_threads  # noqa: F401, I001 (before torch is imported)
from nanovllm.config import Config
from nanovllm.engine import LLMEngine
from nanovllm.llm import LLM
from nanovllm.loader import TINY_QWEN3
from nanovllm.request import CompletionOutput, RequestOutput
from nanovllm.sampling_params import SamplingParams

__all__ = ["LLM", "TINY_QWEN3", "CompletionOutput", "Config", "LLMEngine", "RequestOutput", "SamplingParams"]
