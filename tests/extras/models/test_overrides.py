"""`hf_overrides` has the effect of the same values in config.json, in both spellings of positions, nested or not.

The oracle is the same engine with the values in the file: `test_config_fields.py` compares files with `transformers`.
"""

import copy
import dataclasses
import itertools
import json

import pytest
import torch
import transformers

from nanovllm_extras import LLM
from nanovllm_extras.models.rope import Rope
from nanovllm_extras.weights.checkpoint import read_model_config
from tests.extras.models import gemma4_checkpoints, hybrid_checkpoints
from tests.extras.models.architectures import ARCHITECTURES, IS_4, Checkpoints
from tests.extras.models.test_architectures import logits_of
from tests.extras.models.test_config_fields import changes, with_rotary_positions_elsewhere, write_config, written

pytestmark = pytest.mark.skipif(IS_4, reason="the files are made with transformers 5")
FULL, SLIDING = "full_attention", "sliding_attention"
POSITIONS = {"rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"}
NESTED = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration", "Gemma4ForConditionalGeneration")


def file_of(name):
    """Return a config.json as transformers 5 writes it: the fields of the text network, not nested."""
    if name in ARCHITECTURES:
        variants = ARCHITECTURES[name].variants
        return written(name, "plain" if "plain" in variants else next(iter(variants)))
    if name.startswith("Gemma4"):
        config = gemma4_checkpoints.make_config()
    else:
        config = hybrid_checkpoints.make_config(name.split("For")[0])
    return {**json.loads(config.to_json_string(use_diff=False)), "architectures": [name]}


OF_EACH_KIND = ("llama", "phi3", "deepseek_v3", "gpt_oss", "Lfm2ForCausalLM", "Qwen3_5ForConditionalGeneration")
"""Of the architectures with one kind of positions, those that read them in different ways."""


def nest(raw):
    """Return the file of a model with images: the text network's fields are in `text_config`."""
    fields = {name: value for name, value in raw.items() if name != "architectures"}
    return {"architectures": raw["architectures"], "vision_config": {}, "text_config": fields}


def outcome(folder, raw, overrides=None):
    """Return what the network computes, with angles instead of where they were read; or why it is refused."""
    write_config(folder, raw)
    try:
        model_class, shape = read_model_config(folder, overrides)
    except (ValueError, TypeError):
        return "refused"
    return model_class, described(shape)


def described(shape):
    angles = []
    for name in ("rope", "local_rope"):
        if isinstance(rope := getattr(shape, name, None), Rope):
            frequencies, factor = rope.frequencies(shape.rotary_dim or shape.head_dim, shape.max_position_embeddings)
            angles.append((rope.theta, frequencies.tolist(), factor))
            shape = dataclasses.replace(shape, **{name: None if name == "rope" else Rope()})
    scale = getattr(shape, "score_scale", None)
    return shape, angles, scale


def assert_same(folder, name, raw, overrides, same):
    """Check an override of file `raw` against the file `same`, in files that nest their fields and those that do not.

    Returns the outcome.
    """
    expected = outcome(folder, same)
    for flat_or_nested in (raw, nest(raw)) if name in NESTED else (raw,):
        for given in (overrides, {"text_config": overrides}):
            assert outcome(folder, flat_or_nested, given) == expected, (flat_or_nested.keys(), given)
    return expected


@pytest.mark.parametrize("name", [*OF_EACH_KIND, "gemma3", "Gemma4ForConditionalGeneration"])
def test_each_field_has_the_effect_that_it_has_in_the_file(tmp_path, name):
    """Of each field that the file has, and of null in its place."""
    raw = file_of(name)
    found = [one for one in changes(raw) if one[0] not in POSITIONS and one[0] != "original_max_position_embeddings"]
    nulls = [(field, None) for field in sorted({field for field, _ in found})]
    outcomes = [assert_same(tmp_path, name, raw, {field: one}, {**raw, field: one}) for field, one in [*found, *nulls]]
    plain = outcome(tmp_path, raw)
    assert sum(one not in ("refused", plain) for one in outcomes) > 3


# ---- positions

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
DICTS = {  # in the file, and in the override
    "default": {"rope_type": "default"},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32},
    "yarn": YARN,
    "yarn by hand": {**YARN, "factor": 2.0, "attention_factor": 1.3, "beta_fast": 8.0},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "longrope": {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 64},
}  # fmt: skip
OF_PHI3 = ("default", "longrope")


def rope_dict(raw, name):
    """Return a dict of `DICTS`. LongRoPE has a factor for each pair."""
    if name != "longrope":
        return DICTS[name]
    share = (raw.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0)
    size = raw.get("qk_rope_head_dim") or raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    factors = [1.0 + 0.2 * i for i in range(int(size * share) // 2)]
    return {**DICTS[name], "short_factor": factors, "long_factor": [2 * one for one in factors]}


def with_type_key(fields, key):
    return fields and {key if name == "rope_type" else name: value for name, value in fields.items()}


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_a_dict_of_positions_replaces_that_of_the_file(tmp_path, name):
    """In four spellings, over a type in two spellings. Theta and the rotated share stay, where 4 has them."""
    base = file_of(name)
    known = OF_PHI3 if name == "phi3" else tuple(DICTS)
    beside = {key: value for key, value in (base["rope_parameters"] or {}).items()
              if key == "partial_rotary_factor"} | {"rope_theta": 500.0}  # fmt: skip
    for i, new in enumerate([*DICTS, None]):
        file = {**base, "rope_parameters": {**rope_dict(base, known[(i + 1) % len(known)]), **beside}}
        given = None if new is None else rope_dict(base, new)
        absent = {"rope_type": "default"}
        if name == "gpt_oss":  # null is yarn there, as in transformers
            absent = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                      "original_max_position_embeddings": 4096}  # fmt: skip
        wanted = {**base, "rope_parameters": {**(given or absent), **beside}}
        if name == "phi3" and "original_max_position_embeddings" in (given or {}):  # read beside the dict there
            wanted["original_max_position_embeddings"] = given["original_max_position_embeddings"]
        for raw in (file, with_rotary_positions_elsewhere(file)):
            for key in ("rope_type", "type"):
                spelled = with_type_key(given, key)
                found = assert_same(tmp_path, name, raw, {"rope_scaling": spelled}, wanted)
                if given is not None:
                    assert_same(tmp_path, name, raw, {"rope_parameters": {**spelled, **beside}}, wanted)
                    assert_same(tmp_path, name, raw, {"rope_scaling": spelled, **beside}, wanted)
        assert (found == "refused") == (name == "phi3" and str(new).startswith("yarn"))  # which means longrope there


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_rope_parameters_of_null_leave_what_is_beside_them(tmp_path, name):
    """transformers 5 has theta in the dict, transformers 4 beside it."""
    base = file_of(name)
    for old in DICTS:
        file = {**base, "rope_parameters": {**rope_dict(base, old), "rope_theta": 500.0}}
        file_of_4 = with_rotary_positions_elsewhere(file)
        assert_same(tmp_path, name, file, {"rope_parameters": None}, {**base, "rope_parameters": None})
        kept = {key: value for key, value in file_of_4.items() if key != "rope_scaling"}
        assert_same(tmp_path, name, file_of_4, {"rope_parameters": None}, kept)


@pytest.mark.parametrize("name", OF_EACH_KIND)
@pytest.mark.parametrize("field", ["rope_theta", "partial_rotary_factor", "original_max_position_embeddings"])
def test_a_value_beside_the_dict_replaces_that_in_it(tmp_path, name, field):
    base = file_of(name)
    share = {} if name in ("phi3", "llama") or name.startswith("Qwen3_5") else {"partial_rotary_factor": 1.0}
    value = {"rope_theta": 77.0, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 48}[field]
    for old in DICTS:
        inside = {**(base["rope_parameters"] or {}), **rope_dict(base, old), "rope_theta": 500.0, **share}
        file = {**base, "rope_parameters": inside}
        wanted = {**base, "rope_parameters": {**inside, field: value}}
        if name == "phi3" and field == "original_max_position_embeddings":
            wanted[field] = value
        is_refused = field == "partial_rotary_factor" or (name == "phi3" and old.startswith("yarn"))
        for raw in (file, with_rotary_positions_elsewhere(file)):
            found = assert_same(tmp_path, name, raw, {field: value}, wanted)
            assert (found == "refused") <= is_refused
        without = {**base, "rope_parameters": {key: one for key, one in inside.items() if key != "rope_theta"}}
        assert_same(tmp_path, name, file, {"rope_theta": None}, without)


GEMMA3_ROPES = {FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
                SLIDING: {"rope_type": "default", "rope_theta": 300.0}}  # fmt: skip
OF_GEMMA3 = [  # the override -> what the file's rope_parameters then are
    ({"rope_theta": 77.0}, {FULL: {**GEMMA3_ROPES[FULL], "rope_theta": 77.0}, SLIDING: GEMMA3_ROPES[SLIDING]}),
    ({"rope_local_base_freq": 77.0}, {**GEMMA3_ROPES, SLIDING: {"rope_type": "default", "rope_theta": 77.0}}),
    ({"rope_scaling": YARN}, {**GEMMA3_ROPES, FULL: {**YARN, "rope_theta": 500.0}}),
    ({"rope_scaling": {**YARN, "rope_theta": 9.0}}, {**GEMMA3_ROPES, FULL: {**YARN, "rope_theta": 9.0}}),
    ({"rope_scaling": None}, {**GEMMA3_ROPES, FULL: {"rope_type": "default", "rope_theta": 500.0}}),
    (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 9.0, "rope_local_base_freq": 8.0},
        {
            FULL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 9.0},
            SLIDING: {"rope_type": "default", "rope_theta": 8.0},
        },
    ),
    (
        {"rope_parameters": {FULL: {**YARN, "rope_theta": 9.0}, SLIDING: {"type": "linear", "factor": 2.0}}},
        {FULL: {**YARN, "rope_theta": 9.0}, SLIDING: {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}},
    ),
    ({"rope_parameters": None}, {FULL: {"rope_theta": 1_000_000.0}, SLIDING: {"rope_theta": 10_000.0}}),
    ({"rope_parameters": YARN}, "refused"),
    ({"rope_parameters": {FULL: {**YARN, "partial_rotary_factor": 0.5}}}, "refused"),
    ({"partial_rotary_factor": 0.5}, "refused"),
    ({"original_max_position_embeddings": 48}, "refused"),
]


@pytest.mark.parametrize(("overrides", "wanted"), OF_GEMMA3, ids=str)
def test_positions_of_gemma_3_with_two_thetas(tmp_path, overrides, wanted):
    raw = {**file_of("gemma3"), "rope_parameters": GEMMA3_ROPES}
    of_4 = with_rotary_positions_elsewhere(copy.deepcopy(raw))
    for file in (raw, of_4):
        if "rope_parameters" in overrides and file is of_4 and wanted != "refused":  # theta is beside it there
            parameters = overrides["rope_parameters"] or {}
            expected = {
                FULL: {"rope_theta": 500.0, **parameters.get(FULL, {})},
                SLIDING: {"rope_theta": 300.0, **parameters.get(SLIDING, {})},
            }
        else:
            expected = wanted
        for given in (overrides, {"text_config": overrides}):
            same = "refused" if wanted == "refused" else outcome(tmp_path, {**raw, "rope_parameters": expected})
            assert outcome(tmp_path, file, given) == same


@pytest.mark.parametrize(
    "field", ["rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor",
              "original_max_position_embeddings"]
)  # fmt: skip
def test_gemma_4_refuses_by_name_what_it_does_not_read(tmp_path, field):
    raw = file_of("Gemma4ForConditionalGeneration")
    for file, value in itertools.product((raw, nest(raw)), (None, {"rope_scaling": YARN}.get(field, 0.5))):
        write_config(tmp_path, file)
        for given in ({field: value}, {"text_config": {field: value}}):
            with pytest.raises(ValueError, match=f"hf_overrides: {field} has no effect .* set by rope_parameters"):
                read_model_config(tmp_path, given)


def test_positions_of_gemma_4_are_replaced(tmp_path):
    name = "Gemma4ForConditionalGeneration"
    raw = file_of(name)
    for parameters in (
        {FULL: {"rope_type": "default", "rope_theta": 77.0}, SLIDING: {"type": "proportional", "rope_theta": 5.0}},
        {FULL: {"rope_type": "default", "rope_theta": 77.0}},
        None,
    ):
        same = {**raw, "rope_parameters": parameters}
        assert_same(tmp_path, name, raw, {"rope_parameters": parameters}, same)


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_a_theta_of_windows_is_refused_by_name_where_no_layer_has_it(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(file_of(name)))
    with pytest.raises(ValueError, match="hf_overrides: rope_local_base_freq has no effect on this architecture"):
        read_model_config(tmp_path, {"rope_local_base_freq": 77.0})


def test_two_dicts_that_differ_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(file_of("llama")))
    with pytest.raises(ValueError, match="hf_overrides must have rope_scaling or rope_parameters, got both"):
        read_model_config(tmp_path, {"rope_scaling": YARN, "rope_parameters": DICTS["linear"]})
    with pytest.raises(ValueError, match="hf_overrides: rope_scaling must be a dict"):
        read_model_config(tmp_path, {"rope_scaling": "yarn"})
    with pytest.raises(ValueError, match="hf_overrides: text_config must be a dict"):
        read_model_config(tmp_path, {"text_config": [1]})


def test_a_text_config_of_null_leaves_no_fields(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(nest(file_of("Qwen3_5ForConditionalGeneration"))))
    with pytest.raises(ValueError, match="config.json lacks vocab_size"):
        read_model_config(tmp_path, {"text_config": None})


@pytest.mark.parametrize(
    ("name", "overrides", "config"),
    [
        ("llama", {"rope_scaling": YARN}, {"rope_parameters": {**YARN, "rope_theta": 500.0}}),
        ("llama", {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
        ("gemma3", {"final_logit_softcapping": None}, {"final_logit_softcapping": None}),
    ],
    ids=str,
)
def test_logits_are_those_of_transformers_with_the_values_in_the_file(tmp_path, name, overrides, config):
    """The files have llama3's positions, and a soft cap."""
    folder, model = Checkpoints(tmp_path).make(name, next(iter(ARCHITECTURES[name].variants)))
    prompt = [(7 * i * i + 3) % 200 for i in range(100)]
    options = {"dtype": "float32", "attention_backend": "torch", "enforce_eager": True, "num_kv_blocks": 20}
    llm = LLM(folder, max_model_len=128, block_size=16, device="cpu", hf_overrides=overrides, **options)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **config}))
    model_class = getattr(transformers, type(model).__name__)
    with torch.no_grad():
        edited = model_class.from_pretrained(folder, dtype=torch.float32).eval()
        expected = edited(torch.tensor([prompt]), use_cache=False).logits[0]
        assert not torch.allclose(expected, model(torch.tensor([prompt]), use_cache=False).logits[0], atol=1e-2)
    torch.testing.assert_close(logits_of(llm, prompt), expected, rtol=1e-4, atol=2e-4)
