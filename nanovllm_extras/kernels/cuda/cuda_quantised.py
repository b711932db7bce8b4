"""Matrix products with weights of 8 or 4 bits, bit for bit equal to `nanovllm_extras/weights/quantised_linear.py`.

    round_rows    rounds x to 8 bits, by row and group of inputs, as the definition does
    multiply      computes x @ weight.T from the result of `round_rows`

Sums over a group are sums of integers, so they are exact with every tile size. The kernel adds the groups in order, and
each operation rounds as in PyTorch (`enable_fp_fusion=False`). So a token has the same bits in every batch.

A thread reads 16 bytes of weights at a time. Weights of 8 bits are signed. A byte holds two weights of 4 bits: that of
input 2 i in the lower half and that of input 2 i + 1 in the upper half. Each row is padded with zeros to whole groups.
`quantised_layers.py` calls `pack` and `multiply`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm_extras.kernels.cuda.kernel_launch import GPU, Launch, describe_gpu

SMALLEST = 1e-30  # a group of x with only smaller magnitudes rounds to zero, because 127 / x could be infinite
FEW_ROWS = 16  # the smallest number of rows that the tensor cores multiply
NUM_AT_ONCE = 1 << 22  # weights that are packed at a time
MANY_ROWS = 64  # tokens of a tile for more
LAUNCHES = {  # for more than FEW_ROWS tokens, by the outputs of a tile
    tile: Launch(MANY_ROWS, tile, num_warps=4, num_stages=num_stages)
    for tile, num_stages in ((16, 5), (32, 4), (64, 3))
}
GROUPS_AT_ONCE = 8  # groups that one program rounds
ROUNDING = tl.constexpr(12_582_912.0)  # 1.5 * 2**23: near it, the floats are exactly the whole numbers


@dataclass(frozen=True)
class PackedWeight:
    """A weight of 8 or 4 bits as the kernel reads it.

    weight[o, i] = scales[g, o] * (q[o, i] + offsets[g, o]), where g is the group of input i, or 0 without groups.
    """

    q: torch.Tensor  # 8 bits: [num_outputs, padded inputs] int8; 4 bits: [num_outputs, padded inputs / 2] uint8
    scales: torch.Tensor  # [num_groups or 1, num_outputs] float32
    offsets: torch.Tensor | None  # as scales, int32; None: all are `offset`
    offset: int
    num_inputs: int
    group_size: int
    bits: int

    @property
    def num_groups(self) -> int:
        return -(-self.num_inputs // self.group_size)


def pack(q: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int, group_size: int) -> PackedWeight:
    """Convert a weight from the definition's layout to that of the kernel.

    q: [num_outputs, num_inputs] uint8; scales, zeros: [num_outputs, num_groups or 1]
    """
    num_outputs, num_inputs = q.shape
    num_padded = num_inputs + -num_inputs % group_size
    is_int4, shift = bits == 4, 0 if bits == 4 else 128  # the tensor cores multiply signed numbers
    size, dtype = (num_padded // 2, torch.uint8) if is_int4 else (num_padded, torch.int8)
    stored = torch.empty(num_outputs, size, dtype=dtype, device=q.device)
    num_rows = max(1, NUM_AT_ONCE // num_padded)
    for start in range(0, num_outputs, num_rows):
        rows = slice(start, start + num_rows)
        part = q[rows] if is_int4 else (q[rows] ^ 128).view(torch.int8)  # minus 128
        part = torch.nn.functional.pad(part, (0, num_padded - num_inputs))
        stored[rows] = part[:, 0::2] | part[:, 1::2] << 4 if is_int4 else part
    offsets = None if zeros is None else (shift - zeros.int()).t().contiguous()
    half = 1 << (bits - 1)
    return PackedWeight(stored, scales.t().contiguous(), offsets, shift - half, num_inputs, group_size, bits)


def unpack(weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Convert a weight back to the definition's layout. Returns q, scales and zeros, as `pack` takes them."""
    is_int4, shift = weight.bits == 4, 0 if weight.bits == 4 else 128
    stored = torch.stack((weight.q & 15, weight.q >> 4), dim=-1).flatten(1) if is_int4 else weight.q.view(torch.uint8)
    q = stored[:, : weight.num_inputs]
    zeros = None if weight.offsets is None else (shift - weight.offsets).to(torch.uint8).t().contiguous()
    return (q.contiguous() if is_int4 else q ^ 128), weight.scales.t().contiguous(), zeros


# ---- x in 8 bits


@triton.jit(do_not_specialize=["num_groups"])
def round_rows_kernel(
    q_ptr,  # [num_tokens, num_groups * GROUP] int8
    scales_ptr,  # [num_tokens, num_groups]
    sums_ptr,  # [num_tokens, num_groups]
    x_ptr,  # [num_tokens, num_inputs]
    num_inputs,
    num_groups,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """Round GROUPS groups of one token to 8 bits per program. Grid: (num_tokens, num_groups / GROUPS), rounded up."""
    token = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inputs = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [GROUPS, GROUP]
    x = tl.load(x_ptr + token * num_inputs + inputs, mask=inputs < num_inputs, other=0.0).to(tl.float32)
    # magnitudes compared as integers have the order of the floats, with NaN above all numbers
    magnitudes = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    most = tl.max(magnitudes, 1).to(tl.float32, bitcast=True)
    most_of_8_bits = tl.full([GROUPS], 127.0, tl.float32)
    inverse = tl.where(most >= SMALLEST, tl.div_rn(most_of_8_bits, tl.maximum(most, SMALLEST)), 0.0)
    scaled = x * inverse[:, None]
    nearest = tl.where(scaled == scaled, (scaled + ROUNDING) - ROUNDING, 0.0)  # ties to even
    q = nearest.to(tl.int32)
    is_group = groups < num_groups
    tl.store(q_ptr + token * (num_groups * GROUP) + inputs, q.to(tl.int8), mask=is_group[:, None])
    places = token * num_groups + groups
    tl.store(scales_ptr + places, tl.div_rn(most, most_of_8_bits), mask=is_group)
    tl.store(sums_ptr + places, tl.sum(q, 1), mask=is_group)


def round_rows(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round x: [num_tokens, num_inputs] to 8 bits, and pad it with zeros to whole groups.

    Returns q: [num_tokens, num_groups * group_size] int8; scales and sums: [num_tokens, num_groups].
    """
    assert x.is_contiguous()
    num_tokens, num_inputs = x.shape
    num_groups = -(-num_inputs // group_size)
    q = torch.empty(num_tokens, num_groups * group_size, dtype=torch.int8, device=x.device)
    scales = torch.empty(num_tokens, num_groups, dtype=torch.float32, device=x.device)
    sums = torch.empty(num_tokens, num_groups, dtype=torch.int32, device=x.device)
    with torch.cuda.device_of(x):
        round_rows_kernel[(num_tokens, -(-num_groups // GROUPS_AT_ONCE))](
            q,
            scales,
            sums,
            x,
            num_inputs,
            num_groups,
            GROUP=group_size,
            GROUPS=GROUPS_AT_ONCE,
            SMALLEST=SMALLEST,
            enable_fp_fusion=False,
        )
    return q, scales, sums


# ---- the product


@triton.jit(do_not_specialize=["num_tokens", "num_groups"])
def quantised_linear_kernel(
    out_ptr,  # [num_tokens, num_outputs]
    q_ptr,  # [num_tokens, num_groups * GROUP] int8
    x_scales_ptr,  # [num_tokens, num_groups]
    x_sums_ptr,  # [num_tokens, num_groups]
    weight_ptr,  # [num_outputs, num_groups * GROUP] int8, or half as many bytes
    scales_ptr,  # [num_groups or 1, num_outputs]
    offsets_ptr,  # as scales, only read if HAS_OFFSETS
    bias_ptr,  # [num_outputs], only read if HAS_BIAS
    num_tokens,
    num_outputs,
    num_groups,
    GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_INT4: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute a tile of ROWS x OUTPUTS per program, one group of inputs at a time.

    Grid: (num_outputs / OUTPUTS, num_tokens / ROWS), rounded up.
    """
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row, is_output = rows < num_tokens, outputs < num_outputs
    num_bytes: tl.constexpr = GROUP // 2 if IS_INT4 else GROUP  # of a group
    x_places = rows.to(tl.int64)[:, None] * (num_groups * GROUP) + tl.arange(0, GROUP)[None, :]  # [ROWS, GROUP]
    weight_places = outputs.to(tl.int64)[:, None] * (num_groups * num_bytes) + tl.arange(0, num_bytes)[None, :]
    of_rows = rows.to(tl.int64) * num_groups
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    # A loop with its own number of stages requests all loads ahead. Without it, Triton leaves out those that do not go
    # into the product: scales, offsets and sums, for which each group would wait.
    for group in tl.range(0, num_groups, num_stages=STAGES):
        weight = tl.load(weight_ptr + weight_places + group * num_bytes, mask=is_output[:, None], other=0)
        if IS_INT4:
            weight = tl.interleave((weight & 15).to(tl.int8), (weight >> 4).to(tl.int8))  # [OUTPUTS, GROUP]
        q = tl.load(q_ptr + x_places + group * GROUP, mask=is_row[:, None], other=0)
        sums = tl.dot(q, tl.trans(weight), out_dtype=tl.int32)
        own = group * num_outputs if HAS_GROUPS else 0
        if HAS_OFFSETS:
            offsets = tl.load(offsets_ptr + own + outputs, mask=is_output, other=0)
            sums += tl.load(x_sums_ptr + of_rows + group, mask=is_row, other=0)[:, None] * offsets[None, :]
        elif OFFSET:
            sums += tl.load(x_sums_ptr + of_rows + group, mask=is_row, other=0)[:, None] * OFFSET
        x_scales = tl.load(x_scales_ptr + of_rows + group, mask=is_row, other=0.0)
        scales = tl.load(scales_ptr + own + outputs, mask=is_output, other=0.0)
        acc += sums.to(tl.float32) * (x_scales[:, None] * scales[None, :])
    if HAS_BIAS:
        acc += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    places = rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def choose_launch(num_tokens: int, num_outputs: int, gpu: GPU) -> Launch:
    """Choose the tile of a program (`rows` tokens, `tile` outputs).

    A product of few tokens waits for the weights. So the tile is the largest that leaves a program for each
    multiprocessor, and smaller tiles have more stages, which keep more groups in flight. With more tokens than a tile
    has rows, 64 outputs share each row that is loaded.
    """
    if num_tokens <= FEW_ROWS:
        return Launch(FEW_ROWS, 16, num_warps=2, num_stages=8)
    if num_tokens <= MANY_ROWS:
        for tile in (64, 32):
            if num_outputs >= tile * gpu.num_multiprocessors:
                return LAUNCHES[tile]
        return LAUNCHES[16]
    return LAUNCHES[64]


def multiply(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply x: [num_tokens, num_inputs] by the weight -> [num_tokens, num_outputs], in x's dtype"""
    num_tokens, num_outputs = len(x), len(weight.q)
    out = torch.empty(num_tokens, num_outputs, dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    q, x_scales, x_sums = round_rows(x.contiguous(), weight.group_size)
    launch = choose_launch(num_tokens, num_outputs, describe_gpu(x.device))
    with torch.cuda.device_of(x):
        quantised_linear_kernel[(-(-num_outputs // launch.tile), -(-num_tokens // launch.rows))](
            out,
            q,
            x_scales,
            x_sums,
            weight.q,
            weight.scales,
            weight.q if weight.offsets is None else weight.offsets,
            x if bias is None else bias,
            num_tokens,
            num_outputs,
            weight.num_groups,
            GROUP=weight.group_size,
            OFFSET=weight.offset,
            HAS_OFFSETS=weight.offsets is not None,
            HAS_GROUPS=len(weight.scales) > 1,
            HAS_BIAS=bias is not None,
            IS_INT4=weight.bits == 4,
            ROWS=launch.rows,
            OUTPUTS=launch.tile,
            STAGES=launch.num_stages,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            enable_fp_fusion=False,
        )
    return out
