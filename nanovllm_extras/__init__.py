"""Everything beyond the engine in `nanovllm/`: the same names with all options, and more. The folder can be deleted.

The core's classes have one subclass each. An extra is an object that one of these holds, or a function that replaces
one of theirs, and an option chooses it. `options/all_options.py` and `options/request_params.py` have the options,
`engine/full_engine.py` and `execution/full_runner.py` make the parts, and `engine/assembly.py` and
`execution/chooser.py` choose them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanovllm import TINY_QWEN3

if TYPE_CHECKING:
    from nanovllm_extras.beam_search.beam_outputs import BeamSearchOutput, BeamSearchSequence
    from nanovllm_extras.beam_search.beam_params import BeamSearchParams
    from nanovllm_extras.embedding.embedding_outputs import (
        EmbeddingOutput,
        EmbeddingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from nanovllm_extras.embedding.pooling_params import PoolingParams
    from nanovllm_extras.engine.engine_stats import EngineStats
    from nanovllm_extras.engine.full_engine import LLMEngine
    from nanovllm_extras.full_llm import LLM
    from nanovllm_extras.lora.lora_request import LoRARequest
    from nanovllm_extras.options.all_options import Config
    from nanovllm_extras.options.request_params import RequestOutputKind, SamplingParams
    from nanovllm_extras.options.structured_params import StructuredOutputsParams
    from nanovllm_extras.requests.lazy_outputs import CompletionOutput, RequestMetrics, RequestOutput, StepOutput
    from nanovllm_extras.requests.prompt_forms import PromptType, TextPrompt, TokensPrompt
    from nanovllm_extras.sampling.logprobs import Logprob
    from nanovllm_extras.serve.async_llm import AsyncLLM
    from nanovllm_extras.vllm.engine_args import AsyncEngineArgs, EngineArgs
    from nanovllm_extras.weights.bundled import TINY_QWEN3_5

LAZY = {
    "options.all_options": ("Config",),
    "engine.full_engine": ("LLMEngine",),
    "full_llm": ("LLM",),
    "requests.lazy_outputs": ("CompletionOutput", "RequestMetrics", "RequestOutput", "StepOutput"),
    "options.request_params": ("RequestOutputKind", "SamplingParams"),
    "beam_search.beam_outputs": ("BeamSearchOutput", "BeamSearchSequence"),
    "beam_search.beam_params": ("BeamSearchParams",),
    "weights.bundled": ("TINY_QWEN3_5",),
    "embedding.embedding_outputs": (
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
        "ScoringOutput",
        "ScoringRequestOutput",
    ),
    "embedding.pooling_params": ("PoolingParams",),
    "engine.engine_stats": ("EngineStats",),
    "lora.lora_request": ("LoRARequest",),
    "sampling.logprobs": ("Logprob",),
    "serve.async_llm": ("AsyncLLM",),
    "requests.prompt_forms": ("PromptType", "TextPrompt", "TokensPrompt"),
    "options.structured_params": ("StructuredOutputsParams",),
    "vllm.engine_args": ("AsyncEngineArgs", "EngineArgs"),
}
"""Module in this folder -> its names that the package exports, imported when they are used: `nanovllm.LLM` imports
kernels without the rest."""

__all__ = [
    "LLM",
    "TINY_QWEN3",
    "TINY_QWEN3_5",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Config",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineStats",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "PromptType",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StepOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]
"""What the package exports."""


def __getattr__(name: str) -> Any:
    """Import a name of `LAZY` when it is used."""
    for module, names in LAZY.items():
        if name in names:
            return getattr(import_module(f"nanovllm_extras.{module}"), name)
    raise AttributeError(f"module 'nanovllm_extras' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
