"""The features that are tried together, and a covering array of them: engines that together have every pair of levels.

A factor is a feature, and its levels are what an engine can have of it. The first level of a factor is its absence. A
row gives each factor a level, so it describes one engine. No row has what the table of the code refuses
(`nanovllm_extras/options/compatibility.py`): when a row of that table is deleted, the array has the pair.

    default   rows that have each pair of levels: (K and V in int8, swap), (gpt-oss, overlap) …
    sweep     rows that have, with the default ones, each pair of levels on each model

Rows are found greedily: a row begins with a pair that no row has yet, and takes for each factor, in a random order, the
level that completes the most of such pairs. Of a few orders, the best one is kept (AETG: Cohen, Dalal, Fredman and
Patton, 1997).
"""

import functools
import itertools
import random
from typing import Any

import transformers

from nanovllm_extras.execution.mtp_head import check_head
from nanovllm_extras.models.architectures import find_architecture
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.options.compatibility import check_combinations
from tests.extras.models.architectures import ARCHITECTURES
from tests.extras.models.gemma4_checkpoints import make_config as make_gemma4_config
from tests.extras.models.hybrid_checkpoints import make_config as make_hybrid_config

VOCAB_SIZE = 300  # as the tokenizer of single bytes, and more
WINDOW = {"sliding_window": 16}
# Two ranks halve the inputs of some layers. These sizes leave each half whole groups of 32 inputs, which share a scale.
WIDE = {"intermediate_size": 128}
EXPERTS = {**WIDE, "moe_intermediate_size": 64}
MODELS = {  # name -> (kind in `ARCHITECTURES`, variant, fields), or (kind of hybrid, None, fields), or Gemma 4
    "Qwen3": ("qwen3", "biases", WIDE),
    "windows only": ("mistral", "short window", {**WIDE, **WINDOW}),
    "gpt-oss": ("gpt_oss", "clamped", {**WIDE, **WINDOW}),
    "Gemma 3": ("gemma3", "capped", {**WIDE, **WINDOW}),
    "Gemma 4": ("gemma4", None, {**WIDE, **WINDOW, "vocab_size_per_layer_input": VOCAB_SIZE}),
    "Qwen3.5": ("Qwen3_5", None, WIDE),
    "LFM2": ("Lfm2", None, {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "DeepSeek-V3": ("deepseek_v3", "yarn with mscales", {**EXPERTS, "v_head_dim": 32}),
    "mixture of experts": ("qwen3_moe", "normalised", EXPERTS),
}
DRAFTS = {"num_speculative_tokens": 3, "disable_by_batch_size": 64}
TIER = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": {"shared_storage_path": "a-folder"}}
FEW_BLOCKS = 14  # of 4 tokens: the longest request needs half of them
INT4 = {"method": "int4", "group_size": 32}
INT8 = {"method": "int8", "group_size": 32}
FACTORS: dict[str, dict[str, dict[str, Any]]] = {  # factor -> level -> options; without any, tests ask otherwise for it
    "model": dict.fromkeys(MODELS, {}),
    "prefix cache": {"on": {}, "off": {"enable_prefix_caching": False}},
    "budget": {"large": {}, "7 tokens": {"max_num_batched_tokens": 7}},
    "small pool": {
        "no": {},
        "recompute": {"num_kv_blocks": FEW_BLOCKS},
        "swap": {"num_kv_blocks": FEW_BLOCKS, "preemption_mode": "swap", "swap_space_bytes": 1 << 20},
    },
    "host tier": {"off": {}, "on": {"kv_offloading_size": 1e-2}},
    "disk tier": {"off": {}, "on": {"kv_transfer_config": TIER}},
    "speculation": {
        "none": {},
        "n-gram": {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1, **DRAFTS}},
        "draft model": {"speculative_config": {"model": "a-draft-model", **DRAFTS}},
        "mtp": {"speculative_config": {"method": "mtp", **DRAFTS}},
    },
    "overlap": {"off": {}, "on": {"enable_overlap": True}},
    "weights": {"plain": {}, "int8": {"quantization": INT8}, "int4": {"quantization": INT4}},
    "K and V": {"plain": {}, "int8": {"kv_cache_dtype": "int8"}},
    "ranks": {"1": {}, "2": {"tensor_parallel_size": 2}},
    "adapters": {"none": {}, "on": {"enable_lora": True, "max_loras": 2, "max_lora_rank": 4}},
    "explained misses": {"off": {}, "on": {"explain_prefix_misses": True}},
    "recording": {"off": {}, "on": {}},
    "samples": {"1": {}, "4": {}},
    "structured output": {"off": {}, "on": {}},
    "log-probabilities": {"off": {}, "on": {}},
    "prompt log-probabilities": {"off": {}, "on": {}},
    "beams": {"off": {}, "on": {}},
    "embeddings": {"off": {}, "on": {}},
}
PLAIN = {factor: next(iter(levels)) for factor, levels in FACTORS.items()}
"""The row of an engine with the first model, and no feature."""


def make_config(name):
    """Return the `transformers` config of a model."""
    kind, variant, fields = MODELS[name]
    fields = {"vocab_size": VOCAB_SIZE, **fields}
    if kind == "gemma4":
        return make_gemma4_config(**fields)
    if variant is None:
        return make_hybrid_config(kind, **fields)
    architecture = ARCHITECTURES[kind]
    fields = {**architecture.shape, **architecture.variants[variant], **fields}
    fields = {key: value for key, value in fields.items() if (key, value) != ("head_dim", None)}
    return architecture.config_class(**fields, bos_token_id=None, eos_token_id=None)


def class_name_of(name):
    """Return the name of the class of a model, which takes seconds to import from `transformers`."""
    kind, variant, _ = MODELS[name]
    if variant is not None:
        return ARCHITECTURES[kind].class_name
    return "Gemma4ForCausalLM" if kind == "gemma4" else f"{kind}ForCausalLM"


def class_of(name):
    """Return the class of `transformers` of a model."""
    return getattr(transformers, class_name_of(name))


@functools.cache
def shape_of(name):
    """Return the `NetworkConfig` of a model, for which no weights are made."""
    return find_architecture({**make_config(name).to_dict(), "architectures": [class_name_of(name)]})[1]


def options_of(row):
    """Return the options of the engine of a row, which may have only some of the factors."""
    options = [FACTORS[factor][level] for factor, level in row.items()]
    return {name: value for one in options for name, value in one.items()}


def why_not(row):
    """Return the ValueError with which the code refuses a row of some of the factors, or None."""
    shape = shape_of(row["model"]) if "model" in row else None
    try:
        config = Config("a-model", load_format="dummy", **options_of(row))
        check_combinations(config, shape)
        if row.get("speculation") == "mtp" and shape is not None:
            check_head(config, None, shape)
    except ValueError as error:
        return error
    return None


@functools.cache
def refused():
    """Return the least sets of (factor, level) that the code refuses: pairs, and triples without such a pair."""
    found = []
    asked = [(factor, level) for factor in FACTORS for level, options in FACTORS[factor].items()
             if options or factor == "model"]  # fmt: skip
    for size in (2, 3):
        for some in itertools.combinations(asked, size):
            row = dict(some)
            if len(row) == size and not any(one <= row.items() for one in found) and why_not(row) is not None:
                found.append(frozenset(some))
    return found


def is_allowed(row):
    """Return whether a model, that of the row if it has one, can have these levels."""
    rows = [row] if "model" in row else [{"model": name, **row} for name in MODELS]
    return any(not any(one <= each.items() for one in refused()) for each in rows)


def pairs_of(row):
    return set(itertools.combinations(row.items(), 2))


def allowed_pairs(model=None):
    """Return all pairs of levels that an engine of this model, or of any, can have; in the order of `FACTORS`."""
    fixed = {} if model is None else {"model": model}
    factors = [factor for factor in FACTORS if factor not in fixed]
    every = [
        ((one, level), (other, level_of_other))
        for one, other in itertools.combinations(factors, 2)
        for level, level_of_other in itertools.product(FACTORS[one], FACTORS[other])
    ]
    return [pair for pair in every if is_allowed({**fixed, **dict(pair)})]


def cover(pairs, rows=(), model=None, num_orders=8):
    """Return rows that, with `rows`, have all `pairs` of levels."""
    rng = random.Random(0)
    left = dict.fromkeys(pairs)
    for row in rows:
        left = {pair: None for pair in left if pair not in pairs_of(row)}
    found = []
    while left:
        begin = {**({} if model is None else {"model": model}), **dict(next(iter(left)))}
        tried = [fill(begin, left, rng) for _ in range(num_orders)]
        best = max(tried, key=lambda row: len(pairs_of(row) & left.keys()))
        found.append(best)
        left = {pair: None for pair in left if pair not in pairs_of(best)}
    return found


def fill(begin, left, rng):
    """Return a whole row that begins with these levels; each further level completes the most of the pairs `left`."""
    row = dict(begin)
    factors = [factor for factor in FACTORS if factor not in row]
    rng.shuffle(factors)
    if "model" in factors:  # first: others are refused with some models, and never without their feature
        factors.remove("model")
        factors.insert(0, "model")
    for factor in factors:
        levels = list(FACTORS[factor])
        rng.shuffle(levels)
        levels = [level for level in levels if is_allowed({**row, factor: level})]
        row[factor] = max(levels, key=lambda level: num_completed((factor, level), row, left))
    return {factor: row[factor] for factor in FACTORS}


def num_completed(new, row, left):
    """Return how many of the pairs `left` the level `new` completes beside the levels of a row."""
    return sum((one, new) in left or (new, one) in left for one in row.items())


@functools.cache
def default_rows():
    return cover(allowed_pairs())


@functools.cache
def sweep_rows():
    """Return the rows with each pair of levels on each model, beyond the default ones."""
    every = default_rows()
    return [
        row
        for model in MODELS
        for row in cover(allowed_pairs(model), [one for one in every if one["model"] == model], model, num_orders=3)
    ]


def name_of(row):
    """Return the features of a row, in words."""
    asked = [level if factor in ("model", "speculation") else f"{factor} {level}" for factor, level in row.items()
             if factor == "model" or level != PLAIN[factor]]  # fmt: skip
    return ", ".join(asked).replace(" on,", ",").removesuffix(" on")
