"""Compute with PyTorch's own defaults in a program that has changed them. Called by `plain_defaults`."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def reset_defaults() -> Iterator[None]:
    """Give PyTorch its own defaults, and the program's again in the end."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.set_default_dtype(dtype)
