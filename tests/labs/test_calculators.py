"""The calculators print what can be worked out by hand, or counted in another way. (`test_kv_bytes.py` has its own.)"""

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks.common import QWEN3_06B, ModelShape, make_workload
from benchmarks.roofline import Rates
from labs.calculators import chunk_size, hit_rate, kv_bytes, kv_transfer, roofline, state_bytes, users_fit, waste
from nanovllm_extras import LLM, TINY_QWEN3_5
from tests.extras.models.architectures import ARCHITECTURES
from tests.hub_cache import put_into_cache

ROOT = Path(__file__).resolve().parents[2]


def save_config(folder, name, variant):
    """The config.json of a small model, and its class and config in transformers"""
    one = ARCHITECTURES[name]
    fields = {key: value for key, value in {**one.shape, **one.variants[variant]}.items() if value is not None}
    config = one.config_class(**fields, architectures=[one.class_name])
    config.save_pretrained(folder)
    return one.model_class, config


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (waste, ("--block-size", 0), "block_size must be >= 1"),
        (waste, ("--max-model-len", 100), "max_model_len >= 2011, the longest request"),
        (users_fit, ("--memory", "24GX"), "--memory must be a size such as 24GiB"),
        (users_fit, ("--memory", "1.2.3GB"), "--memory must be a size such as 24GiB"),
        (users_fit, ("--memory", "1GiB"), "no memory is left for the KV cache: of 1.00 GiB, weights take 1.11 GiB"),
        (users_fit, ("--memory", "9GiB", "--mean-len", 0), "--mean-len must be >= 1"),
        (users_fit, ("--memory", "9GiB", "--max-model-len", 500), "--mean-len must be <= max_model_len, got 1000 and"),
        (users_fit, ("--model", "org/none"), "'org/none' is not a folder and not available from the hub"),
        (roofline, ("--model", "org/none"), "'org/none' is not a folder and not available from the hub"),
        (roofline, ("--read-gb-s", 0, "--tflops", 1, "--launch-us", 1), "must be > 0"),
        (roofline, ("--read-gb-s", 1, "--tflops", 1, "--launch-us", 1, "--batch-size", 0), "--batch-size must be >= 1"),
        (chunk_size, ("--budget", 0), "must be >= 1"),
        (chunk_size, ("--cost", 0, 0, 1), "--cost must be >= 0, and fixed or per token > 0"),
        (chunk_size, ("--long-len", 2000), "--long-len must be in 1 … 1952, got 2000"),
        (kv_transfer, ("--gbits", 100, 0), "--tokens, --gbits and --tflops must be above 0"),
        (state_bytes, ("--tokens", 0), "--tokens must be >= 1"),
        (state_bytes, ("--model", QWEN3_06B), "layers keep states, "),
        (hit_rate, ("--num-users", 0), "num_users must be >= 1"),
        (hit_rate, ("--num-kv-blocks", 10), "num_kv_blocks * block_size >= 1120, the longest conversation"),
    ],
)
def test_bad_arguments_are_refused(hub_cache, run_main, capsys, module, arguments, message):
    with pytest.raises(SystemExit):
        run_main(module, *arguments)
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (waste, ()),
        (roofline, ("--read-gb-s", 30, "--tflops", 0.4, "--launch-us", 3)),
        (chunk_size, ("--cost", 5, 20, 5)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_pictures_are_drawn(tmp_path, run_main, module, arguments):
    run_main(module, *arguments, "--plot", tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


# ---- waste


def waste_of(contexts, block_size):
    """Of sequences that hold these numbers of tokens, in one step or another."""
    reserved = sum(-(-context // block_size) * block_size for context in contexts)
    return 1 - sum(contexts) / reserved


@pytest.mark.parametrize("block_size", [1, 16])
def test_waste_is_what_the_last_blocks_do_not_hold(block_size):
    workload = make_workload("tiny", [5, 30], [40, 3], vocab_size=1000, shared_len=0)
    contexts = [*range(5, 5 + 40), *range(30, 30 + 3)]  # in the step of its n-th output, a request holds prompt + n - 1
    slots = waste.count_slots(workload, block_size, 64)
    assert waste.waste_of_blocks(slots) == pytest.approx(waste_of(contexts, block_size))
    assert waste.mean_stored(slots) == pytest.approx(sum(contexts) / len(contexts))
    assert (waste_of(contexts, block_size) == 0) == (block_size == 1)


def test_ranges_are_counted_slot_by_slot():
    prompts, outputs = [5, 30, 7], [40, 3, 1]
    workload = make_workload("tiny", prompts, outputs, vocab_size=1000, shared_len=0)
    ranges = {"Max": [100] * 3, "Pow2": [5 + 64, 30 + 4, 7 + 1], "Oracle": [5 + 39, 30 + 2, 7 + 0]}
    expected = {}
    for rule, sizes in ranges.items():
        later = never = total = 0
        for prompt, output, size in zip(prompts, outputs, sizes, strict=True):
            for step in range(output):
                for slot in range(size):
                    total += 1
                    never += slot >= prompt + output - 1
                    later += prompt + step <= slot < prompt + output - 1
        expected[rule] = (later / total, never / total)
    assert waste.waste_by_rule(waste.count_slots(workload, 16, 100)) == {
        rule: pytest.approx(shares) for rule, shares in expected.items()
    }


# ---- users_fit


def test_users_of_qwen3_06b_by_hand(hub_cache, run_main):
    """596,049,920 weights of two bytes, 112 KiB of cache for a token: 23,503,962,112 bytes are left, 204,938 slots."""
    put_into_cache(hub_cache, "org/qwen", QWEN3_06B, ["config.json"])
    sizes = ("--memory", "24GiB", "--activations", "1GiB", "--context-len", 2048, 32_768)
    lines = run_main(users_fit, "--model", "org/qwen", *sizes)
    assert lines[0] == ("org/qwen: 24.00 GiB - weights 1.11 GiB - activations 1.00 GiB = 21.89 GiB for the KV cache")
    rows = {tuple(re.split(r" {2,}", line)[:2]): re.split(r" {2,}", line)[2:] for line in lines}
    assert rows["GQA of 8", "16 bits"] == ["114,688", "100", "6"]
    assert rows["GQA of 8", "8 bits"] == ["57,344", "200", "12"]
    assert rows["MHA", "16 bits"] == ["229,376", "50", "3"]
    assert rows["MQA", "16 bits"] == ["14,336", "800", "50"]
    assert rows["MLA of 512 + 64", "16 bits"] == ["32,256", "355", "22"]
    assert lines[-3:] == [
        "204,938 slots, users of 1,000 tokens on average, GQA of 8:",
        "  contiguous, max_model_len of 40,960 reserved for each: 5 users",
        "  in blocks of 16: 203 users",  # 204,928 slots of whole blocks / 1,007.5
    ]


@pytest.mark.parametrize(
    ("name", "variant"),
    [("gemma3", "plain"), ("qwen3_moe", "a dense layer"), ("deepseek_v3", "plain")],
)
def test_parameters_equal_transformers(tmp_path, name, variant):
    model_class, config = save_config(tmp_path, name, variant)
    with torch.device("meta"):
        model = model_class(config)
    model.tie_weights()
    weights = [*model.parameters(), *(b for name, b in model.named_buffers() if name.endswith("correction_bias"))]
    assert users_fit.count_parameters(tmp_path) == sum(weight.numel() for weight in weights)


@pytest.mark.parametrize(
    ("text", "number"), [("24GiB", 24 * 2**30), ("1.5 GB", 1_500_000_000), ("512MiB", 2**29), ("12345", 12_345)]
)
def test_sizes(text, number):
    assert users_fit.parse_bytes("--memory", text) == number


# ---- roofline

QWEN3 = ModelShape.from_folder(QWEN3_06B)
RATES = Rates(read_bytes_per_s=30e9, gemm_flops_per_s=400e9)


def test_a_step_of_qwen3_06b_by_hand():
    """440,401,920 + 155,582,464 weights; 28 layers of 16 heads, 8 of K and V, of 128."""
    step = roofline.step_times(QWEN3, 8, 1000, 2, RATES, 3e-6)
    weights = 440_401_920 + 155_582_464
    assert step.reading == pytest.approx((2 * weights + 8 * 1000 * 28 * 2 * 8 * 128 * 2) / 30e9)
    assert step.arithmetic == pytest.approx(8 * (2 * weights + 1000 * 28 * 16 * 128 * 4) / 400e9)
    assert step.launches == pytest.approx((28 * 12 + 4) * 3e-6)
    assert (step.total, step.waits_for) == (step.reading, "reading")


def test_at_the_ridge_arithmetic_takes_over():
    context_len = 100
    ridge = roofline.find_ridge(QWEN3, context_len, 2, RATES)
    below, above = (
        roofline.step_times(QWEN3, batch_size, context_len, 2, RATES, 1e-9)
        for batch_size in (int(ridge), int(ridge) + 1)
    )
    assert (below.waits_for, above.waits_for) == ("reading", "arithmetic")


# ---- chunk_size

COST = chunk_size.Cost(fixed=1.0, per_token=10.0, per_pair=100.0)


def seconds_of(*steps):
    return [1.0 + 10.0 * tokens + 100.0 * pairs for tokens, pairs in steps]


def test_a_budget_that_holds_all_prompts_makes_one_prefill_step():
    workload = make_workload("two", [3, 5], [2, 3], vocab_size=1000, shared_len=0)
    found = chunk_size.model(workload, 2, 8, COST)
    first, second, third = seconds_of((8, 6 + 15), (2, 4 + 6), (1, 7))  # prompts; two decodes; the second's last
    assert found.ttfts == [first, first]
    assert found.tpots == pytest.approx([second, (second + third) / 2])
    assert found.itls == pytest.approx([second, second, third])
    assert found.throughput == pytest.approx(5 / (first + second + third))


def test_a_smaller_budget_cuts_the_second_prompt_into_chunks():
    workload = make_workload("two", [3, 5], [2, 3], vocab_size=1000, shared_len=0)
    found = chunk_size.model(workload, 2, 4, COST)
    # the first prompt and token 0; its decode beside tokens 1 … 3; token 4; two decodes
    steps = seconds_of((4, 6 + 1), (4, 4 + 2 + 3 + 4), (1, 5), (1, 6), (1, 7))
    assert found.ttfts == pytest.approx([steps[0], sum(steps[:3])])
    assert found.tpots == pytest.approx([steps[1], sum(steps[3:]) / 2])


def test_a_fit_finds_the_cost_and_takes_no_negative_part():
    work = [(1, 10), (16, 100), (128, 9000), (1000, 500_000), (1, 2000)]
    cost = chunk_size.Cost(6e-4, 2e-5, 2e-8)
    found = chunk_size.fit([(*one, cost.of(*one)) for one in work])
    assert vars(found) == pytest.approx(vars(cost))
    without_pairs = chunk_size.fit([(tokens, pairs, 6e-4 + 2e-5 * tokens - 1e-12 * pairs) for tokens, pairs in work])
    assert without_pairs.per_pair == 0
    assert (without_pairs.fixed, without_pairs.per_token) == pytest.approx((6e-4, 2e-5), rel=0.01)


# ---- hit_rate


class Witness(hit_rate.Evictions):
    """Counts with sets of prefixes what a cache without end would find."""

    block_size = 16

    def __init__(self):
        super().__init__()
        self.prefixes, self.num_query, self.num_hit = set(), 0, 0

    def on_admit(self, seq):
        super().on_admit(seq)
        tokens = seq.token_ids.tolist()
        sizes = range(self.block_size, len(tokens), self.block_size)  # short of the last token
        self.num_hit += max([size for size in sizes if tuple(tokens[:size]) in self.prefixes], default=0)
        self.num_query += len(tokens)
        self.remember(tokens)

    def on_finish(self, seq):
        self.remember(seq.token_ids[:-1].tolist())  # the last token's K and V were never computed

    def remember(self, tokens):
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        self.prefixes |= {tuple(tokens[:end]) for end in ends}


def test_a_cache_that_holds_everything_finds_every_prefix(monkeypatch):
    monkeypatch.setattr(hit_rate, "Evictions", Witness)
    chat = hit_rate.Chat(num_users=5, num_turns=3, system_len=40, message_len=20, answer_len=12, think_steps=9)
    stats = hit_rate.serve(chat, 5 * -(-chat.longest // 16), 16, 4)
    assert (stats.prefix_cache_query_tokens, stats.prefix_cache_hit_tokens) == (stats.num_query, stats.num_hit)
    assert stats.num_evicted_blocks == 0
    assert stats.num_hit > 5 * 2 * 40


def test_the_conversation_that_waited_longest_is_evicted_first():
    """Two users take turns; 9 blocks of 16 hold one long conversation, or two short ones.

    The first turns leave 3 full blocks each (63 tokens computed, 4 blocks). User 0's second turn finds its 3, takes the
    3 blocks without contents, and evicts 2 of user 1's, the last ones first. User 1's second turn finds the 1 that is
    left, takes 1 without contents, and evicts 6.
    """
    chat = hit_rate.Chat(num_users=2, num_turns=2, system_len=0, message_len=1, answer_len=63, think_steps=0)
    stats = hit_rate.serve(chat, 9, 16, 1)
    assert stats.prefix_cache_query_tokens == 2 * (1 + 65)
    assert stats.prefix_cache_hit_tokens == (3 + 1) * 16
    assert stats.num_evicted_blocks == 2 + 6


# ---- kv_transfer


def prompt_flops(model, num_tokens):
    """Token by token: each weight multiplies and adds, and so does each value of the keys and values so far."""
    cache = model.cache
    values = cache.num_layers * cache.num_heads * cache.head_values  # of keys and values, for one position
    return sum(2 * model.num_weights + 2 * (position + 0.5) * values for position in range(num_tokens))


@pytest.mark.parametrize("model", kv_transfer.MODELS, ids=lambda model: model.cache.name)
def test_a_prompt_is_sent_and_computed_at_the_rates(model):
    num_tokens = 500
    assert model.sending_ms(num_tokens, 8) == pytest.approx(num_tokens * model.bytes_per_token / 1e9 * 1e3)
    assert model.computing_ms(num_tokens, 2) == pytest.approx(prompt_flops(model, num_tokens) / 2e12 * 1e3)
    even = model.break_even_gbits(num_tokens, 2)
    assert model.sending_ms(num_tokens, even) == pytest.approx(model.computing_ms(num_tokens, 2))


def test_weights_of_the_layers_are_those_of_the_network():
    """Of Qwen3-0.6B, by building it; of Llama 3 70B, by the sizes of its matrices."""
    qwen, llama, _ = kv_transfer.MODELS
    config = json.loads((QWEN3_06B / "config.json").read_text(encoding="utf-8"))
    embedding = config["vocab_size"] * config["hidden_size"]  # tied: once
    assert users_fit.count_parameters(QWEN3_06B) - embedding == pytest.approx(qwen.num_weights, rel=0.01)
    layer = 2 * 8192 * 64 * 128 + 2 * 8192 * 8 * 128 + 3 * 8192 * 28672  # q and o; k and v; the MLP
    assert 80 * layer == pytest.approx(llama.num_weights, rel=0.01)


# ---- state_bytes


def test_states_of_qwen35_by_hand():
    """16 heads of 128 × 128 float32 and 3 × 6,144 bfloat16 in 18 layers; 2 KV heads of 256 in 6 layers."""
    small, _, large = state_bytes.HYBRIDS
    assert small.bytes_of_state == 18 * (16 * 128 * 128 * 4 + 3 * 6144 * 2)
    assert small.bytes_per_token == 6 * 2 * 2 * 256 * 2
    assert large.bytes_of_state == 48 * (48 * 128 * 128 * 4 + 3 * 10240 * 2)
    assert state_bytes.QWEN3.bytes_per_token == 114_688


@pytest.mark.parametrize("hybrid", state_bytes.HYBRIDS, ids=lambda hybrid: hybrid.name)
def test_a_hybrid_is_smaller_from_the_border_on(hybrid):
    others = [hybrid.with_attention()] + [state_bytes.QWEN3] * (hybrid is state_bytes.HYBRIDS[0])
    for other in others:
        border = hybrid.smaller_from(other)
        sizes = [(one.bytes_of_sequence(border - 1), one.bytes_of_sequence(border)) for one in (hybrid, other)]
        assert sizes[0][0] >= sizes[1][0]
        assert sizes[0][1] < sizes[1][1]


def test_a_config_json_has_the_sizes_of_the_engines_caches():
    shape = state_bytes.shape_of_model(str(TINY_QWEN3_5))
    options = {"skip_tokenizer_init": True, "attention_backend": "torch", "device": "cpu"}
    with LLM(TINY_QWEN3_5, dtype="bfloat16", block_size=4, num_kv_blocks=8, max_num_seqs=2, **options) as llm:
        cache = llm.engine.runner.kv_cache
        pool = llm.engine.runner.layout.pool
        assert shape.bytes_of_state == pool.bytes_per_slot == llm.get_stats().states.bytes_per_slot
        assert shape.bytes_per_token * 4 == cache.bytes_per_block


def test_calculators_of_k_and_v_refuse_states(run_main, capsys):
    message = "has layers that keep states instead of K and V: use `labs.calculators.state_bytes`"
    for module, arguments in ((kv_bytes, ()), (users_fit, ("--memory", "9GiB"))):
        with pytest.raises(SystemExit):
            run_main(module, "--model", TINY_QWEN3_5, *arguments)
        assert message in capsys.readouterr().err
