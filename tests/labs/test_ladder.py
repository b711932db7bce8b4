"""Each program of the ladder gives the tokens that `transformers` gives, also when memory is full."""

import difflib
import importlib
import json
import random
from pathlib import Path

import pytest
import torch

from labs import (
    cached,
    continuous,
    engine_options,
    mixed_batches,
    on_demand,
    one_file,
    paged,
    prefix_cache,
    recompute,
    static_batch,
)
from labs.ladder import compare_programs, compare_with_claims, plot
from labs.model import TINY_QWEN3, Model
from tests.conftest import hf_greedy

MAX_MODEL_LEN = 64
PROGRAMS = {
    "recompute": lambda folder: recompute.Engine(folder),
    "cached": lambda folder: cached.Engine(folder, MAX_MODEL_LEN),
    "static_batch": lambda folder: static_batch.Engine(folder, 3 * MAX_MODEL_LEN, MAX_MODEL_LEN),
    "continuous": lambda folder: continuous.Engine(folder, 3 * MAX_MODEL_LEN, MAX_MODEL_LEN),
    "paged": lambda folder: paged.Engine(folder, 40, 4),
    "on_demand": lambda folder: on_demand.Engine(folder, 20, 4),
    "mixed_batches": lambda folder: mixed_batches.Engine(folder, 20, 4, 16),
    "prefix_cache": lambda folder: prefix_cache.Engine(folder, 20, 4, 16),
    "one_file": lambda folder: one_file.Engine(folder, 20, 4, 16),
    "engine": lambda folder: engine_options.Engine(folder, 20, 4, 16),
    "engine, overlap": lambda folder: engine_options.Engine(folder, 20, 4, 16, fast_layers=True, overlap=True),
}


def random_requests(chance, vocab_size, num=7, longest=30):
    """Return prompts and limits of different lengths, from one token on. Some prompts share more than a block of 4."""
    beginning = [chance.randrange(vocab_size) for _ in range(11)]
    prompts = []
    for _ in range(num):
        own = [chance.randrange(vocab_size) for _ in range(chance.randint(1, longest - 11))]
        prompts.append(beginning[: chance.choice((0, 3, 8, 11))] + own)
    return prompts, [chance.randint(1, 24) for _ in range(num)]


@pytest.fixture(scope="module")
def expected_of(tiny_checkpoint):
    """Return a function that gives the expected outputs. They stop at the end tokens that the programs use."""
    folder, model = tiny_checkpoint
    end_token_ids = Model(folder).end_token_ids

    def greedy(prompts, limits):
        outputs = []
        for prompt, limit in zip(prompts, limits, strict=True):
            tokens = hf_greedy(model, prompt, limit)
            ends = [i for i, token_id in enumerate(tokens) if token_id in end_token_ids]
            outputs.append(tokens[: ends[0] + 1] if ends else tokens)
        return outputs

    return greedy


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_is_greedy_decoding(program, tiny_checkpoint, expected_of):
    folder, model = tiny_checkpoint
    prompts, limits = random_requests(random.Random(program), model.config.vocab_size)
    engine = PROGRAMS[program](folder)
    expected = expected_of(prompts, limits)
    assert engine.generate(prompts, limits) == expected
    assert engine.generate(prompts[:2], 5) == expected_of(prompts[:2], [5, 5]), "the same engine again"


# ---- programs whose memory fills up


POOLS = ["on_demand", "mixed_batches", "prefix_cache", "one_file"]


@pytest.mark.parametrize("program", POOLS)
def test_a_random_pool(program, tiny_checkpoint):
    engines = [check_random_pool(program, seed, tiny_checkpoint) for seed in range(3 if program == "one_file" else 2)]
    schedulers = [engine.scheduler for engine in engines]
    assert sum(scheduler.num_preemptions for scheduler in schedulers) > 1, "pools were not small enough"
    if program in ("prefix_cache", "one_file"):
        assert sum(scheduler.num_cached_tokens for scheduler in schedulers) > 20, "nothing was found again"
    if program == "one_file":
        assert sum(engine.num_copies for engine in engines) > 5, "no block was copied"


def check_random_pool(program, seed, tiny_checkpoint):
    """Compare a program with `recompute.py` in a tight pool. Check the owners of all blocks after each step."""
    folder, model = tiny_checkpoint
    chance = random.Random(seed)
    block_size, budget = chance.choice((1, 3, 4, 16)), chance.choice((1, 5, 16, 100))
    prompts, limits = random_requests(chance, model.config.vocab_size)
    prompts[-1] = list(prompts[0])  # a prompt twice
    longest = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
    sizes = [-(-longest // block_size) + chance.randint(0, 3), block_size, budget]
    module = importlib.import_module(f"labs.{program}")
    engine = module.Engine(folder, *(sizes[:2] if program == "on_demand" else sizes))
    n = chance.choice((2, 3)) if program == "one_file" else 1
    scheduler, manager = engine.scheduler, engine.scheduler.block_manager
    schedule, count = scheduler.schedule, engine.count
    num_stored = num_reserved = 0

    def schedule_and_check():
        chunks = schedule()
        if program != "on_demand":
            assert 1 <= sum(num for _, num in chunks) <= budget
        owned = [block_id for seq in scheduler.running for block_id in seq.block_table]
        if hasattr(manager, "num_owners"):
            assert manager.num_owners == [owned.count(block_id) for block_id in range(manager.num_blocks)]
        else:
            assert len(set(owned)) == len(owned)
        assert sorted(manager.free) == sorted(set(range(manager.num_blocks)) - set(owned))
        return chunks

    def check_and_count(running):
        nonlocal num_stored, num_reserved
        slots = {
            (s.block_table[i // block_size], i % block_size) for s in running for i in range(s.num_computed_tokens)
        }
        num_stored += len(slots)
        num_reserved += len({block_id for seq in running for block_id in seq.block_table}) * block_size
        count(running)

    scheduler.schedule, engine.count = schedule_and_check, check_and_count
    options = {"n": n} if program == "one_file" else {}
    assert engine.generate(prompts, limits, **options) == simple_answers(folder, prompts, limits, n)
    assert len(manager.free) == manager.num_blocks
    assert (engine.num_stored, engine.num_reserved) == (num_stored, num_reserved)
    return engine


def simple_answers(folder, prompts, limits, n=1):
    """Return `n` answers to each prompt, each computed by itself by the simplest program, from its first token on."""
    engine = recompute.Engine(folder)
    answers = []
    for prompt, limit in zip(prompts, limits, strict=True):
        hidden = engine.model(torch.tensor(prompt), torch.arange(len(prompt)), engine.attend)
        for first in engine.model.logits(hidden[-1]).topk(n).indices.tolist():
            is_finished = limit == 1 or first in engine.model.end_token_ids
            rest = [] if is_finished else engine.generate([[*prompt, first]], limit - 1)[0]
            answers.append([first, *rest])
    return answers


def test_a_prompt_is_cut_into_chunks_while_another_sequence_decodes(tiny_checkpoint):
    engine = mixed_batches.Engine(tiny_checkpoint[0], num_blocks=32, block_size=4, max_num_batched_tokens=8)
    schedule, steps = engine.scheduler.schedule, []

    def schedule_and_note():
        chunks = schedule()
        steps.append([num_new_tokens for _, num_new_tokens in chunks])
        return chunks

    engine.scheduler.schedule = schedule_and_note
    prompts = [list(range(3, 9)), list(range(20, 40))]
    assert engine.generate(prompts, 4) == simple_answers(tiny_checkpoint[0], prompts, [4, 4])
    # 20 tokens: 2 beside the first prompt, then 7 in each step, beside one decode; then both decode
    assert steps == [[6, 2], [1, 7], [1, 7], [1, 4], [1], [1], [1]]


# ---- the prefix cache


@pytest.mark.parametrize(("num_tokens", "num_found"), [(17, 16), (16, 12)])
@pytest.mark.parametrize("program", [prefix_cache, one_file])
def test_what_is_cached_is_not_computed_again(program, num_tokens, num_found, tiny_checkpoint):
    """The last token is always computed, because a step needs its logits."""
    engine = program.Engine(tiny_checkpoint[0], num_blocks=32, block_size=4, max_num_batched_tokens=64)
    prompt = list(range(3, 3 + num_tokens))
    first = engine.generate([prompt], 4)
    assert engine.scheduler.num_cached_tokens == 0
    assert engine.generate([prompt], 4) == first
    assert engine.scheduler.num_cached_tokens == num_found


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning(tiny_checkpoint):
    engine = one_file.Engine(tiny_checkpoint[0], num_blocks=8, block_size=4, max_num_batched_tokens=64)
    prompt = list(range(3, 27))  # 24 tokens, six blocks
    engine.generate([prompt], 1)
    engine.generate([[1] * 15], 1)  # takes four: two that were never used, and the last two of the prompt
    engine.generate([prompt], 1)
    assert engine.scheduler.num_cached_tokens == 16


@pytest.mark.parametrize("program", [prefix_cache, one_file])
def test_a_block_is_found_only_behind_the_same_tokens(program, tiny_checkpoint, expected_of):
    """A + X, B + Y, then B + X: the block of X was computed after A."""
    folder, _ = tiny_checkpoint
    engine = program.Engine(folder, num_blocks=32, block_size=4, max_num_batched_tokens=64)
    a, b, x, y = ([n] * 4 for n in (5, 6, 7, 8))
    prompts = [[*a, *x, 9], [*b, *y, 9], [*b, *x, 9]]
    for prompt in prompts:
        assert engine.generate([prompt], 6) == expected_of([prompt], [6])
    assert engine.scheduler.num_cached_tokens == 4, "only b's block"


# ---- several answers to one prompt


@pytest.fixture
def forked(tiny_checkpoint):
    """Return a function that makes an engine with blocks of 4, and a list of what each step computes."""

    def make(num_blocks=32, budget=64):
        engine = one_file.Engine(tiny_checkpoint[0], num_blocks, 4, budget)
        schedule, steps = engine.scheduler.schedule, []

        def schedule_and_note():
            chunks = schedule()
            steps.append([(list(seq.block_table), num_new_tokens) for seq, num_new_tokens in chunks])
            return chunks

        engine.scheduler.schedule = schedule_and_note
        return engine, steps

    return make


def test_answers_begin_with_the_most_likely_tokens(forked, tiny_checkpoint):
    """The rest of each answer is what `transformers` decodes after that first token."""
    _, model = tiny_checkpoint
    prompts = [list(range(5, 15)), list(range(40, 48))]
    engine, steps = forked()
    engine.model.end_token_ids = set()
    expected = []
    for prompt in prompts:
        with torch.no_grad():
            firsts = model(torch.tensor([prompt])).logits[0, -1].topk(3).indices.tolist()
        expected += [[first, *hf_greedy(model, [*prompt, first], 7)] for first in firsts]
    assert engine.generate(prompts, 8, n=3) == expected
    first, second = (table[0] for table, _ in steps[0])
    assert [table[0] for table, _ in steps[1]] == [first] * 3 + [second] * 3, "in the order of their prompts"
    assert engine.generate(prompts, 8) == expected[::3], "one answer is greedy"


@pytest.mark.parametrize(("num_tokens", "n", "num_copies"), [(6, 1, 0), (6, 4, 3), (8, 4, 0)])
def test_only_a_shared_block_that_is_partly_filled_is_copied(num_tokens, n, num_copies, forked, tiny_checkpoint):
    engine, steps = forked()
    prompt = list(range(5, 5 + num_tokens))
    assert engine.generate([prompt], 12, n=n) == simple_answers(tiny_checkpoint[0], [prompt], [12], n)
    assert engine.num_copies == num_copies, "the last owner does not copy"
    assert [num for _, num in steps[0]] == [num_tokens], "the prompt is computed once"
    [(prompt_table, _)] = steps[0]
    tables = [table for table, _ in steps[1]]
    num_full = num_tokens // 4
    assert len(tables) == n
    assert {tuple(table[:num_full]) for table in tables} == {tuple(prompt_table[:num_full])}, "full blocks are shared"
    assert len({table[num_full] for table in tables}) == n, "each writes to a block of its own"
    if num_tokens % 4:
        assert tables[-1] == prompt_table, "the last owner keeps the block"


def test_the_only_owner_that_is_left_does_not_copy(forked, tiny_checkpoint):
    """The second answer ends with its first token. Then the first answer is the only owner of the last block."""
    prompt = list(range(5, 11))
    expected = simple_answers(tiny_checkpoint[0], [prompt], [6], 2)
    engine, _ = forked()
    engine.model.end_token_ids = {expected[1][0]}
    assert expected[1][0] not in expected[0], "the test needs an answer without this token"
    assert engine.generate([prompt], 6, n=2) == [expected[0], expected[1][:1]]
    assert engine.num_copies == 0


def test_a_pool_for_one_answer_computes_several(forked, tiny_checkpoint):
    """Five blocks hold one answer of 20 tokens. The others are preempted, and find the prompt's full blocks again."""
    prompt = list(range(5, 15))
    engine, _ = forked(num_blocks=5, budget=5)
    assert engine.generate([prompt], 10, n=4) == simple_answers(tiny_checkpoint[0], [prompt], [10], 4)
    assert engine.scheduler.num_preemptions >= 3
    assert engine.scheduler.num_cached_tokens >= 8


@pytest.mark.parametrize("n", [0, 301])
def test_the_number_of_answers_is_checked(n, forked):
    engine, _ = forked()
    with pytest.raises(ValueError, match=f"n must be >= 1 and <= 300, .*got {n}"):
        engine.generate([[1, 2, 3]], 4, n=n)


# ---- bad input


EMPTY, TOO_LONG = [([], 1), ([1], 0)], [([1] * 200, 1), ([1], 200)]  # `recompute.py` keeps nothing: all lengths fit


@pytest.mark.parametrize("program", list(PROGRAMS)[:9])
def test_what_does_not_fit_is_refused(program, tiny_checkpoint):
    engine = PROGRAMS[program](tiny_checkpoint[0])
    for prompt, max_tokens in EMPTY + (TOO_LONG if program != "recompute" else []):
        with pytest.raises(ValueError, match="prompt and max_tokens must be >= 1"):
            engine.generate([[1, 2], prompt], [3, max_tokens])
    assert len(engine.generate([[1, 2]], 3)[0]) <= 3, "the refused requests are gone"


def test_neighbours_differ_in_one_idea():
    """The programs can be compared with `diff`: no step of the ladder is much larger than the others."""
    names = ["recompute", "cached", "static_batch", "continuous", *["paged", *POOLS]]
    programs = [
        (Path(one_file.__file__).parent / f"{name}.py").read_text(encoding="utf-8").splitlines() for name in names
    ]
    for name, before, after in zip(names[1:], programs[:-1], programs[1:], strict=True):
        changed = [
            line for line in difflib.unified_diff(before, after, n=0, lineterm="") if line[:2] not in ("--", "++")
        ]
        num_changed = sum(line[0] in "-+" for line in changed)
        assert 30 < num_changed <= 120, f"{name}.py differs in {num_changed} lines from the program before it"


def test_sizes_are_checked(tiny_checkpoint):
    with pytest.raises(ValueError, match="block_size must be >= 1, got 0"):
        one_file.Engine(tiny_checkpoint[0], num_blocks=4, block_size=0, max_num_batched_tokens=8)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "qwen3", "attention_bias": True},
        {"model_type": "qwen3", "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}},
        {"model_type": "qwen3", "use_sliding_window": True},
    ],
)
def test_the_network_says_which_models_it_reads(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"plain Qwen3 models, got model_type {config['model_type']!r}"):
        Model(tmp_path)


@pytest.mark.slow
def test_the_ladder(capsys, tmp_path):
    """Run all programs with the bundled model and a part of the work. The ladder raises if any token differs."""
    results = compare_programs(TINY_QWEN3, num_slots=512, num_requests=12)
    assert [result.name for result in results][:11] == [
        "recompute everything",
        "KV cache, one by one",
        "static batches",
        "continuous batching",
        "blocks, reserved",
        "blocks on demand",
        "mixed batches",
        "prefix cache",
        "one_file.py",
        "nanovllm, PyTorch layers",
        "nanovllm, fast layers",
    ]
    num_steps = [result.num_steps for result in results[2:8]]
    assert num_steps == sorted(set(num_steps), reverse=True), "each idea needs fewer steps"
    in_rows, reserved, on_demand_, mixed, cached_prefix, complete = results[3:9]
    assert max(mixed.waste, on_demand_.waste) < reserved.waste < in_rows.waste
    assert in_rows.num_sequences < reserved.num_sequences < on_demand_.num_sequences < cached_prefix.num_sequences
    assert complete.num_steps == cached_prefix.num_steps, "with one answer for each prompt"
    assert "nanovllm, PyTorch layers: Its layers are slower" in capsys.readouterr().out
    assert "Paging gives" in compare_with_claims(results)
    plot(results, tmp_path / "ladder.png")
    assert (tmp_path / "ladder.png").stat().st_size > 10_000


@pytest.mark.parametrize("options", [[], ["--fast-layers", "--overlap"]])
def test_options_do_not_change_the_answers(options, run_main):
    questions = ["What is the KV cache?", "Who are you?"]
    model = Model(TINY_QWEN3)
    outputs = one_file.Engine(TINY_QWEN3, 64, 16, 64).generate([model.encode(one) for one in questions], 100)
    assert run_main(engine_options, *options, *questions) == [
        line for token_ids in outputs for line in model.decode(token_ids).splitlines()
    ]


def test_graphs_need_fast_layers(run_main, capsys):
    with pytest.raises(SystemExit):
        run_main(engine_options, "--cuda-graphs")
    assert "--cuda-graphs needs --fast-layers" in capsys.readouterr().err
