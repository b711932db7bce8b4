"""Checkpoints that are quantised already, divided among ranks: the tokens of one rank, up to the order of sums.

The oracle is the engine with one rank, which `tests/extras/quantization` compares with `transformers`. Where a cut
would go through a group of inputs, the start is refused.
"""

import pytest
import torch

from nanovllm_extras import LLM, TINY_QWEN3
from nanovllm_extras.machine.dead import EngineDeadError
from nanovllm_extras.weights.cut import Cut
from nanovllm_extras.weights.quantised_linear import multiply, quantise_weight
from nanovllm_extras.weights.shares import Share
from tests.extras.kernels.processors import need_a_compiler
from tests.extras.quantization.packed_models import Models, greedy_of, make_llm, write_packed
from tests.extras.quantization.packers import write
from tests.extras.quantization.test_stored_weights import FLOATS, FORMATS

PROMPTS = [[5, 7, 11, 200], [3] * 20, list(range(40, 70))]
EQUAL = ("awq, groups of 64", "pack-quantized, zeros", "fp8 in other blocks")


def check_ranks(folder, is_rounded, prompts=PROMPTS, **options):
    """Compare tokens and scores of one rank and of two, and the weights of the first of these.

    is_rounded: whether activations are rounded. A sum in another order may then change a rounding.
    """
    one, two = make_llm(folder, **options), make_llm(folder, tensor_parallel_size=2, **options)
    check_weights(two.engine.runner.model, one.engine.runner.model)
    with two:
        found, expected = greedy_of(two, prompts), greedy_of(one, prompts)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    differences = [
        abs(ours - theirs)
        for (_, scores), (_, wanted) in zip(found, expected, strict=True)
        for ours, theirs in zip(scores, wanted, strict=True)
    ]
    assert max(differences) < (0.05 if is_rounded else 1e-4)
    assert sorted(differences)[len(differences) // 2] < (5e-3 if is_rounded else 1e-4)


def check_weights(part, whole):
    """The first rank has the first rows of each projection of q, k, v, gate and up, and the first columns of others."""
    layers = dict(whole.named_modules())
    for path, layer in part.named_modules():
        if hasattr(layer, "quantised") and path.endswith("_proj"):
            ours, theirs = layer.quantised.dequantised(), layers[path].quantised.dequantised()
            if not hasattr(layer, "parts"):
                assert torch.equal(ours, theirs[:, : ours.shape[1]]), path
            elif "linear_attn" not in path:  # whose q, k and v are one tensor
                rows = theirs.split(tuple(layers[path].parts.values()))
                first = [one[:n] for one, n in zip(rows, layer.parts.values(), strict=True)]
                assert torch.equal(ours, torch.cat(first)), path


@pytest.mark.parametrize("name", EQUAL)
def test_two_ranks_have_the_tokens_of_one(quick_ranks, tmp_path, name):
    write(tmp_path / "model", *{**FORMATS, **FLOATS}[name])
    check_ranks(tmp_path / "model", is_rounded="fp8" not in name)


def test_kernels_of_two_ranks(rank_threads, tmp_path):
    need_a_compiler(torch.float32)
    write(tmp_path / "model", *FORMATS["gptq, symmetric, groups of 32"])
    check_ranks(tmp_path / "model", is_rounded=True, attention_backend="cpu")


def test_one_scale_for_each_output_is_cut_anywhere(quick_ranks, tmp_path):
    """`down_proj` has 640 inputs. A rank's activations are rounded in groups of 128, 128 and 64, not five of 128."""
    write(tmp_path / "model", *FORMATS["int-quantized"])
    one, two = (make_llm(tmp_path / "model", **options) for options in ({}, {"tensor_parallel_size": 2}))
    check_weights(two.engine.runner.model, one.engine.runner.model)
    with two:
        found, expected = greedy_of(two, PROMPTS), greedy_of(one, PROMPTS)
    for (_, scores), (_, wanted) in zip(found, expected, strict=True):
        assert scores[0] == pytest.approx(wanted[0], abs=0.3)


@pytest.mark.parametrize(("kind", "form"), [("Qwen3_5", "awq"), pytest.param("Gemma4", "fp8", marks=pytest.mark.slow)])
def test_states_and_several_shapes(quick_ranks, tmp_path_factory, tmp_path, kind, form):
    """The products of 96 inputs stay in floats: half of them are one group and a half."""
    models = Models(tmp_path_factory.mktemp("models"))

    def is_packed(name, tensor):
        is_product = tensor.dim() == 2 and ".layers." in name and len(tensor) % 8 == 0
        return is_product and (form == "fp8" or not name.endswith(("down_proj.weight", "per_layer_projection.weight")))

    write_packed(tmp_path / "model", models.make(kind)[0], form, is_packed)
    check_ranks(tmp_path / "model", is_rounded=form != "fp8", prompts=models.prompts(kind)[1:4])


REFUSED = {
    "gptq": r"would divide the 384 inputs of model\.layers\.0\.self_attn\.o_proj\.weight into 192 for each rank, but",
    "awq": "but 128 of them share a scale; take tensor_parallel_size=1",
    "gptq, desc_act": "but those that share a scale are anywhere among them",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_cut_through_a_group_is_refused(rank_threads, tmp_path, name):
    write(tmp_path / "model", *FORMATS[name])
    with pytest.raises((ValueError, EngineDeadError), match=REFUSED[name]):  # whichever rank is the first to say so
        LLM(tmp_path / "model", device="cpu", attention_backend="torch", tensor_parallel_size=2, num_kv_blocks=20)


# ---- GGUF files


@pytest.mark.slow
def test_files_of_llama_cpp(quick_ranks, tmp_path):
    pytest.importorskip("gguf")
    from tests.extras.quantization.test_gguf import write as write_file

    write_file(tmp_path / "model", TINY_QWEN3, kind="Q4_0")
    check_ranks(tmp_path / "model", is_rounded=True, load_format="gguf")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "variant"), [("Qwen3_5Moe", "plain"), ("Gemma4", "experts")])
def test_files_of_other_models(quick_ranks, tmp_path_factory, tmp_path, kind, variant):
    """In floats, as 96 inputs are no whole blocks for each rank. Heads are in another order there."""
    pytest.importorskip("gguf")
    from tests.extras.quantization.test_gguf_models import Writer

    models = Models(tmp_path_factory.mktemp("models"))
    Writer(tmp_path / "model", models.make(kind, variant)[0], kind, "F32")
    check_ranks(tmp_path / "model", is_rounded=False, prompts=models.prompts(kind)[1:4], load_format="gguf")


# ---- random weights


def test_random_weights_are_those_of_one_rank(quick_ranks, tmp_path):
    write(tmp_path / "model", *FORMATS["pack-quantized, zeros"])
    (tmp_path / "model" / "model.safetensors").unlink()
    check_ranks(tmp_path / "model", is_rounded=True, load_format="dummy")


# ---- one weight


@pytest.mark.parametrize("bits", [4, 8])
def test_the_parts_of_a_weight_are_its_groups(bits):
    """4 bits have a scale for each group of 32 inputs, 8 bits one for each output. Products are sums of the ranks'."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(48, 96, generator=generator), torch.randn(5, 96, generator=generator)
    whole = quantise_weight(weight, bits, 32)
    columns = [Cut((48, 96), (48, stop - start), 1, ((start, stop),)) for start, stop in ((0, 64), (64, 96))]
    parts = [Share({"one": cut}).of_weight("one", whole) for cut in columns]
    total = sum(
        multiply(x[:, cut.spans[0][0] : cut.spans[0][1]], part) for cut, part in zip(columns, parts, strict=True)
    )
    torch.testing.assert_close(total, multiply(x, whole))
    rows = Cut((48, 96), (20, 96), 0, ((0, 8), (32, 44)))  # of stacked projections
    found = multiply(x, Share({"one": rows}).of_weight("one", whole))
    assert torch.equal(found, multiply(x, whole)[:, [*range(8), *range(32, 44)]])


def test_groups_that_a_cut_would_divide_are_refused():
    share = Share({"one": Cut((48, 96), (48, 48), 1, ((48, 96),)), "two": Cut((48, 96), (24, 96), 0, ((0, 24),))})
    share.check_groups("one", None, is_ordered=False)
    share.check_groups("one", 16, is_ordered=False)
    share.check_groups("two", 32, is_ordered=True)
    for size, is_ordered in ((32, False), (16, True), (None, True)):
        with pytest.raises(ValueError, match="tensor_parallel_size=2 would divide the 96 inputs of one into 48"):
            share.check_groups("one", size, is_ordered)
