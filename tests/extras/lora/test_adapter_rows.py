"""Rows of one batch have different adapters: the oracle is PEFT's model in float32, unmerged and merged."""

import pytest

from nanovllm import TINY_QWEN3
from nanovllm_extras import LLM, LoRARequest, SamplingParams
from tests.conftest import hf_greedy
from tests.extras.lora.peft_adapters import ALL, make_adapter

ADAPTERS = {
    "alice": {"r": 8, "target_modules": "all-linear"},
    "bob": {"r": 16, "target_modules": ["k_proj", "o_proj", "gate_proj"], "use_rslora": True},
    "carol": {"r": 1, "target_modules": ALL, "lora_alpha": 6},
    "dave": {"r": 3, "target_modules": ["q_proj", "v_proj"], "rank_pattern": {"layers.1.self_attn.v_proj": 20}},
    "erin": {"r": 5, "target_modules": ["down_proj", "up_proj"], "lora_alpha": 20},
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Five adapters on disk, and PEFT's model of each."""
    root = tmp_path_factory.mktemp("adapters")
    models = {name: make_adapter(root / name, seed, **options) for seed, (name, options) in enumerate(ADAPTERS.items())}
    return root, models


@pytest.fixture(scope="module")
def expected(adapters):
    """For each adapter and the base model: greedy tokens of two prompts, unmerged and merged."""
    _, models = adapters
    found = {}
    for i, (name, model) in enumerate(models.items()):
        unmerged = [hf_greedy(model, prompt, 8) for prompt in prompts_of(i)]
        if name == "alice":
            with model.disable_adapter():
                found[None] = [hf_greedy(model, prompt, 8) for prompt in prompts_of(len(models))]
        assert [hf_greedy(model.merge_and_unload(), prompt, 8) for prompt in prompts_of(i)] == unmerged
        found[name] = unmerged
    return found


def prompts_of(i):
    return [7 + i, *range(20, 29 + i)], [*range(300, 345), 11 * i]


def requests_of(root):
    """Names, prompts and adapters, those of one adapter far from each other."""
    names = [*ADAPTERS, None]
    one = [(name, prompts_of(i)[k], request(root, name)) for k in range(2) for i, name in enumerate(names)]
    return [[*column] for column in zip(*one, strict=True)]


def request(root, name):
    return None if name is None else LoRARequest(name, 1 + [*ADAPTERS].index(name), root / name)


WAYS = {
    "PyTorch": {"attention_backend": "torch", "enforce_eager": True},
    "C": {},
    "two at once": {"max_loras": 2, "enforce_eager": True},
    "small blocks": {"max_num_batched_tokens": 16, "num_kv_blocks": 12, "max_num_seqs": 3},
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_peft(way, adapters, expected):
    options = {"max_loras": 5, "max_lora_rank": 20, "check_invariants": True, **WAYS[way]}
    llm = LLM(TINY_QWEN3, enable_lora=True, dtype="float32", **options)
    names, prompts, requests = requests_of(adapters[0])
    for _ in range(2):  # from the prefix cache, too
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=requests)
        found = [list(output.outputs[0].token_ids) for output in outputs]
        assert found == [expected[name][i // len(expected)] for i, name in enumerate(names)]
    assert len({tuple(tokens) for tokens in found}) == len(found), "adapters change the answer"
