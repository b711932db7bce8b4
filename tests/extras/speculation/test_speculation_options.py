"""What `speculative_config` takes, and what it refuses before a model is loaded."""

import pytest

from nanovllm_extras import Config
from nanovllm_extras.options.speculation_options import Speculation, read_options
from nanovllm_extras.vllm.engine_args import EngineArgs

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("given", "lookup"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 6}, (2, 6)),
    ],
)
def test_how_many_tokens_are_looked_up(given, lookup):
    """As in vLLM: one that is not given is the other, and both are 5."""
    assert read_options({**NGRAM, **given}).lookup == lookup


def test_a_model_is_a_method():
    assert read_options({"model": "a", "num_speculative_tokens": 3}) == Speculation("draft_model", 3, model="a")


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"method": "eagle", "num_speculative_tokens": 1}, ValueError, r"\['method'\] must be 'ngram', .* got 'eagle'"),
        ({"num_speculative_tokens": 1}, ValueError, "method"),
        ({"method": "ngram"}, TypeError, r"\['num_speculative_tokens'\]"),
        ({**NGRAM, "num_speculative_tokens": 0}, ValueError, r"\['num_speculative_tokens'\].* 0"),
        ({**NGRAM, "num_speculative_tokens": 65}, ValueError, r"\['num_speculative_tokens'\].* 65"),
        ({**NGRAM, "prompt_lookup_min": 0}, ValueError, r"\['prompt_lookup_min'\]"),
        ({**NGRAM, "prompt_lookup_max": "3"}, TypeError, r"\['prompt_lookup_max'\]"),
        ({**NGRAM, "prompt_lookup_min": 3, "prompt_lookup_max": 2}, ValueError, "at most prompt_lookup_max 2, got 3"),
        ({**NGRAM, "model": "a"}, ValueError, "go together"),
        ({"method": "draft_model", "num_speculative_tokens": 2}, ValueError, "go together"),
        ({**NGRAM, "disable_by_batch_size": -1}, ValueError, r"\['disable_by_batch_size'\]"),
        ({**NGRAM, "lookup": 3}, TypeError, "no key 'lookup'; legal are method, num_speculative_tokens"),
        ({}, ValueError, "method"),
    ],
)
def test_a_bad_value_is_named(given, error, words):
    with pytest.raises(error, match=words):
        Config("a-model", speculative_config=given)


def test_a_command_line():
    import argparse

    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    text = '{"method": "ngram", "num_speculative_tokens": 3}'
    args = parser.parse_args(["--model", "a-model", "--speculative-config", text])
    assert EngineArgs.from_cli_args(args).create_engine_config().speculative_config == NGRAM
