"""What requests change of the logits: each processor by itself, all in vLLM's order, and the tensors they become.

Oracles: `transformers`' logits processor for repetition penalty, mask for mask and row by row; for the other processors
and the order of all, the loop in float64 of `sampling_rows.py`; tables worked out by hand for masks and histories.

Seen to fail when broken: any two processors swapped; a processor left out; a penalty with the wrong sign, over the
prompt instead of the output or the other way round; a bad word's first tokens looked for in the prompt too, or not at
all; histories filled up with 0; rows counted among the special ones instead of all; log-probabilities taken after them.
"""

import dataclasses
import math
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanovllm_extras import LLM, SamplingParams
from nanovllm_extras.execution.input_buffer import map_tensors
from nanovllm_extras.sampling.logits import BadWords, BiasRows
from nanovllm_extras.sampling.logits_processors import ForbiddenTokens, MinTokens, apply_processors
from tests.extras.sampling_rows import (
    EOS,
    HISTORY,
    VOCAB_SIZE,
    assert_a_row_is_drawn_the_same_whatever_its_neighbours_want,
    assert_drawn_from,
    assert_frequencies_follow_the_distribution,
    assert_logprobs_are_those_of_the_model,
    assert_random_combinations,
    random_ids,
    random_logits,
    sampling_of,
    sequence,
)
from tests.test_loader import edit_config

# ---- penalties by themselves


def test_repetition_penalty_is_that_of_transformers():
    penalties = [1.0, 1.3, 0.5, 2.0, 1.05, 5.0, 1.0]
    histories = [(random_ids(3 + 4 * i, i), random_ids(2 * i, 50 + i)) for i in range(len(penalties))]
    raw = random_logits(len(penalties), vocab_size=200)
    raw[:, :20] = 0
    rows = [sequence(*h, repetition_penalty=p) for p, h in zip(penalties, histories, strict=True)]
    expected = [
        transformers.RepetitionPenaltyLogitsProcessor(p)(torch.tensor([prompt + output]), raw[i : i + 1])
        for i, (p, (prompt, output)) in enumerate(zip(penalties, histories, strict=True))
    ]
    assert torch.equal(apply_processors(raw, sampling_of(rows).processors), torch.cat(expected))


# ---- all processors, and their order


def double(output_token_ids, logits):
    return logits * 2


def forbid_last(output_token_ids, logits):
    logits = logits.clone()
    logits[output_token_ids[-1:]] = -math.inf
    return logits


ALONE = [
    {"presence_penalty": 2.0},
    {"presence_penalty": -1.5},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.7},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.4},
    {"logit_bias": {5: 4.0, 1: -100, 17: -2.5}},
    {"allowed_token_ids": [2, 3, 5, 7, 11, 13, 30]},
    {"bad_words": ["x"]},
    {"logits_processors": [double]},
    {"logits_processors": [forbid_last, double]},
    {},
]


def test_each_field_alone_in_one_batch():
    rows = [sequence(*HISTORY, **fields) for fields in ALONE]
    assert_drawn_from(random_logits(len(rows), scale=1.5), rows)


# each of these comes out differently if its processors change places
PAIRS = [
    {"allowed_token_ids": [5, 6, 7, 11], "bad_words": ["x"]},
    {"allowed_token_ids": [5, 6, 30], "logit_bias": {5: 1.0, 12: 100.0}},
    {"bad_words": ["x"], "logit_bias": {7: 100.0, 11: 100.0}},
    {"min_tokens": 9, "stop_token_ids": [8], "logit_bias": {8: 100.0, EOS: 50.0}},
    {"logit_bias": {5: 2.0, 6: -3.0}, "logits_processors": [double]},
    {
        "allowed_token_ids": [5, 6, 7, 30],
        "logits_processors": [lambda output_token_ids, logits: logits.nan_to_num(neginf=-1)],
    },
    {"logits_processors": [double], "repetition_penalty": 1.5, "presence_penalty": 1.0},
    {"logit_bias": {5: 3.0, 2: -3.0, 30: 1.5}, "repetition_penalty": 2.0},
    {
        "logits_processors": [double, forbid_last, lambda output_token_ids, logits: logits + 1],
        "repetition_penalty": 1.5,
    },
    {"repetition_penalty": 1.7, "presence_penalty": 1.9, "frequency_penalty": 1.1},
    {"repetition_penalty": 0.6, "presence_penalty": -1.9, "frequency_penalty": -0.4},
    {"presence_penalty": 2.0, "temperature": 0.4},
    {"frequency_penalty": 1.0, "temperature": 3.0},
    {"presence_penalty": 2.0, "top_k": 3},
    {"frequency_penalty": -2.0, "top_p": 0.5},
    {"repetition_penalty": 0.3, "min_p": 0.3},
    {"logit_bias": {12: 9.0}, "top_k": 1},
]


def test_pairs_of_fields_come_in_vllms_order():
    rows = [sequence(*HISTORY, **fields) for fields in PAIRS]
    raw = random_logits(1, scale=1.5).expand(len(rows), -1).contiguous()
    assert_drawn_from(raw, rows)


FIELDS = {  # with the values to choose among, beside those of `random_fields`
    "presence_penalty": [0, 0, 1.3, -0.8],
    "frequency_penalty": [0, 0, 0.6, -0.3],
    "repetition_penalty": [1, 1, 1.4, 0.7],
    "logit_bias": [None, None, {3: 2.5, 30: -1.0}],
    "allowed_token_ids": [None, None, list(range(3, 33))],
    "bad_words": [None, ["x"]],
    "logits_processors": [None, None, [double], [forbid_last]],
}


def test_random_combinations_in_one_batch():
    assert_random_combinations(**FIELDS)


def test_a_row_is_drawn_the_same_whatever_its_neighbours_want():
    assert_a_row_is_drawn_the_same_whatever_its_neighbours_want(**FIELDS)


def test_frequencies_follow_the_distribution():
    assert_frequencies_follow_the_distribution(4, {"min_p": 0.05, "presence_penalty": 1.0})


@pytest.mark.parametrize("wanted", [[0, 0], [3, None, 0], [2, -1], [VOCAB_SIZE]])
def test_logprobs_are_those_of_the_model_itself(wanted):
    """Before temperature, penalties, biases and masks, for rows that have all of these."""
    fields = {"temperature": 0.3, "presence_penalty": 2, "logit_bias": {1: 50.0}, "top_k": 9, "bad_words": ["x"]}
    assert_logprobs_are_those_of_the_model(wanted, fields)


# ---- the tensors that processors become


def rows_of(rows):
    """The only processor of the batch of `rows`."""
    (found,) = sampling_of(rows).processors
    return found


def test_histories_are_filled_up_with_minus_one():
    rows = [
        sequence([4, 4, 5], [6], presence_penalty=0.5),
        sequence(),
        sequence([7], [8, 9, 8], repetition_penalty=1.5, frequency_penalty=-1),
        sequence([1, 2], [], frequency_penalty=2),
    ]
    penalties = rows_of(rows)
    assert penalties.rows.tolist() == [0, 2, 3]
    assert penalties.prompt_ids.tolist() == [[4, 4, 5], [7, -1, -1], [1, 2, -1]]
    assert penalties.output_ids.tolist() == [[6, -1, -1], [8, 9, 8], [-1, -1, -1]]
    assert penalties.presence.tolist() == [[0.5], [0], [0]]
    assert penalties.frequency.tolist() == [[0], [-1], [2]]
    assert penalties.repetition.tolist() == [[1], [1.5], [1]]


def changes_of(rows):
    """{(row, token): bias} of the batch; -inf for a token that must not come."""
    changes = {}
    for processor in sampling_of(rows).processors:
        assert isinstance(processor, BiasRows | ForbiddenTokens)
        pairs = list(zip(processor.rows.tolist(), processor.token_ids.tolist(), strict=True))
        values = processor.values.tolist() if isinstance(processor, BiasRows) else [-math.inf] * len(pairs)
        changes |= dict(zip(pairs, values, strict=True))
    return changes


def test_logit_bias_names_its_row():
    rows = [sequence(), sequence(logit_bias={5: 1.5, 7: -100}), sequence(), sequence(logit_bias={5: 2})]
    assert changes_of(rows) == {(1, 5): 1.5, (1, 7): -100, (3, 5): 2}


CASES = [
    # (bad words as tokens, prompt, output, tokens that must not come now)
    ([[5]], [1], [], [5]),
    ([[5]], [1], [2, 3], [5]),
    ([[5], [6]], [1], [], [5, 6]),
    ([[2, 3, 5]], [1], [], []),
    ([[2, 3, 5]], [1], [2], []),
    ([[2, 3, 5]], [1], [2, 3], [5]),
    ([[2, 3, 5]], [1], [9, 2, 3], [5]),
    ([[2, 3, 5]], [1], [2, 3, 9], []),
    ([[2, 3, 5]], [1], [2, 9, 3], []),
    ([[2, 3, 5]], [2, 3], [], []),  # what the prompt says is not part of the word
    ([[2, 3, 5]], [2], [3], []),
    ([[2, 2, 5]], [1], [2, 2, 2], [5]),
    ([[2, 5], [3, 2, 6], [7]], [1], [3, 2], [5, 6, 7]),
    ([[2, 5], [2, 6], [3, 7]], [1], [2], [5, 6]),
]


@pytest.mark.parametrize(("words", "prompt", "output", "forbidden"), CASES)
def test_bad_words_forbid_their_last_token(words, prompt, output, forbidden):
    row = sequence(prompt, output, processors=(BadWords(words),))
    batch = sampling_of([sequence(), row])
    assert changes_of([sequence(), row]) == {(1, token_id): -math.inf for token_id in forbidden}
    assert bool(batch.processors) == bool(forbidden), "nothing to forbid costs nothing"


@pytest.mark.parametrize(
    ("give", "kind", "says"),
    [
        (lambda logits: None, TypeError, "got NoneType"),
        (lambda logits: logits.tolist(), TypeError, "got list"),
        (lambda logits: logits.max(), ValueError, r"got shape \[\]"),
        (lambda logits: logits[:1], ValueError, r"got shape \[1\]"),
        (lambda logits: logits[:5], ValueError, r"got shape \[5\]"),
        (lambda logits: logits[:, None], ValueError, r"got shape \[8, 1\]"),
    ],
)
def test_what_a_processor_returns_is_checked(give, kind, says):
    """One number, such as the largest logit, would silently become the logit of every token."""
    processors = [double, lambda output_token_ids, logits: give(logits)]
    logits = torch.randn(1, 8)
    with pytest.raises(kind, match=rf"logits_processors\[1\] must return .* 8 .*{says}"):
        rows_of([sequence(logits_processors=processors)]).apply(logits, logits.clone())


@pytest.mark.parametrize(
    ("fields", "reads_output"),
    [
        ({"allowed_token_ids": [1]}, [False]),
        ({"logit_bias": {1: 1.0}}, [False]),
        ({"min_tokens": 1}, [False]),
        ({"bad_words": ["x"]}, [True]),  # one of its forms has two tokens
        ({"logits_processors": [double]}, [True]),
        ({"frequency_penalty": 0.1}, [True]),
    ],
)
def test_processors_say_whether_they_read_the_output(fields, reads_output):
    """Those that do not can be prepared before the newest token is known."""
    assert [processor.reads_output for processor in sequence(**fields).processors] == reads_output
    assert not BadWords([[5], [6]]).reads_output
    assert not MinTokens.reads_output


def test_all_tensors_move_to_the_device():
    rows = [
        sequence(top_k=3, top_p=0.5, min_p=0.1, presence_penalty=1, logit_bias={1: 1}, logprobs=2, min_tokens=1),
        sequence(allowed_token_ids=[4]),
    ]
    batch = sampling_of(rows)

    def tensors(value):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            for part in value:
                yield from tensors(part)
        elif dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                yield from tensors(getattr(value, field.name))

    moved = list(tensors(map_tensors(batch, lambda tensor: tensor.to("meta"))))
    assert [tensor.device.type for tensor in moved] == ["meta"] * len(list(tensors(batch)))
    assert len(moved) == 19


def test_bad_words_beyond_the_vocabulary_of_the_model_change_nothing(with_tokenizer, tmp_path):
    """The tokenizer has 257 tokens, the model 100."""
    folder = tmp_path / "model"
    shutil.copytree(with_tokenizer, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: tensors[name][:100].contiguous() for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, vocab_size=100)
    llm = LLM(folder, attention_backend="torch", num_kv_blocks=8)
    words = ["\n", "\x01"]  # one token each
    outputs = [
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4, bad_words=words[:n]), use_tqdm=False)
        for n in (0, 2)
    ]
    assert outputs[0][0].outputs[0].token_ids == outputs[1][0].outputs[0].token_ids
    forbidden = llm.get_tokenizer().encode("A", add_special_tokens=False)
    assert max(forbidden) < 100
    mixed = SamplingParams(temperature=0, max_tokens=4, bad_words=["A", *words], logit_bias={forbidden[0]: 100.0})
    assert forbidden[0] not in llm.generate([[1, 2, 3]], mixed, use_tqdm=False)[0].outputs[0].token_ids
