"""Matrix products for few tokens, each fused with the operations before and after it into one launch.

A product of few tokens takes as long as its weights take to arrive from memory. The operations around it (the norm
before, the residual or the gate after) are little work. But a separate kernel for each would take as much time again:
to start, to fetch a few kilobytes, and to wait until the last program has ended. So the product includes them:

    norm_linear      rms_norm(x) @ weight.T
    norm_gate_up     silu(gate) * up,  where gate, up = rms_norm(x) @ weight.T
    add_linear       out += x @ weight.T

Each program computes a few outputs for all tokens at once. It reads their rows of the weight once, from start to end,
and loads several tiles ahead. Because there are few tokens, every program normalises all of them itself. The tensor
cores multiply 16 rows, so fewer tokens are padded with zeros. `cuda_decoder_layer.py` calls these functions.
"""

import functools

import torch
import triton
import triton.language as tl

from nanovllm_extras.kernels.cuda.kernel_launch import GPU, Launch, describe_gpu

MAX_TOKENS = 16  # rows of a tensor core's product
OUTPUTS = 16  # outputs of one program: few, so that there are enough programs for all multiprocessors
TILES = (256, 128, 64)  # inputs at a time: the largest of these that divides their number
NUM_STAGES = 6  # tiles in flight, 8 KiB each in half precision
NORM_STAGES = tl.constexpr(4)  # tiles of x in flight, while they are normalised


@triton.jit
def inverse_rms(x_ptr, is_row, eps, NUM_INPUTS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Return 1 / sqrt(mean(x^2) + eps) of each row: [ROWS]."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, TILE)
    squares = tl.zeros([ROWS, TILE], tl.float32)
    for start in tl.range(0, NUM_INPUTS, TILE, num_stages=NORM_STAGES):  # no weight is requested before this has ended
        places = rows[:, None] * NUM_INPUTS + start + columns[None, :]
        x = tl.load(x_ptr + places, mask=is_row[:, None], other=0.0).to(tl.float32)
        squares += x * x
    return tl.rsqrt(tl.sum(squares, 1) / NUM_INPUTS + eps)


@triton.jit(do_not_specialize=["num_tokens"])
def few_tokens_kernel(
    out_ptr,  # [num_tokens, num_outputs]
    x_ptr,  # [num_tokens, NUM_INPUTS]
    norm_weight_ptr,  # [NUM_INPUTS], only read if HAS_NORM
    weight_ptr,  # [num_outputs, NUM_INPUTS]; if IS_GATED, twice as many rows: gates, then ups
    bias_ptr,  # [num_outputs], only read if HAS_BIAS
    num_tokens,
    num_outputs,
    eps,
    NUM_INPUTS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_ADDED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute OUTPUTS outputs of all tokens per program, rounded where PyTorch's layers round.

    Grid: (num_outputs / OUTPUTS,), rounded up.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rows, columns = tl.arange(0, ROWS), tl.arange(0, TILE)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = rows < num_tokens, outputs < num_outputs
    scale = tl.full([ROWS], 1.0, tl.float32)
    if HAS_NORM:
        scale = inverse_rms(x_ptr, is_row, eps, NUM_INPUTS, ROWS, TILE)

    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    ups = tl.zeros([ROWS, OUTPUTS], tl.float32)
    x_places = rows[:, None] * NUM_INPUTS + columns[None, :]  # [ROWS, TILE]
    weight_places = outputs.to(tl.int64)[:, None] * NUM_INPUTS + columns[None, :]  # [OUTPUTS, TILE]
    for start in range(0, NUM_INPUTS, TILE):
        weight = tl.load(weight_ptr + weight_places + start, mask=is_output[:, None], other=0.0)
        x = tl.load(x_ptr + x_places + start, mask=is_row[:, None], other=0.0)
        if HAS_NORM:
            norm_weight = tl.load(norm_weight_ptr + start + columns)
            x = (x.to(tl.float32) * scale[:, None]).to(dtype).to(tl.float32)
            x = (x * norm_weight[None, :].to(tl.float32)).to(dtype)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
        if IS_GATED:
            below = num_outputs.to(tl.int64) * NUM_INPUTS
            weight = tl.load(weight_ptr + below + weight_places + start, mask=is_output[:, None], other=0.0)
            ups = tl.dot(x, tl.trans(weight), ups, input_precision="ieee")

    if HAS_BIAS:
        acc += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    places = rows[:, None] * num_outputs + outputs[None, :]
    is_place = is_row[:, None] & is_output[None, :]
    if IS_GATED:
        gate = acc.to(dtype).to(tl.float32)
        acc = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * ups.to(dtype).to(tl.float32)
    if IS_ADDED:
        acc += tl.load(out_ptr + places, mask=is_place, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, acc.to(dtype), mask=is_place)


def takes(num_inputs: int) -> bool:
    """Return whether one of the tile sizes divides `num_inputs`."""
    return num_inputs % TILES[-1] == 0


@functools.cache
def choose_launch(num_inputs: int, dtype: torch.dtype, is_gated: bool, gpu: GPU) -> Launch:
    """Choose the tile and the number of stages: NUM_STAGES, or as many as fit in shared memory.

    float32 takes twice the memory of half precision. The normalised x is in shared memory too; the calculation allows
    for it, because Triton counts the tile in use as a stage.
    """
    tile = next(tile for tile in TILES if num_inputs % tile == 0)
    rows = MAX_TOKENS + OUTPUTS * (1 + is_gated) + 1  # of x, of the weight or both its halves, of the norm's weight
    num_stages = min(NUM_STAGES // (1 + is_gated), gpu.shared_memory // (rows * tile * dtype.itemsize))
    return Launch(MAX_TOKENS, tile, num_warps=4, num_stages=max(1, num_stages))


def norm_linear(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Normalise x: [num_tokens, num_inputs], and multiply by weight: [num_outputs, num_inputs].

    Returns [num_tokens, num_outputs].
    """
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    return multiply(out, x, weight, bias=bias, norm_weight=norm_weight, eps=eps)


def norm_gate_up(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor) -> torch.Tensor:
    """Normalise x and compute silu(gate) * up -> [num_tokens, num_outputs]

    weight: [2 * num_outputs, num_inputs], the rows of the gates first
    """
    out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    return multiply(out, x, weight, norm_weight=norm_weight, eps=eps, is_gated=True)


def add_linear(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Add x @ weight.T + bias to out: [num_tokens, num_outputs], in place."""
    return multiply(out, x, weight, bias=bias, is_added=True)


def multiply(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    is_gated: bool = False,
    is_added: bool = False,
) -> torch.Tensor:
    """Launch the kernel with the requested operations around the product. Writes to `out` and returns it."""
    num_tokens, num_inputs = x.shape
    num_outputs = out.shape[1]
    assert 0 < num_tokens <= MAX_TOKENS
    assert x.is_contiguous()
    assert weight.is_contiguous()
    options = choose_launch(num_inputs, x.dtype, is_gated, describe_gpu(x.device))
    with torch.cuda.device_of(x):
        few_tokens_kernel[(-(-num_outputs // OUTPUTS),)](
            out,
            x,
            x if norm_weight is None else norm_weight,
            weight,
            x if bias is None else bias,
            num_tokens,
            num_outputs,
            eps,
            NUM_INPUTS=num_inputs,
            HAS_NORM=norm_weight is not None,
            HAS_BIAS=bias is not None,
            IS_GATED=is_gated,
            IS_ADDED=is_added,
            ROWS=options.rows,
            OUTPUTS=OUTPUTS,
            TILE=options.tile,
            num_warps=options.num_warps,
            num_stages=options.num_stages,
            enable_fp_fusion=True,
        )
    return out
