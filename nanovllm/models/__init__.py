"""The networks, and which one a checkpoint needs. Begin with `qwen3.py`, which reads from top to bottom."""

from typing import Any

from nanovllm.models.qwen3 import Qwen3ForCausalLM

ARCHITECTURES = {"Qwen3ForCausalLM": Qwen3ForCausalLM}
"""The name in `architectures` of config.json -> the class of the network."""


def find_architecture(raw: dict[str, Any]) -> Any:
    """Return the class of the network that `raw`, the content of config.json, describes."""
    for name in raw.get("architectures") or ():
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise ValueError(f"architectures must name one of {', '.join(ARCHITECTURES)}, got {raw.get('architectures')}")
