"""nanovllm: an LLM inference engine to read, run and measure."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if "torch" not in sys.modules and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    # libgomp reads this once, as torch loads it. A thread that waits for the others then sleeps after some 0.3 ms, and
    # not after the 4 ms that 300,000 turns take: beside another busy process it would spin while they need its core.
    os.environ["GOMP_SPINCOUNT"] = "20000"
    import torch  # noqa: F401

    del os.environ["GOMP_SPINCOUNT"]  # programs that this process starts decide for themselves

from nanovllm.checks import names_of_extras
from nanovllm.config import Config
from nanovllm.engine import LLMEngine
from nanovllm.inputs import PromptType, TextPrompt, TokensPrompt
from nanovllm.llm import LLM
from nanovllm.outputs import CompletionOutput, EngineStats, Logprob, RequestMetrics, RequestOutput, StepOutput
from nanovllm.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from nanovllm.extras.beam_search.beam_params import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from nanovllm.extras.embedding.pooling_params import EmbeddingOutput, EmbeddingRequestOutput, PoolingParams
    from nanovllm.extras.structured.structured_params import StructuredOutputsParams
    from nanovllm.extras.vllm.engine_args import AsyncEngineArgs, EngineArgs

TINY_QWEN3 = Path(__file__).parent / "assets" / "tiny-qwen3"
"""The bundled model: a Qwen3 of 3.5 million parameters that explains how this engine works."""

EXTRAS = {
    "beam_search/beam_params": ("BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"),
    "embedding/pooling_params": ("EmbeddingOutput", "EmbeddingRequestOutput", "PoolingParams"),
    "structured/structured_params": ("StructuredOutputsParams",),
    "vllm/engine_args": ("AsyncEngineArgs", "EngineArgs"),
}
"""File in `extras/` -> its names here, which are imported when they are used."""

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

if not TYPE_CHECKING:  # to a checker it would mean that every name is there
    __getattr__ = names_of_extras(__name__, EXTRAS)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
