"""Measure the memory that a prompt's activations take, by the length of its chunks.

    python -m labs.demos.activation_memory
    python -m labs.demos.activation_memory --budget 960 120

Activations are the tensors that a forward pass makes and drops again. The program counts the bytes of all tensors that
are alive at the same time, and reports the largest sum of any step. Weights and the KV cache were made before, and do
not count. Tensors that an operation of PyTorch makes and drops inside are not counted either.
"""

import argparse
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams

PROMPT_LEN, BUDGETS = 960, [960, 240, 60]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "attention_backend": "torch",
    "enforce_eager": True,
    "num_kv_blocks": 64,
}


class Alive(TorchDispatchMode):
    """Follows the memory of all tensors that are made while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {self._key(one) for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for one in tree_flatten(result)[0]:
            if isinstance(one, torch.Tensor) and self._key(one) not in given | self._seen:
                self._follow(one.untyped_storage())
        return result

    def _key(self, tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        self._seen.add(key)
        self.num_bytes += num_bytes
        self.peak = max(self.peak, self.num_bytes)

        def drop() -> None:
            self._seen.discard(key)
            self.num_bytes -= num_bytes

        weakref.finalize(storage, drop)


def main() -> None:
    parser = argparse.ArgumentParser(description="Activation memory by chunk length.")
    parser.add_argument("--budget", type=int, nargs="+", default=BUDGETS, metavar="N", help="tokens of a step")
    budgets = parser.parse_args().budget
    if not all(1 <= budget <= PROMPT_LEN for budget in budgets):
        parser.error(f"--budget must be from 1 to {PROMPT_LEN}, the prompt, got {' '.join(map(str, budgets))}")
    torch.set_num_threads(1)
    print(f"a prompt of {PROMPT_LEN} tokens\n")
    print("tokens a step   steps   activations: formula   measured   K and V of the prompt")
    for budget in budgets:
        num_steps, peak, shape, kv_bytes = measure(budget)
        formula = budget * (3 * shape.hidden_size + 4 * shape.intermediate_size) * 4
        columns = f"{formula / 1e6:>17.2f} MB   {peak / 1e6:>5.2f} MB   {kv_bytes / 1e6:>18.2f} MB"
        print(f"{budget:>13}   {num_steps:>5}   {columns}")


def measure(budget: int) -> tuple[int, int, Any, int]:
    """Prefill the prompt. Return the steps, the most bytes alive, the model's shape, and the bytes of K and V."""
    with LLM(TINY_QWEN3, max_num_batched_tokens=budget, enable_prefix_caching=False, **OPTIONS) as llm:
        engine = llm.engine
        params = SamplingParams(temperature=0, max_tokens=1)
        engine.add_request("long", [100 + i for i in range(PROMPT_LEN)], params)
        peak = num_steps = 0
        while engine.has_unfinished_requests():
            with Alive() as alive:
                engine.step()
            peak, num_steps = max(peak, alive.peak), num_steps + 1
        cache = engine.runner.kv_cache
        kv_bytes = PROMPT_LEN * cache.bytes_per_block // engine.runner.backend.block_size
        return num_steps, peak, engine.runner.shape, kv_bytes


if __name__ == "__main__":
    main()
