"""nanovllm: an LLM inference engine to read, run and measure."""

from pathlib import Path

from nanovllm.config import Config
from nanovllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from nanovllm.engine.engine import LLMEngine
from nanovllm.inputs import PromptType, TextPrompt, TokensPrompt
from nanovllm.llm import LLM
from nanovllm.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    EngineStats,
    Logprob,
    RequestMetrics,
    RequestOutput,
    StepOutput,
)
from nanovllm.pooling_params import PoolingParams
from nanovllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from nanovllm.structured_outputs import StructuredOutputsParams

TINY_QWEN3 = Path(__file__).parent / "assets" / "tiny-qwen3"
"""The bundled model: a Qwen3 of 3.5 million parameters that explains how this engine works."""

__all__ = [
    "LLM",
    "TINY_QWEN3",
    "AsyncEngineArgs",
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
    "Logprob",
    "PoolingParams",
    "PromptType",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StepOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]
