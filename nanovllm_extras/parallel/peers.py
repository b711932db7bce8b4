"""Rank 0's side of the other ranks: a socket to each, their processes, and a thread that notices their end.

    rank 0 ─int32 messages→ each other rank           (`messages.py`)
    rank 0 ←lines of JSON─ each other rank            {"ready": true}, {"error": "…"}

The thread also starts the processes of this machine. Linux kills them when the thread that started them ends
(`rank.py`), and the thread that creates an engine may end long before the engine.
"""

import json
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

import numpy as np

from nanovllm_extras.machine.dead import EngineDeadError
from nanovllm_extras.machine.forks import check_process
from nanovllm_extras.parallel.messages import MAX_LINE, send_json
from nanovllm_extras.parallel.nodes import turn_away

Start = Callable[[], "Iterator[subprocess.Popen[bytes]]"]
T = TypeVar("T")

PATIENCE_S = 2.0  # for processes to end by themselves; then they are killed


class Peers:
    """The ranks above 0. When one of them ends, or `stop` is called, all of them end.

    sockets: `sockets[i]` is connected to rank i + 1.
    start: starts the processes of this machine, one after the other. They are the first of these ranks.
    listening: a port on which further connections are refused.
    """

    def __init__(self, sockets: Sequence[socket.socket], start: Start, listening: socket.socket | None = None) -> None:
        self.failure: EngineDeadError | None = None
        self._on_failure: list[Callable[[EngineDeadError], None]] = []
        self._sockets = dict(enumerate(sockets, 1))
        self._start = start
        self._listening = listening
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._is_ready = threading.Condition(self._lock)  # notified when a rank is ready or has failed
        self._ready: set[int] = set()
        self._is_stopping = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._waker, self._wakes = socket.socketpair()
        self._signals, self._hears = socket.socketpair()
        self._signals.setblocking(False)
        self._hears.setblocking(False)
        self._num_interrupts = 0
        self._thread = threading.Thread(target=self._watch, name="nanovllm-ranks", daemon=True)
        self._thread.start()

    # ---- in any thread

    def send(self, message: np.ndarray) -> None:
        """Send message: [num_values] int32 to all ranks. Raises `EngineDeadError` if one of them has ended."""
        self.check()
        check_process()
        for rank, peer in self._sockets.items():
            try:
                peer.sendall(message.data)
            except OSError as error:
                raise self._cannot_reach(rank, error) from error

    def check(self) -> None:
        """Raise `EngineDeadError` if a rank has ended."""
        if self.failure is not None:
            raise self.failure

    def send_json(self, rank: int, value: object) -> None:
        """Send a value to one rank as a line of JSON. Raises `EngineDeadError` if the rank cannot be reached."""
        try:
            send_json(self._sockets[rank], value)
        except OSError as error:
            raise self._cannot_reach(rank, error) from error

    def _cannot_reach(self, rank: int, error: OSError) -> EngineDeadError:
        self.wait_for_failure()  # the thread that watches the ranks knows how this one ended
        return self.fail(f"rank {rank} cannot be reached: {error}")

    def wait_until_ready(self) -> None:
        """Wait until every rank has reported that it is ready. Raises `EngineDeadError` if one ends before."""
        self._wait(lambda: len(self._ready) == len(self._sockets))

    def wait_for(self, function: Callable[[], T]) -> T:
        """Call a function that waits for the other ranks, and return its result.

        Raises `EngineDeadError` if a rank ends before the function returns.
        """
        future: Future[T] = Future()

        def call() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            with self._lock:
                self._is_ready.notify_all()

        threading.Thread(target=call, daemon=True).start()  # if a rank ends, this thread never ends
        self._wait(future.done)
        return future.result()

    def wait_for_failure(self) -> None:
        """Wait until a failure is known, for at most `PATIENCE_S / 2`."""
        with self._lock:
            self._is_ready.wait_for(lambda: self.failure is not None, PATIENCE_S / 2)

    def _wait(self, is_over: Callable[[], bool]) -> None:
        with self._lock:
            self._is_ready.wait_for(lambda: self.failure is not None or is_over())
        self.check()

    def fail(self, reason: str) -> EngineDeadError:
        """Mark the engine as dead, and return the error. If it is dead already, keep the first reason."""
        with self._lock:
            is_first = self.failure is None and not self._is_stopping
            listeners = self._on_failure if is_first else []
            self.failure = self.failure or EngineDeadError(f"the engine is dead, make a new one: {reason}")
            self._is_ready.notify_all()
        self._wake()
        for tell in listeners:
            tell(self.failure)
        return self.failure

    def tell_failure(self, tell: Callable[[EngineDeadError], None]) -> None:
        """Register `tell`, which is called once, in the thread that notices a failure.

        If a failure is known already, call `tell` immediately.
        """
        with self._lock:
            if self.failure is None:
                self._on_failure.append(tell)
                return
        tell(self.failure)

    def stop(self) -> None:
        """End all other ranks, and wait until they have ended. In a forked process, do nothing."""
        if os.getpid() != self._pid:
            return
        self._is_stopping = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._close_signals()

    @property
    def signal_fd(self) -> int:
        """Return the descriptor for `signal.set_wakeup_fd`, which is open until `stop`.

        Through it the thread notices ^C immediately, while Python waits for C code to return. A second ^C in one step
        ends the engine.
        """
        return self._signals.fileno()

    def forget_interrupts(self) -> None:
        """Reset the count of interrupts after they have been handled, including those still in the socket."""
        with self._lock, suppress(BlockingIOError):
            self._num_interrupts = 0
            self._hears.recv(1 << 10)

    def _wake(self) -> None:
        with suppress(OSError):  # the thread has ended
            self._waker.send(b"x")

    # ---- in the thread

    def _watch(self) -> None:
        try:
            for process in self._start():
                self._processes.append(process)
            poll, ranks = select.poll(), {peer.fileno(): rank for rank, peer in self._sockets.items()}
            lines = dict.fromkeys(self._sockets, b"")
            port = -1 if self._listening is None else self._listening.fileno()
            for number in (*ranks, self._wakes.fileno(), self._hears.fileno(), port):
                if number >= 0:
                    poll.register(number, select.POLLIN)
            while not self._is_stopping and self.failure is None:
                for number, _ in poll.poll():
                    if number in ranks and not self._read(ranks[number], lines):
                        poll.unregister(number)
                    if number == self._hears.fileno():
                        self._hear_signals()
                    if number == port and self._listening is not None:
                        turn_away(self._listening)
        except Exception as error:
            self.fail(f"the other ranks could not be started or read from: {type(error).__name__}: {error}")
        finally:
            self._end()

    def _hear_signals(self) -> None:
        with self._lock, suppress(BlockingIOError):  # `forget_interrupts` has read them
            self._num_interrupts += self._hears.recv(1 << 10).count(signal.SIGINT)
        if self._num_interrupts > 1:
            self.fail("KeyboardInterrupt, twice in one step")

    def _read(self, rank: int, lines: dict[int, bytes]) -> bool:
        """Read and handle lines from `rank`. Return False if the rank has ended."""
        try:
            received = self._sockets[rank].recv(1 << 16)
        except OSError:
            received = b""
        if not received:
            self.fail(f"rank {rank} has ended{self._how_ended(rank)}")
            return False
        *whole, lines[rank] = (lines[rank] + received).split(b"\n")
        if len(lines[rank]) > MAX_LINE:
            raise ValueError(f"rank {rank} sent more than {MAX_LINE} bytes without a newline")
        for line in map(json.loads, whole):
            if "error" in line:
                self.fail(f"rank {rank}: {line['error']}")
            else:
                with self._lock:
                    self._ready.add(rank)
                    self._is_ready.notify_all()
        return True

    def _how_ended(self, rank: int) -> str:
        """Describe by which signal or exit status a process of this machine ended; "" if that is unknown."""
        if rank > len(self._processes):
            return ""
        try:
            status = self._processes[rank - 1].wait(PATIENCE_S / 4)
        except subprocess.TimeoutExpired:
            return ""
        return f" by {signal.Signals(-status).name}" if status < 0 else f" with exit status {status}"

    def _end(self) -> None:
        for peer in self._sockets.values():
            with suppress(OSError):  # the rank has ended
                peer.shutdown(socket.SHUT_RDWR)  # tells the rank to end, even if a forked process holds the socket
            peer.close()
        for process in self._processes:
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._listening is not None:
            self._listening.close()
        self._on_failure = []
        self._waker.close()
        self._wakes.close()
        if self._is_stopping:  # otherwise rank 0 may be in a step and still use them
            self._close_signals()

    def _close_signals(self) -> None:
        self._signals.close()
        self._hears.close()
