"""Override the rotary positions of a config.json, whichever of two spellings the file and the override use.

    transformers 4     "rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0, …}, "partial_rotary_factor": …
    transformers 5     "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, …}

The two dicts are names of the same field. An override of either replaces the whole dict, as in vLLM. An override of
`rope_scaling` keeps theta and the rotated share, since transformers 4 has them beside the dict.

Called by `checkpoint_options.py`. An architecture with several RoPEs has its own `override_positions`.
"""

from collections.abc import Collection, Mapping
from typing import Any

from nanovllm_extras.options.option_checks import first_given

DICTS = ("rope_parameters", "rope_scaling")
BESIDE = ("rope_theta", "partial_rotary_factor")  # of the dict in transformers 4, in it in transformers 5
ORIGINAL = "original_max_position_embeddings"  # in the dict, but read beside it first, where Phi-3 has it
POSITIONS = (*DICTS, *BESIDE, ORIGINAL, "rope_local_base_freq")


def override_positions(raw: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the fields `given` of the only RoPE.

    The result has the type and its numbers in `rope_parameters`, and theta and the rotated share beside it.
    """
    check_read(given, (*DICTS, *BESIDE, ORIGINAL))
    parameters, scaling = (raw.get(name) or {} for name in DICTS)
    merged = {name: value for name, value in raw.items() if name not in DICTS}
    if "rope_parameters" not in given:
        merged |= {name: first_given(*(one.get(name) for one in (scaling, parameters, raw))) for name in BESIDE}
    values = {name: value for name, value in given.items() if name not in DICTS}
    found = dict_of(raw)
    if any(name in given for name in DICTS):
        found = dict_of(given)
        if given.get("rope_scaling") and given.get("rope_parameters") not in (None, {}, found):
            raise ValueError(f"hf_overrides must have rope_scaling or rope_parameters, got both: {dict(given)}")
        inside = {name: value for name, value in (found or {}).items() if value is not None}
        values |= {name: inside[name] for name in BESIDE if name in inside}  # which counts first, as in a file
        if ORIGINAL in inside:
            values.setdefault(ORIGINAL, inside[ORIGINAL])
    rest = None if found is None else {name: value for name, value in found.items() if name not in BESIDE}
    return {**merged, **values, "rope_parameters": rest}


def dict_of(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the dict of positions that is read: `rope_scaling`, unless `rope_parameters` says the same and more."""
    parameters, scaling = fields.get("rope_parameters"), fields.get("rope_scaling") or {}
    is_merged = all((parameters or {}).get(name) == value for name, value in scaling.items())
    return parameters if is_merged else scaling


def check_read(given: Mapping[str, object], names: Collection[str]) -> None:
    """Raise ValueError for a field that the architecture does not read."""
    for name, value in given.items():
        if name not in names:
            raise ValueError(f"hf_overrides: {name} has no effect on this architecture, whose positions are set by "
                             f"{', '.join(names)}; got {value!r}")  # fmt: skip
