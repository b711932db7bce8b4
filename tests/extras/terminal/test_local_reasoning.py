"""The reasoning of an engine in this process, between `<think>` tags, whatever the format of the model is.

Oracle: how the answers were made.
"""

from types import SimpleNamespace

import pytest

from nanovllm_extras.terminal.chat_history import TaggedText, without_reasoning
from nanovllm_extras.terminal.local_reasoning import ReasoningReader, sampling_fields
from tests.extras.harmony_tokens import CHANNEL, END, MESSAGE, RETURN, START, TOKENIZER, Marker, encode


def read(parser, pieces, prompt="", tokens=(), prompt_ids=()):
    """The texts that are shown, one after another. tokens: the token ids of each piece."""
    reader = ReasoningReader(parser, TOKENIZER, {"prompt": prompt, "prompt_token_ids": list(prompt_ids)})
    shown = []
    for i in range(len(pieces)):
        ids = sum(tokens[: i + 1], [])
        reason = "stop" if i == len(pieces) - 1 else None
        shown.append(reader.read(SimpleNamespace(text="".join(pieces[: i + 1]), token_ids=ids, finish_reason=reason)))
    assert all(after.startswith(before) for before, after in zip(shown, shown[1:], strict=False))
    return shown[-1]


@pytest.mark.parametrize(
    ("parser", "prompt", "text", "shown"),
    [
        ("qwen3", "<think>\n", "Hm.\n</think>\n\nFour.", "<think>Hm.</think>Four."),
        ("qwen3", "", "<think>Hm.</think>Four.", "<think>Hm.</think>Four."),
        ("qwen3", "", " Four <|channel>.", " Four <|channel>."),
        ("deepseek_r1", "", "Hm.</think>Four.", "<think>Hm.</think>Four."),
        ("gemma4", "<|turn>model\n", "<|channel>thought\nHm.<channel|>Four.", "<think>Hm.</think>Four."),
        ("gemma4", "<|channel>thought\n<channel|>", "Four.", "Four."),
    ],
)
def test_texts(parser, prompt, text, shown):
    assert read(parser, [text], prompt) == read(parser, list(text), prompt) == shown


def test_messages_of_gpt_oss():
    parts = [CHANNEL, "analysis", MESSAGE, "Hm é.", END, START, "assistant", CHANNEL, "final", MESSAGE, "Four.", RETURN]
    texts = ["" if isinstance(part, Marker) else part for part in parts]
    prompt_ids = encode([START, "user", MESSAGE, "What?", END, START, "assistant"])
    tokens = [encode([part]) for part in parts]
    assert read("openai_gptoss", texts, "", tokens, prompt_ids) == "<think>Hm é.</think>Four."


def test_what_the_parsers_need():
    ends = sorted(TOKENIZER.convert_tokens_to_ids(token) for token in ("<|call|>", "<|return|>"))
    assert sampling_fields("openai_gptoss", TOKENIZER) == {"stop_token_ids": ends}
    assert sampling_fields("gemma4", TOKENIZER) == {"skip_special_tokens": False}
    assert sampling_fields("qwen3", TOKENIZER) == {}


def test_reasoning_is_not_sent_back():
    answer = {"role": "assistant", "content": "<think>Hm.</think>Four."}
    assert without_reasoning(answer)["content"] == "Four."
    assert without_reasoning({**answer, "content": "<think>Hm"})["content"] == ""
    parts = [("I look.", False), ("Hm.", True), (" Four.", False), ("So\n", True), (" Five.", False), ("Hm", True)]
    for num_parts, left in enumerate(
        ("", "I look.", "I look.", "I look. Four.", "I look. Four.", *2 * ["I look. Four. Five."])
    ):
        tagged = TaggedText()
        for part in parts[:num_parts]:
            tagged.add(*part)
        assert without_reasoning({**answer, "content": tagged.text})["content"] == left
    for other in ({**answer, "role": "user"}, {**answer, "content": "Four </think>"}):
        assert without_reasoning(other) == other
