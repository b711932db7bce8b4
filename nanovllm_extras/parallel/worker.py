"""A rank above 0 computes its share of each batch that rank 0 sends: `rank.py` is its process.

The first line that comes says what to compute (`start.Plan`). From then on each message is a step.
"""

import socket
import time
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch

from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.parallel.communicator import CommunicationError, Communicator
from nanovllm_extras.parallel.messages import (
    COMMAND,
    DRAFTS,
    HEADER_BYTES,
    LOGITS,
    STEP,
    Header,
    receive,
    receive_json,
    send_json,
    unpack_command,
    unpack_step,
)
from nanovllm_extras.parallel.start_ranks import Plan, start_worker
from nanovllm_extras.parallel.store_ranks import RankShare

REASON_S = 1.0  # within this time rank 0 hears of the rank that has ended first


def work(
    driver: socket.socket, on_ready: Callable[[], None], at_exit: Callable[[Callable[[], object]], None]
) -> NoReturn:
    """Run a rank above 0. Raises ConnectionError when rank 0 has closed the socket, or the rank's own error."""
    try:
        plan = Plan(*receive_json(driver))
        host = None if driver.family == socket.AF_UNIX else driver.getsockname()[0]
        runner, communicator = start_worker(plan, host)
        on_ready()
        send_json(driver, {"ready": True})
        serve(runner, communicator, driver, at_exit)
    except CommunicationError:
        time.sleep(REASON_S)  # another rank has ended: rank 0 hears why from that one, and then ends this one
        raise


def serve(
    runner: ModelRunner,
    communicator: Communicator,
    driver: socket.socket,
    at_exit: Callable[[Callable[[], object]], None],
) -> NoReturn:
    """Compute what each message asks for. Raises ConnectionError when rank 0 has closed the socket."""
    share = None
    while True:
        header = Header(*np.frombuffer(receive(driver, HEADER_BYTES), dtype=np.int32).tolist())
        values = np.frombuffer(receive(driver, 4 * header.num_values), dtype=np.int32)
        if share is None and runner.config.has_kv_store:  # rank 0 has its own by now, and has raised its own errors
            share = runner.store = RankShare(runner)
            at_exit(share.saver.stop)
        if header.kind == STEP:
            compute_step(runner, header, values, share)
        elif header.kind == LOGITS:
            compute_logits(runner, communicator, header)
        elif header.kind == DRAFTS:
            compute_drafts(runner, communicator, header, values)
        elif header.kind == COMMAND:
            assert runner.adapters is not None
            answer = runner.adapters.obey(unpack_command(values))
            communicator.gather(torch.tensor([[answer]], dtype=torch.int64, device=runner.device))
        else:
            assert share is not None
            answer = share.answer(header.kind, values, runner.backend.block_size)
            communicator.gather(torch.tensor([[answer]], dtype=torch.int64, device=runner.device))


def compute_step(runner: ModelRunner, header: Header, values: np.ndarray, share: RankShare | None = None) -> None:
    """Compute the rank's share of a step, from a CUDA graph exactly if rank 0 does."""
    batch = unpack_step(header, values)
    if share is not None:
        share.take_part(batch.copies)
    runner.run(batch, is_replayed=bool(header.is_replayed))


@torch.inference_mode()
def compute_drafts(runner: ModelRunner, communicator: Communicator, header: Header, values: np.ndarray) -> None:
    """Compute a batch by the model's head. The hidden states of the tokens before are received first."""
    previous = torch.empty(header.num_tokens, header.hidden_size, dtype=runner.dtype, device=runner.device)
    communicator.broadcast(previous)
    head: Any = runner.followers[0]
    with runner.step_context():
        sent = runner.send_batch(unpack_step(header, values))
        runner.compute_logits(head.run(sent, previous))


@torch.inference_mode()
def compute_logits(runner: ModelRunner, communicator: Communicator, header: Header) -> None:
    """Compute the logits of rows that no step has named. Their hidden states are received first."""
    shape = header.num_samples, header.hidden_size
    hidden = torch.empty(shape, dtype=runner.dtype, device=runner.device)
    runner.compute_logits(communicator.broadcast(hidden))
