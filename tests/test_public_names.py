"""`from nanovllm import …`: each public name is there, and a name of an extra that is gone says which file it lacks.

Oracles: `__all__`, and a copy of the package without `extras/`, imported in a process of its own.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nanovllm

PACKAGE = Path(nanovllm.__file__).parent

WITHOUT_EXTRAS = """
import json
import sys
# an editable install would find the files that this copy lacks
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in repr(finder)]
import nanovllm
from nanovllm import Config, SamplingParams
from nanovllm.chat import render_conversation

def error_of(ask):
    try:
        ask()
    except Exception as error:
        return [type(error).__name__, str(error)]

errors = {name: error_of(lambda: getattr(nanovllm, name)) for name in nanovllm.__all__}
errors["an unknown name"] = error_of(lambda: nanovllm.NoSuchName)
errors["structured_outputs"] = error_of(lambda: SamplingParams(structured_outputs={"json_object": True}))
call = {"role": "assistant", "tool_calls": []}
tokenizer = type("Tokenizer", (), {"chat_template": "{{ messages }}"})
errors["a call of a tool"] = error_of(lambda: render_conversation(tokenizer, [call]))
errors["a neutral option"] = error_of(lambda: Config.from_options("a-model", {"pipeline_parallel_size": 1}))
errors["a wrong value"] = error_of(lambda: Config.from_options("a-model", {"max_num_seqs": 0}))
errors["a request's neutral option"] = error_of(lambda: SamplingParams(best_of=1))
errors["embed"] = error_of(lambda: nanovllm.LLM.embed)
errors["from_optional"] = error_of(lambda: SamplingParams.from_optional(top_k=None))
print(json.dumps({"errors": errors, "missing": sorted(set(nanovllm.__all__) - set(dir(nanovllm)))}))
"""


def test_every_name_resolves():
    of_extras = {name for names in nanovllm.EXTRAS.values() for name in names}
    assert of_extras <= set(nanovllm.__all__) <= set(dir(nanovllm))
    for name in nanovllm.__all__:
        assert getattr(nanovllm, name) is not None
    for name in of_extras:
        assert getattr(nanovllm, name).__name__ == name


def test_a_star_brings_all_of_them():
    names: dict[str, object] = {}
    exec("from nanovllm import *", names)
    assert set(nanovllm.__all__) <= set(names)


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="module 'nanovllm' has no attribute 'NoSuchName'"):
        nanovllm.NoSuchName  # noqa: B018
    assert not hasattr(nanovllm, "no_such_name")
    with pytest.raises(ImportError, match="cannot import name 'NoSuchName'"):
        exec("from nanovllm import NoSuchName")


def test_names_that_vllm_has_in_modules():
    """As vLLM's examples import them, with the package's name changed."""
    from nanovllm.extras.vllm.engine_args import AsyncEngineArgs, EngineArgs
    from nanovllm.extras.prompt_forms import TextPrompt, TokensPrompt
    from nanovllm.outputs import EmbeddingOutput, EmbeddingRequestOutput
    from nanovllm.extras.lazy_outputs import RequestOutput
    from nanovllm.sampling_params import BeamSearchParams, StructuredOutputsParams
    from nanovllm.extras.request_params import RequestOutputKind, SamplingParams

    for thing in (AsyncEngineArgs, EngineArgs, TextPrompt, TokensPrompt, EmbeddingOutput, EmbeddingRequestOutput):
        assert getattr(nanovllm, thing.__name__) is thing
    for thing in (RequestOutput, BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams):
        assert getattr(nanovllm, thing.__name__) is thing
    with pytest.raises(ImportError, match="cannot import name 'BeamParams' from 'nanovllm.sampling_params'"):
        exec("from nanovllm.sampling_params import BeamParams")


def test_methods_of_extras_are_the_functions_that_lie_with_them():
    from nanovllm.extras.beam_search import beam_params as beam_search
    from nanovllm.extras.embedding import pooling_params as embedding
    from nanovllm.extras.vllm import vllm_metrics as metrics

    functions = [beam_search.beam_search, embedding.embed, metrics.get_metrics]
    for function in functions:
        assert getattr(nanovllm.LLM, function.__name__) is function, "for help() and editors"
    llm = object.__new__(nanovllm.LLM)
    assert llm.embed.__self__ is llm
    assert nanovllm.SamplingParams.from_optional.__self__ is nanovllm.SamplingParams


def test_without_extras_each_of_their_names_says_which_file_is_missing(tmp_path):
    ignored = shutil.ignore_patterns("extras", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "nanovllm", ignore=ignored)
    run = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["missing"] == []
    errors = found["errors"]
    files = {name: file for file, names in nanovllm.EXTRAS.items() for name in names}
    for name in nanovllm.__all__:
        file = files.get(name)
        missing = ["MissingExtra", f"{name} is an extra, and nanovllm/extras/{file}.py is not there"]
        assert errors.pop(name) == (missing if file else None)
    assert errors.pop("an unknown name")[0] == "AttributeError"
    assert (
        errors.pop("structured_outputs")[1]
        == "structured_outputs is an extra, and nanovllm/extras/structured/structured_params.py is not there"
    )
    missing = "content in parts or calls of tools is an extra, and nanovllm/extras/chat_options.py is not there"
    assert errors.pop("a call of a tool") == ["MissingExtra", missing]
    assert errors.pop("a wrong value") == ["ValueError", "max_num_seqs must be an integer >= 1, got 0"]
    for method, file in (
        ("LLM.embed", "embedding/pooling_params"),
        ("SamplingParams.from_optional", "vllm/request_fields"),
    ):
        missing = f"{method} is an extra, and nanovllm/extras/{file}.py is not there"
        assert errors.pop(method.split(".")[1]) == ["MissingExtra", missing]
    for name in ("a neutral option", "a request's neutral option"):
        kind, says = errors.pop(name)
        assert kind == "TypeError"
        assert says.startswith("unknown argument ")
        assert says.endswith("any other option of vLLM is an extra, and nanovllm/extras/vllm is not there")
    assert errors == {}
