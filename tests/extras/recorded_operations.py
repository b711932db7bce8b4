"""A stand-in for CUDA graphs on CPU: records PyTorch's operations, and launches in Triton's interpreter, and replays
them over the same memory.

As with a graph, whatever Python decided while recording stays decided: shapes, addresses, numbers it took from tensors.
As with graphs that share a pool, nothing but a graph's results outlives it: all else that a replay has computed is NaN
afterwards, as it is before.
"""

import contextlib
import math
import os

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from nanovllm.layers.attention import TorchAttention
from nanovllm_extras.models.masking import PLAIN


def tree_leaves(tree):
    """Without the None of operations that return nothing."""
    return [leaf for leaf in _pytree.tree_leaves(tree) if leaf is not None]


class OperationLog(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []
        self._made = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").partition(".")[0]
        assert name not in ("item", "_local_scalar_dense"), "the host waits for a number"
        assert name != "nonzero", "a shape depends on the device"
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    def replay(self):
        for func, args, kwargs, recorded in self.operations:
            new = func(*args, **kwargs)
            for place, tensor in zip(tree_leaves(recorded), tree_leaves(new), strict=True):
                if memory_of(place) != memory_of(tensor):  # else it is a view, or was written in place
                    place.copy_(tensor)

    def poison(self, kept):
        """NaN in all that the operations made, but for `kept`."""
        if self._made is None:  # the operations and their memory stay
            given = self.find_given()
            tensors = [tensor for *_, recorded in self.operations for tensor in tree_leaves(recorded)]
            numbers = [(memory_of(tensor), tensor) for tensor in tensors if tensor.is_floating_point()]
            self._made = [(memory, tensor) for memory, tensor in numbers if memory not in given]
        kept = {memory_of(tensor) for tensor in tree_leaves(kept)}
        for memory, tensor in self._made:
            if memory not in kept:
                tensor.fill_(math.nan)

    def find_given(self):
        """Memory that the operations found: weights, inputs, the cache."""
        given, made = set(), set()
        for _, args, kwargs, recorded in self.operations:
            tensors = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)]
            given |= {memory_of(tensor) for tensor in tensors} - made
            made |= {memory_of(tensor) for tensor in tree_leaves(recorded)} - given
        return given


def memory_of(tensor):
    return tensor.untyped_storage().data_ptr()


@contextlib.contextmanager
def launches_are_operations(log):
    """What Triton's interpreter runs is recorded as one operation, and not by what it does inside."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def run_and_record(kernel, *args, **kwargs):
        def launch(*args, **kwargs):
            run(kernel, *args, **kwargs)
            return ()

        with _disable_current_modes():
            launch(*args, **kwargs)
        log.operations.append((launch, args, kwargs, ()))

    InterpretedFunction.run = run_and_record
    try:
        yield
    finally:
        InterpretedFunction.run = run


class OperationRecorder:
    """Replaces `graphs.Recorder`."""

    def __init__(self):
        self.num_recorded = self.num_replays = 0

    def record(self, function):
        function()
        self.num_recorded += 1
        log = OperationLog()
        with log, launches_are_operations(log):
            results = function()

        def replay():
            self.num_replays += 1
            log.poison(())
            with torch.inference_mode():
                log.replay()
            log.poison(results)

        return replay, results


class GatherAttention(TorchAttention):
    """Decodes attend over the whole width of their block tables, behind a mask: nothing depends on their lengths."""

    supports_graphs = True

    def attend(self, q, layer_cache, metadata, options=PLAIN):
        if metadata.max_seqlen_q:
            return super().attend(q, layer_cache, metadata, options)
        n = len(q)
        k, v = layer_cache[:, metadata.block_tables].flatten(2, 3)  # [n, max_len, num_kv_heads, head_dim] each
        positions, ends = torch.arange(k.shape[1]), metadata.seq_lens[:, None]
        is_token = (positions < ends) & (positions >= ends - (options.window or k.shape[1]))  # [n, max_len]
        group = self.num_heads // self.num_kv_heads
        q = q.view(n, self.num_kv_heads, group, self.head_dim)
        scores = torch.einsum("nhgd,nlhd->nhgl", q, k) * (options.scale or self.head_dim**-0.5)
        scores = scores.masked_fill(~is_token[:, None, None], -math.inf)
        weights = scores.softmax(-1).nan_to_num()  # padding has no tokens
        v = v.masked_fill(~is_token[:, :, None, None], 0)
        return torch.einsum("nhgl,nlhd->nhgd", weights, v).reshape(n, self.num_heads, self.head_dim)
