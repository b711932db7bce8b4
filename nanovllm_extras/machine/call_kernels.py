"""Call the C kernels once on random numbers, without torch: a crash or a hang ends only this process.

    python -I -S call_kernels.py '[{"hidden_size": 1024, …}, "…/cpu-….so", "…/int8_kv-….so", "…/quantised-….so"]'

The status is 0 if the products, the norm, argmax and attention return, and the products with weights of 8 and 4 bits.
The first two libraries may be the same, and the last one may be left out. With `null` for the sizes, the libraries are
only loaded. `own_process.py` and `crash_test.py` start this file. It imports only the standard library, so that it ends
within a tenth of a second.
"""

import ctypes
import json
import platform
import random
import sys
from array import array
from collections.abc import Iterable
from ctypes import c_float, c_int, c_long, c_void_p
from typing import Any, ClassVar

NUM_TOKENS = 21  # of a prompt whose last block is not full
MAX_OUTPUTS = 400  # columns of a product; the loops over columns are the same for more
NUM_QUANTISED, GROUP_SIZE = 128, 128  # outputs of a quantised product: two strips; inputs that share a scale
FAILED = 3  # the exit status, as in `own_process.py`
LONG_MAX = (1 << 63) - 1


def main(text: str) -> None:
    """Load the libraries and call their functions. `text` is JSON, as in the example above."""
    sizes, *paths = json.loads(text)
    allow_tiles()
    two_threads = ctypes.CFUNCTYPE(c_int)(lambda: 2)
    libraries = [ctypes.CDLL(path) for path in paths]
    for library in libraries:
        library.instructions()
        library.element_bytes()
        library.join_team.restype = c_void_p
        library.join_team(None, two_threads, None, c_long(0))
    if sizes is None:
        return
    call_products(libraries[0], sizes)
    if sizes["has_kv"]:
        call_attention(libraries[1], sizes)
    if sizes["states"]:
        call_gated_delta(libraries[0], sizes)
    for library in libraries[2:]:
        call_quantised_products(library, sizes)


def allow_tiles() -> None:
    """Ask Linux to let this process use AMX, as `library.py` does. Nothing happens on other processors."""
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        arch_prctl, arch_req_xcomp_perm, xtile_data = 158, 0x1023, 18
        ctypes.CDLL(None).syscall(c_long(arch_prctl), c_long(arch_req_xcomp_perm), c_long(xtile_data))


class Memory:
    """Buffers of random numbers between -1 and 1, in elements of 2 (bfloat16) or 4 bytes (float32)."""

    def __init__(self, element_bytes: int) -> None:
        self.element_bytes = element_bytes
        numbers = array("f", [random.Random(0).uniform(-1, 1) for _ in range(4096)]).tobytes()
        if element_bytes == 2:  # the upper halves
            numbers = b"".join(numbers[i + 2 : i + 4] for i in range(0, len(numbers), 4))
        self.numbers = numbers
        self._buffers: list[ctypes.Array[ctypes.c_char]] = []  # kept alive, because functions get only their addresses

    def drawn(self, count: int) -> c_void_p:
        """Return the address of `count` random elements."""
        num_bytes = count * self.element_bytes
        repeated = self.numbers * (num_bytes // len(self.numbers) + 1)
        return self.of_bytes(repeated[:num_bytes])

    def of_ints(self, values: Iterable[int]) -> c_void_p:
        """Return the address of 32-bit integers."""
        return self.of_bytes(array("i", values).tobytes())

    def of_bytes(self, values: bytes) -> c_void_p:
        """Return the address of a copy that begins at a cache line, as tensors do."""
        buffer = ctypes.create_string_buffer(len(values) + 128)
        self._buffers.append(buffer)
        address = ctypes.addressof(buffer) + -ctypes.addressof(buffer) % 64
        ctypes.memmove(address, values, len(values))
        return c_void_p(address)


def call_products(library: ctypes.CDLL, sizes: dict[str, int]) -> None:
    """Call the products, the norm and argmax, for one token and for several."""
    memory, hidden_size = Memory(sizes["element_bytes"]), sizes["hidden_size"]
    num_outputs = min(sizes["intermediate_size"] // 16 * 16 or 16, MAX_OUTPUTS)
    x, normed = memory.drawn(NUM_TOKENS * hidden_size), memory.drawn(NUM_TOKENS * hidden_size)
    y, logits = memory.drawn(NUM_TOKENS * num_outputs), memory.of_bytes(bytes(4 * NUM_TOKENS * num_outputs))
    weight, ids = memory.drawn(2 * num_outputs * hidden_size), memory.of_bytes(bytes(8 * NUM_TOKENS))
    for num_tokens in (1, NUM_TOKENS):
        shape = [c_long(one) for one in (num_tokens, num_outputs, hidden_size)]
        check(library.linear(x, weight, None, y, *shape, c_int(0)))
        check(library.linear(x, weight, None, logits, *shape, c_int(1)))
        check(library.gated_linear(x, weight, None, y, *shape, c_int(1)))
        whole = [c_long(one) for one in (num_tokens, 1, hidden_size // 16 * 16, 0, hidden_size)]
        library.rms_norm(x, weight, None, None, normed, *whole, c_int(0), c_float(1e-6))
        library.argmax(logits, ids, c_long(num_tokens), c_long(num_outputs))


class QuantisedStruct(ctypes.Structure):
    """The C type `struct quantised` of quantised.c."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("linear", "gated_linear", "panels", "scales", "zeros")),
        *((name, c_long) for name in ("bits", "group_size", "has_groups")),
    ]


def call_quantised_products(library: ctypes.CDLL, sizes: dict[str, int]) -> None:
    """Multiply by weights of 8 bits, and of 4 bits with a scale for each group, for one token and for several."""
    memory, floats = Memory(sizes["element_bytes"]), Memory(4)
    num_inputs = sizes["hidden_size"] // 16 * 16
    x, y = memory.drawn(NUM_TOKENS * num_inputs), memory.drawn(NUM_TOKENS * NUM_QUANTISED)
    ids, rows = memory.of_bytes(bytes(8)), memory.drawn(num_inputs)
    for bits in (8, 4):
        num_groups = 1 if bits == 8 else -(-num_inputs // GROUP_SIZE)
        panels = memory.of_bytes(random.Random(0).randbytes(NUM_QUANTISED * num_inputs * bits // 8))
        scales = floats.drawn(NUM_QUANTISED * num_groups)
        weight = ctypes.byref(QuantisedStruct(None, None, panels, scales, None, bits, GROUP_SIZE, bits == 4))
        for num_tokens in (1, NUM_TOKENS):
            shape = [c_long(one) for one in (num_tokens, NUM_QUANTISED, num_inputs)]
            check(library.quantised_linear(x, weight, None, y, *shape, c_int(0)))
            half = [c_long(one) for one in (num_tokens, NUM_QUANTISED // 2, num_inputs)]
            check(library.quantised_gated_linear(x, weight, None, y, *half, c_int(1)))
        library.quantised_rows(ids, weight, rows, c_long(1), c_long(num_inputs))


def call_attention(library: ctypes.CDLL, sizes: dict[str, int]) -> None:
    """Store the keys and values of a prompt, and attend from all of its tokens, then from the last one."""
    memory, block_size = Memory(sizes["element_bytes"]), sizes["block_size"]
    num_heads, num_kv_heads, head_dim = sizes["num_heads"], sizes["num_kv_heads"], sizes["head_dim"]
    q_size, kv_size, num_blocks = num_heads * head_dim, num_kv_heads * head_dim, -(-NUM_TOKENS // block_size)
    q, out, k = (memory.drawn(NUM_TOKENS * size) for size in (q_size, q_size, kv_size))
    k_cache, v_cache = (memory.drawn((num_blocks + 1) * block_size * kv_size) for _ in range(2))
    slots = memory.of_ints(range(block_size, block_size + NUM_TOKENS))
    stored = [c_long(one) for one in (NUM_TOKENS, kv_size, kv_size, num_kv_heads, head_dim, block_size)]
    library.store_kv(k, k, k_cache, v_cache, slots, *stored)
    tables, lens = memory.of_ints(range(1, num_blocks + 1)), memory.of_ints([NUM_TOKENS])
    shape = (1, num_blocks, q_size, num_heads, num_kv_heads, head_dim, block_size, LONG_MAX)
    for num_new_tokens in (NUM_TOKENS, 1):
        tensors = (q, out, k_cache, v_cache, tables, lens, memory.of_ints([0, num_new_tokens]))
        check(library.attend(*tensors, *map(c_long, shape), c_float(head_dim**-0.5), c_float(0)))


class DeltaStruct(ctypes.Structure):
    """The C type `struct delta_layer` of gated_delta.h."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("taps", "rates", "dt_bias", "norm")),
        *((name, c_long) for name in ("num_key_heads", "num_heads", "key_dim", "value_dim", "width")),
        ("eps", c_float),
    ]


def call_gated_delta(library: ctypes.CDLL, sizes: dict[str, Any]) -> None:
    """Advance the states of two sequences: by a decode, and by the first tokens of a prompt."""
    num_key_heads, num_heads, key_dim, value_dim, width = sizes["states"]
    if key_dim % 16 or value_dim % 16:  # these layers run in PyTorch
        return
    memory, floats = Memory(sizes["element_bytes"]), Memory(4)
    value_size, num_tokens, num_slots = num_heads * value_dim, NUM_TOKENS + 1, 3
    num_channels = 2 * num_key_heads * key_dim + value_size
    stride = num_channels + value_size + 2 * num_heads
    weights = (floats.drawn(width * num_channels), floats.drawn(num_heads), floats.drawn(num_heads))
    layer = DeltaStruct(*weights, memory.drawn(value_dim), *sizes["states"], 1e-6)
    projected = memory.drawn(num_tokens * stride).value or 0
    starts = (0, num_channels, num_channels + value_size, num_channels + value_size + num_heads)
    parts = [c_void_p(projected + start * sizes["element_bytes"]) for start in starts]
    slots = memory.of_bytes(array("q", [2, 1]).tobytes())  # written, and read
    step = (slots, slots, memory.of_bytes(bytes([0, 1])))
    conv = memory.drawn(num_slots * (width - 1) * num_channels)
    recurrent = floats.drawn(num_slots * key_dim * value_size)
    tensors = (*step, memory.of_ints([0, 1, num_tokens]), conv, recurrent, memory.drawn(num_tokens * value_size))
    check(library.gated_delta(ctypes.byref(layer), *parts, *tensors, c_long(2), c_long(stride)))


def check(status: int) -> None:
    if status:
        print(f"a kernel returned status {status}", file=sys.stderr)
        sys.exit(FAILED)


if __name__ == "__main__":
    main(sys.argv[1])
