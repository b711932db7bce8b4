"""Each program of the ladder gives the tokens that `transformers` gives, and `one_file.py` also when memory is full."""

import json
import random

import pytest

from labs import cached, continuous, engine_options, one_file, paged, recompute, static_batch
from labs.ladder import compare_programs, compare_with_claims, make_requests, plot
from labs.model import TINY_QWEN3, Model
from tests.conftest import hf_greedy

MAX_MODEL_LEN = 64
PROGRAMS = {
    "recompute": lambda folder: recompute.Engine(folder),
    "cached": lambda folder: cached.Engine(folder, MAX_MODEL_LEN),
    "static_batch": lambda folder: static_batch.Engine(folder, 3 * MAX_MODEL_LEN, MAX_MODEL_LEN),
    "continuous": lambda folder: continuous.Engine(folder, 3 * MAX_MODEL_LEN, MAX_MODEL_LEN),
    "paged": lambda folder: paged.Engine(folder, 40, 4),
    "one_file": lambda folder: one_file.Engine(folder, 20, 4, 16),
    "engine": lambda folder: engine_options.Engine(folder, 20, 4, 16),
    "engine, fast layers": lambda folder: engine_options.Engine(folder, 20, 4, 16, fast_layers=True),
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_one_file_in_random_pools(seed, tiny_checkpoint, expected_of):
    check_random_pool(seed, tiny_checkpoint, expected_of)


def test_one_file_in_a_random_pool(tiny_checkpoint, expected_of):
    schedulers = [check_random_pool(seed, tiny_checkpoint, expected_of) for seed in range(4)]
    assert sum(scheduler.num_preemptions for scheduler in schedulers) > 5, "pools were not small enough"
    assert sum(scheduler.num_cached_tokens for scheduler in schedulers) > 50, "nothing was found again"


def check_random_pool(seed, tiny_checkpoint, expected_of):
    """Check after each step that free blocks and owners agree with the block tables. Return the scheduler."""
    folder, model = tiny_checkpoint
    chance = random.Random(seed)
    block_size, budget = chance.choice((1, 3, 4, 16)), chance.choice((1, 5, 16, 100))
    prompts, limits = random_requests(chance, model.config.vocab_size)
    longest = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
    engine = one_file.Engine(folder, -(-longest // block_size) + chance.randint(0, 3), block_size, budget)
    scheduler, manager, schedule = engine.scheduler, engine.scheduler.block_manager, engine.scheduler.schedule

    def schedule_and_check():
        chunks = schedule()
        assert 1 <= sum(num for _, num in chunks) <= budget
        owned = [block_id for seq in scheduler.running for block_id in seq.block_table]
        assert manager.num_owners == [owned.count(block_id) for block_id in range(manager.num_blocks)]
        assert set(manager.free) == set(range(manager.num_blocks)) - set(owned)
        return chunks

    scheduler.schedule = schedule_and_check
    assert engine.generate(prompts, limits) == expected_of(prompts, limits)
    assert len(manager.free) == manager.num_blocks
    return scheduler


@pytest.mark.parametrize(("num_tokens", "num_found"), [(18, 16), (17, 16), (16, 12)])
def test_what_is_cached_is_not_computed_again(num_tokens, num_found, tiny_checkpoint):
    """The last token is always computed, because a step needs its logits."""
    engine = one_file.Engine(tiny_checkpoint[0], num_blocks=32, block_size=4, max_num_batched_tokens=64)
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


def test_a_block_is_found_only_behind_the_same_tokens(tiny_checkpoint, expected_of):
    """A + X, B + Y, then B + X: the block of X was computed after A."""
    folder, _ = tiny_checkpoint
    engine = one_file.Engine(folder, num_blocks=32, block_size=4, max_num_batched_tokens=64)
    a, b, x, y = ([n] * 4 for n in (5, 6, 7, 8))
    prompts = [[*a, *x, 9], [*b, *y, 9], [*b, *x, 9]]
    for prompt in prompts:
        assert engine.generate([prompt], 6) == expected_of([prompt], [6])
    assert engine.scheduler.num_cached_tokens == 4, "only b's block"


EMPTY, TOO_LONG = [([], 1), ([1], 0)], [([1] * 200, 1), ([1], 200)]  # `recompute.py` keeps nothing: all lengths fit


@pytest.mark.parametrize(
    ("program", "prompt", "max_tokens"),
    [("recompute", *case) for case in EMPTY]
    + [(program, *case) for program in list(PROGRAMS)[1:6] for case in EMPTY + TOO_LONG],
)
def test_what_does_not_fit_is_refused(program, prompt, max_tokens, tiny_checkpoint):
    folder, _ = tiny_checkpoint
    engine = PROGRAMS[program](folder)
    with pytest.raises(ValueError, match="prompt and max_tokens must be >= 1"):
        engine.generate([[1, 2], prompt], [3, max_tokens])
    assert len(engine.generate([[1, 2]], 3)[0]) <= 3, "the refused requests are gone"


def test_the_one_file_has_at_most_300_lines():
    with open(one_file.__file__, encoding="utf-8") as file:
        assert len(file.readlines()) <= 300


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


def test_requests_of_the_ladder_without_a_tokenizer(tiny_checkpoint):
    prompts, limits = make_requests(Model(tiny_checkpoint[0]), 5)
    assert len({tuple(prompt) for prompt in prompts}) == len(limits) == 5
    assert len({tuple(prompt[:48]) for prompt in prompts}) == 1, "they begin alike"


@pytest.mark.slow
def test_the_ladder(capsys, tmp_path):
    """Run all programs with the bundled model and a part of the work. The ladder raises if any token differs."""
    results = compare_programs(TINY_QWEN3, num_slots=512, num_requests=12)
    assert [result.name for result in results][:8] == [
        "recompute everything",
        "KV cache, one by one",
        "static batches",
        "continuous batching",
        "blocks, reserved",
        "one_file.py",
        "nanovllm, PyTorch layers",
        "nanovllm, fast layers",
    ]
    in_batches, in_rows, reserved, one_file_py = results[2:6]
    assert one_file_py.num_steps < reserved.num_steps < in_rows.num_steps < in_batches.num_steps
    assert one_file_py.waste < reserved.waste < in_rows.waste
    assert one_file_py.num_sequences > reserved.num_sequences > in_rows.num_sequences
    assert "Paging gives" in compare_with_claims(results)
    plot(results, tmp_path / "ladder.png")
    assert (tmp_path / "ladder.png").stat().st_size > 10_000


@pytest.mark.parametrize("options", [[], ["--fast-layers"], ["--fast-layers", "--overlap"]])
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
