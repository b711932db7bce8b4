"""Each field of config.json, set to another value, gives what `transformers` makes of it, or is refused.

So no field is overlooked that changes the result: a list of fields to read would have the gaps of who wrote it.
"""

import json
import logging

import pytest
import torch

from nanovllm import LLM
from tests.models.architectures import ARCHITECTURES, Checkpoints
from tests.models.test_architectures import logits_of

# what names a file or a token, and changes no logits
SKIPPED = {"architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "_name_or_path"}
OTHER_VALUES = {  # where a number next to the old one would say little, or the old one is None
    "hidden_act": ["gelu", "gelu_pytorch_tanh", "relu"],
    "hidden_activation": ["gelu", "silu"],
    "head_dim": [64],
    "sliding_window": [None, 5, 30],
    "sliding_window_pattern": [1, 2],
    "max_window_layers": [0, 1],
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
    "quantization_config": [{"quant_method": "fp8"}],
}


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


def logits_of_transformers(architecture, folder, prompt):
    """None where it loads nothing, or starts a weight at random."""
    try:
        model, info = architecture.model_class.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
        with torch.no_grad():
            logits = model.eval()(torch.tensor([prompt]), use_cache=False).logits[0]
    except Exception:  # noqa: BLE001 (any: its own refusal)
        return None
    return None if info["missing_keys"] or info["mismatched_keys"] else logits


@pytest.mark.parametrize(
    "name", [name if name == "gemma3" else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES]
)
def test_a_changed_field_is_computed_or_refused(tmp_path, caplog, name):
    caplog.set_level(logging.ERROR)
    checkpoints, architecture = Checkpoints(tmp_path), ARCHITECTURES[name]
    variant = next(iter(architecture.variants))
    folder, _ = checkpoints.make(name, variant)
    prompt = checkpoints.prompts(name, variant)[-1]
    raw = json.loads((folder / "config.json").read_text())
    outcomes = {"computed": [], "refused": []}
    for field, value in changes(raw):
        (folder / "config.json").write_text(json.dumps({**raw, field: value}))
        theirs = logits_of_transformers(architecture, folder, prompt)
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
