"""Crashes and hangs of kernels, found in a process of their own, which runs while the weights are loaded.

On a CPU the process runs `call_kernels.py`: the C kernels through ctypes, without torch. On CUDA it runs this file: the
attention backend over random tensors, which compiles Triton's kernels into the cache that the engine uses too.
"""

import json
import signal
import subprocess
import sys
import threading
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.extras.self_check.comparison import SelfCheckError
from nanovllm.extras.self_check.networks import new_cache, send
from nanovllm.extras.self_check.steps import MIN_MODEL_LEN, draw_vectors, make_steps

if TYPE_CHECKING:
    from nanovllm.extras.full_runner import ModelRunner

TIMEOUTS = {"cpu": 5.0, "cuda": 15.0}  # seconds


class CrashTest:
    """Runs a command in another process. `wait` raises SelfCheckError if the process has not ended well."""

    def __init__(self, command: list[str], timeout: float) -> None:
        self.command, self.timeout = command, timeout
        self.reason: str | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()
        if self.reason is not None:
            raise SelfCheckError(self.reason)

    def _run(self) -> None:
        try:
            done = subprocess.run(
                self.command, capture_output=True, timeout=self.timeout, stdin=subprocess.DEVNULL, check=False
            )
        except subprocess.TimeoutExpired:
            self.reason = f"hang: the kernels did not return within {self.timeout:g} s, in a process of their own"
        except OSError:  # no process can be started; the comparison will do
            return
        else:
            if done.returncode < 0:
                name = signal.Signals(-done.returncode).name
                self.reason = f"crash: the kernels ended a process of their own by {name}"
            elif done.returncode:
                last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
                self.reason = f"error: the kernels failed in a process of their own: {''.join(last)}"


def start_crash_test(runner: "ModelRunner") -> CrashTest:
    """Start the test of a runner's attention backend, whose weights need not be loaded."""
    shape, backend = runner.shape, runner.backend
    if runner.device.type == "cpu":
        return CrashTest(of_c_kernels(shape, backend, runner.dtype), TIMEOUTS["cpu"])
    path = f"{type(backend).__module__}.{type(backend).__qualname__}"
    heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, backend.block_size)
    kv_cache_dtype = runner.config.kv_cache_dtype
    arguments = [path, heads, str(runner.dtype).removeprefix("torch."), kv_cache_dtype, str(runner.device)]
    return CrashTest([sys.executable, "-m", __name__, json.dumps(arguments)], TIMEOUTS["cuda"])


def of_c_kernels(shape: Any, backend: Any, dtype: torch.dtype) -> list[str]:
    """Return the command that calls the C kernels."""
    kernels = find_spec("nanovllm.extras.self_check.call_kernels")
    assert kernels is not None
    sizes = {
        "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size,
        "num_heads": shape.num_attention_heads, "num_kv_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim, "block_size": backend.block_size,
        "element_bytes": dtype.itemsize, "has_kv": shape.latent_rank is None,
    }  # fmt: skip
    return [sys.executable, "-I", "-S", str(kernels.origin), json.dumps([backend.library._name, sizes])]


@torch.inference_mode()
def attend_once(
    path: str, heads: tuple[int, int, int, int], dtype_name: str, kv_cache_dtype: str, device_name: str
) -> None:
    """Store and attend as in the three steps of `steps.py`, with random numbers."""
    module, _, name = path.rpartition(".")
    num_heads, num_kv_heads, head_dim, block_size = heads
    dtype, device = getattr(torch, dtype_name), torch.device(device_name)
    backend = getattr(import_module(module), name)(*heads, dtype, kv_cache_dtype)
    batches, num_blocks = make_steps(block_size, 4 * block_size + MIN_MODEL_LEN, [0])
    cache = new_cache(backend, num_blocks, dtype, device)[:, 0]
    for batch in batches:
        metadata = send(batch.metadata, device)
        q, k, v = (
            draw_vectors(0, len(batch.input_ids), count, head_dim).to(device, dtype)
            for count in (num_heads, num_kv_heads, num_kv_heads)
        )
        backend.store_kv(k, v, cache, metadata.slot_mapping)
        backend.attend(q, cache, metadata).cpu()  # waits until the device has computed it


if __name__ == "__main__":
    attend_once(*json.loads(sys.argv[1]))
