"""The bundled hybrid is a genuine Qwen3.5: its files, its names, and the tokens that `transformers` computes with it.

`test_tiny_qwen3_answers.py` asks it what it was trained to know.
"""

import pytest
import torch
import transformers

from nanovllm_extras import LLM, TINY_QWEN3, TINY_QWEN3_5, SamplingParams
from nanovllm_extras.weights.checkpoint import resolve_model
from tests.extras.models.hybrid_checkpoints import continue_greedily

pytest.importorskip("transformers.models.qwen3_5")
MAX_BYTES = 8_000_000
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
INSTRUCTIONS = "You are an expert in LLM inference."
QUESTIONS = ["What is a block table?", "Why is decoding slow?", "How are blocks freed?"]  # their first words differ


@pytest.fixture(scope="module")
def reference():
    return transformers.AutoModelForCausalLM.from_pretrained(TINY_QWEN3_5, dtype=torch.float32).eval()


def make_llm(**options) -> LLM:
    options = {"attention_backend": "torch", "block_size": 4, "num_kv_blocks": 200, "max_num_seqs": 8, **options}
    return LLM(TINY_QWEN3_5, dtype="float32", device="cpu", **options)


# ---- the files


def test_folder_is_small():
    assert sum(path.stat().st_size for path in TINY_QWEN3_5.iterdir()) <= MAX_BYTES


def test_transformers_loads_it_unchanged():
    model, info = transformers.AutoModelForCausalLM.from_pretrained(TINY_QWEN3_5, output_loading_info=True)
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    assert not any(info[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_description_ends_with_what_computes():
    engine = make_llm().engine
    slots, first, *_, last = engine.description.split("; ")
    assert slots.startswith("16 slots of states, which take ")
    assert first.startswith("a state of ")
    assert last.startswith("PyTorch on cpu, ")


# ---- its names


@pytest.mark.parametrize("folder", [TINY_QWEN3, TINY_QWEN3_5], ids=lambda folder: folder.name)
def test_a_bundled_model_is_found_by_its_name(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_model(folder.name).samefile(folder)
    (tmp_path / folder.name).mkdir()
    (tmp_path / folder.name / "config.json").write_text("{}")
    assert resolve_model(folder.name).resolve() == tmp_path / folder.name, "a folder has precedence"


# ---- its tokens


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_tokens_are_those_of_transformers(reference, backend):
    """Together, in small chunks. The oracle computes each token without a cache."""
    with make_llm(attention_backend=backend, block_size=16, max_num_batched_tokens=20) as llm:
        prompts = [encode(llm, question) for question in QUESTIONS]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    expected = [continue_greedily(reference, prompt, GREEDY.max_tokens)[0] for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == expected


def encode(llm: LLM, question: str) -> list[int]:
    messages = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": question}]
    return llm.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_the_third_request_finds_the_instructions_by_a_snapshot(reference):
    """The second one leaves the blocks of the first at the end of the instructions, and keeps a snapshot there."""
    with make_llm() as llm:
        prompts = [encode(llm, question) for question in QUESTIONS]
        outputs = [llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in prompts]
    first, second, third = prompts
    num_common = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert third[:num_common] == first[:num_common]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, num_common // 4 * 4]
    assert outputs[2].outputs[0].token_ids == continue_greedily(reference, third, GREEDY.max_tokens)[0]
