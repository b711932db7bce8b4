"""How many examples does hypothesis try? A module of its own: a folder of tests may have a conftest of its own."""

import os


def examples(n):
    """All of them in a sweep (`pytest -m slow`), a third by default."""
    return n if os.environ.get("NANOVLLM_SWEEP") else n // 3
