"""Connect the ranks of several machines to rank 0.

    machine 0, rank 0     listens at master_addr:master_port
    machine 0, rank 1     a pair of sockets → rank 0               `processes.py`
    machine 1             its command connects a socket for each of its ranks, and then starts their processes, which
                          inherit these                            `processes.run_node`

The first line on a connection identifies the caller, and rank 0 answers with one line:

    → {"rank": 2, "size": 4, "nnodes": 2}        ← {"accepted": 2}, or {"refused": "…"}

Any program can connect to the port. A program that sends something else, or nothing, does not delay the ranks: rank 0
listens to all callers at once, reads at most `MAX_HELLO` bytes of each, and closes the connection after `HELLO_S`.
"""

import json
import logging
import select
import socket
import sys
import time
from contextlib import ExitStack, suppress

from nanovllm_extras.options.all_options import Config
from nanovllm_extras.parallel.messages import receive_json, send_json

HELLO_S = 10.0  # time limit for the first line of a connection
MAX_HELLO = 256  # maximum bytes of that line
MAX_CALLERS = 64  # connections without a first line; if there are more, the oldest is closed
CONNECT_S = 0.5  # between two attempts to reach machine 0
NOTE_S = 20.0  # a longer wait is logged, and again after each such period
SILENCE_S = 20  # after this silence the kernel sends up to four keep-alive probes to the other machine
logger = logging.getLogger(__name__)


def accept_ranks(config: Config, ranks: range) -> tuple[list[socket.socket], socket.socket]:
    """Wait until all `ranks` of other machines have connected; return their sockets in order, and the open port."""
    family = socket.AF_INET6 if ":" in config.master_addr else socket.AF_INET
    try:
        listening = socket.create_server((config.master_addr, config.master_port), family=family)
    except OSError as error:
        raise ValueError(
            f"master_addr and master_port must be an address of this machine and a free port, "
            f"got {config.master_addr}:{config.master_port}: {error.strerror or error}"
        ) from error
    with Reception(listening, config, ranks) as reception:
        return reception.wait(), listening


def turn_away(listening: socket.socket) -> None:
    """Refuse one caller, because all ranks have connected."""
    with suppress(OSError):  # the caller has disconnected
        peer, address = listening.accept()
        with peer:
            peer.setblocking(False)
            logger.warning(f"refused a connection from {address[0]}, because all ranks have connected")
            send_json(peer, {"refused": "all ranks of its engine have connected; each machine needs its own node_rank"})


class Reception:
    """Rank 0's port and its callers, as a context manager.

    On exit it closes the connections that `wait` has not returned, and after an error the port too.
    """

    def __init__(self, listening: socket.socket, config: Config, ranks: range) -> None:
        self._listening = listening
        self._config = config
        self._ranks = ranks
        self._callers: dict[socket.socket, Caller] = {}  # in the order of arrival
        self._found: dict[int, socket.socket] = {}
        self._poll = select.poll()
        self._poll.register(listening, select.POLLIN)
        listening.setblocking(False)

    def wait(self) -> list[socket.socket]:
        """Wait until all ranks have connected; return their sockets in the order of ranks."""
        noted = time.monotonic()
        while len(self._found) < len(self._ranks):
            readable = {number for number, _ in self._poll.poll(1000 * CONNECT_S)}
            if self._listening.fileno() in readable:
                self._accept()
            for rank, peer in [*self._found.items()]:
                if peer.fileno() in readable:  # disconnected: a rank sends nothing before it receives a first message
                    self._poll.unregister(self._found.pop(rank))
                    peer.close()
            for peer in [*self._callers]:
                if peer.fileno() in readable:
                    self._hear(peer)
                elif time.monotonic() > self._callers[peer].deadline:
                    self._hang_up(peer, "sent nothing in time")
            if time.monotonic() > noted + NOTE_S:
                noted = time.monotonic()
                missing = [rank for rank in self._ranks if rank not in self._found]
                logger.warning(f"still waiting at {address_of(self._config)} for ranks {missing} on other machines")
        found, self._found = self._found, {}
        return [found[rank] for rank in self._ranks]

    def _accept(self) -> None:
        try:
            peer, address = self._listening.accept()
        except OSError:  # the caller has disconnected
            return
        peer.setblocking(False)
        if len(self._callers) == MAX_CALLERS:
            self._hang_up(next(iter(self._callers)), "was disconnected, because there are too many connections")
        self._callers[peer] = Caller(str(address[0]))
        self._poll.register(peer, select.POLLIN)

    def _hear(self, peer: socket.socket) -> None:
        caller = self._callers[peer]
        try:
            received = peer.recv(MAX_HELLO)
        except OSError:
            received = b""
        caller.line += received
        if not received or len(caller.line) > MAX_HELLO:
            self._hang_up(peer, "is not a rank of this engine")
        elif caller.line.endswith(b"\n"):
            self._decide(peer, caller.line)

    def _decide(self, peer: socket.socket, line: bytes) -> None:
        """Accept the caller if its line identifies a rank that is missing; otherwise refuse it with a reason."""
        try:
            hello = json.loads(line)
            rank, size, nnodes = (int(hello[name]) for name in ("rank", "size", "nnodes"))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            self._hang_up(peer, "is not a rank of this engine")
            return
        own_size, own_nnodes = self._config.tensor_parallel_size, self._config.nnodes
        if (size, nnodes) != (own_size, own_nnodes):
            why = f"tensor_parallel_size and nnodes are {own_size} and {own_nnodes} on machine 0, got {size}, {nnodes}"
        elif rank not in self._ranks:
            why = f"rank {rank} is not on another machine; node_rank must be in 1 … {own_nnodes - 1}"
        elif rank in self._found:
            why = f"rank {rank} has already connected; each machine needs its own node_rank"
        else:
            del self._callers[peer]
            prepare(peer)
            self._found[rank] = peer
            with suppress(OSError):  # the caller has disconnected, which `wait` will notice
                send_json(peer, {"accepted": rank})
            return
        with suppress(OSError):
            send_json(peer, {"refused": why})
        self._hang_up(peer, f"is refused: {why}")

    def _hang_up(self, peer: socket.socket, why: str) -> None:
        logger.warning(f"{self._callers.pop(peer).address} {why}")
        self._poll.unregister(peer)
        peer.close()

    def __enter__(self) -> "Reception":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        for peer in (*self._callers, *self._found.values()):
            peer.close()
        if error is not None:
            self._listening.close()


class Caller:
    """The state of a connection whose first line has not arrived yet."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.line = b""
        self.deadline = time.monotonic() + HELLO_S


def reach_engine(config: Config, ranks: range) -> list[socket.socket]:
    """Wait until machine 0 listens, and return a connection to rank 0 for each rank of this machine.

    Raises ValueError if machine 0 refuses a rank.
    """
    with ExitStack() as on_error:
        peers: list[socket.socket] = []
        for rank in ranks:
            peer = connect(config, is_patient=not peers)
            on_error.enter_context(peer)
            peer.settimeout(HELLO_S)
            send_json(peer, {"rank": rank, "size": config.tensor_parallel_size, "nnodes": config.nnodes})
            check_answer(config, rank, peer)
            prepare(peer)
            peers.append(peer)
        on_error.pop_all()
        return peers


def check_answer(config: Config, rank: int, peer: socket.socket) -> None:
    """Read rank 0's answer. Raises ValueError with its reason if it refuses."""
    try:
        answer = receive_json(peer, MAX_HELLO + 256)
        if answer == {"accepted": rank}:
            return
        why = answer["refused"]
    except (OSError, ValueError, TypeError, KeyError):
        why = "the program that listens there is not nanovllm"
    raise ValueError(f"machine 0 at {address_of(config)} refuses this one: {why}")


def connect(config: Config, is_patient: bool) -> socket.socket:
    """Connect to machine 0. If `is_patient`, wait until it listens; otherwise raise ValueError if it does not."""
    noted = time.monotonic()
    while True:
        try:
            peer = socket.create_connection((config.master_addr, config.master_port), HELLO_S)
            if peer.getsockname() != peer.getpeername():
                return peer
            peer.close()  # TCP can connect a local port to itself if no process listens on it
        except socket.gaierror as error:
            raise ValueError(f"master_addr must be an address of machine 0, got {config.master_addr!r}") from error
        except OSError as error:
            if not is_patient:
                raise ValueError(f"machine 0 at {address_of(config)} has ended: {error}") from error
        if time.monotonic() > noted + NOTE_S:
            noted = time.monotonic()
            logger.warning(f"still waiting for machine 0 at {address_of(config)}")
        time.sleep(CONNECT_S)


def prepare(peer: socket.socket) -> None:
    """Set socket options: send messages without delay, and detect a lost machine in about `2 * SILENCE_S`."""
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 4)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def address_of(config: Config) -> str:
    return f"{config.master_addr}:{config.master_port}"
