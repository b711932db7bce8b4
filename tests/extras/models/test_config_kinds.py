"""Each field of config.json absent, null, and of each type that transformers accepts: `transformers` is the oracle.

An absent field gets a default, and null usually means something else: no bias, no window, as many heads as there are.
A field that is refused here must be named.
"""

import json
import logging

import pytest
import torch

from nanovllm_extras import LLM
from tests.extras.models.architectures import ARCHITECTURES, IS_4, Checkpoints
from tests.extras.models.test_architectures import logits_of
from tests.extras.models.test_config_fields import SKIPPED, logits_of_transformers, read, write_config, written

pytestmark = pytest.mark.skipif(IS_4, reason="transformers 4 does not check types, and crashes later")
ABSENT = "absent"
OPTIONS = {"max_num_batched_tokens": 25, "block_size": 16, "num_kv_blocks": 8, "dtype": "float32"}
# fields of which an error names the one that is wrong because of them, or that means the same
OTHER_NAMES = {"use_sliding_window": "sliding_window"}
# transformers' default of 128 does not fit small checkpoints, and DeepSeek's attention does not use it
UNUSED = {("deepseek_v3", "num_key_value_heads")}


def kinds_of(value):
    """The same value in other types, null, and none."""
    yield ABSENT
    yield None
    if isinstance(value, bool):
        yield from (int(value), float(value), str(value))
    elif isinstance(value, int):
        yield from (0, float(value), str(value), bool(value), [value])
    elif isinstance(value, float):
        yield from (0, int(value), str(value), [value])
    elif isinstance(value, str):
        yield from ("", [value], 1)
    elif isinstance(value, list | dict):
        yield from ([], {}, str(value))


def changed(raw):
    """(field, kind, the whole config); of `rope_parameters`, each of its fields too."""
    for field in sorted(raw.keys() - SKIPPED):
        if field.endswith(("token_id", "token_ids")):
            continue
        for kind in kinds_of(raw[field]):
            yield field, kind, with_field(raw, field, kind)
        for inner in raw[field] if isinstance(raw[field], dict) else ():
            for kind in kinds_of(raw[field][inner]):
                yield inner, kind, {**raw, field: with_field(raw[field], inner, kind)}


def with_field(raw, field, kind):
    rest = {name: value for name, value in raw.items() if name != field}
    return rest if kind is ABSENT else {**rest, field: kind}


def spelled_out(name, raw):
    """What transformers makes of a config.json, with every default; None if it refuses it."""
    try:
        config = ARCHITECTURES[name].config_class.from_dict(json.loads(json.dumps(raw)))
        return {**json.loads(config.to_json_string(use_diff=False)), "architectures": raw["architectures"]}
    except Exception:  # noqa: BLE001 (any: its own refusal)
        return None


def read_or_refuse(raw):
    """The parsed config, or the error."""
    try:
        return read(raw)
    except (ValueError, TypeError) as error:
        return error


def is_named(field, error):
    return any(name in str(error) for name in (field, OTHER_NAMES.get(field, field)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_defaults_are_those_of_transformers(name, caplog):
    """A config is read as the one in which transformers has spelled out what is absent or null."""
    caplog.set_level(logging.CRITICAL)
    raw, compared = written(name, next(iter(ARCHITECTURES[name].variants))), 0
    for field, kind, other in changed(raw):
        ours, theirs = read_or_refuse(other), spelled_out(name, other)
        if isinstance(ours, Exception):
            assert is_named(field, ours), (field, kind, ours)
        elif theirs is not None and (name, field) not in UNUSED:
            assert ours == read_or_refuse(theirs), (field, kind)
            compared += 1
    assert compared > 20


def start(folder):
    """The engine, or the error."""
    try:
        return LLM(folder, device="cpu", attention_backend="torch", enforce_eager=True, **OPTIONS)
    except (ValueError, TypeError) as error:
        return error


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "deepseek_v3"])
def test_kinds_are_computed_as_by_transformers(tmp_path, caplog, name):
    """Oracle: its logits, wherever its config keeps a value that is null or of an odd type."""
    caplog.set_level(logging.CRITICAL)
    checkpoints, architecture = Checkpoints(tmp_path), ARCHITECTURES[name]
    variant = next(iter(architecture.variants))
    folder, _ = checkpoints.make(name, variant)
    prompt = checkpoints.prompts(name, variant)[-1]
    raw = json.loads((folder / "config.json").read_text())
    compared = 0
    for field, kind, other in changed(raw):
        theirs = None if kind is ABSENT else spelled_out(name, other)
        if theirs is None:
            continue
        write_config(folder, other)
        llm = start(folder)
        if isinstance(llm, Exception):
            assert is_named(field, llm) or "tensor" in str(llm), (field, kind, llm)
            continue
        logits = logits_of_transformers(architecture.model_class, folder, prompt)
        if logits is not None:
            ours = logits_of(llm, prompt)
            assert torch.allclose(ours, logits, rtol=1e-4, atol=1e-3), f"{field} = {kind!r}"
            compared += 1
    assert compared > 5
