"""Each field of config.json, set to another value, gives what `transformers` makes of it, or is refused.

So no field is overlooked that changes the result: a list of fields to read would have its author's gaps.
"""

import dataclasses
import json
import logging

import pytest
import torch

from nanovllm_extras import LLM
from nanovllm_extras.models.architectures import find_architecture
from nanovllm_extras.models.rope_types import ScaledRope
from tests.extras.models.architectures import ARCHITECTURES, IS_4, NO_FIELDS, Checkpoints
from tests.extras.models.hybrid_checkpoints import HybridCheckpoints
from tests.extras.models.test_architectures import logits_of

# what names a file or a token, and changes no logits
SKIPPED = {"architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "_name_or_path"}
OTHER_VALUES = {  # where a number next to the old one would say little, or the old one is None
    "hidden_act": ["gelu", "gelu_pytorch_tanh", "relu"],
    "hidden_activation": ["gelu", "silu"],
    "head_dim": [64],
    "sliding_window": [None, 5, 30],
    "sliding_window_pattern": [1, 2],
    "max_window_layers": [0, 1],
    "no_rope_layers": [None, [1, 1, 1], [0, 0, 1], [1, 0], [1, 2, 0]],
    "layer_types": [["full_attention"] * 3, ["sliding_attention"] * 3, ["chunked_attention"] * 3],
    "num_hidden_layers": [1, 3],
    "num_key_value_heads": [1, None],
    "rope_theta": [77.0],
    "rope_local_base_freq": [77.0],
    "partial_rotary_factor": [0.5],
    "rope_scaling": [{"rope_type": "linear", "factor": 3.0}, {"type": "dynamic", "factor": 3.0}, {"rope_type": "new"}],
    "original_max_position_embeddings": [32],
    "max_position_embeddings": [512],
    "final_logit_softcapping": [2.0],
    "attn_logit_softcapping": [2.0],
    "query_pre_attn_scalar": [50],
    "quantization_config": [{"quant_method": "hqq"}],
}
HYBRIDS = [] if IS_4 else ["Qwen3_5Moe", "Lfm2"]  # the former has all fields of the dense model
OF_5_ALONE = (  # fields of which transformers 4 makes something else than 5, which the engine follows
    {(name, "original_max_position_embeddings") for name in ("qwen3", "deepseek_v3")}
    | {("deepseek_v3", "num_experts_per_tok")}
    if IS_4
    else set()
)


def other_values(name, value):
    if name in OTHER_VALUES:
        return [other for other in OTHER_VALUES[name] if other != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2]
    if isinstance(value, float):
        return [value * 30 + 0.01]
    if isinstance(value, dict):  # one of its values at a time, at any depth
        return [{**value, key: other} for key, inner in value.items() for other in other_values(key, inner)]
    return []


def changes(raw):
    """(name, other value); also of fields that older files have."""
    for name in sorted({*raw, *(OTHER_VALUES if "rope_parameters" not in raw else ["quantization_config"])} - SKIPPED):
        if not name.endswith(("token_id", "token_ids")):
            for value in other_values(name, raw.get(name)):
                yield name, value


def write_config(folder, raw):
    """Replace config.json. To truncate the old file may wait for the disk."""
    (folder / "config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))


def logits_of_transformers(model_class, folder, prompt):
    """None where it loads nothing, or starts a weight at random."""
    try:
        model, info = model_class.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
        with torch.no_grad():
            logits = model.eval()(torch.tensor([prompt]), use_cache=False).logits[0]
    except Exception:  # noqa: BLE001 (any: its own refusal)
        return None
    return None if info["missing_keys"] or info["mismatched_keys"] else logits


@pytest.mark.parametrize(
    "name",
    [
        "gemma3",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("llama", "qwen2", "phi3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "smollm3")
        ),
    ],
)
def test_a_changed_field_is_computed_or_refused(tmp_path, caplog, name):
    caplog.set_level(logging.ERROR)
    checkpoints, architecture = Checkpoints(tmp_path), ARCHITECTURES[name]
    variant = next(iter(architecture.variants))
    skipped = {field for one, field in OF_5_ALONE if one == name}
    folder, _ = checkpoints.make(name, variant)
    change_fields(folder, architecture.model_class, checkpoints.prompts(name, variant)[-1], skipped)


@pytest.mark.slow
@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_changed_field_of_a_model_with_states_is_computed_or_refused(tmp_path, caplog, kind):
    caplog.set_level(logging.ERROR)
    hybrids = HybridCheckpoints(tmp_path, kind)
    folder, model = hybrids.make()
    change_fields(folder, type(model), hybrids.prompts()[-1])


def change_fields(folder, model_class, prompt, skipped=()):
    """Change one field of the checkpoint in `folder` at a time, and compare the logits of the prompt."""
    raw = json.loads((folder / "config.json").read_text())
    outcomes = {"computed": [], "refused": []}
    for field, value in changes(raw):
        if field in skipped:
            continue
        write_config(folder, {**raw, field: value})
        theirs = logits_of_transformers(model_class, folder, prompt)
        try:
            options = {"max_num_batched_tokens": 25, "block_size": 16, "num_kv_blocks": 8, "dtype": "float32"}
            llm = LLM(folder, device="cpu", attention_backend="torch", enforce_eager=True, **options)
        except (ValueError, TypeError):
            outcomes["refused"].append((field, value))
            continue
        if theirs is not None:
            ours = logits_of(llm, prompt)
            error = (ours - theirs).abs().max().item()
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-3), f"{field} = {value!r} gives {error:.4f} more"
            outcomes["computed"].append((field, value))
        else:
            outcomes["refused by transformers alone"] = [*outcomes.get("refused by transformers alone", []), field]
    assert len(outcomes["computed"]) > 5
    assert len(outcomes["refused"]) > 5
    assert any(field == "quantization_config" for field, _ in outcomes["refused"])


def written(name, variant):
    """What the installed transformers writes to config.json."""
    architecture = ARCHITECTURES[name]
    fields = {
        **architecture.shape,
        **architecture.variants[variant],
        "architectures": [architecture.class_name],
    }
    kept = {key: value for key, value in fields.items() if key not in NO_FIELDS and (key, value) != ("head_dim", None)}
    return json.loads(architecture.config_class(**kept).to_json_string(use_diff=False))


def with_rotary_positions_elsewhere(raw):
    """From `rope_parameters`, where transformers 5 keeps them, to the places of transformers 4, or back."""
    raw = dict(raw)
    if "rope_parameters" not in raw:
        scaling = dict(raw.pop("rope_scaling", None) or {})
        parameters = {"rope_type": scaling.pop("type", "default"), **scaling}
        parameters["rope_theta"] = raw.pop("rope_theta")
        if (local_theta := raw.pop("rope_local_base_freq", None)) is not None:
            local = {"rope_type": "default", "rope_theta": local_theta}
            parameters = {"full_attention": parameters, "sliding_attention": local}
        return {**raw, "rope_parameters": parameters}
    parameters = raw.pop("rope_parameters")
    if "full_attention" in parameters:
        raw["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
    parameters = dict(parameters.get("full_attention", parameters))
    raw |= {key: parameters.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in parameters}
    return {**raw, "rope_scaling": None if parameters == {"rope_type": "default"} else parameters}


def read(raw):
    """As the engine reads it; of the rotary positions what they are, not where they were found."""
    config = find_architecture(raw)[1]
    ropes = {}
    for name in ("rope", "local_rope"):
        if isinstance(rope := getattr(config, name, None), ScaledRope):
            places = ("rope_theta", "rope_type", "type", "partial_rotary_factor")
            parameters = {key: value for key, value in rope.parameters.items() if key not in places}
            ropes[name] = ScaledRope(rope.theta, rope.rope_type, parameters)
    return dataclasses.replace(config, **ropes)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rotary_positions_are_found_in_both_places(name):
    """Of each variant, so of each type; that they are computed rightly, is tested in one of the places."""
    for variant in ARCHITECTURES[name].variants:
        raw = written(name, variant)
        other = with_rotary_positions_elsewhere(raw)
        assert ("rope_parameters" in raw) != ("rope_parameters" in other)
        assert read(other) == read(raw), variant
        scaling = other.get("rope_scaling")
        if scaling:  # the type's older name
            older = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
            assert read({**other, "rope_scaling": older}) == read(raw), variant


@pytest.mark.parametrize("field", ["norm_topk_prob", "rope_interleave"])
@pytest.mark.parametrize("value", [None, "absent", False, True])
def test_null_is_not_the_default_of_deepseek_v3(field, value):
    """transformers takes null for false."""
    raw = written("deepseek_v3", "plain")
    raw = {name: one for name, one in raw.items() if name != field} | ({} if value == "absent" else {field: value})
    theirs = ARCHITECTURES["deepseek_v3"].config_class.from_dict(dict(raw))
    assert getattr(find_architecture(raw)[1], field) == bool(getattr(theirs, field))
