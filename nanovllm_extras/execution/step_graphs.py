"""CUDA graphs: a decode step is recorded once for each of some batch sizes, and from then on replayed as one launch.

A step of a small model is hundreds of kernels of a few microseconds each; to launch them one by one from Python takes
longer than to run them (https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/). A graph fixes all that the
host decides: addresses, shapes, numbers of programs. The contents of the memory may change. So:

- the inputs of all sizes have the same addresses, and one copy from the host fills them;
- a batch is padded to the next size recorded, with sequences of no tokens, whose K and V go to the null block;
- block tables are as wide as the longest sequence needs;
- rows of some models have more inputs: slots and tables of groups of layers, slots of states (`MoreInputs`);
- the newest tokens are read from, and written to, one tensor: with overlap the host does not know them yet.

    256 sequences, 27 graphs:   1 2 4 8 16 24 … 64 | 72 80 … 128 | 144 160 … 256
    a batch of 70               replays the one of 72, two rows of which are padding

`ModelRunner.advance` replays batches of decodes, and computes all others eagerly.
"""

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.batch import Batch, SamplingBatch
from nanovllm.cuda_graphs import Recorder
from nanovllm.layers.attention import AttentionMetadata, TorchAttention
from nanovllm_extras.execution.graph_inputs import MoreInputs
from nanovllm_extras.execution.input_buffer import InputBuffer
from nanovllm_extras.execution.layout import Network
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.sampling.runner_hooks import Draw, fill_in, has_placeholders, sample

logger = logging.getLogger(__name__)

# one value for each sequence; wide dtypes first, so that every column is aligned to the size of its values
COLUMNS: dict[str, np.dtype] = {
    "uniforms": np.dtype(np.float64),
    "top_k": np.dtype(np.int64),
    "input_ids": np.dtype(np.int32),
    "positions": np.dtype(np.int32),
    "slot_mapping": np.dtype(np.int32),
    "seq_lens": np.dtype(np.int32),
    "temperatures": np.dtype(np.float32),
    "top_p": np.dtype(np.float32),
    "min_p": np.dtype(np.float32),
}
OF_ATTENTION = ("slot_mapping", "seq_lens")
OF_SAMPLING = ("uniforms", "top_k", "temperatures", "top_p", "min_p")
# the part of `Batch` that a column comes from; the others are fields of `Batch` itself
OWNERS = {**dict.fromkeys(OF_ATTENTION, "metadata"), **dict.fromkeys(OF_SAMPLING, "sampling")}
NO_DRAW_KERNEL = "without triton, drawing tokens makes the host wait"
OFF = {"uniforms": 0, "top_k": 0, "top_p": 1, "min_p": 0}  # for batches in which no row asks for it


@dataclass(frozen=True)
class StepSizes:
    """How large a step can get."""

    max_num_batched_tokens: int
    max_num_seqs: int  # with speculation, drafts included
    max_model_len: int

    @property
    def max_decodes(self) -> int:
        return min(self.max_num_seqs, self.max_num_batched_tokens)


def graph_sizes(max_batch_size: int) -> list[int]:
    """Return the batch sizes to record. Padding is less than 8 rows, or less than an eighth from 128 rows on."""
    sizes, size = [1, 2, 4], 8
    while size < max_batch_size:
        sizes.append(size)
        size += max(8, 1 << (size.bit_length() - 4))
    return [size for size in sizes if size < max_batch_size] + [max_batch_size]


class Recorded(NamedTuple):
    replay: Callable[[], None]
    hidden: torch.Tensor  # [size, hidden_size], for rows that ask for more than a token drawn


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Freeze all objects within the context: torch collects garbage before each recording, except for frozen objects.

    If the program has frozen most objects itself, they stay frozen, and nothing is done.
    """
    gc.collect()
    is_frozen = gc.get_freeze_count() > len(gc.get_objects())
    if not is_frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not is_frozen:
            gc.unfreeze()


class CudaGraphs:
    """A decode step of `model` and `draw`, recorded for each of `sizes`. The KV cache must keep its address."""

    def __init__(
        self,
        model: Network,
        kv_cache: torch.Tensor,
        draw: Draw,
        sizes: list[int],
        max_num_blocks: int,
        recorder: Recorder | None = None,
        more: MoreInputs | None = None,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._draw = draw
        self._sizes = sorted(sizes)
        self._inputs = DecodeInputs(self._sizes[-1], max_num_blocks, kv_cache.device, more)
        self._newest_ids = torch.zeros(self._sizes[-1], dtype=torch.int64, device=kv_cache.device)  # [max_batch_size]
        self._recorder = recorder or Recorder()
        self._graphs: dict[int, Recorded] = {}

    def record_all(self) -> None:
        with frozen_objects():
            for size in reversed(self._sizes):  # the memory that the largest takes is enough for all others
                self.record(size)

    @torch.inference_mode()
    def record(self, size: int) -> None:
        batch = self._inputs.batch(size)

        def decode() -> torch.Tensor:
            input_ids = fill_in(batch.input_ids, self._newest_ids)
            hidden = self._model(input_ids, batch.positions, batch.metadata, self._kv_cache)
            self._newest_ids[:size] = sample(self._model.compute_logits(hidden), batch.sampling, self._draw)[0]
            return hidden

        self._graphs[size] = Recorded(*self._recorder.record(decode))

    def can_replay(self, batch: Batch, newest_ids: torch.Tensor) -> bool:
        """Return whether the batch holds only decodes, all get a token, and the largest graph is large enough."""
        num_seqs = len(batch.metadata.seq_lens)
        return (
            batch.metadata.num_decodes == num_seqs <= self._sizes[-1]
            and not getattr(batch, "readers", ())
            and np.array_equal(batch.logits_indices.numpy(), np.arange(num_seqs))
            and len(newest_ids) <= len(self._newest_ids)
            and self._inputs.more.can_replay(batch)
        )

    def replay(self, batch: Batch, newest_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Replay the graph for `batch`, on the host. newest_ids: [num_samples] of the step before, on the device

        Returns the sampled tokens, [num_seqs] int64, and the hidden states, [num_seqs, hidden_size], for rows that ask
        for more than a token. Both are valid until the next replay.
        """
        num_seqs = len(batch.metadata.seq_lens)
        size = self._sizes[bisect_left(self._sizes, num_seqs)]
        self._inputs.fill(batch, size)
        if has_placeholders(batch) and newest_ids.data_ptr() != self._newest_ids.data_ptr():  # not drawn by a replay
            self._newest_ids[: len(newest_ids)] = newest_ids
        self._graphs[size].replay()
        return self._newest_ids[:num_seqs], self._graphs[size].hidden[:num_seqs]


class DecodeInputs:
    """The tensors of a batch of decodes, at fixed addresses on the device: columns of `max_batch_size` rows.

    The host sends all columns and, after them, the block tables, as narrow as they are in the batch. On the device the
    block tables are then copied into the wide tables that the graphs read.
    """

    def __init__(
        self, max_batch_size: int, max_num_blocks: int, device: torch.device, more: MoreInputs | None = None
    ) -> None:
        self.more = more or MoreInputs()
        self._num_rows = -(-max_batch_size // 4) * 4  # so that each column begins at a multiple of 16 bytes
        self._dtypes = {**COLUMNS, **self.more.dtypes}
        self._num_column_bytes = self._num_rows * sum([dtype.itemsize for dtype in self._dtypes.values()])
        shape = (1 + self.more.num_tables, max_batch_size, max_num_blocks)
        self._block_tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self._buffer = InputBuffer(device, self._num_column_bytes + self._block_tables.nbytes)
        self._offsets = torch.arange(max_batch_size + 1, dtype=torch.int32, device=device)

    def batch(self, size: int) -> Batch:
        """Return the first `size` rows as a batch for recording. All values are zero until `fill` is called."""
        column = {}
        for name, (start, stop, dtype) in self._layout(size).items():
            column[name] = self._buffer.device_bytes[start:stop].view(getattr(torch, dtype.name))
        slots, seq_lens = column.pop("slot_mapping"), column.pop("seq_lens")
        (tables, *more_tables), offsets = self._block_tables[:, :size], self._offsets[: size + 1]
        metadata = AttentionMetadata.of_decodes(slots, tables, seq_lens, offsets)
        of_more = {name: column.pop(name) for name in self.more.dtypes}
        return Batch(
            input_ids=column.pop("input_ids"),
            positions=column.pop("positions"),
            metadata=self.more.add_to(metadata, of_more, more_tables),
            logits_indices=self._offsets[:size],
            sampling=SamplingBatch(**column),
            copies=[],
        )

    def fill(self, batch: Batch, size: int) -> None:
        """Send `batch`, on the host, followed by padding up to `size` sequences."""
        num_seqs, width = batch.metadata.block_tables.shape
        packed, values_of = self._buffer.next_host_bytes(), {**columns_of(batch), **self.more.values_of(batch)}
        for name, (start, stop, dtype) in self._layout(size).items():
            column, values = packed[start:stop].view(dtype), values_of[name]
            column[:num_seqs] = OFF[name] if values is None else values.numpy()
            # a sequence of padding has no tokens and is greedy, and slot 0 is in the null block
            column[num_seqs:] = self.more.padding.get(name, 0)
        stop = self._num_column_bytes
        for tables in (batch.metadata.block_tables, *self.more.tables_of(batch)):
            flat = tables.numpy().reshape(-1).view(np.uint8)
            start, stop = stop, stop + len(flat)
            packed[start:stop] = flat
        self._buffer.send(stop)
        narrow = self._buffer.device_bytes[self._num_column_bytes : stop].view(torch.int32)
        self._block_tables[:, :num_seqs, :width] = narrow.view(-1, num_seqs, width)

    def _layout(self, size: int) -> dict[str, tuple[int, int, np.dtype]]:
        """Return (start, stop, dtype) of each column's first `size` rows, in bytes of the buffer."""
        layout, start = {}, 0
        for name, dtype in self._dtypes.items():
            layout[name] = (start, start + size * dtype.itemsize, dtype)
            start += self._num_rows * dtype.itemsize
        return layout


def columns_of(batch: Batch) -> dict[str, torch.Tensor | None]:
    """Return the values of each column: [num_seqs] each, or None if no row of the batch asks for it."""
    return {name: getattr(getattr(batch, OWNERS[name]) if name in OWNERS else batch, name) for name in COLUMNS}


# ---- at startup


def choose_graphs(
    config: Config, backend: TorchAttention, has_draw_kernel: bool, device: torch.device, num_experts: int = 0
) -> tuple[str | None, str]:
    """Return the part of a decode step that is replayed, and on CUDA the reason, for the log.

    "step" is all of it. "forward" is only the forward pass, with the core's graphs, for machines without a kernel that
    samples the tokens (`has_draw_kernel`).
    """
    reason = None
    if device.type != "cuda":
        reason = f"they need a CUDA device, got {device}"
    elif config.enforce_eager:
        reason = "enforce_eager=True"
    elif not getattr(backend, "supports_graphs", False):  # a property of kernels
        reason = "this attention backend reads lengths back to the host"
    elif num_experts:
        reason = "tokens are grouped by expert on the host"
    elif config.enable_cuda_graphs is False:
        reason = "enable_cuda_graphs=False"
    elif not has_draw_kernel:
        reason = NO_DRAW_KERNEL
    if reason is not None and config.enable_cuda_graphs:
        raise ValueError(
            f"enable_cuda_graphs=True is not available ({reason}); leave it None, which takes them where possible"
        )
    if device.type != "cuda":
        return None, ""
    if reason == NO_DRAW_KERNEL:
        return "forward", f", with CUDA graphs of the forward pass only ({reason})"
    return ("step", ", with CUDA graphs") if reason is None else (None, f", no CUDA graphs ({reason})")


def record_graphs(
    model: Network,
    kv_cache: torch.Tensor,
    draw: Draw,
    max_batch_size: int,
    max_num_blocks: int,
    more: MoreInputs | None = None,
) -> CudaGraphs:
    """Record graphs for up to `max_batch_size` decodes, with block tables of up to `max_num_blocks` blocks."""
    start = time.monotonic()
    sizes = graph_sizes(max_batch_size)
    with torch.cuda.device_of(kv_cache):
        free_before = torch.cuda.mem_get_info()[0]
        graphs = CudaGraphs(model, kv_cache, draw, sizes, max_num_blocks, more=more)
        graphs.record_all()
        num_bytes = free_before - torch.cuda.mem_get_info()[0]
    logger.info(
        f"{len(sizes)} CUDA graphs for 1 to {max_batch_size} sequences: "
        f"{time.monotonic() - start:.1f} s, {num_bytes / 2**20:.0f} MiB"
    )
    return graphs


def measure_graph_bytes(
    model: Network,
    kv_cache: torch.Tensor,
    draw: Draw,
    max_batch_size: int,
    max_num_blocks: int,
    more: MoreInputs | None = None,
) -> int:
    """Estimate the device memory of all graphs: the largest one's, and for each other one that of the smallest.

    A cache without blocks is enough for this: padding needs only the null block.
    """
    sizes = graph_sizes(max_batch_size)
    with torch.cuda.device_of(kv_cache):
        before = torch.cuda.mem_get_info()[0]
        graphs = CudaGraphs(model, kv_cache, draw, sizes, max_num_blocks, more=more)
        graphs.record(sizes[-1])
        after_largest = torch.cuda.mem_get_info()[0]
        graphs.record(sizes[0])
        after_both = torch.cuda.mem_get_info()[0]
    return max(0, before - after_largest) + (len(sizes) - 1) * max(0, after_largest - after_both)
