"""A rank that waits for its peers asks every 0.2 s: what comes between two questions is neither lost nor a failure."""

import pytest

from nanovllm_extras.parallel.communicator import CommunicationError, GlooCommunicator


class Work:
    """As torch's, of a call that ends at a given moment: ("wait", n) is just after the n-th time is up, before anybody
    can ask whether the call is over."""

    def __init__(self, ends_after, fails):
        self._ends_after, self._fails = ends_after, fails
        self.num_waits = 0

    def is_completed(self):
        return self.num_waits >= self._ends_after

    def wait(self, timeout):
        is_over = self.is_completed()
        self.num_waits += 1
        if not is_over:
            raise RuntimeError("Operation timed out!")
        if self._fails:
            raise RuntimeError("Connection closed by peer")


@pytest.fixture
def communicator():
    """Of which only the waiting is tested."""
    communicator = GlooCommunicator.__new__(GlooCommunicator)
    communicator.rank, communicator.size, communicator._works = 0, 2, []
    communicator.close = communicator._open = lambda: None
    return communicator


@pytest.mark.parametrize("ends_after", [0, 1, 3])
def test_a_call_that_ends_when_its_time_is_up(communicator, ends_after):
    work = Work(ends_after, fails=False)
    communicator._wait(work)
    assert work.num_waits == ends_after + 1


@pytest.mark.parametrize("ends_after", [0, 1, 3])
def test_a_peer_that_ends_meanwhile(communicator, ends_after):
    with pytest.raises(CommunicationError, match="rank 0 of 2 lost a peer"):
        communicator._wait(Work(ends_after, fails=True))
