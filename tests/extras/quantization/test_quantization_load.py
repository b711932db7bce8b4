"""A loaded network becomes quantised: which layers, and what is refused."""

import pytest
from torch import nn

from nanovllm.layers.basic import Embedding, FusedLinear, Linear
from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from nanovllm_extras.models.moe import Router
from nanovllm_extras.weights.quantise import quantise
from nanovllm_extras.weights.quantised_linear import QuantisedEmbedding, QuantisedFusedLinear, QuantisedLinear

CHAT = [{"role": "user", "content": "What is a block table?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=20)


class Network(nn.Module):
    def __init__(self, size=32):
        super().__init__()
        self.table = Embedding(24, size)
        self.head = self.table
        self.layers = nn.ModuleList([Linear(size, 16, bias=True), FusedLinear(size, {"a": 8, "b": 8})])
        self.router = Router(size, 4)
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        self.requires_grad_(False)


def classes(network):
    return [type(layer) for layer in (network.table, *network.layers, network.router)]


def test_products_and_tables_are_quantised():
    network = Network()
    quantise(network, "int4")
    assert classes(network) == [QuantisedEmbedding, QuantisedLinear, QuantisedFusedLinear, Router]
    assert network.head is network.table
    assert [layer.quantised.bits for layer in (network.table, *network.layers)] == [8, 4, 4]


def test_tables_stay_as_they_are_where_that_is_asked():
    network = Network()
    quantise(network, {"method": "int8", "embeddings": False})
    assert classes(network) == [Embedding, QuantisedLinear, QuantisedFusedLinear, Router]


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_tables_have_four_bits_where_that_is_asked(method):
    network = Network()
    quantise(network, {"method": method, "embeddings": "int4"})
    assert network.head is network.table
    assert [layer.quantised.bits for layer in (network.table, *network.layers)] == [4, *[int(method[3:])] * 2]


def test_what_does_not_fit_is_named_before_anything_changes():
    network = Network(size=24)
    with pytest.raises(ValueError, match=r"quantization='int8' needs .* a multiple of 16, but table has 24"):
        quantise(network, "int8")
    assert type(network.layers[0]) is Linear


def test_the_bundled_model_still_answers():
    options, quantization = {"num_kv_blocks": 40, "dtype": "float32"}, {"method": "int4", "group_size": 32}
    definition = LLM(TINY_QWEN3, quantization=quantization, attention_backend="torch", enforce_eager=True, **options)
    assert "QuantisedLinear" in definition.engine.description, "it says what PyTorch computes"
    fast = LLM(TINY_QWEN3, quantization=quantization, **options)
    plain = LLM(TINY_QWEN3, **options)
    texts = [llm.chat(CHAT, GREEDY, use_tqdm=False)[0].outputs[0].text for llm in (plain, definition, fast)]
    assert texts[1:] == texts[:1] * 2


@pytest.mark.slow
def test_ranks_quantise_their_shares():
    llm = LLM(TINY_QWEN3, quantization="int8", num_kv_blocks=40, tensor_parallel_size=2)
    plain = LLM(TINY_QWEN3, num_kv_blocks=40)
    texts = [one.chat(CHAT, GREEDY, use_tqdm=False)[0].outputs[0].text for one in (plain, llm)]
    assert texts[0] == texts[1]
