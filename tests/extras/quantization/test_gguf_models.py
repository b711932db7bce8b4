"""GGUF files of models with recurrent states and of models with K and V of several shapes.

Files are written as llama.cpp's converters write them: names by the tables of the package `gguf`, values changed as the
converters change them. The oracle is `transformers` with what the file's weights mean.
"""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.extras.quantization.packed_models import GREEDY, Models, check_tokens, greedy_of, make_llm, with_weights
from tests.extras.speculation.test_mtp import Heads, check_draws, predicting, record_draws

pytestmark = pytest.mark.slow  # the package is an extra
gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers.models.gemma4")
ARCHITECTURES = {"Qwen3_5": "QWEN35", "Qwen3_5Moe": "QWEN35MOE", "Lfm2": "LFM2", "Gemma4": "GEMMA4"}
KINDS = gguf.GGMLQuantizationType


class Writer:
    """Writes the model in `of` as a file in `folder`. `meanings`: path -> weight of each quantised projection"""

    def __init__(self, folder, of, kind, quantised="Q8_0", with_halves=False, change=lambda tensors: None):
        shutil.copytree(of, folder)
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        change(tensors)
        tensors = with_joined_experts(tensors, with_halves or kind == "Gemma4")
        self.raw = json.loads((folder / "config.json").read_text())
        self.kind, self.quantised, self.meanings = kind, quantised, {}
        architecture = gguf.MODEL_ARCH[ARCHITECTURES[kind]]
        self.num_layers = self.raw["num_hidden_layers"]
        self.names = gguf.get_tensor_name_map(architecture, self.num_layers + 1)  # with a head that makes drafts
        self.writer = gguf.GGUFWriter(folder / "model.gguf", gguf.MODEL_ARCH_NAMES[architecture])
        for name, tensor in tensors.items():
            self.convert(name, tensor.float())
        if kind == "Gemma4":
            self.writer.add_tensor("rope_freqs.weight", torch.ones(32).numpy())
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()

    def convert(self, name, tensor):
        """As `modify_tensors` of the converter of this architecture."""
        if self.kind == "Lfm2" and "conv.conv" in name:
            tensor = tensor.squeeze(1)
        if self.kind == "Gemma4":
            name = re.sub("layer_scalar$", "layer_scalar.weight", name)
            for end, stored in ((".router.scale", "ffn_gate_inp"), (".router.per_expert_scale", "ffn_down_exps")):
                if name.endswith(end):
                    return self.add(name, f"blk.{name.split('.')[2]}.{stored}.scale", tensor)
        rows, columns = None, None
        name = name.replace("mtp.layers.0.", f"model.layers.{self.num_layers}.")
        heads = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
                 "norm": "shared_head_norm"}  # fmt: skip
        if match := re.fullmatch(r"mtp\.(\w+)\.weight", name):
            tensor = tensor if match[1] == "fc" else tensor + 1
            return self.add(name, f"blk.{self.num_layers}.nextn.{heads[match[1]]}.weight", tensor)
        if self.kind.startswith("Qwen3_5"):
            if ".linear_attn." in name:
                rows, columns = self.orders(name, tensor)
            if name.endswith(".A_log"):
                tensor = -torch.exp(tensor)
            elif name.endswith(".dt_bias"):
                name = name.rpartition(".dt_bias")[0] + ".dt_proj.bias"
            elif "conv1d" in name:
                tensor = tensor.squeeze()
            elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
                tensor = tensor + 1
        return self.add(name, self.names.get_name(name, (".weight", ".bias")), tensor, rows, columns)

    def orders(self, name, tensor):
        """The rows and the columns of a tensor of Gated DeltaNet, in the order of the file."""
        num_keys, num_values = self.raw["linear_num_key_heads"], self.raw["linear_num_value_heads"]
        key_dim, value_dim = self.raw["linear_key_head_dim"], self.raw["linear_value_head_dim"]

        def tiled(start, head_dim):
            grouped = torch.arange(num_values * head_dim).reshape(num_keys, num_values // num_keys, head_dim)
            return start + grouped.permute(1, 0, 2).reshape(-1)

        if ".in_proj_qkv." in name or ".conv1d" in name:
            before = 2 * num_keys * key_dim
            return torch.cat((torch.arange(before), tiled(before, value_dim))), None
        if ".in_proj_z." in name:
            return tiled(0, value_dim), None
        if any(one in name for one in (".in_proj_a.", ".in_proj_b.", ".A_log", ".dt_bias")):
            return tiled(0, 1), None
        return None, tiled(0, value_dim) if ".out_proj." in name else None

    def add(self, name, stored_name, tensor, rows=None, columns=None):
        tensor = tensor if rows is None else tensor[rows]
        tensor = tensor if columns is None else tensor[:, columns]
        is_product = tensor.dim() > 1 and ".layers." in name and "conv" not in name.rsplit(".", 2)[1]
        is_quantised = is_product and tensor.shape[-1] % 32 == 0 and not re.search(r"(mlp\.gate|router)\.", name)
        wanted = KINDS[self.quantised] if is_quantised else KINDS.F32
        data = gguf.quantize(tensor.contiguous().numpy(), wanted)
        self.writer.add_tensor(stored_name, data, raw_dtype=wanted)
        if is_quantised and wanted != KINDS.F32:
            there, meaning = torch.from_numpy(gguf.dequantize(data, wanted)), torch.empty(tensor.shape)
            rows = torch.arange(len(tensor)) if rows is None else rows
            columns = torch.arange(tensor.shape[1]) if columns is None else columns
            if tensor.dim() == 2:
                meaning[rows[:, None], columns] = there
            self.meanings[name.removesuffix(".weight")] = meaning if tensor.dim() == 2 else there


def with_joined_experts(tensors, with_halves):
    """Return tensors with one for each projection of all experts. with_halves: gate and up-projection are one, too"""
    joined, experts = {}, {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            experts.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = tensor
        elif name.endswith("experts.gate_up_proj"):
            for half, weight in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                joined[name.replace("gate_up_proj", f"{half}_proj.weight")] = weight
        else:
            joined[f"{name}.weight" if name.endswith("experts.down_proj") else name] = tensor
    joined |= {name: torch.stack([found[i] for i in range(len(found))]) for name, found in experts.items()}
    for name in [one for one in joined if one.endswith("experts.gate_proj.weight") and with_halves]:
        both = joined.pop(name), joined.pop(name.replace("gate_proj", "up_proj"))
        joined[name.replace("gate_proj", "gate_up_proj")] = torch.cat(both, dim=1)
    return joined


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("gguf"))


def read(folder, **options):
    return make_llm(folder, load_format="gguf", **options)


VARIANTS = [
    ("Qwen3_5", "plain"),
    ("Qwen3_5", "tied"),
    ("Qwen3_5", "as many heads of keys"),
    ("Qwen3_5", "heads that are not whole vectors"),
    ("Qwen3_5", "biases"),
    ("Qwen3_5Moe", "plain"),
    ("Lfm2", "plain"),
    ("Lfm2", "output layer"),
    ("Gemma4", "plain"),
    ("Gemma4", "keys are values"),
    ("Gemma4", "experts"),
    ("Gemma4", "experts, shared keys"),
]


@pytest.mark.parametrize(("kind", "variant"), VARIANTS)
def test_floats_are_those_of_the_checkpoint(models, tmp_path, kind, variant):
    of, model = models.make(kind, variant)
    Writer(tmp_path / "model", of, kind, "F32")
    check_tokens(
        read(tmp_path / "model", max_num_batched_tokens=13), model, models.prompts(kind)[1:4], is_rounded=False
    )


@pytest.mark.parametrize(
    ("kind", "variant", "quantised", "backend"),
    [
        (*pair, ("Q8_0", "Q4_0")[i % 2], ("torch", "cpu")[i // 2 % 2])
        for i, pair in enumerate(pair for pair in VARIANTS if "expert" not in pair[1] and "Moe" not in pair[0])
    ],
)
def test_blocks_mean_what_the_package_says(models, tmp_path, kind, variant, quantised, backend):
    """A head of 24 channels is not whole blocks: llama.cpp changes the order of heads, and then makes blocks."""
    of, model = models.make(kind, variant)
    writer = Writer(tmp_path / "model", of, kind, quantised)
    llm = read(tmp_path / "model", attention_backend=backend, max_num_batched_tokens=13)
    assert len(writer.meanings) > 15

    def order(path, num_inputs):
        name = f"{path}.weight"
        columns = writer.orders(name, None)[1] if ".linear_attn." in name else None
        return slice(None) if columns is None else columns

    check_tokens(llm, with_weights(model, writer.meanings, 32, order), models.prompts(kind)[1:4], is_rounded=True)


@pytest.mark.parametrize(("kind", "variant"), [("Qwen3_5Moe", "plain"), ("Gemma4", "experts")])
@pytest.mark.parametrize("with_halves", [False, True])
def test_experts_of_one_tensor(models, tmp_path, kind, variant, with_halves):
    """Gate and up-projection may be one tensor too, always in files of Gemma 4."""
    writer = Writer(tmp_path / "model", models.make(kind, variant)[0], kind, with_halves=with_halves)
    llm = read(tmp_path / "model")
    path = f"model.layers.1.{'' if kind == 'Gemma4' else 'mlp.'}experts"
    found = llm.engine.runner.model.get_submodule(f"{path}.3.gate_up_proj").quantised.dequantised()
    means = writer.meanings
    both = (
        [means.get(f"{path}.gate_up_proj")]
        if with_halves or kind == "Gemma4"
        else [means[f"{path}.{half}_proj"] for half in ("gate", "up")]
    )
    assert torch.equal(found, torch.cat([one[3] for one in both]))
    assert len(greedy_of(llm, models.prompts(kind)[:3])) == 3


def test_what_is_not_computed_is_passed_over(models, heads, tmp_path):
    """A layer that predicts more tokens, behind the others, and the K and V of layers that share those of others."""
    of, model, _ = heads.make(is_trained=False)
    Writer(tmp_path / "model", of, "Qwen3_5", "F32")
    check_tokens(read(tmp_path / "model"), model, models.prompts("Qwen3_5")[1:2], is_rounded=False)
    of, model = models.make("Gemma4")

    def add_keys(tensors):
        tensors |= {f"model.layers.5.self_attn.{name}_proj.weight": torch.zeros(128, 64) for name in "kv"}
        tensors["model.layers.5.self_attn.k_norm.weight"] = torch.zeros(64)

    Writer(tmp_path / "gemma", of, "Gemma4", "F32", change=add_keys)
    check_tokens(read(tmp_path / "gemma"), model, models.prompts("Gemma4")[1:2], is_rounded=False)


@pytest.mark.parametrize("kind", ["Qwen3_5", "Lfm2", "Gemma4"])
def test_a_tensor_of_another_layer_is_refused_by_its_name(models, tmp_path, kind):
    def remove(tensors):
        del tensors[next(name for name in sorted(tensors) if name.endswith(("up_proj.weight", "w3.weight")))]

    Writer(tmp_path / "model", models.make(kind)[0], kind, change=remove)
    with pytest.raises(ValueError, match=r"up_proj\.weight \(blk\.0\.ffn_up\.weight\) is missing in"):
        read(tmp_path / "model")


@pytest.mark.parametrize(("kind", "variant"), [("Qwen3_5Moe", "plain")])
def test_drafts_are_those_of_the_head_in_the_file(tmp_path, kind, variant):
    heads = Heads(tmp_path, kind)
    of, model, head = heads.make(is_trained=False, variant=variant)
    Writer(tmp_path / "model", of, kind, "F32")
    llm = read(tmp_path / "model", speculative_config=predicting())
    draws = record_draws(llm.engine)
    llm.generate(heads.hybrids.prompts()[1:3], GREEDY, use_tqdm=False)
    check_draws(model, head, draws)


def test_a_file_without_the_head_makes_no_drafts(models, tmp_path):
    Writer(tmp_path / "model", models.make("Qwen3_5")[0], "Qwen3_5")
    with pytest.raises(ValueError, match=r"tensor mtp\.fc\.weight \(blk\.4\.nextn\.eh_proj\.weight\) is missing in"):
        read(tmp_path / "model", speculative_config=predicting())
