"""How another rank's process finds this package, whatever the names of the folders are."""

import os
import socket
import subprocess
import sys

import pytest

from nanovllm_extras.parallel import processes, rank, worker
from tests.core_alone import ROOT


@pytest.mark.parametrize("paths", [None, "/one:/two"])
def test_no_path_is_added_to_a_list_that_colons_separate(monkeypatch, paths):
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **others: started.append((command, others)))
    if paths is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", paths)
    ours, theirs = socket.socketpair()
    processes.start_process(theirs, (), 1)
    ((command, others),) = started
    assert others["env"].get("PYTHONPATH") == paths
    assert int(command[2]) > 2
    assert os.path.samefile(command[1], rank.__file__)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(int(command[2]))  # this process has closed it
    ours.close()


def test_a_rank_finds_the_package_of_its_own_file(monkeypatch):
    monkeypatch.setattr(sys, "path", [os.path.dirname(rank.__file__), "/other"])
    monkeypatch.setattr(worker, "work", lambda *arguments: None)
    rank.run(None, lambda: None)
    assert sys.path == [str(ROOT), "/other"]
