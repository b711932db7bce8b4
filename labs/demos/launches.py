"""Measure the cost of many small operations: the bundled model with PyTorch's layers, and with nanovllm's kernels.

Both compute the same tokens from the same weights. With PyTorch's layers, a decode step runs hundreds of operations.
With the kernels, it calls C once for each decoder layer. The network runs on one thread.

    python -m labs.demos.launches
    python -m labs.demos.launches --batch-size 1 64
"""

import argparse
import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams

BATCH_SIZES = [1, 4, 16]
MAX_BATCH_SIZE = 64  # each sequence has 3 blocks of 16 tokens
NUM_STEPS = 40  # the fastest counts


class CountOperations(TorchDispatchMode):
    """Counts the operations of PyTorch, without views, which compute nothing."""

    num_operations = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        self.num_operations += not operation.is_view
        return operation(*args, **(kwargs or {}))


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of many small operations, by batch size.")
    parser.add_argument(
        "--batch-size", type=int, nargs="+", default=BATCH_SIZES, metavar="N", help="sequences that decode together"
    )
    sizes = parser.parse_args().batch_size
    if not all(1 <= n <= MAX_BATCH_SIZE for n in sizes):
        parser.error(f"--batch-size must be from 1 to {MAX_BATCH_SIZE}, got {' '.join(map(str, sizes))}")
    torch.set_num_threads(1)
    times = "  ".join(f"{f'batch of {n}':>11}" for n in sizes)
    print(f"layers     operations of PyTorch  {times}")
    answers = [measure("PyTorch", sizes, attention_backend="torch", enforce_eager=True), measure("kernels", sizes)]
    print(f"the same tokens: {answers[0] == answers[1]}")


def measure(name: str, sizes: list[int], **options: Any) -> list[list[int]]:
    """Measure one engine, print its row, and return the tokens of all sequences."""
    params = SamplingParams(temperature=0, max_tokens=NUM_STEPS, ignore_eos=True)
    milliseconds, token_ids = [], []
    with LLM(TINY_QWEN3, dtype="float32", num_kv_blocks=256, **options) as llm:
        for n in sizes:
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
