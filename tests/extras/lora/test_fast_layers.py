"""Adapters with fast layers: with quantised weights, ranks and bfloat16, tokens are those that PyTorch's layers find.

`test_pairs.py` has all pairs of features, with PyTorch's layers.
"""

import pytest

from nanovllm import TINY_QWEN3
from nanovllm_extras import LLM, TINY_QWEN3_5, LoRARequest, SamplingParams
from tests.extras.lora.peft_adapters import make_adapter

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
LORA = {"enable_lora": True, "max_loras": 2}
PROMPTS = [[*range(20 + i, 50 + 3 * i)] for i in range(6)]
WAYS = {
    "two ranks": {"tensor_parallel_size": 2},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": {"method": "int4", "group_size": 32}},
    "recurrent states": {"model": TINY_QWEN3_5},
    "self-check": {"self_check": "strict"},
}


def serve(root, **options):
    """Return the tokens of each prompt, and the log-probabilities of the prompt's tokens."""
    adapters = [LoRARequest(name, i, root / name) for i, name in enumerate("ab", 1)]
    with LLM(**{"model": TINY_QWEN3, "dtype": "float32", "num_kv_blocks": 64, **options}, **LORA) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=[None, *adapters] * 2)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    rows = [zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True) for output in outputs]
    return tokens, [[row[token_id].logprob for row, token_id in one] for one in rows]


@pytest.mark.parametrize("way", [pytest.param(one, marks=[pytest.mark.slow] * (one != "int8")) for one in WAYS])
def test_answers_are_those_of_pytorch(way, tmp_path):
    """Numbers that are rounded to 8 bits may become the next one, as without adapters."""
    options = WAYS[way]
    for seed, name in enumerate("ab"):
        make_adapter(tmp_path / name, seed, options.get("model", TINY_QWEN3), scale=0.6, target_modules="all-linear")
    plain = {key: value for key, value in options.items() if key in ("quantization", "model")}
    expected, logprobs = serve(tmp_path, **plain, attention_backend="torch", enforce_eager=True)
    found, found_logprobs = serve(tmp_path, **options)
    is_rounded = "quantization" in options
    for one, other in zip(found_logprobs, logprobs, strict=True):
        assert one == pytest.approx(other, abs=0.25 if is_rounded else 1e-3)
    assert is_rounded or found == expected
    assert len(set(map(tuple, found))) == len(found)
