"""The networks, and which one a checkpoint needs. Begin with `qwen3.py`, which reads from top to bottom."""

from typing import Any

from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.plugins import find_plugins, load_network

ARCHITECTURES = {"Qwen3ForCausalLM": Qwen3ForCausalLM}
"""The name in `architectures` of config.json -> the class of the network. Other packages register more."""


def find_architecture(raw: dict[str, Any]) -> Any:
    """Return the class of the network that `raw`, the content of config.json, describes."""
    for name in raw.get("architectures") or ():
        network = ARCHITECTURES.get(name) or load_network(name)
        if network is not None:
            return network
    known = sorted({*ARCHITECTURES, *find_plugins("models")})
    raise ValueError(f"architectures must name one of {', '.join(known)}, got {raw.get('architectures')}; "
                     f"nanovllm_extras.LLM serves more models")  # fmt: skip
