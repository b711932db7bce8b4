"""Replacements of a rank's process and its communicator, for ranks that are threads of one process."""

import select
import subprocess
import threading

import torch

from nanovllm_extras.parallel import rank as rank_process
from nanovllm_extras.parallel.communicator import CommunicationError, Communicator, join_columns, sum_parts


class RankThread(threading.Thread):
    """Has the methods of a `Popen` that `Peers` calls.

    When rank 0 closes the socket, the thread ends as a process does, even while it waits in a collective.
    """

    def __init__(self, peer):
        super().__init__(name="rank", daemon=True)
        self.communicator = None
        self._peer = peer
        self._status = None
        self.start()

    _has_ended = False

    def run(self):
        threading.Thread(target=self._abort_in_the_end, args=(self._peer.dup(),), daemon=True).start()
        with self._peer:  # a process that ends closes what it has
            self._status = rank_process.run(self._peer, lambda: None)

    def _abort_in_the_end(self, peer):
        poll = select.poll()
        poll.register(peer.fileno(), select.POLLRDHUP)
        poll.poll()
        peer.close()
        self._has_ended = True
        if self.communicator is not None:
            self.communicator.abort()

    def take(self, communicator):
        """Abort this communicator in the end: it may wait for rank 0, which has failed, perhaps already."""
        self.communicator = communicator
        if self._has_ended:
            communicator.abort()

    def poll(self):
        return None if self.is_alive() else self._status

    def wait(self, timeout=None):
        self.join(timeout)
        if self.is_alive():
            raise subprocess.TimeoutExpired("a rank", timeout)
        return self._status

    def kill(self):
        self.join(60)  # on a busy machine
        assert not self.is_alive(), "a rank did not end when it was told to"


class QueueCommunicator(Communicator):
    """Gloo's sums without its sockets: `links[a][b]` is the queue of what rank a sends to rank b."""

    def __init__(self, rank, links):
        self.rank, self.size = rank, len(links)
        self._links = links

    def all_reduce(self, x):
        assert x.is_contiguous()
        mine = x.clone()
        for rank in range(self.size):
            self._links[self.rank][rank].put(mine)
        return x.copy_(sum_parts(torch.stack([self._receive(rank) for rank in range(self.size)])))

    def broadcast(self, x):
        assert x.is_contiguous()
        if self.rank:
            return x.copy_(self._receive(0))
        for rank in range(1, self.size):
            self._links[0][rank].put(x.clone())
        return x

    def gather(self, x):
        assert x.is_contiguous()
        self._links[self.rank][0].put(x)
        return x if self.rank else join_columns(torch.stack([self._receive(rank) for rank in range(self.size)]))

    def _receive(self, rank):
        received = self._links[rank][self.rank].get()
        if received is None:
            raise CommunicationError(f"rank {rank} is gone")
        return received

    def abort(self):
        for links in self._links:
            for queue in links:
                queue.put(None)

    def close(self):
        self.abort()
