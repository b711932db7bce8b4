"""Rank 0 drives: it sends each batch to the other ranks, computes its own share of it, and draws the tokens.

The runner of rank 0 holds a `Driver` as its `ranks`. What the others do for one message, rank 0 does too, collective by
collective:

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
from nanovllm_extras.execution.alone import Alone
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.machine.dead import EngineDeadError
from nanovllm_extras.parallel.communicator import CommunicationError, Communicator
from nanovllm_extras.parallel.messages import pack_command, pack_logits, pack_step
from nanovllm_extras.parallel.peers import Peers
from nanovllm_extras.parallel.store_ranks import AllRanks
from nanovllm_extras.records.tier import Chain


class Driver(Alone):
    """Lives as long as the runner that holds it; then the other ranks end."""

    def __init__(self, runner: ModelRunner, peers: Peers, communicator: Communicator) -> None:
        self.peers = peers
        self.readings = (StillAlive(peers),)
        self._communicator, self._device = communicator, runner.device
        self._is_underway = False  # the other ranks compute what rank 0 has not finished
        self._has_due_logits = False  # the message has asked for the logits that come next
        self._end = weakref.finalize(self, peers.stop)

    @contextmanager
    def step(
        self, batch: Batch, has_logits: bool = True, is_replayed: bool = False, previous: torch.Tensor | None = None
    ) -> Iterator[None]:
        with interrupts_held_back(self.peers):
            self._check_is_idle()
            message = pack_step(batch, has_logits, is_replayed, 0 if previous is None else previous.shape[1])
            self._is_underway, self._has_due_logits = True, has_logits and len(batch.logits_indices) > 0
            self.peers.send(message)
            try:
                if previous is not None:
                    self._communicator.broadcast(previous)
                yield
            except BaseException as error:
                if self._is_underway:
                    dead = self._die(error)
                    if isinstance(error, Exception):
                        raise dead from error
                raise
            self._is_underway = self._has_due_logits = False  # a replayed CUDA graph passes none of the lines below

    def end_forward(self) -> None:
        self._is_underway = self._has_due_logits

    @contextmanager
    def logits(self, hidden: torch.Tensor) -> Iterator[None]:
        """Send hidden: [num_rows, hidden_size] to the other ranks if the step's message did not name its rows."""
        if not len(hidden):  # each rank knows it: nothing is sent
            yield
            return
        if not self._has_due_logits:
            self._is_underway = True
            self.peers.send(pack_logits(*hidden.shape))
            self._communicator.broadcast(hidden.contiguous())
        yield
        self._is_underway = self._has_due_logits = False

    def tiers_of_all(self, tiers: Chain, bytes_per_state: int) -> Chain:
        return AllRanks(tiers.tiers, self, bytes_per_state)

    def stop(self) -> None:
        self._end()

    def tell_failure(self, call: Callable[[EngineDeadError], None]) -> None:
        self.peers.tell_failure(call)

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

    def command(self, order: list[Any], answer: Callable[[], int]) -> int:
        return self.ask(pack_command(order), answer)

    def _check_is_idle(self) -> None:
        if self._is_underway:
            raise self._die("a forward pass was left half-way")

    def _die(self, reason: object) -> EngineDeadError:
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
