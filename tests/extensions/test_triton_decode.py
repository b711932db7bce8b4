"""`examples/extensions/triton_decode.py`: against the float64 reference, in Triton's interpreter if there is no GPU.

Triton reads TRITON_INTERPRET when it is imported, so the tests of the kernel run in a process of their own then.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanovllm.config import Config
from nanovllm.engine import LLMEngine
from nanovllm.extension import import_extension
from nanovllm_testing.attention_steps import HEADS, Step, check_close, random_lens
from nanovllm_testing.engine_traffic import MODEL, SMALL, drive, random_requests
from tests import cuda_stand_in

pytestmark = pytest.mark.triton

ROOT = Path(__file__).parents[2]
EXTENSION = ROOT / "examples" / "extensions" / "triton_decode.py"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
runs_the_kernel = pytest.mark.triton if IS_INTERPRETED else pytest.mark.gpu


@pytest.fixture
def extension():
    pytest.importorskip("triton")
    return import_extension(EXTENSION)


@pytest.mark.skipif(DEVICE == "cuda" or IS_INTERPRETED, reason="the others run here")
def test_the_kernel_in_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-x", "-n0", "-m", "triton", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@runs_the_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter's bfloat16 is wrong
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("head_dim", "block_size"), [(32, 4), (80, 16), (128, 1)])
def test_steps_against_the_reference(extension, heads, dtype, head_dim, block_size):
    """Decodes and chunks, at the borders of blocks and of what the kernel reads at a time. Other slots hold NaN."""
    backend = extension.TritonDecode(*heads, head_dim, block_size, dtype)
    tokens = extension.TOKENS
    lens = [*random_lens(block_size, seed=1), *((n - 1, 1) for n in (1, tokens, tokens + 1, 2 * tokens + 5))]
    for some in (lens, [pair for pair in lens if pair[1] == 1], [pair for pair in lens if pair[1] > 1]):
        step = Step(backend, some, dtype=dtype, device=DEVICE)
        check_close(step.run(backend), step)


@runs_the_kernel
def test_an_empty_sequence_gives_zeros(extension):
    """A CUDA graph pads a batch with them."""
    backend = extension.TritonDecode(4, 2, 32, 4)
    step = Step(backend, [(5, 1), (9, 1)], device=DEVICE)
    step.batch.metadata.seq_lens[1] = 0
    out = step.run(backend)
    assert (out[1] == 0).all()
    torch.testing.assert_close(out[:1].double().cpu(), step.expected[:1], rtol=2e-6, atol=2e-6)


@runs_the_kernel
@pytest.mark.skipif(DEVICE == "cuda", reason="the stand-in for CUDA is a CPU")
def test_decodes_are_recorded_in_graphs(extension, monkeypatch):
    """The oracle is PyTorch's attention. The stand-in refuses what a graph cannot record."""
    cuda_stand_in.install(monkeypatch)

    class Launched(extension.TritonDecode):
        rules = None

        def decode(self, *args):
            return self.rules.launch(super().decode, *args)

    class Runner(cuda_stand_in.StandInRunner):
        def load(self):
            super().load()
            self.backend.rules = self.rules

    class Engine(cuda_stand_in.StandInEngine):
        runner_class = Runner

    rng = random.Random(3)
    requests = list(random_requests(rng, 3))
    engine = Engine(Config(MODEL, **SMALL, attention_backend=Launched))
    assert engine.runner.backend.supports_graphs
    assert drive(engine, requests, rng) == drive(
        LLMEngine(Config(MODEL, **SMALL, attention_backend="torch")), requests, rng
    )
    assert sum(replay.__self__.num_replays for replay, _ in engine.runner.graphs.graphs.values()) > 5


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("arch", [80, 86, 90])
@pytest.mark.parametrize(("pointer", "head_dim"), [("*bf16", 128), ("*fp16", 64), ("*bf16", 256), ("*fp32", 128)])
def test_the_kernel_compiles(extension, arch, pointer, head_dim):
    """Without a GPU, too. What it keeps in shared memory fits into the 99 KiB of a program on sm_86."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = [*extension.decode_kernel.arg_names]
    constants = {"GROUP": 2, "DIM": head_dim, "BLOCK_SIZE": 16, "ROWS": 16, "DIMS": head_dim, "TOKENS": 32}
    kinds = dict.fromkeys(("out_ptr", "q_ptr", "k_ptr", "v_ptr"), pointer)
    kinds |= {"tables_ptr": "*i32", "lens_ptr": "*i32", "table_stride": "i32", "scale": "fp32"}
    signature = {name: "constexpr" if name in constants else kinds[name] for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    target = GPUTarget("cuda", arch, 32)
    compiled = triton.compile(ASTSource(extension.decode_kernel, signature, places), target, {"num_stages": 2})
    assert compiled.metadata.shared <= 99 * 1024
