"""`StateCheck`: the self-check of a model with recurrent states, which compares attention, draws, and such layers.

The steps of `steps.py` have no slots, so the network is not run as a whole: one layer with states of each kind runs by
itself, over a small pool of its own. Only decodes by a CUDA graph are compared in the whole network, with random states
in the slots of the real pool. Called by `mode.py`.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from nanovllm.batch import Batch
from nanovllm_extras.execution.device_setup import Device
from nanovllm_extras.execution.runner_protocol import Runner
from nanovllm_extras.execution.state_pool import slot_tensors, with_states
from nanovllm_extras.machine.own_process import SelfCheckError
from nanovllm_extras.models.gated_delta import GatedDeltaNet
from nanovllm_extras.models.layer_inputs import StateMetadata, StateShape
from nanovllm_extras.records.moves import Moves
from nanovllm_extras.self_check.comparison import OF_QUANTISED, WIDER, check_rows
from nanovllm_extras.self_check.networks import kind_of, num_weights, quantised_weight_of
from nanovllm_extras.self_check.runner_check import ENDS, NEARLY_EQUAL, SelfCheck
from nanovllm_extras.self_check.steps import draw_vectors
from nanovllm_extras.self_check.stored_results import StoredResult

STEPS = [  # (slot written, slot read, computed tokens, new tokens): decodes first, then chunks of prompts
    [(1, 1, 0, 70)],
    [(1, 1, 70, 1), (2, 2, 0, 1), (3, 3, 0, 5)],
    [(2, 2, 1, 1), (1, 1, 71, 9), (3, 3, 5, 33)],
    [(1, 1, 80, 1), (2, 1, 81, 1), (3, 2, 82, 1)],  # a token and two drafts
]
NUM_SLOTS = 3
NUM_DRAWN = 4  # states, again and again in the slots of decodes


def begin_check(runner: Runner, kind: Device, stored: StoredResult) -> SelfCheck:
    """Begin the check of a runner: a `StateCheck` if its model has states."""
    check = SelfCheck if runner.shape.state_shape is None else StateCheck
    return check.begin(runner, kind, stored)


class StateCheck(SelfCheck):
    def expect_layers(self) -> list[Callable[[], None]]:
        """Run layers with states in PyTorch. Returns functions that compare their fast versions with the results."""
        paths: dict[tuple[object, ...], str] = {}
        for path, module in self.runner.model.named_modules():
            if isinstance(module, GatedDeltaNet):
                paths.setdefault(kind_of(module), path)
        return [self.expect_layer(path) for path in paths.values()]

    def expect_layer(self, path: str) -> Callable[[], None]:
        """Run the layer with this name in PyTorch. Returns a function that compares its fast version."""
        runner, dtype, wider = self.runner, self.runner.dtype, WIDER[self.runner.dtype]
        shape: StateShape = runner.shape.state_shape
        size = runner.shape.hidden_size
        layer = runner.model.get_submodule(path)
        self.need_memory_for(num_weights(layer) * wider.itemsize)
        is_quantised = any(quantised_weight_of(module) is not None for module in layer.modules())
        allowed = OF_QUANTISED if is_quantised else 0.0
        arguments = (shape, size, dtype, runner.device)
        exact = run_state_layer(deepcopy(layer).to(wider), wider, *arguments)
        plain = run_state_layer(layer, dtype, *arguments)

        def compare() -> None:
            fast = run_state_layer(runner.model.get_submodule(path), dtype, *arguments)
            check_rows("a layer with recurrent states", fast, plain, exact, dtype, allowed)

        return compare

    # ---- decodes by a CUDA graph

    @property
    def states(self) -> list[Tensor]:
        """What the layers of the model keep: [num_state_layers, num_slots + 1, …] each"""
        pool = self.runner.layout.pool
        assert pool is not None
        return [one for one in (pool.conv, pool.recurrent) if one.numel()]

    def complete(self, batch: Batch) -> Batch:
        """Return decodes with slots 1, 2, …, which hold random states. The slot behind them must not change."""
        num_seqs, pool = len(batch.input_ids), self.runner.layout.pool
        assert pool is not None
        if num_seqs >= pool.num_slots:
            self.is_complete = False
            return batch  # without slots it is not replayed
        self.draw_states(num_seqs + 1)
        return replace(batch, copies=Moves(slots=range(1, num_seqs + 1)))

    def draw_states(self, num_slots: int) -> None:
        for seed, states in enumerate(self.states):
            drawn = draw_vectors(seed, len(states), NUM_DRAWN, *states.shape[2:]).to(states)
            for i in range(NUM_DRAWN):
                states[:, 1 + i : 1 + num_slots : NUM_DRAWN] = drawn[:, i : i + 1]

    def compare_decodes(self, batch: Batch, token_ids: Tensor) -> None:
        """Compare tokens as the parent does, and the states that the graph has left."""
        num_seqs = len(token_ids)
        slots = sorted({*range(1, min(NUM_DRAWN, num_seqs) + 1), num_seqs, num_seqs + 1})
        written = [one[:, slots][ENDS].float() for one in self.states]  # [2, len(slots), …] each
        self.draw_states(num_seqs + 1)
        super().compare_decodes(with_states(batch), token_ids)
        for found, one in zip(written, self.states, strict=True):
            expected = one[:, slots][ENDS].float()
            errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
            if (~(errors <= NEARLY_EQUAL) & expected.isfinite().all(dim=-1)).any():
                raise SelfCheckError("wrong result: decodes by a CUDA graph: states differ from those without one")


@torch.inference_mode()
def run_state_layer(
    layer: nn.Module,
    dtype: torch.dtype,
    shape: StateShape,
    hidden_size: int,
    drawn_in: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Run a layer in the steps of `STEPS`, over a pool that is full of NaN: [num_tokens, hidden_size]

    The random inputs are rounded to the dtype `drawn_in`, so that layers of other dtypes get the same.
    """
    conv = torch.full((NUM_SLOTS + 1, *shape.conv), torch.nan, dtype=dtype, device=device)
    state_dtype = torch.promote_types(dtype, torch.float32)
    recurrent = torch.full((NUM_SLOTS + 1, *shape.recurrent), torch.nan, dtype=state_dtype, device=device)
    outputs = []
    for i, chunks in enumerate(STEPS):
        x = draw_vectors(i, sum(n for *_, n in chunks), hidden_size).to(drawn_in).to(device, dtype)
        own, sources = [(slot, start, n) for slot, _, start, n in chunks], [source for _, source, *_ in chunks]
        outputs.append(layer(x, conv, recurrent, metadata_of(own, device, sources)))
    return torch.cat(outputs)


def metadata_of(
    chunks: list[tuple[int, int, int]], device: torch.device, sources: list[int] | None = None
) -> StateMetadata:
    """Return what a layer with states reads of a step's metadata. Chunks of one token are decodes.

    chunks: (slot, computed tokens, new tokens) of each. They read the slots in `sources`, or their own.
    """
    slots, starts, lens = torch.tensor(chunks, device=device).unbind(1)  # [num_seqs] each
    offsets = torch.cat((lens.new_zeros(1), lens.cumsum(0))).int()  # [num_seqs + 1]
    num_decodes, none = int((lens == 1).sum()), torch.empty(0)
    attention = (none, none, starts + lens, offsets, offsets, offsets, num_decodes, 0, 0, 0)
    of_slots = slot_tensors(slots.tolist(), sources or slots.tolist(), device)
    return StateMetadata(*attention, is_first=starts == 0, **of_slots)
