"""nanovllm: an LLM inference engine to read, run and measure."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.extras import *  # noqa: F403
    from nanovllm.extras import LLM, CompletionOutput, Config, LLMEngine, RequestOutput, SamplingParams
elif find_spec("nanovllm.extras"):  # the folder may be deleted: then the core's own classes are exported
    from nanovllm.extras import __all__, __dir__, __getattr__  # `__getattr__` finds the names of `__all__`
else:
    from nanovllm.config import Config
    from nanovllm.engine import LLMEngine
    from nanovllm.llm import LLM
    from nanovllm.outputs import CompletionOutput, RequestOutput
    from nanovllm.sampling_params import SamplingParams

TINY_QWEN3 = Path(__file__).parent / "assets" / "tiny-qwen3"
"""The bundled model: a Qwen3 of 3.5 million parameters that explains how this engine works."""
