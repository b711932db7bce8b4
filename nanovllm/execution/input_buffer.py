"""How does a step's input reach the device? In one copy, which nobody waits for.

A copy from ordinary memory makes the host wait for the device, and each copy is a launch of its own. So the tensors of
a step are packed end to end into pinned host memory, which the device reads by itself, and are views of one
tensor there. Used on CUDA, by `ModelRunner` and by `cuda_graph.py`; on CPU there is nothing to send. What the host does
not know yet, the tokens of a step in flight, are on the device already: `fill_in` puts them in their places.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")

ALIGNMENT = 16  # bytes: what kernels like to load at once


class InputBuffer:
    """Two buffers in host memory, used in turn, and one on the device.

    The device's is free again when the last step's kernels have run, which is before the next copy begins, as both are
    in one stream. A buffer of the host is free again when it has been copied: with two of them, that was a step ago.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.device = device
        self._copied = [torch.cuda.Event() for _ in range(2)] if device.type == "cuda" else None
        self._turn = 0
        self._allocate(num_bytes)

    def next_host_bytes(self) -> np.ndarray:
        """Where the next input is to be packed: [num_bytes] uint8, of what was there two steps ago."""
        self._turn = 1 - self._turn
        if self._copied is not None:
            self._copied[self._turn].synchronize()
        return self._host_bytes[self._turn].numpy()

    def send(self, num_bytes: int) -> None:
        """The first so many of `next_host_bytes()` become the first of `device_bytes`, when the device gets there."""
        self.device_bytes[:num_bytes].copy_(self._host_bytes[self._turn][:num_bytes], non_blocking=True)
        if self._copied is not None:
            self._copied[self._turn].record()

    def send_record(self, record: T) -> T:
        """A dataclass with tensors on the host -> the same on the device, valid for the kernels up to the next call."""
        tensors = list(tensors_of(record))
        starts, stop = [], 0
        for tensor in tensors:
            starts.append(stop)
            stop += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if stop > len(self.device_bytes):
            self._allocate(2 * stop)
        packed = self.next_host_bytes()
        for tensor, start in zip(tensors, starts, strict=True):
            packed[start : start + tensor.nbytes] = tensor.numpy().reshape(-1).view(np.uint8)
        self.send(stop)
        views = (
            self.device_bytes[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, start in zip(tensors, starts, strict=True)
        )
        return map_tensors(record, lambda _: next(views))

    def _allocate(self, num_bytes: int) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the old ones may still be read
        pin = self.device.type == "cuda"
        self._host_bytes = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
        self.device_bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)  # [num_bytes]


def make_sender(device: torch.device) -> Callable[[T], T]:
    """What sends a dataclass of tensors to the device; on CPU they are there already."""
    if device.type == "cuda":
        return InputBuffer(device, 1 << 16).send_record
    return lambda record: record


def tensors_of(record: Any) -> Iterator[torch.Tensor]:
    """Those of a dataclass, and of the dataclasses in it, in the order of the fields."""
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, torch.Tensor):
            yield value
        elif is_dataclass(value):
            yield from tensors_of(value)


def map_tensors(record: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same dataclass with `function` of each of its tensors, in the order of `tensors_of`."""
    mapped = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, torch.Tensor):
            mapped[field.name] = function(value)
        elif is_dataclass(value):
            mapped[field.name] = map_tensors(value, function)
    return replace(record, **mapped)


def fill_in(input_ids: torch.Tensor, newest_ids: torch.Tensor) -> torch.Tensor:
    """input_ids: [num_tokens], -1 - row for the id that is newest_ids[row] -> [num_tokens], all of them ids"""
    rows = (-1 - input_ids).clamp_(min=0)  # [num_tokens]
    return torch.where(input_ids < 0, newest_ids[rows].to(input_ids.dtype), input_ids)
