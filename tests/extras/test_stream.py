"""Text as it is made: `llm.stream`, `LLMEngine.step().outputs`, how requests end, and how they are aborted.

Oracles: `llm.generate` for what a stream adds up to; the same requests in an undisturbed engine for those that an abort
does not affect; counts of blocks. The model is random and draws from letters where text is wanted; its tokenizer is
byte-level, so that a stream without such a mask is full of halves of characters.

Seen to fail when broken: `finished` never, always or too early true; only text or tokens of the newest step; an output
that changes after it was given; a closed stream that goes on; blocks of an aborted request that are not freed, while it
waits, in its prefill, or of one sample only; an abort that takes a neighbour along; text of a stop token that is shown,
a stop string that is not cut, a reason that is mixed up.
"""

import gc

import pytest
import torch

from nanovllm_extras import LLM, RequestOutput, SamplingParams
from tests.failing_runs import Failing
from tests.tiny_tokenizers import byte_level, copy_checkpoint

VOCAB_SIZE = 300
BLOCK_SIZE = 4
TOKENIZER = byte_level()
LETTERS = TOKENIZER.convert_tokens_to_ids(list("abcdefgh"))
EOS = TOKENIZER.eos_token_id


@pytest.fixture(scope="module")
def folder(checkpoints, tmp_path_factory):
    return copy_checkpoint(
        checkpoints.make(num_hidden_layers=1)[0], tmp_path_factory.mktemp("stream") / "model", TOKENIZER
    )


def make_llm(folder, **options):
    options = {"num_kv_blocks": 64, "block_size": BLOCK_SIZE, **options}
    return LLM(folder, dtype="float32", device="cpu", attention_backend="torch", **options)


@pytest.fixture
def llm(folder):
    llm = make_llm(folder)
    yield llm
    assert_at_rest(llm.engine)


def assert_at_rest(engine):
    """Nothing runs, waits or owns a block."""
    stats = engine.get_stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_kv_blocks
    assert not engine.has_unfinished_requests()
    if hasattr(space := space_of(engine), "num_free_blocks"):
        assert space.num_free_blocks == engine.runner.num_swap_blocks


def space_of(engine):
    """The blocks in host memory, if it swaps."""
    return getattr(engine.scheduler.block_manager, "swap_space", None) or ()


def ids(length, seed=0):
    """Random tokens, and at the end a letter, so that no character is left for the output to complete."""
    random_ids = torch.randint(VOCAB_SIZE, (length - 1,), generator=torch.Generator().manual_seed(seed))
    return [*random_ids.tolist(), LETTERS[-1]]


def params(max_tokens=10, **fields):
    return SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **fields})


def letters(max_tokens=10, **fields):
    return params(max_tokens, allowed_token_ids=LETTERS, **{"temperature": 2.0, "seed": 1, **fields})


def summary(output):
    """All of an output that does not depend on the clock, on who came before, or on rounding."""
    return [
        (c.index, c.text, c.token_ids, c.finish_reason, c.stop_reason, tokens_of(c.logprobs)) for c in output.outputs
    ]


def tokens_of(logprobs):
    return logprobs and [entries and list(entries) for entries in logprobs]


def assert_grows(outputs):
    """One request's outputs are cumulative: each holds the one before, and only the last one is finished."""
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert len({output.request_id for output in outputs}) == 1
    for output in outputs:
        assert isinstance(output, RequestOutput)
        reasons = [completion.finish_reason for completion in output.outputs]
        assert all(reason is not None for reason in reasons) == output.finished
    for before, after in zip(outputs, outputs[1:], strict=False):
        grown = 0
        for old, new in zip(before.outputs, after.outputs, strict=True):
            assert new.text.startswith(old.text)
            assert new.token_ids[: len(old.token_ids)] == old.token_ids
            grown += len(new.token_ids) - len(old.token_ids)
            if old.finish_reason is not None:
                assert new == old
        assert grown > 0


def by_request(outputs):
    """{request id: its outputs}, in the order in which the requests were added."""
    grouped = {}
    for output in outputs:
        grouped.setdefault(output.request_id, []).append(output)
    return dict(sorted(grouped.items(), key=lambda item: int(item[0])))


REQUESTS = [
    (ids(5, 1), params(seed=1)),
    (ids(30, 2), letters(seed=2)),
    (ids(9, 3), params(temperature=0, max_tokens=1)),
    (ids(9, 4), params(seed=4, n=3, logprobs=1)),
    (ids(3, 5), letters(40, seed=5, stop=["ab", "hag"])),
    (ids(3, 5), letters(40, seed=5, stop=["ab", "hag"], include_stop_str_in_output=True)),
    (ids(3, 6), letters(40, seed=6, n=2, stop_token_ids=LETTERS[:1])),
    (ids(7, 7), params(seed=7, detokenize=False)),
    (ids(7, 8), params(30, seed=8, skip_special_tokens=False, prompt_logprobs=0)),
]
PROMPTS, PARAMS = map(list, zip(*REQUESTS, strict=True))


# --- stream ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 5}, {"num_kv_blocks": 16}, {"max_num_seqs": 3}], ids=str
)
def test_a_stream_grows_to_what_generate_gives(folder, options):
    llm = make_llm(folder, **options)
    expected = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    streams = by_request(llm.stream(PROMPTS, PARAMS))
    assert len(streams) == len(REQUESTS)
    for outputs, whole in zip(streams.values(), expected, strict=True):
        assert_grows(outputs)
        assert summary(outputs[-1]) == summary(whole)
        assert outputs[-1].prompt_token_ids == whole.prompt_token_ids
        assert tokens_of(outputs[-1].prompt_logprobs) == tokens_of(whole.prompt_logprobs)
        num_tokens = max(len(completion.token_ids) for completion in whole.outputs)
        assert num_tokens <= len(outputs) <= sum(len(completion.token_ids) for completion in whole.outputs)
    assert (llm.get_stats().num_preemptions > 0) == ("num_kv_blocks" in options)
    assert_at_rest(llm.engine)


def test_bad_arguments_are_refused_by_the_call_itself(llm):
    for prompts, one in (([[]], params()), ([5], SamplingParams(stop_token_ids=[VOCAB_SIZE])), (None, params())):
        with pytest.raises((TypeError, ValueError)):
            llm.stream(prompts, one)
        assert_at_rest(llm.engine)


# --- a stream that is not read to its end ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answers(folder):
    return [summary(output) for output in make_llm(folder).generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize(("how", "num_outputs"), [("forget", 0), ("close", 4), ("forget", 15), ("throw", 15)])
@pytest.mark.usefixtures("little_to_search")
def test_closing_a_stream_early_frees_everything(folder, answers, how, num_outputs):
    llm = make_llm(folder, max_num_batched_tokens=16, enable_prefix_caching=False)
    stream = llm.stream(PROMPTS, PARAMS)
    for _ in range(num_outputs):
        next(stream)
    assert (llm.get_stats().num_free_blocks < 64) == (num_outputs > 0)
    if how == "close":
        stream.close()
    elif how == "throw":
        with pytest.raises(KeyboardInterrupt):
            stream.throw(KeyboardInterrupt())
    del stream
    gc.collect()
    assert_at_rest(llm.engine)
    assert [summary(output) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)] == answers


@pytest.fixture
def impatient(llm, monkeypatch):
    """An engine that complains if it is stepped again and again with nothing to do."""
    step, idle = llm.engine.step, []

    def watched():
        idle.append(not llm.engine.has_unfinished_requests())
        assert not all(idle[-5:]) or len(idle) < 5, "it would go on for ever"
        return step()

    monkeypatch.setattr(llm.engine, "step", watched)
    return llm


@pytest.mark.parametrize("between", ["another stream", "generate"])
def test_a_stream_ends_though_others_step_the_engine(impatient, between):
    """While a stream pauses, other calls advance its request along with theirs: it misses steps, but not its end."""
    llm = impatient
    expected = llm.generate(ids(5), letters(4), use_tqdm=False)
    stream = llm.stream(ids(5), letters(4))
    outputs = [next(stream)]
    if between == "another stream":
        assert list(llm.stream(ids(9), params(20, seed=2)))[-1].finished
    else:
        assert llm.generate(ids(9), params(20, seed=2), use_tqdm=False)[0].finished
    outputs += list(stream)
    assert_grows(outputs)
    assert summary(outputs[-1]) == summary(expected[0])


@pytest.mark.parametrize("exception", [KeyboardInterrupt, RuntimeError])
def test_a_paused_stream_says_that_the_step_of_another_call_has_failed(folder, exception):
    """Every sixteenth forward pass of the other call fails, with the requests of both."""
    llm = make_llm(folder)
    failing = Failing(llm.engine, 0, exception("now"), "before")
    for nth in range(1, 100, 16):
        paused = llm.stream(ids(4), letters(100))
        next(paused)
        failing.countdown = nth
        try:
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            break
        except exception:
            assert list(paused)[-1].finished
        assert_at_rest(llm.engine)
        assert llm._inboxes == {}
    assert nth > 10


def test_a_stream_whose_request_is_gone_says_so(impatient):
    stream = impatient.stream([ids(5), ids(9)], params(8))
    request_ids = {next(stream).request_id, next(stream).request_id}
    for request_id in request_ids:
        impatient.engine.abort_request(request_id)
    with pytest.raises(RuntimeError, match="are not in the engine any more"):
        list(stream)
    assert impatient._inboxes == {}


# --- step ------------------------------------------------------------------------------------------------------------


def test_steps_give_only_the_end_of_what_is_not_streamed(llm):
    llm.engine.add_request("quiet", ids(5), letters(4, n=2, stop="ab"), stream=False)
    llm.engine.add_request("loud", ids(5), letters(4, n=2))
    outputs = []
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step().outputs
    assert [output.finished for output in outputs if output.request_id == "quiet"] == [True]
    assert [output.finished for output in outputs if output.request_id == "loud"] == [False] * 3 + [True]


# --- reasons ---------------------------------------------------------------------------------------------------------


def force(token_ids):
    """A processor that makes these tokens come."""

    def processor(output_token_ids, logits):
        chosen = torch.tensor(token_ids[len(output_token_ids)])
        return torch.full_like(logits, -torch.inf).index_fill(0, chosen, 0.0)

    return [processor]


A, B, C, D = LETTERS[:4]
REASONS = {
    # name: (tokens that the model would say, parameters, (tokens, text, finish_reason, stop_reason))
    "length": ([A, B, C, D], {"max_tokens": 3}, ([A, B, C], "abc", "length", None)),
    "end token": ([A, EOS, C], {}, ([A, EOS], "a", "stop", None)),
    "end token, included": ([A, EOS], {"include_stop_str_in_output": True}, ([A, EOS], "a", "stop", None)),
    "end token, special tokens shown": ([A, EOS], {"skip_special_tokens": False}, ([A, EOS], "a", "stop", None)),
    "end token, included and shown": (
        [A, EOS],
        {"skip_special_tokens": False, "include_stop_str_in_output": True},
        ([A, EOS], "a<|im_end|>", "stop", None),
    ),
    "end token ignored": ([A, EOS, B], {"ignore_eos": True, "max_tokens": 3}, ([A, EOS, B], "ab", "length", None)),
    "end token at max_tokens": ([A, EOS], {"max_tokens": 2}, ([A, EOS], "a", "stop", None)),
    "stop token": ([A, B, C], {"stop_token_ids": [D, B]}, ([A, B], "a", "stop", B)),
    "stop token, included": (
        [A, B, C],
        {"stop_token_ids": [B], "include_stop_str_in_output": True},
        ([A, B], "ab", "stop", B),
    ),
    "stop token first": ([A], {"stop_token_ids": [A]}, ([A], "", "stop", A)),
    "stop token at max_tokens": ([A, B], {"stop_token_ids": [B], "max_tokens": 2}, ([A, B], "a", "stop", B)),
    "stop token under ignore_eos": (
        [A, EOS, B],
        {"stop_token_ids": [B], "ignore_eos": True},
        ([A, EOS, B], "a", "stop", B),
    ),
    "end token as a stop token": (
        [A, EOS],
        {"stop_token_ids": [EOS], "ignore_eos": True},
        ([A, EOS], "a", "stop", EOS),
    ),
    "end token and stop token": ([A, EOS], {"stop_token_ids": [EOS]}, ([A, EOS], "a", "stop", None)),
    "stop string": ([A, B, C, D], {"stop": "bc"}, ([A, B, C], "a", "stop", "bc")),
    "stop string, included": (
        [A, B, C, D],
        {"stop": "bc", "include_stop_str_in_output": True},
        ([A, B, C], "abc", "stop", "bc"),
    ),
    "stop string at max_tokens": ([A, B, C], {"stop": ["bc"], "max_tokens": 3}, ([A, B, C], "a", "stop", "bc")),
    "half a stop string at max_tokens": (
        [A, B, C],
        {"stop": "bcd", "max_tokens": 3},
        ([A, B, C], "abc", "length", None),
    ),
    "half a stop string at a stop token": (
        [A, B, C],
        {"stop": "bcd", "stop_token_ids": [C]},
        ([A, B, C], "ab", "stop", C),
    ),
    "stop string with a stop token's letter": (
        [A, B, C],
        {"stop": "bc", "stop_token_ids": [C]},
        ([A, B, C], "ab", "stop", C),
    ),
    "two stop strings": ([A, B, C], {"stop": ["c", "b"]}, ([A, B], "a", "stop", "b")),
    "stop string in the prompt": ([A, B], {"stop": "zza", "max_tokens": 2}, ([A, B], "ab", "length", None)),
    "no text": ([A, B], {"detokenize": False, "stop_token_ids": [B]}, ([A, B], "", "stop", B)),
}


@pytest.mark.parametrize("name", REASONS)
def test_how_a_request_ends(llm, name):
    """As in vLLM: the stop token is in `token_ids`, but not in `text` unless it is wanted; a stop string is cut."""
    answer, fields, expected = REASONS[name]
    one = SamplingParams(**{"max_tokens": 20, "logits_processors": force([*answer, A, A, A]), **fields})
    prompt = TOKENIZER.encode("zz")
    for output in (llm.generate(prompt, one, use_tqdm=False)[0], list(llm.stream(prompt, one))[-1]):
        (completion,) = output.outputs
        found = (completion.token_ids, completion.text, completion.finish_reason, completion.stop_reason)
        assert found == expected
        assert output.finished


# --- abort -----------------------------------------------------------------------------------------------------------

OTHERS = [(ids(6, 21), params(14, seed=21)), (ids(11, 22), params(14, seed=22, n=2))]
TARGETS = {
    "one sample": (ids(19, 20), params(6, seed=20)),
    "three samples": (ids(19, 20), params(6, seed=20, n=3)),
    "three samples with a stop string": (ids(19, 20), letters(6, seed=20, n=3, stop="ab")),
}
ENGINES = {
    # name: (options, where the request can be met in it)
    "plain": ({}, {"waiting", "decoding"}),
    "chunks": ({"max_num_batched_tokens": 7}, {"waiting", "in its prefill", "decoding"}),
    "no prefix caching": (
        {"max_num_batched_tokens": 7, "enable_prefix_caching": False},
        {"waiting", "in its prefill", "decoding"},
    ),
    "few blocks": ({"num_kv_blocks": 12}, {"waiting", "decoding", "preempted"}),
    "swapping": (
        {"num_kv_blocks": 12, "preemption_mode": "swap", "swap_space_bytes": 1 << 20},
        {"waiting", "decoding", "swapped out"},
    ),
    "one at a time": ({"max_num_seqs": 3}, {"waiting", "decoding"}),
}


def sequences_of(engine, request_id):
    queued = [*engine.scheduler.running, *engine.scheduler.waiting]
    return [seq for seq in queued if seq.request_id == request_id]


def state_of(engine, request_id):
    """Where a request is; None if it is over."""
    seqs = sequences_of(engine, request_id)
    if not seqs:
        return None
    space = space_of(engine)
    if any(seq in space for seq in seqs):
        return "swapped out"
    if any(seq.num_preemptions and not seq.block_table for seq in seqs):
        return "preempted"
    if any(seq.num_output_tokens for seq in seqs):
        return "decoding"
    return "in its prefill" if seqs[0].block_table else "waiting"


def run(engine, requests, num_steps=None):
    """Add the requests, step until all is done or `num_steps` times; {request id: its last output if it is finished}"""
    for request_id, (prompt, one) in requests.items():
        engine.add_request(request_id, prompt, one)
    done = {}
    while engine.has_unfinished_requests() and num_steps != 0:
        done |= {output.request_id: output for output in engine.step().outputs if output.finished}
        num_steps = None if num_steps is None else num_steps - 1
    return done


@pytest.fixture(scope="module")
def undisturbed(folder):
    """What each request gets in an engine without the others."""
    requests = {"first": OTHERS[0], "second": OTHERS[1], **TARGETS}
    return {
        request_id: summary(run(make_llm(folder).engine, {request_id: request})[request_id])
        for request_id, request in requests.items()
    }


def abort_after(engine, requests, num_steps):
    """Abort "target" after `num_steps` steps, and let the others go on: (where it was, its output, theirs)."""
    engine.reset_prefix_cache()
    done = run(engine, requests, num_steps)
    state = state_of(engine, "target")
    blocks = {block for seq in sequences_of(engine, "target") for block in seq.block_table}
    num_free_before = engine.get_stats().num_free_blocks
    output = engine.abort_request("target")
    assert engine.get_stats().num_free_blocks == num_free_before + len(blocks)
    assert sequences_of(engine, "target") == []
    if len(requests) == 1:
        assert_at_rest(engine)
    assert engine.abort_request("target") is None
    later = run(engine, {})
    assert "target" not in later
    assert_at_rest(engine)
    return state, output, {**done, **later}


@pytest.mark.parametrize(("name", "options"), list(zip([*TARGETS, *TARGETS], ENGINES, strict=True)))
def test_abort_at_any_moment(folder, undisturbed, name, options):
    """After each even number of steps: it ends at once, its blocks are free, and others get what they always get."""
    engine = make_llm(folder, **ENGINES[options][0]).engine
    expected, met = undisturbed[name], set()
    requests = {"first": OTHERS[0], "target": TARGETS[name], "second": OTHERS[1]}
    if "num_kv_blocks" in ENGINES[options][0]:
        requests["target"] = requests.pop("target")  # the last one is preempted
    for num_steps in range(0, 60, 2):
        state, output, done = abort_after(engine, requests, num_steps)
        met.add(state)
        assert summary(done["first"]) == undisturbed["first"]
        assert summary(done["second"]) == undisturbed["second"]
        if state is None:
            assert output is None
            assert summary(done["target"]) == expected
            break
        assert "target" not in done
        assert output.finished
        for completion, whole in zip(output.outputs, expected, strict=True):
            if completion.finish_reason != "abort":
                assert summary(output)[completion.index] == whole
                continue
            assert completion.stop_reason is None
            assert completion.token_ids == whole[2][: len(completion.token_ids)]
            assert completion.text == TOKENIZER.decode(completion.token_ids, skip_special_tokens=True)
        assert "abort" in {completion.finish_reason for completion in output.outputs}
    assert met == ENGINES[options][1] | {None}


def test_abort_after_some_samples_have_ended(folder):
    """Those keep their reasons and texts; the blocks of the others are freed."""
    engine = make_llm(folder).engine
    requests = {"target": (ids(19, 20), letters(40, seed=20, n=3, stop="ab", stop_token_ids=LETTERS[2:3]))}
    (whole,) = run(engine, requests).values()
    ends = sorted(len(completion.token_ids) for completion in whole.outputs)
    assert ends[0] < ends[2]
    _, output, _ = abort_after(engine, requests, ends[0])
    reasons = [completion.finish_reason for completion in output.outputs]
    assert sorted(set(reasons)) == ["abort", "stop"]
    for completion, one in zip(output.outputs, whole.outputs, strict=True):
        assert completion.finish_reason == "abort" or completion == one


def test_abort_shows_what_was_held_back(llm):
    """The text of an aborted request is that of its tokens, though it ends with half a stop string."""
    one = params(9, seed=1, stop="abcd", logits_processors=force([A, B, C, D, A, A, A, A, A]))
    run(llm.engine, {"target": (ids(5), one)}, 3)
    (completion,) = llm.engine.abort_request("target").outputs
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("abc", [A, B, C], "abort")


@pytest.mark.parametrize("victim", ["itself", "another", "all"])
def test_abort_in_the_middle_of_a_step(folder, undisturbed, victim):
    """Called while a step is in flight, here by a logits processor: what it computes for the victim is dropped."""
    engine = make_llm(folder).engine
    victims = {"itself": ["target"], "another": ["second"], "all": ["target", "second", "first"]}[victim]

    def abort(output_token_ids, logits):
        if len(output_token_ids) == 3:
            for request_id in victims:
                engine.abort_request(request_id)
        return logits

    target = (ids(19, 20), params(6, seed=20, logits_processors=[abort]))
    done = run(engine, {"first": OTHERS[0], "target": target, "second": OTHERS[1]})
    for request_id in {"first", "second"} - set(victims):
        assert summary(done[request_id]) == undisturbed[request_id]
    assert not set(victims) & set(done)
    assert_at_rest(engine)
