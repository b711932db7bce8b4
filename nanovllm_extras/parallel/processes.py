"""Start the processes of the other ranks of this machine. Each inherits a socket to rank 0.

On rank 0's machine the socket is one of a socket pair, which has no address. `nodes.py` connects several machines.
"""

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch

from nanovllm_extras.kernels.cpu.threads import BINDING, on_all_places
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.parallel.nodes import accept_ranks, address_of, reach_engine
from nanovllm_extras.parallel.peers import Peers
from nanovllm_extras.parallel.shared_memory import above_standard_streams

logger = logging.getLogger(__name__)


def share_threads(num_local_ranks: int) -> int:
    """Return the number of threads of each rank on this machine: its share of the cores, or `$OMP_NUM_THREADS`."""
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    return max(1, torch.get_num_threads() // num_local_ranks)


def start_process(
    peer: socket.socket, inherited: tuple[int, ...], num_threads: int, folder: str = ""
) -> "subprocess.Popen[bytes]":
    """Start a rank's process. It inherits the socket `peer`, which this process then closes.

    folder: the folder in which the ranks of this machine meet.
    """
    environment = {  # without the variables that would bind each rank's first thread to the same processor
        **{name: value for name, value in os.environ.items() if name not in BINDING},
        "PYTHONSAFEPATH": "1",  # no file in the working directory can replace a library
        "OMP_NUM_THREADS": str(num_threads),
    }
    # run as a file, because `-m` would import torch first; rank.pyc if only compiled files are installed
    rank = str(Path(__file__).with_stem("rank"))
    number = above_standard_streams(peer.detach())
    command = [sys.executable, rank, str(number), str(os.getpid()), folder]
    try:
        with on_all_places():
            return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=(number, *inherited))
    finally:
        os.close(number)


Remote = tuple[list[socket.socket], socket.socket | None]
"""Sockets to the ranks of other machines, and the port to which they connected."""


def accept_other_machines(config: Config) -> Remote:
    """Wait until all ranks of other machines have connected."""
    num_local = config.tensor_parallel_size // config.nnodes
    return accept_ranks(config, range(num_local, config.tensor_parallel_size)) if config.nnodes > 1 else ([], None)


def start_peers(remote: Remote, num_local: int, num_threads: int, memory: int, folder: str) -> Peers:
    """Start the other ranks of this machine. `memory`: the file descriptor of the shared memory, or -1"""
    pairs = [socket.socketpair() for _ in range(1, num_local)]
    inherited = () if memory < 0 else (memory,)

    def start() -> "Iterator[subprocess.Popen[bytes]]":
        for _, theirs in pairs:
            yield start_process(theirs, inherited, num_threads, folder)

    return Peers([ours for ours, _ in pairs] + remote[0], start, remote[1])


def run_node(config: Config) -> NoReturn:
    """Run this machine's ranks until machine 0 ends. Raises SystemExit, with status 1 if one of them has failed."""
    num_local = config.tensor_parallel_size // config.nnodes
    first = config.node_rank * num_local
    peers = reach_engine(config, range(first, first + num_local))
    logger.info(f"computing for machine 0 at {address_of(config)}")
    processes = []
    try:
        for peer in peers:
            processes.append(start_process(peer, (), share_threads(num_local)))
        statuses = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    raise SystemExit(int(any(statuses)))
