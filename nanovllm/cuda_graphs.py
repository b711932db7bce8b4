"""CUDA graphs: the forward pass of decodes, recorded for some batch sizes and replayed with one launch.

A decode step of a small model is hundreds of kernels of a few microseconds each. Launching them one by one from Python
takes longer than running them (https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/). A graph fixes the
addresses and shapes of all tensors, but not their contents. So:

- the inputs of all graphs are in the same buffers, and each step's inputs are copied there;
- a batch is padded to the next recorded size with empty sequences, whose K and V go to slot 0, in the null block: 70
  decodes replay the graph of 80;
- block tables are as wide as the longest sequence needs.

`ModelRunner.forward` replays a batch if `can_replay` allows it. Prefill has any shape, and takes long enough to hide
its launches, so it is never replayed. Logits and sampling are not part of the graphs.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import ClassVar, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from nanovllm.batch import Batch
from nanovllm.layers.attention import AttentionMetadata

T = TypeVar("T")
NUM_STREAMS = 32  # of PyTorch's pool, which come round again


class Recorder:
    """Records what a function launches. All graphs share their working memory, because only one of them runs at a time.

    No other living recorder uses its stream. PyTorch keeps a cuBLAS workspace for each stream (32 MiB on Hopper), and
    frees that of a graph's stream together with the graph: graphs of another engine, recorded in the same stream, would
    still write to the freed workspace (https://github.com/pytorch/pytorch/issues/193402).
    """

    _living: ClassVar[WeakSet["Recorder"]] = WeakSet()  # of the process, as PyTorch's streams are

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream = unused_stream([recorder._stream for recorder in self._living])
        self._living.add(self)

    def record(self, function: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Record `function`. Return a function that replays it, and its outputs, which each replay overwrites."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            function()  # compiles kernels and lets libraries set themselves up, neither of which can be recorded
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            results = function()
        return graph.replay, results


def unused_stream(used: list[torch.cuda.Stream]) -> torch.cuda.Stream:
    """Return a stream that is not in `used`. Raises RuntimeError if all NUM_STREAMS of PyTorch's pool are."""
    for _ in range(NUM_STREAMS):
        stream = torch.cuda.Stream()
        if stream not in used:
            return stream
    raise RuntimeError(f"{NUM_STREAMS} engines with CUDA graphs are alive on this device: there are no more streams")


class CudaGraphs:
    """Graphs of `model` for up to `max_num_seqs` decodes. `kv_cache` must keep its address.

    metadata_cls: the class of the metadata of each batch (`ModelRunner.make_metadata`)
    """

    def __init__(
        self,
        model: nn.Module,
        kv_cache: Tensor,
        max_num_seqs: int,
        max_num_blocks: int,
        metadata_cls: type[AttentionMetadata] = AttentionMetadata,
    ) -> None:
        self.model, self.kv_cache, self.metadata_cls = model, kv_cache, metadata_cls
        self.sizes = [size for size in (1, 2, 4, 8, *range(16, max_num_seqs, 16)) if size < max_num_seqs]
        self.sizes.append(max_num_seqs)
        # the buffers: one row for each decode
        device = kv_cache.device
        columns = torch.zeros(4, max_num_seqs, dtype=torch.int32, device=device)
        self.input_ids, self.positions, self.slot_mapping, self.seq_lens = columns  # [max_num_seqs] each
        self.block_tables = torch.zeros(max_num_seqs, max_num_blocks, dtype=torch.int32, device=device)
        self.offsets = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        own = [one.name for one in fields(metadata_cls)[len(fields(AttentionMetadata)) :]]
        self.token_fields = {name: torch.zeros_like(self.slot_mapping) for name in own}  # [max_num_seqs] each
        self.graphs: dict[int, tuple[Callable[[], None], Tensor]] = {}  # size -> replay, and the tensor that it writes
        self.recorder = Recorder()

    def record_all(self) -> None:
        for size in reversed(self.sizes):  # the memory of the largest graph is enough for all others
            self.record(size)

    def measure_bytes(self) -> int:
        """Estimate the memory of all graphs: the largest one's, plus the smallest one's for each of the others."""
        free = [torch.cuda.mem_get_info()[0]]
        for size in (self.sizes[-1], self.sizes[0]):
            self.record(size)
            free.append(torch.cuda.mem_get_info()[0])
        return free[0] - free[1] + (len(self.sizes) - 1) * (free[1] - free[2])

    @torch.inference_mode()
    def record(self, size: int) -> None:
        self.graphs[size] = self.recorder.record(partial(self.forward, size))

    def forward(self, size: int) -> Tensor:
        """Run the model over the first `size` rows of the buffers -> [size, hidden_size]"""
        tables, offsets = self.block_tables[:size], self.offsets[: size + 1]
        more = [buffer[:size] for buffer in self.token_fields.values()]
        inputs = self.slot_mapping[:size], tables, self.seq_lens[:size], offsets
        metadata = self.metadata_cls.of_decodes(*inputs, *more)
        return self.model(self.input_ids[:size], self.positions[:size], metadata, self.kv_cache)

    def can_replay(self, batch: Batch) -> bool:
        """Return whether the batch has only decodes, and not more than the largest graph."""
        return batch.metadata.num_decodes == len(batch.metadata.seq_lens) <= self.sizes[-1]

    def replay(self, batch: Batch) -> Tensor:
        """Replay a batch of decodes -> hidden states [num_tokens, hidden_size], valid until the next replay"""
        metadata = batch.metadata
        n, width = metadata.block_tables.shape
        size = self.sizes[bisect_left(self.sizes, n)]
        self.slot_mapping[n:size] = 0  # padding
        self.seq_lens[n:size] = 0
        self.input_ids[:n] = batch.input_ids
        self.positions[:n] = batch.positions
        self.slot_mapping[:n] = metadata.slot_mapping
        self.seq_lens[:n] = metadata.seq_lens
        self.block_tables[:n, :width] = metadata.block_tables
        for name, buffer in self.token_fields.items():
            buffer[n:size] = 0
            buffer[:n] = getattr(metadata, name)
        replay, hidden = self.graphs[size]
        replay()
        return hidden[:n]
