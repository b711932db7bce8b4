"""`thinking_token_budget` over everything else that an engine does, and what is refused.

Oracles: `must_be`, which reads the whole text of an answer before each token. It forces tokens in a loop over the
logits of `transformers`, and for sampled requests as a logits processor of the user, in an engine without drafts,
overlap and preemption. The model is random; a bias makes it end its reasoning itself now and then.

Broken by hand, and seen here: a budget that counts the first tag, or that is counted from the prompt's tag on when the
answer has its own; a tag that is forced again after the model's own end; a draft that is taken for the answer's
beginning; a token that is not awaited before a tag is forced; sequences with a budget that get no drafts; a bias or a
penalty that is added to a forced tag.
"""

import random

import pytest
import torch

from nanovllm_extras import LLM, Config, LLMEngine, SamplingParams
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.sampling.thinking_budget import ThinkingTags
from nanovllm_extras.scheduling.pending import as_if
from tests.extras.late_runner import LateRunner
from tests.extras.speculation.test_speculation import Knowing, speculating
from tests.tiny_tokenizers import byte_level, copy_checkpoint

OPEN, CLOSE = "<think>", "</think>"
ENGINES = {
    "preemption and drafts": {"num_kv_blocks": 48, "block_size": 4},
    "swap and drafts": {"num_kv_blocks": 48, "block_size": 4, "preemption_mode": "swap", "swap_space_bytes": 1 << 20},
    "overlap": {"enable_overlap": True, "max_num_batched_tokens": 9, "block_size": 4},
}


def with_tags(is_one_token):
    tokenizer = byte_level()
    if is_one_token:
        tokenizer.add_tokens([OPEN, CLOSE])
    assert len(tokenizer.encode(CLOSE)) == (1 if is_one_token else len(CLOSE))
    return tokenizer


@pytest.fixture(scope="module", params=[True, False], ids=["tags of one token", "tags of several tokens"])
def world(request, checkpoints, tmp_path_factory):
    """A checkpoint, its model in transformers, and its tokenizer."""
    folder, model = checkpoints.make(num_hidden_layers=1)
    tokenizer = with_tags(request.param)
    return copy_checkpoint(folder, tmp_path_factory.mktemp("budget") / "model", tokenizer), model, tokenizer


def must_be(tokenizer, budget, starts_inside, output):
    """The token that must come next, or None."""

    def text_of(token_ids):
        return tokenizer.decode(token_ids, skip_special_tokens=False)

    has_tag = [n for n in range(len(output) + 1) if text_of(output[:n]).lstrip().startswith(OPEN)]
    if not has_tag and not starts_inside:
        return None
    reasoning = output[has_tag[0] :] if has_tag else output
    if len(reasoning) < budget or CLOSE in text_of(reasoning):
        return None
    close = tokenizer.encode(CLOSE)
    return close[max(n for n in range(len(close)) if reasoning[len(reasoning) - n :] == close[:n])]


def requests_for(tokenizer, num_requests=24):
    """(prompt, whether the answer begins inside, fields of its parameters)"""
    rng, made = random.Random(0), []
    opened, closed = ([tokenizer.encode(tag)[i] for i in (0, -1)] for tag in (OPEN, CLOSE))
    for i in range(num_requests):
        end = ["<think>", "<think>\n", "<think>\n\n</think>\n\n", ""][i % 4]
        prompt = [*rng.choices(range(3, 259), k=rng.randint(1, 14)), *tokenizer.encode(end)]
        fields = {"thinking_token_budget": [0, 1, 2, 5, 9, None][i % 6]}
        biases = {}
        if i % 4 == 3:
            biases[opened[0]] = 9.0  # a model that opens its reasoning itself
        if i % 5 < 2:
            biases[closed[0]] = 2.5  # one that may close it itself
        if biases:
            fields["logit_bias"] = biases
        if i % 3 == 1:
            fields["frequency_penalty"] = 1.0
        if i % 7 == 5:
            fields["allowed_token_ids"] = list(range(60, 120))
        made.append((prompt, i % 4 < 2, fields))
    return made


def hf_answer(model, tokenizer, prompt, starts_inside, fields, max_tokens):
    output, budget = [], fields["thinking_token_budget"]
    while len(output) < max_tokens:
        forced = None if budget is None else must_be(tokenizer, budget, starts_inside, output)
        if forced is None:
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *output]])).logits[0, -1].clone()
            if "allowed_token_ids" in fields:
                keep = torch.full_like(logits, -torch.inf)
                keep[fields["allowed_token_ids"]] = 0
                logits += keep
            for token_id, bias in fields.get("logit_bias", {}).items():
                logits[token_id] += bias
            for token_id in set(output):
                logits[token_id] -= fields.get("frequency_penalty", 0) * output.count(token_id)
            forced = int(logits.argmax())
        output.append(forced)
    return output


def serve(folder, requests, **options):
    """The tokens and log-probabilities of each sample; requests come two at a step. And the engine, and its runner."""
    engine = LLMEngine(Config(folder, dtype="float32", device="cpu", check_invariants=True, **options))
    late = LateRunner(engine) if options.get("enable_overlap") else None
    todo, outputs = list(enumerate(requests)), {}
    while todo or engine.has_unfinished_requests():
        for i, (prompt, params) in todo[:2]:
            engine.add_request(str(i), prompt, params, stream=bool(i % 2))
        del todo[:2]
        for output in engine.step().outputs:
            outputs[output.request_id] = output
    finals = [outputs[str(i)].outputs for i in range(len(requests))]
    given = [[(one.token_ids, one.text, logprobs_of(one)) for one in final] for final in finals]
    return given, engine, late


def logprobs_of(completion):
    return [{token_id: one.logprob for token_id, one in place.items()} for place in completion.logprobs or ()]


def proposer_of(expected):
    """Proposes the expected tokens with mistakes, of each request's samples."""
    proposer = Knowing()
    proposer.answers = {(str(i), j): tokens for i, samples in enumerate(expected) for j, tokens in enumerate(samples)}
    return proposer


@pytest.fixture(scope="module")
def greedy(world):
    """(prompt, parameters, expected tokens) of each request."""
    _, model, tokenizer = world
    made = []
    for prompt, starts_inside, fields in requests_for(tokenizer):
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **fields)
        made.append((prompt, params, hf_answer(model, tokenizer, prompt, starts_inside, fields, max_tokens=24)))
    ends = [(params.thinking_token_budget is None, CLOSE in tokenizer.decode(tokens)) for _, params, tokens in made]
    assert {(False, True), (True, False)} <= set(ends), "some are forced"
    return made


@pytest.mark.parametrize("name", ENGINES)
def test_greedy_answers_are_those_of_a_loop_over_transformers(world, greedy, name):
    is_ahead = name == "overlap"
    asked = [one for one in greedy if not (is_ahead and one[1].frequency_penalty)]  # penalties are never ahead
    budgets = [params.thinking_token_budget for _, params, _ in asked]
    proposer = proposer_of(
        [[tokens if budget is not None else []] for budget, (_, _, tokens) in zip(budgets, asked, strict=True)]
    )
    drafts = {} if is_ahead else {"speculative_config": speculating(proposer)}
    given, engine, late = serve(world[0], [one[:2] for one in asked], **ENGINES[name], **drafts)
    assert [samples[0][0] for samples in given] == [tokens for _, _, tokens in asked]
    if is_ahead:
        assert late.num_ahead > late.num_steps / 4, "most tokens need not be known"
    else:
        assert engine.get_stats().num_preemptions > 0
        assert proposer.num_proposed > 0


@pytest.mark.parametrize("name", ENGINES)
def test_samples_are_those_with_a_function_of_the_user(world, name):
    """Three samples with seeds, log-probabilities and a stop string, which a forced tag may complete."""
    folder, _, tokenizer = world
    asked, plain = [], []
    for i, (prompt, starts_inside, fields) in enumerate(requests_for(tokenizer)[:12]):
        budget, fields = fields["thinking_token_budget"], {**fields, "thinking_token_budget": None}
        fields |= {"n": 3, "seed": i, "logprobs": 2, "max_tokens": 16, "stop": [["k>"], None][i % 4 == 0]}

        def force(output, logits, budget=budget, starts_inside=starts_inside):
            token_id = None if budget is None else must_be(tokenizer, budget, starts_inside, output)
            return (
                logits
                if token_id is None
                else torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor(token_id), 0.0)
            )

        # a user's function comes before penalties, which change no forced token: the others are impossible
        plain.append((prompt, SamplingParams(**fields, logits_processors=[force])))
        asked.append((prompt, SamplingParams(**{**fields, "thinking_token_budget": budget})))
    chunks = {key: value for key, value in ENGINES[name].items() if key == "max_num_batched_tokens"}  # these round
    expected, _, _ = serve(folder, plain, block_size=4, **chunks)
    proposer = proposer_of([[tokens for tokens, _, _ in samples] for samples in expected])
    drafts = {} if name == "overlap" else {"speculative_config": speculating(proposer)}
    given, _, _ = serve(folder, asked, **ENGINES[name], **drafts)
    for samples, wanted in zip(given, expected, strict=True):
        for (tokens, text, logprobs), (*answer, wanted_logprobs) in zip(samples, wanted, strict=True):
            assert [tokens, text] == answer
            for one, other in zip(logprobs, wanted_logprobs, strict=True):
                assert one == pytest.approx(other, abs=1e-4), "batches of other sizes differ in the last bits"
    assert len({str(tokens) for samples in given for tokens, _, _ in samples}) > 24


def test_a_form_has_no_reasoning_to_end(world):
    """JSON begins with the answer, also if the template has opened the reasoning, and a budget leaves it as it is."""
    folder, _, tokenizer = world
    llm = LLM(folder, dtype="float32", device="cpu", num_kv_blocks=64)
    choice = {"structured_outputs": {"choice": ["abcdef", "bcdefa"]}, "temperature": 0, "max_tokens": 20}
    (output,) = llm.generate([OPEN], SamplingParams(thinking_token_budget=2, **choice), use_tqdm=False)
    assert output.outputs[0].text in choice["structured_outputs"]["choice"]


@pytest.mark.parametrize(
    ("options", "fields", "words"),
    [
        ({}, {"structured_outputs": {"regex": "a+"}}, ["thinking_token_budget", "structured_outputs.regex", "got 3"]),
        ({}, {"structured_outputs": {"grammar": 'start: "a"'}}, ["structured_outputs.grammar", "got 3"]),
        ({"reasoning_parser": "openai_gptoss"}, {}, ["reasoning_parser", "'openai_gptoss'", "qwen3, deepseek_v3"]),
        ({"skip_tokenizer_init": True}, {}, ["thinking_token_budget needs a tokenizer"]),
    ],
)
def test_refusals(world, options, fields, words):
    llm = LLM(world[0], dtype="float32", device="cpu", num_kv_blocks=16, **options)
    with pytest.raises(ValueError, match="thinking_token_budget") as error:
        llm.generate([[5]], SamplingParams(thinking_token_budget=3, **fields), use_tqdm=False)
    assert all(word in str(error.value) for word in words), error.value
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("parser", "prompt", "answer", "forced_at"),
    [
        ("qwen3", "a<think>\n", "xyz", 2),
        ("qwen3", "a<think>x", "xyz", None),  # the parser takes this for the answer
        ("qwen3", "a", "\n <think>\nxyz", 5),
        ("qwen3", "a", "x<think>xyz", None),
        ("qwen3", "a<think>", "<think>xyz", 3),
        ("qwen3", "a<think>", "x</think><think>xyz", None),
        ("qwen3", "a<think>", "x", None),
        ("qwen3", "a<think>", "xy", 2),
        ("deepseek_r1", "a", "xyz", 2),
        ("deepseek_r1", "a", "<think>xyz", 3),
        ("gemma4", "a<|channel>thought\n", "xyz", 2),
        ("gemma4", "a", "<|channel>xyz", 3),
    ],
)
def test_where_reasoning_begins(parser, prompt, answer, forced_at):
    """A budget of 2 tokens, of which each is a character or a tag. forced_at: the position of a forced token"""
    tokenizer = with_tags(True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|channel>", "<channel|>"]})
    tags, before = ThinkingTags(parser, tokenizer, 300), tokenizer.encode(prompt)
    budget, seq = tags.budget_for(2, before), Sequence("0", before, SamplingParams(), frozenset(), 0, 0)
    forced = [budget.forced_token(seq, seq.num_tokens)]
    for token_id in tokenizer.encode(answer):
        seq.append_token(token_id)
        forced.append(budget.forced_token(seq, seq.num_tokens))
    places = [i for i, token_id in enumerate(forced) if token_id is not None]
    assert places == [] if forced_at is None else places[:1] == [forced_at]
    assert {forced[i] for i in places} <= set(tags.close_ids)


def test_a_rejected_draft_is_no_beginning_of_the_answer():
    tokenizer = with_tags(False)
    tags = ThinkingTags("qwen3", tokenizer, 300)
    budget, seq = tags.budget_for(0, [5]), Sequence("0", [5], SamplingParams(), frozenset(), 0, 0)
    for token_id in tokenizer.encode("<thi"):
        seq.append_token(token_id)
    for wrong in ("s", "nk>"):  # no reasoning, or reasoning
        drafts = tokenizer.encode(wrong)
        drafted = as_if(seq, drafts)
        assert (budget.forced_token(drafted, len(drafted.token_ids)) is None) == (wrong == "s")
        assert budget.forced_token(seq, seq.num_tokens) is None
    for token_id in tokenizer.encode("nk>"):
        seq.append_token(token_id)
    assert budget.forced_token(seq, seq.num_tokens) == tags.close_ids[0]


def test_an_answer_of_white_space_is_decoded_once_for_each_token(monkeypatch):
    """It may still begin with the tag. A client can force this with a bias, and the steps of all others would wait."""
    tokenizer, decoded = with_tags(False), []
    tags = ThinkingTags("qwen3", tokenizer, 300)
    text_of = tags.text_of
    monkeypatch.setattr(tags, "text_of", lambda token_ids: decoded.append(len(token_ids)) or text_of(token_ids))
    budget, seq = tags.budget_for(0, [5]), Sequence("0", [5], SamplingParams(), frozenset(), 0, 0)
    decoded.clear()
    for token_id in tokenizer.encode(" " * 100 + OPEN):
        seq.append_token(token_id)
        forced = budget.forced_token(seq, seq.num_tokens)
        assert (forced is None) == (seq.num_output_tokens < 100 + len(OPEN))
    assert len(decoded) < 2 * seq.num_output_tokens


def test_a_call_ends_the_reasoning(world):
    """Qwen3.5 calls without ending its reasoning: a tag in the call would break it."""
    tokenizer = world[2]
    tags = ThinkingTags("qwen3", tokenizer, 300)
    budget = tags.budget_for(3, tokenizer.encode(OPEN))
    for reasoning, is_forced in (("<tool_call>\n<function=", False), ("<tool_call> and more text", True)):
        seq = Sequence("0", tokenizer.encode(OPEN), SamplingParams(), frozenset(), 0, 0)
        for token_id in tokenizer.encode(reasoning):
            seq.append_token(token_id)
        budget.num_tokens = seq.num_output_tokens
        assert (budget.forced_token(seq, seq.num_tokens) is not None) == is_forced


@pytest.mark.slow
def test_two_ranks(world, greedy):
    with LLM(world[0], dtype="float32", device="cpu", tensor_parallel_size=2, num_kv_blocks=256, block_size=4) as llm:
        given = llm.generate([one[0] for one in greedy], [one[1] for one in greedy], use_tqdm=False)
    assert [output.outputs[0].token_ids for output in given] == [tokens for _, _, tokens in greedy]
