"""The solutions of the exercises on sampling, overlap, speculation and several engines, against independent oracles.

The checker compares an answer with the solution, so the solution itself must be compared with something else: with
nanovllm's own functions, or with a plain program.
"""

from fractions import Fraction
from itertools import product
from random import Random

import pytest
import torch

from labs import one_file
from labs.learn.answers import load
from labs.learn.exercises import (
    draw_token,
    graph_padding,
    hand_over,
    placeholders,
    prefix_router,
    rejection_sampling,
    stop_strings,
    streaming_detokenizer,
    top_p,
    verify_draft,
)
from labs.learn.simulation import VOCABULARY, mix
from nanovllm import TINY_QWEN3
from nanovllm.detokenizer import Detokenizer
from nanovllm.sampler import apply_top_p, invert_distribution


def solution(module):
    return load(module.SOLUTION, module.__name__)


def test_top_p_is_that_of_the_sampler():
    generator = torch.Generator().manual_seed(0)
    for p in (0.01, 0.3, 0.8, 0.99, 1.0):
        logits = 3 * torch.randn(50, generator=generator, dtype=torch.float64)
        expected = apply_top_p(logits[None], torch.tensor([p], dtype=torch.float64)).softmax(-1)[0]
        torch.testing.assert_close(solution(top_p).apply_top_p(logits.softmax(0), p), expected)


def test_tokens_are_drawn_as_by_the_sampler():
    answer, random = solution(draw_token), Random(0)
    rows = []
    for seed in range(64):
        weights = [random.choice((0, 1, 2, 5)) for _ in range(7)] + [1]
        rows.append(([weight / 64 for weight in weights[:-1]] + [1 - sum(weights[:-1]) / 64], seed, seed % 5))
    probs = torch.tensor([row[0] for row in rows], dtype=torch.float64)
    uniforms = torch.tensor([answer.uniform(seed, position) for _, seed, position in rows], dtype=torch.float64)
    # a little more than u: `softmax` of logarithms rounds, and u is often exactly a sum
    assert answer.sample(rows) == invert_distribution(probs.log(), uniforms + 1e-9).tolist()


def test_streamed_text_is_the_text():
    answer, random = solution(streaming_detokenizer), Random(0)
    for _ in range(100):
        data = "".join(random.choices("aé块🙂", k=6)).encode()[: random.randint(1, 24)]
        cuts = sorted(random.choices(range(len(data) + 1), k=4))
        vocab = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        detokenizer, shown = answer.Detokenizer(vocab), ""
        for token_id in range(len(vocab)):
            shown += detokenizer.append(token_id)
            whole = b"".join(vocab[: token_id + 1]).decode(errors="ignore")  # without an incomplete end
            assert shown == whole
        assert shown + detokenizer.finish() == data.decode(errors="replace")


def test_stop_strings_are_those_of_the_detokenizer():
    from tokenizers import Tokenizer

    tokenizer, random = Tokenizer.from_file(str(TINY_QWEN3 / "tokenizer.json")), Random(0)
    ids = [tokenizer.token_to_id(text) for text in ("a", "b", "c")]
    for _ in range(200):
        stops = list({"".join(random.choices("ab", k=random.randint(1, 4))) for _ in range(random.randint(1, 3))})
        ours, theirs, shown = solution(stop_strings).Output(stops), Detokenizer(tokenizer, [], stops), ""
        for _ in range(8):
            letters = random.choices(range(3), k=random.randint(1, 3))  # one by one for the detokenizer
            shown += ours.append("".join("abc"[letter] for letter in letters))
            for letter in letters:
                theirs.append(ids[letter])
            assert (shown, ours.stop) == (theirs.text(theirs.stop_string is not None), theirs.stop_string)
            if ours.stop is not None:
                break
        else:
            assert shown + ours.finish() == theirs.text(is_finished=True)


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_overlap_does_not_change_tokens(block_size):
    requests = (((1, 2, 3), 5), ((0, 1), 6), ((2,), 3), ((3, 3), 9))
    run = placeholders.Run(solution(placeholders), (block_size, requests))
    seen = list(run.steps())
    for (prompt, max_tokens), seq in zip(requests, run.seqs.values(), strict=True):
        tokens, kept = list(prompt), 0
        for position in range(len(prompt) + max_tokens - 1):
            kept = mix(kept, tokens[position])
            if position >= len(prompt) - 1:
                tokens.append(kept % VOCABULARY)
                if tokens[-1] == placeholders.END:
                    break
        assert seq.token_ids == tokens
        computed = [tuple(tokens[:end]) for end in range(block_size, len(tokens), block_size) if end >= len(prompt)]
        assert set(computed) <= set(run.registered)
    assert not any(one.value.too_early for one in seen)


def test_padding_does_not_change_results():
    batches = ("ABC", "ABC", "AC", "A", "CB", "B")
    seen = list(graph_padding.run(solution(graph_padding), ((1, 4), batches)))
    lens = dict.fromkeys("ABC", 0)
    for one, batch in zip(seen, batches, strict=True):
        for name in batch:
            lens[name] += 1
        first = {"A": 10, "B": 20, "C": 30}
        assert one.value.results == tuple(sum(range(first[name], first[name] + lens[name])) for name in batch)
        assert one.value.damage == ()
        assert one.value.size == (1 if len(batch) == 1 else 4)


def test_drafts_do_not_change_tokens():
    verify, random = solution(verify_draft).verify, Random(0)
    for _ in range(100):
        prompt = random.choices(range(1, 5), k=3)
        expected = list(prompt)
        while len(expected) < 60 and expected[-1] != verify_draft.END:
            expected.append(verify_draft.next_token(expected))
        blocks, seq = one_file.BlockManager(30, 4), one_file.Sequence(list(prompt), 3, 99)
        while len(seq.token_ids) < 40 and seq.token_ids[-1] != verify_draft.END:
            drafts, sampled = verify_draft.propose(seq.token_ids, random.choices((0, 0, 1), k=random.randint(0, 4)))
            while len(seq.block_table) < blocks.num_blocks_for(len(seq.token_ids) + len(drafts)):
                seq.block_table.append(blocks.take())
            num_before = len(seq.token_ids)
            verify(seq, drafts, sampled, blocks)
            assert len(seq.token_ids) > num_before
            assert seq.num_computed_tokens == len(seq.token_ids) - 1
            assert len(seq.block_table) == blocks.num_blocks_for(seq.num_computed_tokens)
            assert len(blocks.free) == blocks.num_blocks - len(seq.block_table)
        assert seq.token_ids == expected[: len(seq.token_ids)]


@pytest.mark.parametrize(
    ("q", "p"),
    [((4, 4), (6, 2)), ((2, 2, 4), (4, 2, 2)), ((4, 2, 2), (2, 3, 3)), ((8, 0), (3, 5)), ((1, 7), (1, 7))],
)
def test_accepted_drafts_have_the_distribution_of_the_model(q, p):
    accept = solution(rejection_sampling).accept
    q, p = ([Fraction(one, 8) for one in row] for row in (q, p))
    found = [Fraction(0)] * len(p)
    grid = [Fraction(i, 8) for i in range(8)]  # the limits of these cases are multiples of 1/8, so sums are exact
    for (draft, share), u, v in product(enumerate(q), grid, grid):
        if share:
            found[accept([draft], [q], [p, p], [u, v, Fraction(0)])[0]] += share / 64
    assert found == p


def test_the_router_finds_what_a_block_manager_finds():
    random = Random(0)
    for block_size in (1, 2, 3):
        router = solution(prefix_router).Router(2, block_size)
        managers = [one_file.BlockManager(400, block_size) for _ in range(2)]
        for _ in range(60):
            prompt = random.choices((0, 1), k=random.randint(1, 9))
            for engine, manager in enumerate(managers):
                found = manager.find(one_file.Sequence(list(prompt), len(prompt), 1))
                assert router.num_cached(engine, prompt) == len(found) * block_size
            seq = one_file.Sequence(list(prompt), len(prompt), 1)
            engine = router.route(prompt)
            assert managers[engine].try_admit(seq)
            before, seq.num_computed_tokens = seq.num_computed_tokens, len(prompt)
            managers[engine].register(seq, before)


def test_two_engines_make_the_tokens_of_one():
    case = hand_over.Case(2, 5, 5, 1, ((5, 3), (6, 2), (3, 4), (1, 2)))
    case = case._replace(requests=tuple(hand_over.Request(*one) for one in case.requests))
    *ticks, total = hand_over.run(solution(hand_over), case)
    for i, (_, output, _) in enumerate(ticks[-1].value.tokens):
        prompt_len, max_tokens = case.requests[i]
        tokens = [10 * i + j for j in range(prompt_len)]
        for _ in range(max_tokens):
            read = kept = 0
            for token in tokens:
                kept = mix(kept, token)
                read = mix(read, kept)
            tokens.append(read % VOCABULARY)
        assert output == tuple(tokens[prompt_len:])
    assert not any(tick.value.notes for tick in ticks)
    assert total.value.num_moved == sum(-(-one.prompt_len // 2) for one in case.requests)
    assert sorted(ticks[-1].value.prefill) == list(range(5))
    assert sorted(ticks[-1].value.decode) == list(range(5))
