"""nanovllm: an LLM inference engine to read, run and measure."""

import os
import sys
from pathlib import Path

if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    # libgomp, which torch loads, reads this once. A thread that waits for the others then sleeps after some 0.3 ms, and
    # not after the 4 ms that 300,000 turns take: beside another busy process it would spin while they need its core.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

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
