"""Replayed steps compute the adapter of each row, which is a column of the inputs of a graph; 0 is the padding.

Steps with an adapter of the embeddings or of the output layer are not replayed.

Without a GPU, graphs are recorded operations (`recorded_operations.py`). The oracle is the same engine without graphs.
"""

import pytest
import torch

from nanovllm import TINY_QWEN3
from nanovllm_extras import LoRARequest, SamplingParams
from nanovllm_extras.kernels.adapter_rows import AdapterRows, MaskedProducts
from nanovllm_extras.lora import make_adapters
from tests.extras.cuda.test_graphs import make_engines
from tests.extras.lora.peft_adapters import make_adapter


def masked(shape, rows, num_slots, dtype):
    return MaskedProducts(shape, rows, num_slots, dtype, 8, torch.device("cpu"))


def select_on_device(self, slots):
    """As on CUDA, where the host does not read the slots."""
    self.slots = slots


@pytest.mark.parametrize("has_overlap", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_replayed_steps_have_the_adapter_of_each_row(monkeypatch, tmp_path, has_overlap):
    for seed, name in enumerate("ab"):
        make_adapter(tmp_path / name, seed, scale=0.6)
    make_adapter(tmp_path / "c", 2, scale=0.6, target_modules=["embed_tokens", "lm_head", "q_proj"])
    monkeypatch.setattr(make_adapters, "TorchProducts", masked)
    monkeypatch.setattr(AdapterRows, "select", select_on_device)
    options = {
        "enable_lora": True,
        "max_loras": 3,
        "num_kv_blocks": 48,
        "block_size": 16,
        "enable_overlap": has_overlap,
    }
    eager, replaying = make_engines(monkeypatch, TINY_QWEN3, max_num_seqs=5, **options)
    adapters = [None, *[LoRARequest(name, i, tmp_path / name) for i, name in enumerate("abc", 1)]]
    for some, counts in ((adapters[:3], range(6, 12)), (adapters, range(1, 4))):  # the last ends before another one
        found = [serve(engine, some) for engine in (eager, replaying)]
        assert found[0] == found[1]
        assert len(set(map(tuple, found[0].values()))) == 5
        num_replays, replaying.recorder.num_replays = replaying.recorder.num_replays, 0
        assert num_replays in counts


def serve(engine, adapters):
    """Five requests, which end one after another: rows of padding follow rows of adapters."""
    for i in range(5):
        params = SamplingParams(temperature=0, max_tokens=3 + 2 * i, ignore_eos=True)
        adapter = adapters[i % len(adapters)]
        engine.add_request(str(i), [*range(30 + i // 3, 44)], params, stream=False, lora_request=adapter)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output.outputs[0].token_ids for output in engine.step().outputs}
    return outputs
