"""Crashes and hangs of kernels, found in a process of their own, which runs while the weights are loaded.

On a CPU the process runs `call_kernels.py`: the C kernels through ctypes, without torch. On CUDA it runs this file: the
attention backend over random tensors, layers with random weights, and the kernel that draws tokens. This compiles
Triton's kernels into the cache that the engine uses too.

The kernels on a GPU have 15 seconds. The time to import torch and to compile is not theirs, so the process prints how
many seconds the part that follows may take.

    120    import torch, set up the device, compile and launch
    15     wait until the device has computed the step
    120    compile and launch
    …
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from nanovllm.layers.attention import TorchAttention
from nanovllm_extras.execution.device_setup import Device
from nanovllm_extras.execution.runner_protocol import Runner
from nanovllm_extras.kernels.backend import AttentionBackend
from nanovllm_extras.kernels.cpu.library import QUANTISED, load_library
from nanovllm_extras.machine.own_process import FAILED, TIMEOUTS, CrashTest, call_in_own_process
from nanovllm_extras.models.layer_inputs import StateShape
from nanovllm_extras.self_check.comparison import has_kernels
from nanovllm_extras.self_check.networks import run_attention
from nanovllm_extras.self_check.random_layers import SHARE_OF_MEMORY, RandomLayers, describe_model
from nanovllm_extras.self_check.steps import MIN_MODEL_LEN, draw_vectors, make_steps


def start_crash_test(runner: Runner, kind: Device) -> CrashTest:
    """Start the test of a runner's attention backend, and of a kernel that draws. No weights need be loaded."""
    shape, backend = runner.shape, runner.backend
    if hasattr(backend, "library"):
        return CrashTest(of_c_kernels(runner), TIMEOUTS["cpu"])
    attention = model = None
    if has_kernels(runner):
        heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, backend.block_size)
        attention = [path_of(type(backend)), heads, runner.config.kv_cache_dtype]
        has_layers = hasattr(backend, "make_fast") and not runner.config.enforce_eager
        if has_layers and shape.state_shape is None:  # the steps of the test have no states
            model = describe_model(runner)
    draw = None if kind.draw is None else [path_of(kind.draw), shape.vocab_size]
    arguments = [attention, model, draw, str(runner.dtype).removeprefix("torch."), str(runner.device)]
    return CrashTest([sys.executable, "-m", __name__, json.dumps(arguments)], TIMEOUTS["compile"])


def path_of(definition: Callable[..., object]) -> str:
    return f"{definition.__module__}.{definition.__qualname__}"


def of_c_kernels(runner: Runner) -> list[str]:
    """Return the command that calls the C kernels, with those of 8 and 4 bits if the runner uses them."""
    config, shape = runner.config, runner.shape
    backend: Any = runner.backend  # whose class has C kernels
    sizes: dict[str, object] = {
        "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size,
        "num_heads": shape.num_attention_heads, "num_kv_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim, "block_size": backend.block_size,
        "element_bytes": runner.dtype.itemsize, "has_kv": shape.latent_rank is None,
        "states": sizes_of_states(shape.state_shape),
    }  # fmt: skip
    libraries = [backend.library, getattr(backend, "cache_library", backend.library)]
    is_quantised = config.quantization is not None or shape.quantization_config is not None
    if (is_quantised or config.load_format == "gguf") and not config.enforce_eager:
        libraries.append(load_library(runner.dtype, QUANTISED))
    return call_in_own_process(sizes, *(library.path_for_others() for library in libraries))


def sizes_of_states(shape: StateShape | None) -> list[int] | None:
    """Return the heads of keys and of values, their channels, and the width of the convolution of a `StateShape`.

    None if there are no recurrent states, for which there is a kernel.
    """
    if shape is None or not shape.recurrent[0]:
        return None
    num_heads, key_dim, value_dim = shape.recurrent
    num_key_heads = (shape.conv[1] - num_heads * value_dim) // (2 * key_dim)
    return [num_key_heads, num_heads, key_dim, value_dim, shape.conv[0] + 1]


# ---- the process on CUDA


def call_kernels(
    attention: list[Any] | None,
    model: dict[str, Any] | None,
    draw: list[Any] | None,
    dtype_name: str,
    device_name: str,
) -> None:
    """Attend, run layers, and draw tokens, unless one of them is None.

    `attention` has the class of the backend, its sizes, and the option `kv_cache_dtype`; `model` is what
    `describe_model` returns; `draw` has the function, and the size of the vocabulary.
    """
    dtype, device = getattr(torch, dtype_name), torch.device(device_name)
    if attention is not None:
        backend = make_backend(dtype, *attention)
        layers = None if model is None else RandomLayers(backend, dtype, device, model, bytes_for_layers(device))
        with failing():
            attend_once(dtype, device, backend)
            if layers is not None:
                layers.run(lambda: wait_for(device))
    if draw is not None:
        with failing():
            draw_once(dtype, device, *draw)


@contextmanager
def failing() -> Iterator[None]:
    """End the process with the status `FAILED` if a kernel raises an exception within the context."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(FAILED)


def bytes_for_layers(device: torch.device) -> int:
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 1 << 30
    return total // SHARE_OF_MEMORY


def draw_once(dtype: torch.dtype, device: torch.device, path: str, vocab_size: int) -> None:
    """Draw tokens from random logits: the likeliest ones, and by a random number and top-p."""
    draw, logits = find(path), draw_vectors(0, 4, vocab_size).to(device, dtype)
    halves = torch.full((4,), 0.5, device=device)
    wait_for(device)
    draw(logits, torch.zeros(4, device=device))
    draw(logits, halves, halves.double(), top_p=halves)
    wait_for(device)


def make_backend(dtype: torch.dtype, path: str, heads: tuple[int, int, int, int], kv_cache_dtype: str) -> Any:
    backend_class = find(path)
    more = (dtype, kv_cache_dtype) if issubclass(backend_class, AttentionBackend) else ()  # else it is the core's
    return backend_class(*heads, *more)


def attend_once(dtype: torch.dtype, device: torch.device, backend: TorchAttention) -> None:
    """Store and attend as in the three steps of `steps.py`, with random numbers."""
    steps = make_steps(backend.block_size, 4 * backend.block_size + MIN_MODEL_LEN, [0])
    run_attention(backend, *steps, dtype, dtype, device, wait=lambda: wait_for(device))


def find(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def wait_for(device: torch.device) -> None:
    """Wait until the device has computed what was launched. This may not take long; to compile the next kernels may."""
    print(round(TIMEOUTS["cuda"]), flush=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    print(round(TIMEOUTS["compile"]), flush=True)


if __name__ == "__main__":
    call_kernels(*json.loads(sys.argv[1]))
