"""Crashes and hangs of kernels, found in a process of their own, which runs while the weights are loaded.

On a CPU the process runs `call_kernels.py`: the C kernels through ctypes, without torch. On CUDA it runs this file: the
attention backend over random tensors, which compiles Triton's kernels into the cache that the engine uses too.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.extras.kernels.backend import AttentionBackend
from nanovllm.extras.self_check.comparison import HangError, SelfCheckError
from nanovllm.extras.self_check.networks import run_attention
from nanovllm.extras.self_check.steps import MIN_MODEL_LEN, make_steps

if TYPE_CHECKING:
    from nanovllm.extras.full_runner import ModelRunner

logger = logging.getLogger(__name__)

TIMEOUTS = {"cpu": 20.0, "cuda": 120.0}  # seconds; on CUDA, to import torch and to compile kernels takes most of it
CRASHES = {signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP}
FAILED = 3  # exit status of the process: a kernel has raised an exception


class CrashTest:
    """Runs a command in another process. `wait` raises SelfCheckError if a kernel has crashed, hung or failed.

    If the process ends in another way (it cannot be started, has no memory, is killed), nothing is known. The
    comparison in this process must suffice then.
    """

    def __init__(self, command: list[str], timeout: float) -> None:
        self.command, self.timeout = command, timeout
        self.error: SelfCheckError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        package = str(Path(__file__).parents[3])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        try:
            done = subprocess.run(
                self.command, capture_output=True, timeout=self.timeout, stdin=subprocess.DEVNULL, env=environment
            )
        except subprocess.TimeoutExpired:
            seconds = f"{self.timeout:g} s"
            self.error = HangError(f"hang: the kernels did not return within {seconds}, in a process of their own")
            return
        except OSError as error:
            logger.info("the kernels are not tested in a process of their own: %s", error)
            return
        last = "".join(done.stderr.decode(errors="replace").strip().splitlines()[-1:])
        if -done.returncode in CRASHES:
            name = signal.Signals(-done.returncode).name
            self.error = SelfCheckError(f"crash: the kernels ended a process of their own by {name}")
        elif done.returncode == FAILED:
            self.error = SelfCheckError(f"error: the kernels failed in a process of their own: {last}")
        elif done.returncode:
            logger.info("the kernels are not tested in a process of their own (%d): %s", done.returncode, last)


def start_crash_test(runner: "ModelRunner") -> CrashTest:
    """Start the test of a runner's attention backend, whose weights need not be loaded."""
    shape, backend = runner.shape, runner.backend
    if hasattr(backend, "library"):
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


def attend_once(
    path: str, heads: tuple[int, int, int, int], dtype_name: str, kv_cache_dtype: str, device_name: str
) -> None:
    """Store and attend as in the three steps of `steps.py`, with random numbers."""
    module, _, name = path.rpartition(".")
    dtype, device = getattr(torch, dtype_name), torch.device(device_name)
    backend_class = getattr(import_module(module), name)
    more = (dtype, kv_cache_dtype) if issubclass(backend_class, AttentionBackend) else ()  # else it is the core's
    backend = backend_class(*heads, *more)
    steps = make_steps(backend.block_size, 4 * backend.block_size + MIN_MODEL_LEN, [0])
    try:
        run_attention(backend, *steps, dtype, dtype, device).cpu()  # waits until the device has computed it
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(FAILED)


if __name__ == "__main__":
    attend_once(*json.loads(sys.argv[1]))
