"""The engine gets out of the bundled models what the training put in.

The accuracy tests generate for real, greedily, through `LLM`: a part of about 1,700 prompts by default, and many more
in the sweep. They show at once that a checkpoint knows its corpus and that the engine computes what the checkpoint
says.
"""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from nanovllm_extras import LLM, TINY_QWEN3, TINY_QWEN3_5, SamplingParams
from tools.read_corpus import Entry, load_corpus, split_sums, sum_exchange

CORPUS_DIR = Path(__file__).resolve().parents[2] / "tools" / "corpus"

# The least share of questions answered word for word, by group; unseen wordings are only reported.
THRESHOLDS = {"short": 0.98, "long": 0.90, "held-out sums": 0.95}
REPORTED = ("short, unseen wordings", "long, unseen wordings")

GOOD_ENTRY = "Q: What is X?\nQ: x?\nU: Describe X.\nA: X is a letter.\n"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_QWEN3)


# --- accuracy ------------------------------------------------------------------------------------------------------


def exchanges_by_group() -> dict[str, list[tuple[str, str]]]:
    """Every question asked, with the answer expected; each group's share is measured on its own."""
    groups: dict[str, list[tuple[str, str]]] = {name: [] for name in (*THRESHOLDS, *REPORTED)}
    for entry in load_corpus(CORPUS_DIR):
        length = "long" if entry.is_long else "short"
        groups[length] += [(question, entry.answer) for question in entry.questions]
        groups[f"{length}, unseen wordings"].append((entry.unseen, entry.answer))
    _, held_out = split_sums()
    groups["held-out sums"] = [sum_exchange(pair, i) for i, pair in enumerate(held_out)]
    return groups


def ask(llm: LLM, tokenizer, questions: list[str]) -> list[str | None]:
    """Greedy answers; None for one that did not end with the end-of-turn token."""
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in questions
    ]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=400), use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    return [c.text if c.finish_reason == "stop" else None for c in completions]


CASES = [(TINY_QWEN3, "float32", 80), (TINY_QWEN3, "bfloat16", 80), (TINY_QWEN3_5, "float32", 120)]
SWEEP = [(TINY_QWEN3, "bfloat16", 5), (TINY_QWEN3_5, "bfloat16", 5)]


@pytest.mark.parametrize(
    ("model", "dtype", "every"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SWEEP)]
)
def test_answers_word_for_word(model: Path, dtype: str, every: int, tokenizer, record_property):
    groups = {name: group[::every] for name, group in exchanges_by_group().items()}
    questions = [question for group in groups.values() for question, _ in group]
    # No wording occurs twice, so a dict loses nothing.
    with LLM(model=model, dtype=dtype) as llm:
        answers = dict(zip(questions, ask(llm, tokenizer, questions), strict=True))
    shares = {}
    for name, group in groups.items():
        num_right = sum(answers[question] == expected for question, expected in group)
        shares[name] = num_right / len(group)
        record_property(f"{dtype}: {name}", shares[name])
        print(f"{model.name}, {dtype}: {name}: {num_right} of {len(group)} answered word for word ({shares[name]:.1%})")
    too_low = {name: shares[name] for name, least in THRESHOLDS.items() if shares[name] < least}
    assert not too_low


# --- the corpus ----------------------------------------------------------------------------------------------------


def write_corpus(folder: Path, text: str, name: str = "topic.txt") -> Path:
    (folder / name).write_text(text)
    return folder


def test_corpus_is_large_enough():
    entries = load_corpus(CORPUS_DIR)
    assert sum(len(entry.questions) for entry in entries) >= 200
    assert sum(entry.is_long for entry in entries) >= 20


def test_an_entry_is_read(tmp_path: Path):
    text = f"# a title\n\n{GOOD_ENTRY}"
    expected = Entry("long_topic", ("What is X?", "x?"), "Describe X.", "X is a letter.", is_long=True)
    assert load_corpus(write_corpus(tmp_path, text, "long_topic.txt")) == [expected]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("What is X?\n", r"topic\.txt:1: a line must start with"),
        ("# c\n\nQ: a b?\nQ: b?\nU: c?\nA:\n", r"topic\.txt:6: a line must start with"),
        ("Q: a b?\nQ: b?\nU:  c?\nA: d\n", r"topic\.txt:3: text must be ASCII without spaces"),
        ("Q: a b?\nQ: b?\nU: c?\nA: d \u2014 e\n", r"topic\.txt:4: text must be ASCII"),
        ("Q: a b?\nQ: b?\nA: d\n", r"topic\.txt:1: an entry is at least 2 'Q:' lines"),
        ("Q: a b?\nU: c?\nA: d\n", r"topic\.txt:1: an entry is at least 2 'Q:' lines"),
        ("Q: a b?\nQ: b?\nU: c?\nU: d?\nA: e\n", r"got Q Q U U A"),
        ("Q: a b?\nQ: b?\nU: c?\nA: d\nA: e\n", r"got Q Q U A A"),
        (GOOD_ENTRY + GOOD_ENTRY, r"got Q Q U A Q Q U A"),  # the blank line is missing
        (GOOD_ENTRY + "\n" + GOOD_ENTRY, r"topic\.txt:6: the wording 'What is X\?' is already at topic\.txt:1"),
        ("Q: What is X?\nQ: b?\nU: what is x\nA: d\n", r"topic\.txt:3: the wording 'what is x' is already at"),
    ],
)
def test_malformed_corpus_is_refused(tmp_path: Path, text: str, message: str):
    with pytest.raises(ValueError, match=message):
        load_corpus(write_corpus(tmp_path, text))


def test_held_out_sums_are_not_trained():
    trained, held_out = split_sums()
    assert len(set(held_out)) == 200
    assert not {tuple(sorted(pair)) for pair in held_out} & {tuple(sorted(pair)) for pair in trained}
    assert len(trained) + len({p for a, b in held_out for p in ((a, b), (b, a))}) == 90 * 90
    assert all(10 <= number <= 99 for pair in trained + held_out for number in pair)
    assert split_sums() == (trained, held_out)  # always the same
