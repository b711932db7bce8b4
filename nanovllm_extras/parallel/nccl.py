"""Collectives through NCCL, for ranks with a CUDA device each. Tested with stand-ins on CPU; not yet run on a GPU.

Every call only launches a kernel on the current stream and reads no result back, so a CUDA graph can record it. NCCL
connects its devices when the first calls run. So one step must run before a step is recorded; the warm-up in
`nanovllm_extras/execution/step_graphs.py` does this.
"""

import os
import threading
from typing import Any

import torch
from torch import distributed
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions, Store

from nanovllm_extras.parallel.communicator import (
    PATIENCE,
    CommunicationError,
    Communicator,
    check_rank,
    check_tensor,
    join_columns,
)


class NcclCommunicator(Communicator):
    """A communicator for tensors on `device`.

    NCCL chooses how to round the sums of 16-bit floats, so their bits may depend on the batch.

    When a peer dies, a kernel that waits for it keeps waiting until a thread that notices the death calls `abort`. The
    results that the device has computed since then are invalid, and the next call raises CommunicationError.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        """Wait until all ranks have joined. The store must not contain keys of another group."""
        check_rank(rank, size)
        if not distributed.is_nccl_available():
            raise ValueError(f"device {device} needs a PyTorch with NCCL for several ranks; this PyTorch has no NCCL")
        # NCCL's watchdog would end this process, which may be a server, when a peer is lost.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        # Its heartbeat monitor polls the store for requests to dump traces. The store's folder is removed after the
        # start, and a FileStore without its file waits for 300 s, for which the end of the group would wait too.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        self.rank, self.size, self._device = rank, size, device
        self._is_aborted = threading.Event()
        group_class: Any = distributed.ProcessGroupNCCL
        options = group_class.Options()
        options._timeout = PATIENCE
        self._group = group_class(store, rank, size, options)
        self._group.eager_connect_single_device(device)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        check_tensor(x, self._device.type)
        self._launch("allreduce", AllreduceOptions(), [x])
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        check_tensor(x, self._device.type)
        options = BroadcastOptions()
        options.rootRank = 0
        self._launch("broadcast", options, [x.view(-1).view(torch.uint8)])
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gather with an all-gather, which is one kernel.

        NCCL's gather is a send and a receive for each rank. These connect when they are first used, which a graph would
        have to record. Rank 0 receives the same number of bytes in both.
        """
        check_tensor(x, self._device.type)
        rows = x.new_empty(self.size * len(x), x.shape[1])  # of rank 0, then those of rank 1, ...
        self._launch("_allgather_base", AllgatherOptions(), rows, x)
        return join_columns(rows.view(self.size, *x.shape)) if self.rank == 0 else x

    def abort(self) -> None:
        self._is_aborted.set()
        self._group.abort()

    def close(self) -> None:
        if not self._is_aborted.is_set():
            self._is_aborted.set()
            self._group.shutdown()

    def _launch(self, name: str, options: Any, *tensors: object) -> None:
        if self._is_aborted.is_set():
            raise CommunicationError("the communicator was aborted or closed")
        options.asyncOp = False  # run on the current stream, not on one of the group's own streams
        try:
            work = getattr(self._group, name)(*tensors, options)
            if work is not None:
                work.wait()  # at most the stream waits, never the host
        except RuntimeError as error:
            raise CommunicationError(f"rank {self.rank} of {self.size}: {error}") from error
