"""The other ranks as rank 0 sees them: a socket to each, their processes, and a thread that notices their end.

    rank 0 ─int32 messages→ each other rank           (`messages.py`)
    rank 0 ←lines of JSON─ each other rank            {"ready": true}, {"error": "…"}

The thread also starts the processes of this machine: Linux kills them when the thread that has started them ends
(`rank.py`), and the thread that makes an engine may end long before the engine.
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
from typing import Any, TypeVar

import numpy as np

from nanovllm.extras.dead import EngineDeadError
from nanovllm.extras.parallel.messages import MAX_LINE, send_json
from nanovllm.extras.parallel.nodes import turn_away

Start = Callable[[], "Iterator[subprocess.Popen[bytes]]"]
T = TypeVar("T")

PATIENCE_S = 2.0  # for processes that are told to end; then they are killed


class Peers:
    """`sockets[i]` leads to rank i + 1. When one of these ranks ends, or `stop` is called, all of them end.

    start: starts the processes of this machine, which are the first of these ranks, one after the other.
    listening: a port, at which more callers are turned away.
    """

    def __init__(self, sockets: Sequence[socket.socket], start: Start, listening: socket.socket | None = None) -> None:
        self.failure: EngineDeadError | None = None
        self._on_failure: list[Callable[[EngineDeadError], None]] = []
        self._sockets = dict(enumerate(sockets, 1))
        self._start = start
        self._listening = listening
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._is_ready = threading.Condition(self._lock)  # or failed
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
        """message: [num_values] int32, to all. Raises `EngineDeadError` if one of them is gone."""
        self.check()
        if os.getpid() != self._pid:
            raise EngineDeadError("this process was forked from the one that has the engine: make a new one here")
        for rank, peer in self._sockets.items():
            try:
                peer.sendall(message.data)
            except OSError as error:
                raise self.fail(f"rank {rank} cannot be reached: {error}") from error

    def check(self) -> None:
        """Raises `EngineDeadError` if a rank has ended."""
        if self.failure is not None:
            raise self.failure

    def send_json(self, rank: int, value: Any) -> None:
        try:
            send_json(self._sockets[rank], value)
        except OSError as error:
            raise self.fail(f"rank {rank} cannot be reached: {error}") from error

    def wait_until_ready(self) -> None:
        """Until each has said so. Raises `EngineDeadError` if one ends before."""
        self._wait(lambda: len(self._ready) == len(self._sockets))

    def wait_for(self, function: Callable[[], T]) -> T:
        """The result of a function that waits for the other ranks. Raises `EngineDeadError` if one ends before."""
        future: Future[T] = Future()

        def call() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            with self._lock:
                self._is_ready.notify_all()

        threading.Thread(target=call, daemon=True).start()  # which waits on in vain, if a rank ends
        self._wait(future.done)
        return future.result()

    def wait_for_failure(self) -> None:
        """Until one is known, or `PATIENCE_S` are over."""
        with self._lock:
            self._is_ready.wait_for(lambda: self.failure is not None, PATIENCE_S / 2)

    def _wait(self, is_over: Callable[[], bool]) -> None:
        with self._lock:
            self._is_ready.wait_for(lambda: self.failure is not None or is_over())
        self.check()

    def fail(self, reason: str) -> EngineDeadError:
        """Note that the engine is dead; the first reason counts."""
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
        """Have `tell` called once, in the thread that notices a failure; at once if there is one already."""
        with self._lock:
            if self.failure is None:
                self._on_failure.append(tell)
                return
        tell(self.failure)

    def stop(self) -> None:
        """End all other ranks, and wait for it. A second call does nothing, nor does one in a forked process."""
        if os.getpid() != self._pid:
            return
        self._is_stopping = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._close_signals()

    @property
    def signal_fd(self) -> int:
        """For `signal.set_wakeup_fd`. The thread hears of a ^C at once, while Python waits for C code to return: a
        second one ends the engine. Open until `stop`."""
        return self._signals.fileno()

    def forget_interrupts(self) -> None:
        """They have been handled, also those that the thread has not heard of yet."""
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
            self.fail(f"the other ranks cannot be started, or heard: {type(error).__name__}: {error}")
        finally:
            self._end()

    def _hear_signals(self) -> None:
        with self._lock, suppress(BlockingIOError):  # they have been forgotten
            self._num_interrupts += self._hears.recv(1 << 10).count(signal.SIGINT)
        if self._num_interrupts > 1:
            self.fail("KeyboardInterrupt, twice in one step")

    def _read(self, rank: int, lines: dict[int, bytes]) -> bool:
        """What `rank` has to say; False if it has ended."""
        try:
            received = self._sockets[rank].recv(1 << 16)
        except OSError:
            received = b""
        if not received:
            self.fail(f"rank {rank} has ended{self._how_ended(rank)}")
            return False
        *whole, lines[rank] = (lines[rank] + received).split(b"\n")
        if len(lines[rank]) > MAX_LINE:
            raise ValueError(f"rank {rank} sends no lines")
        for line in map(json.loads, whole):
            if "error" in line:
                self.fail(f"rank {rank}: {line['error']}")
            else:
                with self._lock:
                    self._ready.add(rank)
                    self._is_ready.notify_all()
        return True

    def _how_ended(self, rank: int) -> str:
        """Of a process of this machine: its signal, or its exit status."""
        if rank > len(self._processes):
            return ""
        try:
            status = self._processes[rank - 1].wait(PATIENCE_S / 4)
        except subprocess.TimeoutExpired:
            return ""
        return f" by {signal.Signals(-status).name}" if status < 0 else f" with exit status {status}"

    def _end(self) -> None:
        for peer in self._sockets.values():
            with suppress(OSError):  # it has ended
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
        if self._is_stopping:  # else rank 0 may be in a step
            self._close_signals()

    def _close_signals(self) -> None:
        self._signals.close()
        self._hears.close()
