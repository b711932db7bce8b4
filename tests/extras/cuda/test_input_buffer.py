"""A step's tensors reach the device in one copy, whatever they are; here both are on CPU."""

import dataclasses

import numpy as np
import torch

from nanovllm_extras.execution.input_buffer import InputBuffer

CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Inner:
    a: torch.Tensor
    note: str


@dataclasses.dataclass(frozen=True)
class Record:
    first: torch.Tensor
    inner: Inner | None
    last: torch.Tensor
    every_second: torch.Tensor
    number: int


def test_a_record_arrives_as_it_was_sent():
    buffer = InputBuffer(CPU, 64)
    rng = np.random.default_rng(0)
    for n in (0, 1, 3, 5, 1000, 2):  # the buffer grows on the way
        record = Record(
            torch.from_numpy(rng.integers(0, 100, n, dtype=np.int32)),
            Inner(torch.from_numpy(rng.random((n, 3))), "x") if n != 3 else None,
            torch.from_numpy(rng.random((n, 2), dtype=np.float32)).t(),  # not contiguous
            torch.from_numpy(rng.random((n, 2)))[:, 0],  # nor this
            n,
        )
        sent = buffer.send_record(record)
        assert torch.equal(sent.first, record.first)
        assert torch.equal(sent.last, record.last)
        assert torch.equal(sent.every_second, record.every_second)
        assert (sent.inner is None) == (record.inner is None)
        if record.inner is not None:
            assert torch.equal(sent.inner.a, record.inner.a)
            assert sent.inner.a.dtype == torch.float64
            assert sent.inner.note == "x"
        assert sent.number == n
        for tensor in (sent.first, sent.last, sent.every_second):
            assert tensor.data_ptr() % 16 == buffer.device_bytes.data_ptr() % 16
            assert tensor.untyped_storage().data_ptr() == buffer.device_bytes.data_ptr()


def test_the_host_may_pack_the_next_step_while_the_last_is_on_its_way():
    buffer = InputBuffer(CPU, 32)
    first, second, third = (buffer.next_host_bytes() for _ in range(3))
    assert first.ctypes.data != second.ctypes.data
    assert first.ctypes.data == third.ctypes.data
