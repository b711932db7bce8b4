"""Adapters with fast layers: with quantised weights, ranks and bfloat16, tokens are those that PyTorch's layers find.

`test_pairs.py` has all pairs of features, with PyTorch's layers.
"""

import pytest

from nanovllm import TINY_QWEN3
from nanovllm_extras import LLM, TINY_QWEN3_5, LoRARequest, SamplingParams
from tests.extras.lora.peft_adapters import make_adapter

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[*range(20 + i, 50 + 3 * i)] for i in range(6)]
WAYS = {
    "two ranks": {"tensor_parallel_size": 2},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": {"method": "int4", "group_size": 32}},
    "recurrent states": {"model": TINY_QWEN3_5},
    "self-check": {"self_check": "strict"},
}


def find_tokens(root, base, **options):
    adapters = [LoRARequest(name, i, root / name) for i, name in enumerate("ab", 1)]
    options = {"model": TINY_QWEN3, "dtype": "float32", "num_kv_blocks": 64, **options}
    with LLM(**options, enable_lora=True, max_loras=2) as llm:
        requests = [None, *adapters] * 2
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=requests)
        return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("way", [pytest.param(one, marks=[pytest.mark.slow] * (one != "int8")) for one in WAYS])
def test_tokens_are_those_of_pytorch(way, tmp_path):
    options = WAYS[way]
    base = options.get("model", TINY_QWEN3)
    for seed, name in enumerate("ab"):
        make_adapter(tmp_path / name, seed, base, scale=0.6, target_modules="all-linear")
    plain = {key: value for key, value in options.items() if key in ("quantization", "model")}
    expected = find_tokens(tmp_path, base, **plain, attention_backend="torch", enforce_eager=True)
    found = find_tokens(tmp_path, base, **options)
    same = sum(one == other for one, other in zip(found, expected, strict=True))
    assert same >= len(PROMPTS) - ("quantization" in options), "sums of 8 bits may round otherwise"
    assert len(set(map(tuple, found))) == len(found)
