"""Fixtures: ranks above 0 as threads of this process, so that an engine of several ranks starts in milliseconds."""

import threading
from queue import SimpleQueue

import pytest

from nanovllm_extras.parallel import processes
from nanovllm_extras.parallel import start_ranks as start
from tests.extras.parallel.rank_threads import QueueCommunicator, RankThread
from tests.extras.parallel.shareable import ShareableCheckpoints


@pytest.fixture
def rank_threads(monkeypatch):
    """The ranks above 0 that a test's engines start, as `RankThread`s. They speak as processes would."""
    started, all_peers = [], []

    def start_thread(peer, *_):
        started.append(RankThread(peer))
        return started[-1]

    def connect(*arguments):
        communicator = connected(*arguments)
        if isinstance(threading.current_thread(), RankThread):
            threading.current_thread().take(communicator)
        return communicator

    def start_peers(*arguments):
        all_peers.append(started_peers(*arguments))
        return all_peers[-1]

    connected, started_peers = start.connect, start.start_peers
    monkeypatch.setattr(processes, "start_process", start_thread)
    monkeypatch.setattr(start, "connect", connect)
    monkeypatch.setattr(start, "start_peers", start_peers)
    yield started
    for peers in all_peers:  # of engines that are garbage, which nobody has collected
        peers.stop()


@pytest.fixture
def quick_ranks(rank_threads, monkeypatch):
    """The same, but they exchange their tensors by queues: a step takes half the time that it takes with Gloo."""
    queues = {}

    def connect(meeting, rank, size, *others):
        links = queues.setdefault(meeting.file, [[SimpleQueue() for _ in range(size)] for _ in range(size)])
        communicator = QueueCommunicator(rank, links)
        if isinstance(threading.current_thread(), RankThread):
            threading.current_thread().take(communicator)
        return communicator

    monkeypatch.setattr(start, "connect", connect)
    return rank_threads


@pytest.fixture(scope="session")
def shareable(tmp_path_factory):
    return ShareableCheckpoints(tmp_path_factory.mktemp("shareable"))
