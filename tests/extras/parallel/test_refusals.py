"""What cannot be shared among ranks is refused by the name and value of its field, before a rank is started."""

import pytest
import torch

from nanovllm_extras import LLM, Config
from nanovllm_extras.parallel import processes
from nanovllm_extras.parallel import start_ranks as start


@pytest.fixture
def no_rank_starts(monkeypatch):
    def refuse(*_):
        raise AssertionError("a rank was started")

    monkeypatch.setattr(processes, "start_process", refuse)
    monkeypatch.setattr(start, "start_peers", refuse)


def make_llm(folder, **options):
    return LLM(folder, device="cpu", attention_backend="torch", **options)


SIZES = [  # (architecture, variant, fields, number of ranks, what the message says)
    ("qwen3", "yarn", {}, 4, "tensor_parallel_size 4 must divide num_attention_heads, config.json has 6"),
    ("llama", "plain", {"intermediate_size": 97}, 2, "2 must divide intermediate_size, config.json has 97"),
    ("qwen3_moe", "plain", {"moe_intermediate_size": 50}, 3, "3 must divide moe_intermediate_size, config.json has 50"),
    ("mixtral", "plain", {"intermediate_size": 100}, 3, "3 must divide intermediate_size, config.json has 100"),
    ("llama", "plain", {"num_key_value_heads": 3}, 2, "divide num_key_value_heads, or be a multiple of it.* has 3"),
    ("qwen3", "yarn", {"num_key_value_heads": 2}, 3, "divide num_key_value_heads, or be a multiple of it.* has 2"),
]


@pytest.mark.parametrize(("name", "variant", "fields", "size", "message"), SIZES)
def test_sizes_that_ranks_do_not_divide(shareable, no_rank_starts, name, variant, fields, size, message):
    folder, _ = shareable.make(name, variant, 6)
    with pytest.raises(ValueError, match=message):
        make_llm(folder, tensor_parallel_size=size, hf_overrides=fields)


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", True, None])
def test_the_number_of_ranks(size):
    with pytest.raises((ValueError, TypeError), match=f"tensor_parallel_size.*{size}"):
        Config("a-model", tensor_parallel_size=size)


NODES = [
    ({"nnodes": 3}, "nnodes must divide tensor_parallel_size 2, got 3"),
    ({"nnodes": 2, "node_rank": 2}, "node_rank must be below nnodes 2, got 2"),
    ({"node_rank": 1}, "node_rank must be below nnodes 1, got 1"),
    ({"nnodes": 0}, "nnodes must be .*1.* got 0"),
    ({"node_rank": -1}, "node_rank must be .*0.* got -1"),
    ({"master_port": 70000}, "master_port must be .*65535.* got 70000"),
    ({"master_addr": 7}, "master_addr must be .* got 7"),
    ({"max_model_len": 10**6}, "max_model_len"),
]


@pytest.mark.parametrize(("options", "message"), NODES)
def test_machines(tiny_checkpoint, no_rank_starts, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make_llm(tiny_checkpoint[0], tensor_parallel_size=2, **options)


def test_several_machines_for_one_rank(tiny_checkpoint, no_rank_starts):
    """The field is not ignored where tensor_parallel_size stays at 1."""
    with pytest.raises(ValueError, match="nnodes must divide tensor_parallel_size 1, got 2"):
        make_llm(tiny_checkpoint[0], nnodes=2)


@pytest.fixture
def two_cards(monkeypatch):
    """As on a machine with two CUDA devices, up to the first tensor there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_each_rank_has_a_card(two_cards, device):
    config = Config("a-model", device=device, tensor_parallel_size=2)
    assert [start.device_of(config, rank) for rank in (0, 1)] == ["cuda:0", "cuda:1"]
    two_machines = Config("a-model", device=device, tensor_parallel_size=4, nnodes=2)
    assert [start.device_of(two_machines, rank) for rank in range(4)] == ["cuda:0", "cuda:1"] * 2


def test_cards(two_cards, tiny_checkpoint, no_rank_starts):
    options = {"tensor_parallel_size": 2, "device": "cuda:1"}
    with pytest.raises(ValueError, match="device must be auto or cuda with tensor_parallel_size > 1, got 'cuda:1'"):
        LLM(tiny_checkpoint[0], **options)
    with pytest.raises(ValueError, match="tensor_parallel_size needs 4 CUDA devices, there are 2"):
        LLM(tiny_checkpoint[0], tensor_parallel_size=4, device="cuda")
