"""`examples/extensions/image_embeddings.py`: the oracle is transformers' LLaVA, with a random vision tower."""

from pathlib import Path

import pytest
import torch
import transformers

from nanovllm import LLM, SamplingParams

EXTENSION = Path(__file__).parents[2] / "examples" / "extensions" / "image_embeddings.py"
IMAGE = 299  # the placeholder
NUM_ROWS = 9  # of an image: 12 x 12 pixels in patches of 4 x 4


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """Return the folder of a random LLaVA, and the model."""
    tower = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=12, patch_size=4
    )
    text = transformers.Qwen3Config(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=False,
        initializer_range=0.2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        vision_config=tower, text_config=text, image_token_index=IMAGE, image_seq_length=NUM_ROWS
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    for weight in [*model.model.vision_tower.parameters(), *model.model.multi_modal_projector.parameters()]:
        weight.data = 0.3 * torch.randn(weight.shape)
    folder = tmp_path_factory.mktemp("llava")
    model.save_pretrained(folder)
    return folder, model


def expected(model, prompt, images):
    ids = torch.tensor([prompt])
    more = {"pixel_values": torch.stack(images)} if images else {}
    with torch.no_grad():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, **more)
    return output[0, len(prompt) :].tolist()


def params(prompt, images):
    starts = [i for i, token in enumerate(prompt) if token == IMAGE][::NUM_ROWS]
    extra_args = {"images": list(zip(starts, images, strict=True))} if images else None
    return SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, extra_args=extra_args)


def make_llm(folder, **options):
    return LLM(folder, extension=EXTENSION, block_size=4, num_kv_blocks=80, enforce_eager=True, **options)


def answers(llm, requests):
    prompts, all_params = [prompt for prompt, _ in requests], [params(*one) for one in requests]
    outputs = llm.generate(prompts, all_params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], [output.num_cached_tokens for output in outputs]


def test_tokens_are_those_of_transformers(llava):
    """Chunks of at most 7 tokens cut the images. One prompt has no image, one has two, and one ends with its image."""
    llm, images = make_llm(llava[0], max_num_batched_tokens=7), torch.randn(4, 3, 12, 12)
    placeholders = [IMAGE] * NUM_ROWS
    requests = [
        ([5, 6, *placeholders, 7], [images[0]]),
        ([5, 6, 7, 8, 9], []),
        ([11, *placeholders, 12, 13, *placeholders, 14], [images[1], images[2]]),
        ([15, *placeholders], [images[3]]),
        ([15, *placeholders], [images[0]]),
    ]
    found, _ = answers(llm, requests)
    assert found == [expected(llava[1], *one) for one in requests]
    assert found[3] != found[4], "images change the answer"


def test_blocks_of_equal_images_are_shared(llava):
    """Blocks of 4: the image begins at position 6, in the second block. Text before different images is shared."""
    llm, (one, other) = make_llm(llava[0]), torch.randn(2, 3, 12, 12)
    prompt = [21, 22, 23, 24, 25, 26, *[IMAGE] * NUM_ROWS, 27, 28]
    requests = [(prompt, [image]) for image in (one, other, one.clone(), other)]
    results = [answers(llm, [request]) for request in requests]
    assert [tokens for (tokens,), _ in results] == [expected(llava[1], *one) for one in requests]
    assert [hits for _, (hits,) in results] == [0, 4, 16, 16]


def test_an_image_beyond_the_prompt_is_refused(llava):
    llm, image = make_llm(llava[0]), torch.randn(3, 12, 12)
    with pytest.raises(ValueError, match="the position of an image must be below 3, got 3"):
        llm.generate([[1, 2, 3]], SamplingParams(extra_args={"images": [(3, image)]}), use_tqdm=False)
    with pytest.raises(ValueError, match="an image of 9 tokens begins at position 1 of a prompt of 3"):
        llm.generate([[1, 2, 3]], SamplingParams(extra_args={"images": [(1, image)]}), use_tqdm=False)
    assert answers(llm, [([5, 6, 7], [])])[0] == [expected(llava[1], [5, 6, 7], [])]
