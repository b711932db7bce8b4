"""The models in the package, by name: `LLM("tiny-qwen3.5")`, `nanovllm chat tiny-qwen3.5`. Called by `hub.py`."""

from pathlib import Path

from nanovllm.loader import TINY_QWEN3

TINY_QWEN3_5 = Path(__file__).parents[1] / "assets" / "tiny-qwen3.5"
"""A Qwen3.5 of 3.5 million parameters, trained like the bundled Qwen3. Three of its four layers keep states."""

BUNDLED = {"tiny-qwen3": TINY_QWEN3, "tiny-qwen3.5": TINY_QWEN3_5}
"""Name -> folder."""
