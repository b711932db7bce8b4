"""Extensions of the core in the engine with all options and its fast layers. Oracles are those of their own tests."""

import pytest
import torch

import nanovllm
from nanovllm_extras import LLM, SamplingParams
from tests.conftest import hf_greedy
from tests.extensions import test_image_embeddings, test_int8_kv, test_multi_lora, test_my_model
from tests.extensions.test_image_embeddings import IMAGE, NUM_ROWS, llava  # noqa: F401 (a fixture)
from tests.extensions.test_multi_lora import merged  # noqa: F401 (a fixture)

OPTIONS = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 60}
PARAMS = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def generate(folder, extension, prompts, extra_args):
    params = [SamplingParams(**PARAMS, extra_args=extra) for extra in extra_args]
    with LLM(folder, extension=extension, **OPTIONS) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def test_adapters(tiny_checkpoint, merged):  # noqa: F811
    prompts = [[7, *range(20, 29)], [8, 9]] * len(merged)
    names = [name for name in merged for _ in range(2)]
    extra_args = [name and {"adapter": name} for name in names]
    found = generate(tiny_checkpoint[0], test_multi_lora.EXTENSION, prompts, extra_args)
    assert found == [hf_greedy(merged[name], prompt, 8) for name, prompt in zip(names, prompts, strict=True)]


def test_images(llava):  # noqa: F811
    folder, model = llava
    images, prompt = torch.randn(2, 3, 12, 12), [5, 6, *[IMAGE] * NUM_ROWS, 7]
    extra_args = [{"images": [(2, image)]} for image in images]
    found = generate(folder, test_image_embeddings.EXTENSION, [prompt] * 2, extra_args)
    assert found == [test_image_embeddings.expected(model, prompt, [image]) for image in images]


@pytest.mark.parametrize("shape", [{}, {"head_dim": 32}])
def test_a_network(tmp_path, shape):
    """Heads of 16 numbers are computed in PyTorch, heads of 32 by the kernels."""
    model = test_my_model.make_checkpoint(tmp_path, **shape)
    prompts = [[5, 6, 7], [*range(10, 31)]]
    found = generate(tmp_path, test_my_model.EXTENSION, prompts, [None, None])
    assert found == [hf_greedy(model, prompt, 8) for prompt in prompts]


def test_a_cache_of_8_bits(tiny_checkpoint):
    """The oracle is the core: what is rounded to 8 bits may differ from what transformers computes."""
    prompts = [[5, 6, 7], [*range(10, 31)]]
    core = nanovllm.LLM(tiny_checkpoint[0], extension=test_int8_kv.EXTENSION, **OPTIONS)
    outputs = core.generate(prompts, nanovllm.SamplingParams(**PARAMS), use_tqdm=False)
    found = generate(tiny_checkpoint[0], test_int8_kv.EXTENSION, prompts, [None, None])
    assert found == [output.outputs[0].token_ids for output in outputs]
