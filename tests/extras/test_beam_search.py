"""Beam search equals `transformers`' beam search (`early_stopping=False`), token for token in float32.

One prompt at a time there, any number here; small caches force beams to be preempted, and to be swapped or recomputed.
"""

import pytest
import torch

from nanovllm_extras import LLM, BeamSearchParams, SamplingParams

PROMPT_LENS = (3, 17, 40)


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(300, (n,), generator=generator).tolist() for n in PROMPT_LENS]


def make_llm(checkpoint, eos, **options):
    llm = LLM(checkpoint[0], dtype="float32", **options)
    llm.engine.input_processor.eos_token_ids = frozenset(eos)
    return llm


def cut(tokens, num_prompt_tokens, eos):
    """`transformers` fills finished sequences up; what counts ends with the first end token."""
    ends = [i for i, token in enumerate(tokens) if i >= num_prompt_tokens and token in eos]
    return tokens[: ends[0] + 1] if ends else tokens


def hf_beams(checkpoint, prompt, eos, width, length_penalty, max_tokens):
    with torch.no_grad():
        output = checkpoint[1].generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            num_beams=width,
            num_return_sequences=width,
            length_penalty=length_penalty,
            early_stopping=False,
            do_sample=False,
            eos_token_id=list(eos) or None,
            pad_token_id=0,
        )
    return [cut(tokens, len(prompt), eos) for tokens in output.tolist()]


@pytest.mark.parametrize(
    ("eos", "length_penalty", "width"),
    [((), 1.0, 3), ((7,), 2.0, 2), ((7, 11, 19, 50, 231), 0.0, 4), ((7, 11, 19, 50, 231), 2.0, 3)],
)
def test_equals_transformers(tiny_checkpoint, prompts, eos, length_penalty, width):
    llm = make_llm(tiny_checkpoint, eos)
    outputs = llm.beam_search(prompts, BeamSearchParams(width, 12, length_penalty=length_penalty))
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = hf_beams(tiny_checkpoint, prompt, eos, width, length_penalty, 12)
        assert [sequence.tokens for sequence in output.sequences] == expected
    assert llm.get_stats().num_free_blocks == llm.get_stats().num_kv_blocks


SCARCE = {
    "budget 7": {"max_num_batched_tokens": 7, "block_size": 8},
    "few blocks": {"num_kv_blocks": 15, "block_size": 4},
    "few blocks, swapping": {
        "num_kv_blocks": 15,
        "block_size": 4,
        "preemption_mode": "swap",
        "swap_space_bytes": 1 << 20,
    },
    "few blocks, no prefix caching": {"num_kv_blocks": 15, "block_size": 4, "enable_prefix_caching": False},
}


@pytest.mark.parametrize("options", SCARCE.values(), ids=SCARCE)
def test_the_engine_around_it_changes_nothing(tiny_checkpoint, prompts, options):
    expected = make_llm(tiny_checkpoint, (7,)).beam_search(prompts, BeamSearchParams(4, 12))
    llm = make_llm(tiny_checkpoint, (7,), **options)
    outputs = llm.beam_search(prompts, BeamSearchParams(4, 12))
    assert [[s.tokens for s in o.sequences] for o in outputs] == [[s.tokens for s in o.sequences] for o in expected]
    assert llm.get_stats().num_free_blocks == llm.get_stats().num_kv_blocks
    if "num_kv_blocks" in options:
        assert llm.get_stats().num_preemptions > 0


def test_cum_logprob_is_that_of_a_forward_pass(tiny_checkpoint, prompts):
    (output,) = make_llm(tiny_checkpoint, ()).beam_search(prompts[1], BeamSearchParams(3, 8))
    for sequence in output.sequences:
        with torch.no_grad():
            logprobs = tiny_checkpoint[1](torch.tensor([sequence.tokens])).logits[0].log_softmax(-1)
        n = len(prompts[1])
        expected = sum(logprobs[i - 1, sequence.tokens[i]].item() for i in range(n, len(sequence.tokens)))
        assert sequence.cum_logprob == pytest.approx(expected, abs=1e-4)


def test_ignore_eos(tiny_checkpoint, prompts):
    params = BeamSearchParams(3, 10, ignore_eos=True)
    with_end = make_llm(tiny_checkpoint, (7, 231)).beam_search(prompts, params)
    without = make_llm(tiny_checkpoint, ()).beam_search(prompts, params)
    assert [[s.tokens for s in o.sequences] for o in with_end] == [[s.tokens for s in o.sequences] for o in without]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"beam_width": 0}, ValueError),
        ({"beam_width": 2.0}, TypeError),
        ({"max_tokens": 0}, ValueError),
        ({"length_penalty": float("nan")}, ValueError),
        ({"ignore_eos": 1}, TypeError),
    ],
)
def test_bad_parameters_are_named(fields, error):
    (name,) = fields
    with pytest.raises(error, match=name):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **fields})


def test_a_width_that_the_engine_cannot_serve_is_refused(tiny_checkpoint):
    llm = make_llm(tiny_checkpoint, (), max_num_seqs=3)
    with pytest.raises(ValueError, match=r"beam_width must be at most 3 .* got 4"):
        llm.beam_search([[1, 2]], BeamSearchParams(4, 4))
    with pytest.raises(TypeError, match="BeamSearchParams"):
        llm.beam_search([[1, 2]], {"beam_width": 2})
    assert not llm.engine.has_unfinished_requests()


def test_a_search_beside_requests_that_run_and_wait_already(tiny_checkpoint, prompts):
    """In a small cache of the core's scheduler, whose queues are ordered when the search begins."""
    options = {"num_kv_blocks": 24, "block_size": 4, "attention_backend": "torch", "enforce_eager": True}
    expected = make_llm(tiny_checkpoint, ()).beam_search(prompts, BeamSearchParams(3, 12))
    greedy = SamplingParams(temperature=0, max_tokens=20)
    answers = make_llm(tiny_checkpoint, ()).generate(prompts, greedy)
    llm = make_llm(tiny_checkpoint, (), **options)
    assert type(llm.engine.scheduler.waiting) is list
    stream = llm.stream([*prompts, *prompts], greedy)
    next(stream)
    outputs = llm.beam_search(prompts, BeamSearchParams(3, 12))
    for output, one in zip(outputs, expected, strict=True):
        assert [beam.tokens for beam in output.sequences] == [beam.tokens for beam in one.sequences]
    found = {output.request_id: output.outputs[0].token_ids for output in stream if output.finished}
    assert [found[key] for key in sorted(found, key=int)] == [one.outputs[0].token_ids for one in answers] * 2
    assert llm.get_stats().num_preemptions > 0


@pytest.mark.parametrize("num_steps", [0, 3])
def test_an_aborted_search_owns_nothing(tiny_checkpoint, prompts, num_steps):
    engine = make_llm(tiny_checkpoint, ()).engine
    engine.add_request("beams", prompts[1], BeamSearchParams(3, 12))
    for _ in range(num_steps):
        engine.step()
    output = engine.abort_request("beams")
    assert (output.finished, output.sequences) == (True, [])
    stats = engine.get_stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_kv_blocks
    assert not engine.has_unfinished_requests()


def test_a_search_ends_if_no_token_can_be_sampled(tiny_checkpoint, prompts, monkeypatch):
    """As any other request (`test_nothing_to_sample.py`)."""
    llm = make_llm(tiny_checkpoint, (), attention_backend="torch", enforce_eager=True)
    model, calls = type(llm.engine.runner.model), iter(range(100))
    compute_logits = model.compute_logits

    def broken(self, hidden):
        logits = compute_logits(self, hidden)
        return logits if next(calls) < 2 else torch.full_like(logits, torch.nan)

    monkeypatch.setattr(model, "compute_logits", broken)
    (output,) = llm.beam_search([prompts[0]], BeamSearchParams(3, 12))
    assert (output.finished, output.sequences) == (True, [])
    assert next(calls) == 3, "no step after the one without a token"
    assert llm.get_stats().num_free_blocks == llm.get_stats().num_kv_blocks
