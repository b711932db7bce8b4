"""Every refusal at the start names the option and the value, and recommends what works.

All options of a table are tried on models of several kinds, alone and in pairs. What a message recommends is tried, and
must start.
"""

import ast
import functools
import itertools
import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

import nanovllm
from nanovllm_extras import LLM, TINY_QWEN3
from nanovllm_extras.kv_store.memory_tier import MemoryTier
from tests.extras.models.architectures import ARCHITECTURES, Checkpoints
from tests.extras.models.gemma4_checkpoints import Gemma4Checkpoints
from tests.extras.models.hybrid_checkpoints import HybridCheckpoints
from tests.extras.parallel.conftest import quick_ranks, rank_threads  # noqa: F401 (fixtures)

DEFAULTS = {
    "device": "cpu", "attention_backend": "torch", "enforce_eager": True, "dtype": "float32", "num_kv_blocks": 60,
    "max_num_seqs": 4,
}  # fmt: skip
DRAFTS = {"num_speculative_tokens": 2, "disable_by_batch_size": 4}  # given, it is not measured at each start
NGRAM = {"method": "ngram", **DRAFTS}
HOST_MEMORY = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 24}}
OPTIONS = {
    "ranks": {"tensor_parallel_size": 2},
    "machines": {"nnodes": 2},
    "int8": {"quantization": "int8"},
    "awq": {"quantization": "awq"},
    "fp8": {"quantization": "fp8"},
    "K and V in fp8": {"kv_cache_dtype": "fp8"},
    "K and V in int8": {"kv_cache_dtype": "int8"},
    "n-grams": {"speculative_config": NGRAM},
    "a draft model": {"speculative_config": {"model": "ITSELF", **DRAFTS}},
    "another draft model": {"speculative_config": {"model": str(TINY_QWEN3), **DRAFTS}},
    "mtp": {"speculative_config": {"method": "mtp", **DRAFTS}},
    "overlap": {"enable_overlap": True},
    "swap": {"preemption_mode": "swap", "swap_space_bytes": 1 << 26},
    "host memory": {"kv_offloading_size": 0.02},
    "connector": {"kv_transfer_config": HOST_MEMORY},
    "consumer": {"kv_transfer_config": {**HOST_MEMORY, "kv_role": "kv_consumer"}},
    "tier": {"kv_transfer_config": {"kv_connector": MemoryTier(1 << 24)}},
    "no prefixes": {"enable_prefix_caching": False},
    "C": {"attention_backend": "cpu", "enforce_eager": False},
    "Triton": {"attention_backend": "triton"},
    "flash-attn": {"attention_backend": "flash_attn"},
    "graphs": {"enable_cuda_graphs": True, "enforce_eager": False},
    "eager": {"enforce_eager": True},
    "long": {"max_model_len": 10**6},
    **({"GGUF": {"load_format": "gguf"}} if find_spec("gguf") else {}),  # else it is refused, but for the lack
    "small blocks": {"block_size": 4},
    "float16": {"dtype": "float16"},
    "template": {"chat_template": "{{ messages }}", "skip_tokenizer_init": True},
}
ON_EACH_RANK = {"Triton", "flash-attn", "graphs"}  # with ranks, a thread would print the same refusal
WAITS = {"ranks", "machines"}  # together these are not refused: the engine waits for the second machine
COMBINATIONS = [
    combination
    for count in (1, 2)
    for combination in itertools.combinations(OPTIONS, count)
    if set(combination) != WAITS and not ("ranks" in combination and ON_EACH_RANK & set(combination))
]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("refusals")

    @functools.cache
    def make(name):
        if name == "qwen3":
            return str(TINY_QWEN3)
        if name == "gemma4":
            return str(Gemma4Checkpoints(root).make()[0])
        if name == "qwen3_5":
            return str(HybridCheckpoints(root).make()[0])
        if name == "lfm2":
            return str(HybridCheckpoints(root, "Lfm2").make()[0])
        return str(Checkpoints(root).make(name, next(iter(ARCHITECTURES[name].variants)))[0])

    return make


def start(folder, options):
    return LLM(folder, **{**DEFAULTS, **options})


def refusal_of(folder, options):
    """The message of the ValueError or TypeError that the start raises, or None if it starts."""
    try:
        start(folder, options)
    except (ValueError, TypeError) as error:
        return str(error)


def value_in(text):
    """The literal at the beginning of `text`, and what follows it. (None, None) if there is none."""
    for end in sorted({match.start() for match in re.finditer(r"[ ,;:.)]|$", text)}):
        try:
            return [ast.literal_eval(text[:end])], text[end:]
        except (ValueError, SyntaxError):
            continue
    return None, None


def ways_in(message, options):
    """The options of each way that a message recommends: in words, or else by what an option must be."""
    ways = []
    advice = message[message.find("take ") :].replace(";", " ; ") if "take " in message else ""
    for both in re.findall(r"(?<![\w'])(\w+=\S+(?: and \w+=\S+)*)", advice):
        way = options
        for one in both.split(" and "):
            name, _, text = one.partition("=")
            way = {**way, name: value_in(text)[0][0]}
        ways.append(way)
    for names in re.findall(r"[Ll]eave out (\w+(?: and \w+)*)", message):
        ways.append({key: value for key, value in options.items() if key not in names.split(" and ")})
    if "the method 'ngram'" in message:
        ways.append({**options, "speculative_config": NGRAM})
    if match := re.match(r"(\w+)=.*leave it None", message):
        ways.append({**options, match[1]: None})
    if not ways and (match := re.match(r"(\w+)(?:\['(\w+)'\])? must be (?:at most )?", message)):
        name, key = match.groups()
        values, rest = value_in(message[match.end() :])
        while values:
            ways.append({**options, name: {**options[name], key: values[0]} if key else values[0]})
            values, rest = value_in(rest[4:]) if rest.startswith(" or ") else (None, None)
    return ways


def faults_of(message, options, folder, num_wrong_alone):
    """What is wrong with a refusal, as lines of text. `num_wrong_alone`: options that are refused by themselves

    If there are some, a way may lead to their own refusal, but one of the ways must serve if there is only one.
    """
    names = [name for name in options if name in message]
    if not names:
        yield f"no option is named: {message}"
    values = [value for name in names for value in values_of(options[name])]
    if not any(value in message for value in values):
        yield f"no value is named: {message}"
    ways = ways_in(message, options)
    if not ways:
        yield f"nothing is recommended: {message}"
    problems = {str(way): refusal_of(folder, way) for way in ways}
    if num_wrong_alone == 0 or (num_wrong_alone == 1 and all(problems.values())):
        for way, problem in problems.items():
            if problem is not None:
                yield f"{message}\n    recommends {way}\n    which is refused: {problem}"


def values_of(value):
    return [text for one in value.values() for text in values_of(one)] if isinstance(value, dict) else [str(value)]


@pytest.mark.parametrize(
    ("name", "every"),  # of the pairs
    [
        ("qwen3_5", 5),
        pytest.param("qwen3", 3, marks=pytest.mark.slow),
        pytest.param("gemma4", 3, marks=pytest.mark.slow),
        pytest.param("deepseek_v2", 6, marks=pytest.mark.slow),
        pytest.param("lfm2", 6, marks=pytest.mark.slow),
    ],
)
def test_what_a_refusal_recommends_works(folder_of, quick_ranks, name, every):  # noqa: F811 (a fixture)
    folder, refused, seen, faults = folder_of(name), set(), set(), []
    for combination in COMBINATIONS[: len(OPTIONS)] + COMBINATIONS[len(OPTIONS) :: every]:
        options = {key: value for one in combination for key, value in OPTIONS[one].items()}
        if (options.get("speculative_config") or {}).get("model") == "ITSELF":
            options["speculative_config"] = {**options["speculative_config"], "model": folder}
        message = refusal_of(folder, options)
        if message is None:
            continue
        refused |= {combination[0]} if len(combination) == 1 else set()
        if message not in seen:
            seen.add(message)
            faults += faults_of(message, options, folder, len(refused & set(combination)) if combination[1:] else 0)
    assert not faults, "\n".join(faults)
    assert len(seen) > 10


# ---- refusals that name what is at fault


BAD_ROPES = [  # a rope_scaling of Phi-3, and what names it
    ({"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8}, r"short_factor must .*\[1.0\]"),
    ({"type": "longrope", "short_factor": [1.0] * 8}, "long_factor"),
    ({"type": "linear"}, "factor"),
    ({"type": "nonsense"}, "'nonsense' is not supported"),
    ("yes", "rope_scaling must be .* got 'yes'"),
]


@pytest.fixture(scope="module")
def phi3(tmp_path_factory):
    """Return the folder of a Phi-3 with a tokenizer and this `rope_scaling`."""

    def make(rope_scaling):
        folder = tmp_path_factory.mktemp("phi3")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(TINY_QWEN3) / name, folder)
        fields = {
            "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 64, "intermediate_size": 96,
            "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 2048,
            "max_position_embeddings": 128, "original_max_position_embeddings": 64, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "rope_scaling": rope_scaling,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(fields))
        return folder

    return make


@pytest.mark.parametrize("kind", [nanovllm.LLM, LLM])
@pytest.mark.parametrize(("rope_scaling", "says"), BAD_ROPES)
def test_a_fault_of_config_json_is_not_the_tokenizers(phi3, kind, rope_scaling, says):
    options = {"device": "cpu", "load_format": "dummy", "num_kv_blocks": 20, "attention_backend": "torch"}
    with pytest.raises((ValueError, TypeError), match=says) as error:
        kind(phi3(rope_scaling), **options)
    assert "the tokenizer" not in str(error.value)
    assert type(error.value) in (ValueError, TypeError)


def test_a_fault_of_config_json_that_an_override_corrects_is_none(phi3):
    llm = start(phi3({"type": "nonsense"}), {"load_format": "dummy", "hf_overrides": {"rope_scaling": None}})
    assert llm.engine.tokenizer.decode(llm.engine.tokenizer.encode("a block table")) == "a block table"


def test_a_fault_of_the_tokenizer_is_the_tokenizers(phi3):
    folder = phi3(None)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="the tokenizer in .* cannot be loaded"):
        start(folder, {"load_format": "dummy"})


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_position_embeddings": 64}, "must take max_model_len 2048 tokens; it takes 64: take max_model_len=64"),
        ({"max_position_embeddings": 64, "rope_scaling": YARN}, "max_model_len must be at most 128"),
        ({"vocab_size": 300}, "must have the vocabulary of the model, 2048 tokens, got 300"),
        ({"architectures": ["Nothing"]}, r"architecture \['Nothing'\] is not supported"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
    ],
)
def test_a_refusal_of_a_draft_model_names_it(tmp_path, fields, says):
    config = json.loads((Path(TINY_QWEN3) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
    options = {"load_format": "dummy", "speculative_config": {"model": str(tmp_path), **DRAFTS}}
    message = refusal_of(TINY_QWEN3, options)
    assert message.startswith(f"speculative_config['model'] '{tmp_path}': ")
    assert re.search(says, message)
    assert list(faults_of(message, options, TINY_QWEN3, 0)) == []
