"""Adapters come and go at random, while requests wait, run, are preempted and end.

The parts are those of an engine: what the engine, the scheduler and the runner hold. The model is what each request has
asked for. The adapter of a folder adds the folder's own number to each row, so rows show which adapter they have.
"""

from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import nn

from nanovllm.layers.basic import Embedding, Linear
from nanovllm_extras.execution.alone import Alone
from nanovllm_extras.kernels.adapter_rows import AdapterRows, TorchProducts
from nanovllm_extras.lora import adapters as adapters_module
from nanovllm_extras.lora.adapter_file import Adapter, Matrices
from nanovllm_extras.lora.adapters import Adapters
from nanovllm_extras.lora.lora_request import LoRARequest
from nanovllm_extras.lora.registry import AdapterRegistry
from nanovllm_extras.lora.slots import PATIENCE, AdapterSlots

MAX_LORAS, MAX_LOADED, MAX_RUNNING = 2, 3, 4
NUMBERS = st.integers(1, 6)


class Network(nn.Module):
    """One linear layer of one number."""

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = Embedding(1, 1)
        self.lm_head = self.model.embed_tokens
        self.linear = Linear(1, 1)


def read_adapter(folder, *_):
    """Read the adapter of the folder `3`, which adds 3."""
    value = torch.full((1, 1), float(folder.name))
    return Adapter(folder.name, 1, {"linear": Matrices(torch.ones(1, 1), value)})


class Lifetimes(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        network, self.rows = Network(), AdapterRows()
        with torch.no_grad():
            network.linear.weight.zero_()
        self.runner = Adapters(network, network, {}, MAX_LORAS, 1, torch.float32, self.rows)
        self.runner.wrap(network, lambda shape, rows: TorchProducts(shape, rows, MAX_LORAS, torch.float32))
        self.runner.wrap_vocabulary(network, torch.device("cpu"), 0)
        self.network, self.slots = network, AdapterSlots(MAX_LORAS)
        self.registry = AdapterRegistry(self.runner, Alone, MAX_LOADED, self.in_use)
        self.waiting, self.running = [], []
        self.versions = {}  # number that users know -> folder, which changes whenever an adapter is removed

    def in_use(self):
        return {seq.adapter.number for seq in self.waiting + self.running if seq.adapter is not None}

    def find(self, number):
        folder = self.versions.setdefault(number, 10 * number)
        return folder, self.registry.find(LoRARequest(f"name {number}", number, Path(str(folder))))

    @rule(number=NUMBERS)
    def load(self, number):
        self.find(number)

    @rule(number=NUMBERS)
    def unload(self, number):
        self.registry.remove(number)
        if number in self.versions:
            self.versions[number] += 1

    @rule(number=st.integers(0, 6))
    def request(self, number):
        folder, adapter = self.find(number) if number else (0, None)
        self.waiting.append(SimpleNamespace(expected=folder, adapter=adapter, adapter_slot=0, children=[], age=0))

    @rule(data=st.data())
    @precondition(lambda self: self.running)
    def preempt(self, data):
        self.waiting.insert(0, self.running.pop(data.draw(st.integers(0, len(self.running) - 1))))

    @rule(data=st.data())
    @precondition(lambda self: self.running or self.waiting)
    def finish_or_abort(self, data):
        i = data.draw(st.integers(0, len(self.running + self.waiting) - 1))
        (self.running if i < len(self.running) else self.waiting).remove((self.running + self.waiting)[i])
        self.registry.sweep()

    @rule()
    def step(self):
        held = self.slots.find_held(self.waiting, self.running)
        for seq in [one for one in self.waiting if one not in held][: MAX_RUNNING - len(self.running)]:
            self.waiting.remove(seq)
            self.running.append(seq)
            self.slots.assign(seq, self.running)
        chunks = [(seq, 0, 1) for seq in self.running]
        metadata = FakeMetadata(torch.arange(len(chunks) + 1))
        with_slots = self.runner.add_to(Alone(), SimpleNamespace(chunks=chunks), metadata)
        self.rows.select(getattr(with_slots, "adapters", None))
        found = self.network.linear(torch.ones(len(chunks), 1))[:, 0].tolist()
        assert found == [seq.expected for seq in self.running], "a row has the adapter that its request was given"

    @invariant()
    def memory_has_what_is_known_or_in_use(self):
        known = {one.adapter.number for one in self.registry.known.values()}
        assert self.runner._packed.keys() == known | self.in_use()
        assert len(self.slots.slot_of) <= MAX_LORAS
        assert {*self.runner._in_slot} - {0} <= self.runner._packed.keys(), "no slot keeps what is forgotten"
        assert len(known) <= MAX_LOADED or len(known - self.in_use()) <= 1, "more only while requests have them"

    def teardown(self):
        """Every request runs in the end, and then nothing stays of adapters that were removed."""
        for _ in range((len(self.waiting) + len(self.running)) * (PATIENCE + 2)):
            self.step()
            if self.running:
                self.running.pop(0)
                self.registry.sweep()
        assert not self.waiting
        assert not self.running
        for number in [*self.registry.known]:
            self.registry.remove(number)
        assert not self.runner._packed
        assert not any(self.runner._in_slot)
        assert not self.registry.needs_sweep


class FakeMetadata:
    """As much of a step's metadata as the runner's part reads."""

    def __init__(self, cu_seqlens_q):
        self.cu_seqlens_q = cu_seqlens_q


def test_rows_have_the_adapters_of_their_requests_and_memory_those_that_are_needed(monkeypatch):
    monkeypatch.setattr(adapters_module, "read_adapter", read_adapter)
    monkeypatch.setattr(adapters_module, "with_adapters", lambda _, slots: SimpleNamespace(adapters=slots))
    machine = Lifetimes.TestCase
    machine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    machine().runTest()
