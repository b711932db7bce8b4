"""`cpu.c` for ARM: compiled by cross compilers, read in assembly, and run by qemu-user against float64.

Debian 12's packages are used: gcc-12-aarch64-linux-gnu 12.2, libc6-dev-arm64-cross, clang 14, qemu-user 7.2. What is
missing is skipped.
"""

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from nanovllm.layers.basic import RMSNorm
from nanovllm_extras.kernels.cpu.cpu_attention import CpuAttention
from nanovllm_extras.kernels.cpu.cpu_layers import HugePages, pack
from nanovllm_extras.kernels.cpu.library import SOURCE, masking
from nanovllm_extras.models.masking import PLAIN
from tests.extras.attention_options import SINKS
from tests.extras.attention_steps import Int8Step, Step, check_close

pytestmark = pytest.mark.slow

GCC, CLANG, QEMU = "aarch64-linux-gnu-gcc-12", "clang", "qemu-aarch64"
COMPILERS = {"gcc": [GCC, "-Wno-psabi"], "clang": [CLANG, "--target=aarch64-linux-gnu"]}
TARGETS = [  # without and with bfloat16 arithmetic; the second has SVE as well
    ("gcc", "neoverse-n1", "float32"),
    ("gcc", "neoverse-n1", "bfloat16"),
    ("gcc", "neoverse-v1", "bfloat16"),
    ("clang", "apple-m1", "float32"),
]


def compile_with(compiler, processor, dtype, *arguments):
    command = [*COMPILERS[compiler], "-std=gnu11", "-O3", f"-mcpu={processor}", f"-I{SOURCE.parent}", *arguments]
    for program in {command[0], GCC, QEMU}:
        if not shutil.which(program):
            pytest.skip(f"there is no {program}")
    return subprocess.run([*command, *(["-DBFLOAT16"] if dtype == "bfloat16" else [])], check=True, capture_output=True)


# ---- what the compilers make of the product


def innermost_loops(assembly):
    """Their instructions, of each function. A loop is what lies between a label and a branch back to it."""
    code, labels, spans = [], {}, []
    for line in assembly.splitlines():
        line = line.split("//")[0].strip()
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(code)
        elif line and not line.startswith((".", "#")) and not line.endswith(":"):
            code.append(line)
            branch = re.match(r"(?:b\.?\w*|cbn?z|tbn?z)\s.*?(\.L\w+)$", line)
            if branch and branch[1] in labels:
                spans.append((labels[branch[1]], len(code)))
    return [
        code[first:last]
        for first, last in spans
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in spans)
    ]


def is_product(instruction):
    return bool(re.match(r"(fmla|bfdot)\s+v", instruction))


@pytest.mark.parametrize(("compiler", "processor", "dtype"), TARGETS)
def test_sums_stay_in_registers(tmp_path, compiler, processor, dtype):
    """No loop of products touches the stack, and of the widest at least half of the instructions are products."""
    source = tmp_path / "product.c"
    source.write_text(
        '#include "product.h"\nvoid all(const struct product *p, int rows, int panels) { multiply(p, rows, panels); }\n'
        "void most(const struct product *p) { multiply_vectors(p, ROWS, 2); }\n"
    )
    compile_with(compiler, processor, dtype, "-S", str(source), "-o", str(tmp_path / "product.s"))
    assembly = (tmp_path / "product.s").read_text()
    loops = [loop for loop in innermost_loops(assembly) if any(map(is_product, loop))]
    assert len(loops) >= 8
    assert not [loop for loop in loops if re.search(r"\[(sp|x29)\b", "\n".join(loop))]
    widest = [loop for loop in innermost_loops(assembly[assembly.index("\nmost:") :]) if any(map(is_product, loop))]
    loop = max(widest, key=lambda loop: sum(map(is_product, loop)))
    assert sum(map(is_product, loop)) >= len(loop) / 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_servers_with_sve_compute_in_vectors(tmp_path, dtype):
    compile_with("gcc", "neoverse-v1", dtype, "-S", str(SOURCE), "-o", str(tmp_path / "cpu.s"))
    assembly = (tmp_path / "cpu.s").read_text()
    vectors, numbers = (len(re.findall(rf"\tf(?:mla|mls|m?add|mul|sub)\t{kind}\d", assembly)) for kind in "vs")
    assert vectors > 20 * numbers


# ---- what they compute

LENS = [(15, 1), (16, 1), (170, 1), (0, 17), (33, 20), (5, 3)]


class Arm:
    """`cpu.c` on a processor that qemu pretends to be."""

    def __init__(self, program, dtype):
        self.command = [QEMU, "-cpu", "max", str(program)]
        self.dtype = getattr(torch, dtype)

    def call(self, name, *arguments):
        """Calls a function of cpu.c; tensors get what it writes."""
        message, tensors = [struct.pack("=32sq", name.encode(), len(arguments))], []
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                tensors.append(argument)
                message += [b"p", struct.pack("=q", argument.nbytes), as_bytes(argument).numpy().tobytes()]
            elif isinstance(argument, float):
                message.append(struct.pack("=cd", b"f", argument))
            else:
                message.append(struct.pack("=cq", *((b"p", -1) if argument is None else (b"i", argument))))
        run = subprocess.run(self.command, input=b"".join(message), capture_output=True)
        assert run.returncode == 0, run.stderr
        start = 0
        for tensor in tensors:
            part = bytearray(run.stdout[start : start + tensor.nbytes])
            start += tensor.nbytes
            if part:
                as_bytes(tensor).copy_(torch.frombuffer(part, dtype=torch.uint8))

    def linear(self, x, packed, y, wants_floats):
        self.call("linear", x, packed, None, y, len(x), y.shape[1], x.shape[1], int(wants_floats))


def as_bytes(tensor):
    """Contiguous tensors only: what is written into a copy would be lost."""
    return tensor.view(-1).view(torch.uint8)


class ArmAttention(CpuAttention):
    def __init__(self, arm, *args, **kwargs):
        super().__init__(*args, arm.dtype, **kwargs)
        self.arm = arm

    def store_kv(self, k, v, layer_cache, slot_mapping):
        k_cache, v_cache = (t.contiguous() for t in layer_cache)
        sizes = (len(k), k.stride(0), v.stride(0), self.num_kv_heads, self.head_dim, self.block_size)
        self.arm.call("store_kv", k, v, k_cache, v_cache, slot_mapping, *sizes)
        layer_cache.copy_(torch.stack((k_cache, v_cache)))

    def attend(self, q, layer_cache, metadata, options=PLAIN):
        out = torch.empty_like(q)
        tables, lens = metadata.block_tables, (metadata.seq_lens, metadata.cu_seqlens_q)
        heads = (q.stride(0), self.num_heads, self.num_kv_heads, self.head_dim, self.block_size)
        window, scale, softcap = masking(options, self.scale)
        tensors = (q, out, *layer_cache, tables, *lens)
        self.arm.call("attend", *tensors, options.sinks, *tables.shape, *heads, window, float(scale), float(softcap))
        return out


def program_for(folder, target, *options):
    compiler, processor, dtype = target
    program, library = folder / "call", folder / "call.o"
    source = Path(__file__).with_name("call.c")
    compile_with(compiler, processor, dtype, *options, "-c", str(source), "-o", str(library))
    subprocess.run([GCC, "-static", "-pthread", str(library), "-lm", "-o", str(program)], check=True)
    return Arm(program, dtype)


@pytest.fixture(scope="module", params=TARGETS, ids="-".join)
def arm(request, tmp_path_factory):
    return program_for(tmp_path_factory.mktemp("arm"), request.param)


def randn(*shape, dtype, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_linear_equals_float64(arm):
    """Sums of up to 1,024 products, none of them rounded to bfloat16; and the same bits in every batch."""
    for n, k in [(1, 2), (17, 6), (48, 130), (100, 1024)]:
        weight = randn(n, k, dtype=arm.dtype)
        packed = pack(weight, HugePages(1 << 20))
        x = randn(11, k, dtype=arm.dtype, seed=2)
        y = torch.empty(11, n)
        arm.linear(x, packed, y, wants_floats=True)
        torch.testing.assert_close(y.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)
        for num_rows in (1, 2, 3, 4, 5):
            part = torch.empty(num_rows, n)
            arm.linear(x[:num_rows].clone(), packed, part, wants_floats=True)
            assert torch.equal(part, y[:num_rows])


@pytest.mark.parametrize(("block_size", "options"), [(16, SINKS["all and sinks"]), (80, PLAIN)], ids=["all", "plain"])
def test_attention_equals_the_reference(arm, block_size, options):
    backend = ArmAttention(arm, 8, 2, 64, block_size)
    step = Step(backend, LENS, dtype=arm.dtype, options=options)
    check_close(step.run(backend), step)


@pytest.mark.parametrize("target", [TARGETS[1], TARGETS[3]], ids="-".join)
def test_attention_over_8_bits_equals_the_reference(target, tmp_path):
    """Compiled with -O1, in a quarter of the time: of ARM the results are tested, and not the speed."""
    backend = ArmAttention(program_for(tmp_path, target, "-DINT8_KV", "-O1"), 8, 2, 64, 16, kv_cache_dtype="int8")
    step = Int8Step(backend, LENS, dtype=backend.dtype, options=SINKS["all and sinks"])
    tolerance = 3e-4 if backend.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(step.run(backend).double(), step.expected, rtol=tolerance, atol=tolerance)


def test_norms_and_the_argmax_equal_the_definition(arm):
    x, y, weight = randn(7, 48, dtype=arm.dtype), torch.empty(7, 48, dtype=arm.dtype), randn(48, dtype=arm.dtype)
    arm.call("rms_norm", x, weight, None, None, y, 7, 1, 48, 0, 48, 0, 1e-6)
    layer = RMSNorm(48, 1e-6)
    layer.weight.data = weight
    tolerance = 1e-5 if arm.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(y, layer(x), rtol=tolerance, atol=tolerance)
    logits, ids = randn(3, 1001, dtype=torch.float32), torch.empty(3, dtype=torch.int64)
    arm.call("argmax", logits, ids, *logits.shape)
    assert torch.equal(ids, logits.argmax(dim=-1))
