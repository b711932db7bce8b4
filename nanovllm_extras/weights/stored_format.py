"""Read from config.json how the weights of a checkpoint are quantised. `checkpoint.py` calls `read_format`."""

from collections.abc import Callable, Mapping
from typing import Any

from nanovllm_extras.weights.formats import READERS, Format
from nanovllm_extras.weights.fp8_weights import Fp8, read_compressed_fp8, read_fp8
from nanovllm_extras.weights.mxfp4 import Mxfp4, read_mxfp4


def read_format(field: str, raw: object) -> Format | Fp8 | Mxfp4:
    """Parse `raw`, the value of `field` in config.json. Raises ValueError if the format is not supported."""
    given = raw if isinstance(raw, Mapping) else {}
    name = given.get("quant_method") or given.get("format") or raw
    known: dict[str, Callable[[Mapping[str, Any]], Format | Fp8 | Mxfp4]] = {
        **READERS,
        "fp8": read_fp8,
        "mxfp4": read_mxfp4,
    }
    if field != "quantization_config" or not isinstance(name, str) or name not in known:
        raise ValueError(
            f"config.json has a {field}: the weights are quantised with {name}, which is not supported; "
            f"known are {', '.join(known)}. Take the same model in bfloat16, float16 or float32"
        )
    if name == "compressed-tensors" and given.get("format") in ("float-quantized", "naive-quantized"):
        return read_compressed_fp8(given)
    return known[name](given)
