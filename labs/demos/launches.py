"""Measure the cost of many small operations: the bundled model with PyTorch's layers, and with nanovllm's kernels.

Both compute the same tokens from the same weights. With PyTorch's layers, a decode step runs hundreds of operations.
With the kernels, it calls C once for each decoder layer. The network runs on one thread.

    python -m labs.demos.launches
"""

import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams

BATCH_SIZES = [1, 4, 16]
NUM_STEPS = 40  # the fastest counts


class CountOperations(TorchDispatchMode):
    """Counts the operations of PyTorch, without views, which compute nothing."""

    num_operations = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        self.num_operations += not operation.is_view
        return operation(*args, **(kwargs or {}))


def main() -> None:
    torch.set_num_threads(1)
    times = "  ".join(f"{f'batch of {n}':>11}" for n in BATCH_SIZES)
    print(f"layers     operations of PyTorch  {times}")
    answers = [measure("PyTorch", attention_backend="torch", enforce_eager=True), measure("kernels")]
    print(f"the same tokens: {answers[0] == answers[1]}")


def measure(name: str, **options: Any) -> list[list[int]]:
    """Measure one engine, print its row, and return the tokens of all sequences."""
    params = SamplingParams(temperature=0, max_tokens=NUM_STEPS, ignore_eos=True)
    milliseconds, token_ids = [], []
    with LLM(TINY_QWEN3, dtype="float32", num_kv_blocks=256, **options) as llm:
        for n in BATCH_SIZES:
            for i in range(n):
                llm.engine.add_request(f"{n}-{i}", [1, 331, 268, 201, 309 + i], params)
            llm.engine.step()  # prefill
            with CountOperations() as counted:
                llm.engine.step()
            seconds = []
            while llm.engine.has_unfinished_requests():
                start = time.perf_counter()
                step = llm.engine.step()
                seconds.append(time.perf_counter() - start)
            milliseconds.append(1e3 * min(seconds))
            token_ids += [list(output.outputs[0].token_ids) for output in step.outputs]
    times = "  ".join(f"{ms:>8.2f} ms" for ms in milliseconds)
    print(f"{name:<9}  {counted.num_operations:>21}  {times}")
    return token_ids


if __name__ == "__main__":
    main()
