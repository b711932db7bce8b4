"""NCCL's communicator without a GPU: Gloo replaces its process group. Both are a `Backend` of torch, and bind the
same arguments; what only NCCL's has is compared with the types that torch ships.
"""

import ast
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import distributed

from nanovllm_extras.parallel.communicator import CommunicationError
from nanovllm_extras.parallel.nccl import NcclCommunicator

TYPES = ast.parse((Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi").read_text(encoding="utf-8"))
CPU = torch.device("cpu")


class StandIn:
    """A process group that notes the names and tensors of its calls, and lets Gloo's do them."""

    class Options:
        _timeout = None

    def __init__(self, store, rank, size, options):
        assert isinstance(options, StandIn.Options)
        assert options._timeout.total_seconds() > 1800
        self.environ = dict(os.environ)  # the library reads it here
        self.gloo = distributed.ProcessGroupGloo(store, rank, size)
        self.calls = []

    def eager_connect_single_device(self, device):
        self.calls.append(("eager_connect_single_device", device))

    def call(self, name, *tensors_and_options):
        *tensors, options = tensors_and_options
        assert not options.asyncOp, "on the current stream"
        self.calls.append((name, *tensors))
        return getattr(self.gloo, name)(*tensors_and_options)

    def allreduce(self, *args):
        return self.call("allreduce", *args)

    def broadcast(self, *args):
        assert args[-1].rootRank == 0
        return self.call("broadcast", *args)

    def _allgather_base(self, *args):
        return self.call("_allgather_base", *args)

    def abort(self):
        self.calls.append(("abort",))

    def shutdown(self):
        self.calls.append(("shutdown",))


@pytest.fixture
def nccl(monkeypatch):
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", StandIn, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


@pytest.fixture
def pair(nccl):
    store = distributed.HashStore()
    with ThreadPoolExecutor(2) as pool:
        yield list(pool.map(lambda rank: NcclCommunicator(store, rank, 2, CPU), range(2))), pool


def arguments(class_name, method):
    found = next(node for node in TYPES.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    function = next(node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == method)
    return [arg.arg for arg in function.args.args if arg.arg != "self"]


def test_stand_in_has_the_methods_of_the_library():
    for class_name, method, expected in [
        ("ProcessGroupNCCL", "__init__", ["store", "rank", "size", "options"]),
        ("ProcessGroupNCCL", "abort", []),
        ("Backend", "shutdown", []),
        ("Backend", "eager_connect_single_device", ["device"]),
    ]:
        assert arguments(class_name, method) == expected, method
    source = Path(distributed.distributed_c10d.__file__).read_text(encoding="utf-8")
    assert re.search(r"options\._timeout = (opts\.)?timeout", source)  # with `opts` since torch 2.14
    for name in ("AllreduceOptions", "AllgatherOptions", "BroadcastOptions"):
        assert getattr(distributed.distributed_c10d, name)().asyncOp, "it must be switched off"


def test_what_is_called_with_which_tensors(pair):
    together, pool = pair

    def check(ranks):
        calls = ranks._group.calls
        assert calls == [("eager_connect_single_device", CPU)]
        x = torch.full((2, 3), 1.0 + ranks.rank, dtype=torch.bfloat16)
        assert ranks.all_reduce(x) is x
        assert (x == 3).all()
        assert calls[-1][0] == "allreduce"
        assert calls[-1][1][0] is x, "in place"
        ids = torch.tensor([[7, 8]], dtype=torch.int64) * (1 - ranks.rank)
        assert ranks.broadcast(ids) is ids
        assert ids.tolist() == [[7, 8]]
        assert calls[-1][0] == "broadcast"
        assert calls[-1][1][0].data_ptr() == ids.data_ptr()
        part = torch.arange(6.0).view(2, 3) + 10 * ranks.rank
        gathered = ranks.gather(part)
        assert calls[-1][0] == "_allgather_base"
        assert calls[-1][2] is part
        whole = [[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]]
        assert gathered.tolist() == whole if ranks.rank == 0 else gathered is part
        assert len(calls) == 4, "one launch for each"

    list(pool.map(check, together))


def test_abort_and_close(pair):
    together, _ = pair
    together[0].abort()
    together[0].close()
    together[1].close()
    together[1].close()
    assert together[0]._group.calls[1:] == [("abort",)], "what has been aborted is not shut down"
    assert together[1]._group.calls[1:] == [("shutdown",)]
    for call in (together[0].all_reduce, together[1].gather):
        with pytest.raises(CommunicationError, match="aborted or closed"):
            call(torch.zeros(1, 3))


def test_an_error_of_the_library_is_a_communication_error(pair):
    together, _ = pair

    def fail(*args):
        raise distributed.DistBackendError("NCCL error")

    together[0]._group.allreduce = fail
    with pytest.raises(CommunicationError, match="rank 0 of 2: NCCL error"):
        together[0].all_reduce(torch.zeros(3))


@pytest.mark.parametrize(
    ("name", "of_user"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"),  # the watchdog would end the process
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),  # the heartbeat monitor would poll a store whose folder is gone
    ],
)
def test_threads_of_the_library_neither_end_the_process_nor_delay_its_end(nccl, monkeypatch, name, of_user):
    """Unless the user has asked for it."""

    def value_when_made():
        return NcclCommunicator(distributed.HashStore(), 0, 1, CPU)._group.environ[name]

    assert value_when_made() == of_user
    monkeypatch.delenv(name)
    assert value_when_made() == "0"


def test_what_is_refused(pair, monkeypatch):
    together, _ = pair
    with pytest.raises(ValueError, match="x must be on cpu, got a tensor on meta"):
        together[0].all_reduce(torch.zeros(3, device="meta"))
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ValueError, match="device cuda:0 needs a PyTorch with NCCL"):
        NcclCommunicator(distributed.HashStore(), 0, 2, torch.device("cuda:0"))
