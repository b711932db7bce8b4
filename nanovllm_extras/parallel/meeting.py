"""Choose the communicator of an engine's ranks, and let the ranks find each other.

On one machine the ranks use a file in a private folder and anonymous shared memory, so two engines cannot collide. With
several machines, rank 0 opens a TCP port.

    cuda                                     nccl
    cpu, one Linux machine, a C compiler     shared_memory
    cpu otherwise, or with attention_backend=torch    gloo
"""

import logging
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed import FileStore, Store, TCPStore

from nanovllm_extras.kernels.cpu.library import NoLibraryError, load_library
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.parallel.communicator import Communicator, GlooCommunicator
from nanovllm_extras.parallel.nccl import NcclCommunicator
from nanovllm_extras.parallel.shared_memory import SharedMemoryCommunicator

logger = logging.getLogger(__name__)

PATIENCE = timedelta(hours=1)  # until all ranks have joined; the end of a rank is noticed by its socket


class Meeting(NamedTuple):
    """What a rank needs to join the others, as a record that JSON can hold."""

    kind: str  # nccl, gloo or shared_memory
    file: str = ""  # path of the store's file if there is one machine
    host: str = "127.0.0.1"  # machine 0's address for the other machines
    port: int = 0
    memory: int = -1  # file descriptor of the shared memory, inherited by the ranks

    def close(self) -> None:
        """Close the memory's file descriptor. Call this method after all ranks have mapped the memory."""
        if self.memory >= 0:
            os.close(self.memory)


def choose_kind(config: Config, device: torch.device, dtype: torch.dtype) -> str:
    """Return the kind of communicator from the table above."""
    if device.type == "cuda":
        return "nccl"
    if config.nnodes > 1 or config.attention_backend == "torch" or sys.platform != "linux":  # futexes are Linux's
        return "gloo"
    try:
        load_library(dtype)
    except NoLibraryError:
        return "gloo"
    return "shared_memory"


def make_meeting(kind: str, size: int, config: Config, folder: str) -> tuple[Meeting, Store | None]:
    """Create a meeting. Return it, and the store that must stay alive until all ranks have joined."""
    if config.nnodes > 1:
        store = TCPStore(config.master_addr, 0, size, True, PATIENCE, wait_for_workers=False)
        return Meeting(kind, host=config.master_addr, port=store.port), store
    memory = -1
    if kind == "shared_memory":
        try:
            memory = SharedMemoryCommunicator.allocate(size)
        except OSError as error:  # refused by the rules of a container, for example
            logger.warning("the ranks use sockets, because shared memory is not available: %s", error)
            kind = "gloo"
    return Meeting(kind, file=str(Path(folder) / "store"), memory=memory), None


def connect(
    meeting: Meeting,
    rank: int,
    size: int,
    device: torch.device,
    dtype: torch.dtype,
    store: Store | None = None,
    host: str | None = None,
) -> Communicator:
    """Wait until all ranks have joined, and return this rank's communicator.

    `host` is this machine's address for the other machines; None is machine 0's address.
    """
    if meeting.kind == "shared_memory":
        return SharedMemoryCommunicator(meeting.memory, rank, size, load_library(dtype))
    if store is None:
        if meeting.port:
            store = TCPStore(meeting.host, meeting.port, size, False, PATIENCE)
        else:
            store = FileStore(meeting.file, size)
    if meeting.kind == "gloo":
        return GlooCommunicator(store, rank, size, host or meeting.host)
    return NcclCommunicator(store, rank, size, device)
