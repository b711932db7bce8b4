"""Which LoRA adapter a sequence has. The matrices are in the runner (`lora/adapters.py`)."""

from typing import NamedTuple


class LoadedAdapter(NamedTuple):
    """An adapter that the engine has loaded."""

    number: int
    """Given once and never again, also if an adapter of the same name is loaded later."""
    name: str
    digest: str
    """A hash of its matrices. Blocks of the KV cache are named by it."""
