"""Rank 0 drives: it sends each batch to the other ranks, computes its own share of it, and draws the tokens.

`Driver` wraps the runner's `compute` and `transfer`. A batch that is sent to the device is sent to all devices. What
the others do for one message, rank 0 does too, collective by collective:

    rank 0       message → embedding → halves of layers … → logits → draw
    rank 1       message → embedding → halves of layers … → logits          then it waits for the next message

If rank 0 left this order half-way, the ranks would wait for each other. So an error between the message and the logits
ends the engine. An interrupt waits until the step is over, and a second one ends the engine. An error behind the
logits, by a processor of a request for example, disturbs nobody.
"""

import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.batch import Batch
from nanovllm.scheduler import Step
from nanovllm_extras.dead import EngineDeadError
from nanovllm_extras.full_runner import ModelRunner
from nanovllm_extras.parallel.communicator import CommunicationError, Communicator
from nanovllm_extras.parallel.messages import pack_logits, pack_step
from nanovllm_extras.parallel.peers import Peers
from nanovllm_extras.runner_hooks import SampledTokens


class Driver:
    """Lives as long as the runner whose callables it wraps; then the other ranks end."""

    def __init__(self, runner: ModelRunner, peers: Peers, communicator: Communicator) -> None:
        self.peers = peers
        self._communicator, self._device = communicator, runner.device
        self._send, self._compute = runner.transfer, runner.compute
        runner.transfer, runner.compute = self.send, self.compute
        own = weakref.proxy(self)  # CUDA graphs, which it holds, hold the model: no circle may keep them
        runner.model.register_forward_hook(lambda module, arguments, output: own._end_forward())
        lm_head: Any = runner.model.lm_head
        lm_head.around_logits = lambda hidden: own._around_logits(hidden)
        self._announced: Batch | None = None
        self._is_underway = False  # the other ranks compute what rank 0 has not finished
        self._has_due_logits = False  # the message has asked for the logits that come next
        runner.stop = weakref.finalize(self, peers.stop)

    def compute(self, runner: ModelRunner, batch: Batch) -> SampledTokens:
        """Replaces `ModelRunner.compute`."""
        with interrupts_held_back(self.peers):
            self._announce(batch, has_draw=True, is_replayed=runner.is_replayed(batch))
            try:
                sampled = self._compute(runner, batch)
            except BaseException as error:
                if self._is_underway:
                    dead = self._die(error)
                    if isinstance(error, Exception):
                        raise dead from error
                raise
            self._is_underway = self._has_due_logits = False  # a replayed CUDA graph passes none of the lines below
            return sampled._replace(readings=(*sampled.readings, StillAlive(self.peers)))

    def send(self, record: Any) -> Any:
        """Replaces `ModelRunner.transfer`. A batch that is not computed by `compute` is sent here."""
        if isinstance(record, Batch) and record is not self._announced:
            self._announce(record, has_draw=False)
        return self._send(record)

    def ask(self, message: np.ndarray, answer: Callable[[], int]) -> int:
        """Send a message that each rank answers with a number, rank 0 by `answer`. Returns the least of the answers."""
        with interrupts_held_back(self.peers):
            self._check_is_idle()
            self.peers.send(message)
            try:
                own = torch.tensor([[answer()]], dtype=torch.int64, device=self._device)
                return int(self._communicator.gather(own).amin())
            except Exception as error:
                raise self._die(error) from error

    def _announce(self, batch: Batch, has_draw: bool, is_replayed: bool = False) -> None:
        self._check_is_idle()
        message = pack_step(batch, has_draw, is_replayed)
        self._announced = batch
        self._is_underway, self._has_due_logits = True, has_draw and len(batch.logits_indices) > 0
        self.peers.send(message)

    def _check_is_idle(self) -> None:
        if self._is_underway:
            raise self._die("a forward pass was left half-way")

    def _end_forward(self) -> None:
        self._is_underway = self._has_due_logits

    @contextmanager
    def _around_logits(self, hidden: torch.Tensor) -> Iterator[None]:
        """Send hidden: [num_rows, hidden_size] to the other ranks if the step's message did not name its rows."""
        if not self._has_due_logits:
            self._is_underway = True
            self.peers.send(pack_logits(*hidden.shape))
            self._communicator.broadcast(hidden.contiguous())
        yield
        self._is_underway = self._has_due_logits = False

    def _die(self, reason: Any) -> EngineDeadError:
        if isinstance(reason, CommunicationError):
            self.peers.wait_for_failure()  # the thread that watches the others knows more
        return self.peers.fail(f"rank 0 failed, while others computed with it: {reason!r}")


class StillAlive(NamedTuple):
    """The last result of a step that is read. On CUDA, a step with an aborted communicator has meaningless tokens."""

    peers: Peers

    def to_host(self) -> "StillAlive":
        return self

    def deliver(self, scheduled: Step) -> None:
        """Raise `EngineDeadError` if a rank has failed, before the step's tokens are used."""
        if self.peers.failure is not None:
            raise self.peers.failure


@contextmanager
def interrupts_held_back(peers: Peers) -> Iterator[None]:
    """Delay the KeyboardInterrupt of a ^C to the end of the block. A second ^C raises it immediately.

    Only the main thread gets any. While it waits in C for another rank, `peers` hears the second one and ends the wait.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append((number, frame))
        if len(held) > 1:  # the step takes too long, or another rank hangs
            handler(number, frame)

    signal.signal(signal.SIGINT, hold)
    other_fd = signal.set_wakeup_fd(peers.signal_fd, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(other_fd)
        if held:
            peers.forget_interrupts()
        signal.signal(signal.SIGINT, handler)
        if len(held) == 1:
            handler(*held[0])
