"""The roofline's counts against a brute-force count, and against PyTorch's counter on transformers' model."""

import json
import random
from dataclasses import asdict

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common import QWEN3_06B, ModelShape, Workload, named_workload
from benchmarks.roofline import (
    Rates,
    count_prefill_flops,
    count_weight_bytes,
    report_roofline,
    roofline,
    shared_prefix_len,
    token_flops,
    workload_roofline,
)
from nanovllm_extras import LLM, TINY_QWEN3
from tests.extras.models.architectures import ARCHITECTURES

TINY = ModelShape(
    hidden_size=8, intermediate_size=12, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=6, vocab_size=20
)
RATES = Rates(read_bytes_per_s=1000.0, gemm_flops_per_s=5000.0)


def matrices(shape):
    """(rows, columns) of every weight matrix of one layer."""
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield from [(q_size, shape.hidden_size), (kv_size, shape.hidden_size), (kv_size, shape.hidden_size)]
    yield (shape.hidden_size, q_size)
    yield from [(shape.intermediate_size, shape.hidden_size)] * 2
    yield (shape.hidden_size, shape.intermediate_size)


def brute_token_flops(shape, position):
    """Counted multiplication by multiplication, of the layers for the token at this position."""
    multiplications = 0
    for _ in range(shape.num_layers):
        multiplications += sum(rows * columns for rows, columns in matrices(shape))
        for _ in range(shape.num_heads):
            for _ in range(position + 1):
                multiplications += shape.head_dim  # its score
                multiplications += shape.head_dim  # its share of the value
    return 2 * multiplications  # each goes with an addition


def brute_roofline(shape, prompts, output_lens, bytes_per_value, rates):
    """(prefill seconds, decode seconds) by simulating which (position, token) keys exist and where they are needed."""
    head_flops = 2 * shape.hidden_size * shape.vocab_size
    weights = shape.num_layers * sum(rows * columns for rows, columns in matrices(shape))
    weights += shape.hidden_size * shape.vocab_size
    num_shared = 0
    if len(prompts) > 1:
        while num_shared < min(map(len, prompts)) - 1 and len({prompt[num_shared] for prompt in prompts}) == 1:
            num_shared += 1
    # A key is the same for all requests in the shared prefix, and a request's own behind it.
    keys = {(p if p < num_shared else (i, p)): p for i, prompt in enumerate(prompts) for p in range(len(prompt))}
    flops = sum(brute_token_flops(shape, position) for position in keys.values()) + len(prompts) * head_flops
    prefill = max(flops / rates.gemm_flops_per_s, weights * bytes_per_value / rates.read_bytes_per_s)
    decode, lens, generated = 0.0, [len(prompt) for prompt in prompts], [1] * len(prompts)
    while any(done < wanted for done, wanted in zip(generated, output_lens, strict=True)):
        flops, read_keys = 0, set()
        for i, wanted in enumerate(output_lens):
            if generated[i] == wanted:
                continue
            flops += brute_token_flops(shape, lens[i]) + head_flops
            lens[i] += 1
            generated[i] += 1
            read_keys |= {p if p < num_shared else (i, p) for p in range(lens[i])}
        values = weights + len(read_keys) * shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim
        decode += max(flops / rates.gemm_flops_per_s, values * bytes_per_value / rates.read_bytes_per_s)
    return prefill, decode


@pytest.mark.parametrize("rates", [RATES, Rates(20_000.0, 5000.0), Rates(1e12, 1.0), Rates(1.0, 1e12)])
def test_bound_equals_brute_force(rates):
    for seed in range(6):
        check_against_brute_force(random.Random(seed), rates)


def check_against_brute_force(rng, rates):
    shared = [rng.randrange(20) for _ in range(rng.choice([0, 0, 5]))]
    prompts = [shared + [i, *(rng.randrange(20) for _ in range(rng.randint(0, 6)))] for i in range(rng.randint(1, 5))]
    output_lens = [rng.randint(1, 6) for _ in prompts]
    bound = roofline(TINY, list(map(len, prompts)), output_lens, shared_prefix_len(prompts), 2, rates)
    assert (bound.prefill_s, bound.decode_s) == pytest.approx(brute_roofline(TINY, prompts, output_lens, 2, rates))
    assert bound.output_tokens_per_second == pytest.approx(sum(output_lens) / bound.total_s)


def tiny_transformers_model():
    config = transformers.Qwen3Config(
        hidden_size=TINY.hidden_size,
        intermediate_size=TINY.intermediate_size,
        num_hidden_layers=TINY.num_layers,
        num_attention_heads=TINY.num_heads,
        num_key_value_heads=TINY.num_kv_heads,
        head_dim=TINY.head_dim,
        vocab_size=TINY.vocab_size,
        attn_implementation="eager",
    )
    return transformers.Qwen3ForCausalLM(config).eval()


def count_flops(model, **inputs):
    """What PyTorch counts: matrix products. transformers' rotary frequencies are among them, and are taken out."""
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        output = model(**inputs, use_cache=True)
    rotary = sum(counter.get_flop_counts().get("Qwen3ForCausalLM.model.rotary_emb", {}).values())
    return counter.get_total_flops() - rotary, output.past_key_values


def test_counts_equal_pytorchs():
    """A single token has no future, so there PyTorch's count of whole score matrices is the exact one."""
    model, cache = tiny_transformers_model(), None
    for position in range(5):
        flops, cache = count_flops(model, input_ids=torch.tensor([[position]]), past_key_values=cache)
        assert flops == token_flops(TINY, position + 1) + 2 * TINY.head_params
    # In one go it computes the scores of future tokens as well, and the head's for every row.
    flops, _ = count_flops(model, input_ids=torch.arange(5)[None])
    future = 5 * 4 // 2 * TINY.attention_flops_per_pair
    assert flops == count_prefill_flops(TINY, [5], 0) + future + 4 * 2 * TINY.head_params


OTHERS = [("qwen3_moe", "every second layer"), ("mixtral", "width shared"), ("deepseek_v3", "plain"), ("llama", "MQA"),
          ("phi3", "plain"), ("gemma3", "plain")]  # fmt: skip


@pytest.mark.parametrize(("name", "variant"), OTHERS)
def test_parameters_of_other_architectures_equal_the_models(tmp_path, name, variant):
    """The matrices of transformers' model; of experts only as many as a token goes through."""
    one = ARCHITECTURES[name]
    fields = {**one.shape, **one.variants[variant]}
    config = one.config_class(**{key: value for key, value in fields.items() if key != "head_dim" or value})
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = one.model_class(config)
    shape, total = ModelShape.from_folder(tmp_path), 0
    for parameter_name, parameter in model.model.layers.named_parameters():
        if "bias" in parameter_name or "norm" in parameter_name:
            continue
        share = 1.0
        if ".experts." in parameter_name:  # the tensors of all experts together
            share = config.num_experts_per_tok / shape.experts.num_experts
        total += parameter.numel() * share
    assert shape.body_params == round(total)


def test_what_qwen3_06b_reads_and_computes():
    """By hand: 440,401,920 weights in layers, 155,582,464 in the head, 2 · 8 · 128 · 28 keys and values per token."""
    shape = ModelShape.from_folder(QWEN3_06B)
    assert (shape.body_params, shape.head_params, shape.kv_values_per_token) == (440_401_920, 155_582_464, 57_344)
    bound = roofline(shape, [64], [2], 0, 2, Rates(1e9, 1e15))
    assert bound.decode_bytes == 2 * (440_401_920 + 155_582_464 + 65 * 57_344)
    assert bound.decode_s == pytest.approx(bound.decode_bytes / 1e9)
    assert bound.memory_bound_steps == 1


@pytest.mark.parametrize(("name", "tokens_per_second"), [("W", 143), ("W2", 25.8), ("W3", 192)])
def test_named_workloads(name, tokens_per_second):
    """With 32 GB/s and 430 GFLOP/s."""
    shape = ModelShape.from_folder(QWEN3_06B)
    bound = workload_roofline(
        shape, named_workload(name, shape.vocab_size), ("bfloat16", None, "auto"), Rates(32e9, 430e9)
    )
    assert bound.output_tokens_per_second == pytest.approx(tokens_per_second, rel=0.04)


def test_shared_prefix():
    assert shared_prefix_len([[1, 2, 3]]) == 0
    assert shared_prefix_len([[1, 2, 3], [1, 2, 4]]) == 2
    assert shared_prefix_len([[1, 2, 3], [1, 2, 3]]) == 2  # a prompt's last token is always computed
    assert shared_prefix_len([[1, 2, 3, 4], [1, 2]]) == 1
    assert shared_prefix_len([[1, 2], [5, 2], [1, 2]]) == 0
    assert shared_prefix_len(named_workload("W3", 151_936).prompts) == 512


def test_report_is_json_and_names_the_fraction():
    workload = Workload("tiny", [[1, 2, 3], [4]], [2, 3])
    bound = workload_roofline(TINY, workload, ("float32", None, "auto"), RATES)
    report = report_roofline(TINY, workload, ("float32", None, "auto"), RATES, elapsed_s=2 * bound.total_s)
    assert report["roofline_fraction"] == 0.5
    assert set(asdict(bound)) < set(json.loads(json.dumps(report))["roofline"])


def test_bad_lengths_are_refused():
    for lens, message in (
        (([], [], 0), "a prompt and an output"),
        (([1, 2], [1], 0), "a prompt and an output"),
        (([1, 0], [1, 1], 0), ">= 1"),
        (([1, 2], [1, 0], 0), ">= 1"),
        (([3, 2], [1, 1], 3), "the shortest prompt"),
    ):
        with pytest.raises(ValueError, match=message):
            roofline(TINY, *lens, 2, RATES)


def test_quantised_weights_are_counted_as_the_engine_keeps_them():
    shape = ModelShape.from_folder(TINY_QWEN3)
    for given in ("int8", {"method": "int4", "group_size": 32, "embeddings": "int4"}):
        network = LLM(TINY_QWEN3, quantization=given, num_kv_blocks=4).engine.runner.model
        stored, scales_of_outputs = 0, 0
        for layer in network.modules():
            weight = getattr(layer, "packed", None)
            if weight is not None:
                stored += weight.nbytes
                scales = getattr(layer, "scales", torch.empty(0, 1))
                stored, scales_of_outputs = (
                    stored + scales.nbytes,
                    scales_of_outputs + scales.nbytes * (scales.shape[1] == 1),
                )
        assert count_weight_bytes(shape, 2, given) == stored - scales_of_outputs
    assert count_weight_bytes(shape, 2) == 2 * (shape.body_params + shape.head_params)
