"""A step's input reaches the device in one copy, which the host does not wait for.

A copy from pageable memory makes the host wait for the device, and each copy is a launch of its own. So the tensors of
a step are packed end to end into pinned host memory, which the device reads by itself; on the device they are views of
one buffer. `CudaDevice.send` calls `InputBuffer.send_record`; `step_graphs.py` has a buffer of its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")

ALIGNMENT = 16  # bytes: the most that a thread loads at once


class InputBuffer:
    """Two buffers in host memory, used in turn, and one on the device.

    The device's buffer may be overwritten when the kernels of the last step have run. The next copy begins after them,
    because both are in one stream. A host buffer may be overwritten when it has been copied to the device: with two in
    turn, this is the copy of the step before the last, and the host hardly ever waits for it.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.device = device
        self._copied = [torch.cuda.Event() for _ in range(2)] if device.type == "cuda" else None
        self._turn = 0
        self._allocate(num_bytes)

    def next_host_bytes(self) -> np.ndarray:
        """Return the host buffer for the next input: [num_bytes] uint8, with the contents of two steps ago."""
        self._turn = 1 - self._turn
        if self._copied is not None:
            self._copied[self._turn].synchronize()
        return self._host_bytes[self._turn].numpy()

    def send(self, num_bytes: int) -> None:
        """Copy the first `num_bytes` of `next_host_bytes()` to `device_bytes`, in the order of the stream."""
        self.device_bytes[:num_bytes].copy_(self._host_bytes[self._turn][:num_bytes], non_blocking=True)
        if self._copied is not None:
            self._copied[self._turn].record()

    def send_record(self, record: T) -> T:
        """Send a dataclass of tensors to the device. The result is valid for kernels launched before the next call."""
        tensors = list(tensors_of(record))
        starts, stop = [], 0
        for tensor in tensors:
            starts.append(stop)
            stop += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if stop > len(self.device_bytes):
            self._allocate(2 * stop)
        packed = self.next_host_bytes()
        for tensor, start in zip(tensors, starts, strict=True):
            packed[start : start + tensor.nbytes] = tensor.contiguous().numpy().reshape(-1).view(np.uint8)
        self.send(stop)
        views = (
            self.device_bytes[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, start in zip(tensors, starts, strict=True)
        )
        return map_tensors(record, lambda _: next(views))

    def _allocate(self, num_bytes: int) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # kernels may still read the old buffers
        pin = self.device.type == "cuda"
        self._host_bytes = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
        self.device_bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)  # [num_bytes]


def tensors_of(record: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a dataclass, and of the dataclasses and tuples in it, in the order of the fields."""
    for value in [getattr(record, field.name) for field in fields(record)]:
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, torch.Tensor):
                yield part
            elif is_dataclass(part):
                yield from tensors_of(part)


def map_tensors(record: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the dataclass with `function` applied to each of its tensors, in the order of `tensors_of`."""

    def mapped(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return function(value)
        if isinstance(value, tuple):
            return tuple(mapped(part) for part in value)
        return map_tensors(value, function) if is_dataclass(value) else value

    return replace(record, **{field.name: mapped(getattr(record, field.name)) for field in fields(record)})
