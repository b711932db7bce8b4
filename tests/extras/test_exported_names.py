"""`from nanovllm_extras import …`: each public name is there. Oracle: `__all__`."""

import pytest

import nanovllm
import nanovllm_extras
from nanovllm_extras import LAZY

OF_EXTRAS = {name: module for module, names in LAZY.items() for name in names}


def test_every_name_resolves():
    assert set(OF_EXTRAS) <= set(nanovllm_extras.__all__) == set(dir(nanovllm_extras))
    for name in nanovllm_extras.__all__:
        assert getattr(nanovllm_extras, name) is not None
    for name in set(OF_EXTRAS) - {"PromptType", "TINY_QWEN3_5"}:
        assert getattr(nanovllm_extras, name).__name__ == name


def test_a_star_brings_all_of_them():
    names: dict[str, object] = {}
    exec("from nanovllm_extras import *", names)
    assert set(nanovllm_extras.__all__) <= set(names)


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="module 'nanovllm_extras' has no attribute 'NoSuchName'"):
        nanovllm_extras.NoSuchName  # noqa: B018
    assert not hasattr(nanovllm_extras, "no_such_name")
    with pytest.raises(ImportError, match="cannot import name 'NoSuchName'"):
        exec("from nanovllm_extras import NoSuchName")


def test_names_that_vllm_has():
    """As vLLM's examples import them, with the package's name changed."""
    from nanovllm_extras.beam_search.beam_params import BeamSearchParams
    from nanovllm_extras.embedding.embedding_outputs import EmbeddingOutput, EmbeddingRequestOutput
    from nanovllm_extras.options.request_params import RequestOutputKind, SamplingParams
    from nanovllm_extras.options.structured_params import StructuredOutputsParams
    from nanovllm_extras.requests.lazy_outputs import RequestOutput
    from nanovllm_extras.requests.prompt_forms import TextPrompt, TokensPrompt
    from nanovllm_extras.vllm.engine_args import AsyncEngineArgs, EngineArgs

    for thing in (AsyncEngineArgs, EngineArgs, TextPrompt, TokensPrompt, EmbeddingOutput, EmbeddingRequestOutput):
        assert getattr(nanovllm_extras, thing.__name__) is thing
    for thing in (RequestOutput, BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams):
        assert getattr(nanovllm_extras, thing.__name__) is thing


def test_methods_of_extras_are_the_functions_that_lie_with_them():
    from nanovllm_extras.beam_search import beam_params as beam_search
    from nanovllm_extras.embedding import pooling_params as embedding
    from nanovllm_extras.vllm import vllm_metrics as metrics

    functions = [beam_search.beam_search, embedding.embed, metrics.get_metrics]
    for function in functions:
        assert getattr(nanovllm_extras.LLM, function.__name__) is function, "for help() and editors"
    llm = object.__new__(nanovllm_extras.LLM)
    assert llm.embed.__self__ is llm
    assert nanovllm_extras.SamplingParams.from_optional.__self__ is nanovllm_extras.SamplingParams


def test_the_engine_exports_its_own_classes():
    """One knows from the import which engine one has."""
    names = [name for name in nanovllm.__all__ if name != "TINY_QWEN3"]
    assert {getattr(nanovllm, name).__module__.partition(".")[0] for name in names} == {"nanovllm"}
    assert {getattr(nanovllm_extras, name).__module__.partition(".")[0] for name in names} == {"nanovllm_extras"}
    assert nanovllm_extras.TINY_QWEN3 == nanovllm.TINY_QWEN3
