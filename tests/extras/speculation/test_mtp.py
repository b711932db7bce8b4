"""The head for multi-token prediction makes the drafts of a reference, and changes no output.

The reference computes the head in float32 with the modules of `transformers`. For each draft it computes all tokens
again, without a cache. A random head is nearly always wrong. A head that was trained on the answers is mostly right.

Broken by hand, and seen here: hidden states of another row, or of a rejected draft; hidden states that prefix hits do
not find; K and V of the head that copies of blocks leave out; position 0 that is seen; drafts that do not go on from
the head's own hidden state.
"""

import functools
import importlib
import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from tests.extras.models.hybrid_checkpoints import HybridCheckpoints
from tests.extras.models.test_qwen3_5 import GREEDY, TINY_POOLS, check_all_free, check_greedy, logprobs, make_llm

pytest.importorskip("transformers.models.qwen3_5")


class ReferenceHead(torch.nn.Module):
    """The head, with the names of a checkpoint."""

    def __init__(self, model, kind):
        super().__init__()
        folder = {"Qwen3_5": "qwen3_5", "Qwen3_5Moe": "qwen3_5_moe"}[kind]
        modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        config, norm = model.config, getattr(modeling, f"{kind}RMSNorm")
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (norm(size, eps) for _ in range(3))
        self.fc = torch.nn.Linear(2 * size, size, bias=False)
        layer = config.layer_types.index("full_attention")
        self.layers = torch.nn.ModuleList([getattr(modeling, f"{kind}DecoderLayer")(config, layer)])

    def forward(self, pairs, rotary):
        """pairs: [n, 2 * hidden_size], embeddings and hidden states -> [n, hidden_size]"""
        embedded, hidden = pairs.chunk(2, -1)
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), -1))[None]
        mask = torch.full((1, 1, x.shape[1], x.shape[1]), -torch.inf).triu(1)
        positions = torch.arange(x.shape[1])[None]
        out = self.layers[0](x, position_embeddings=rotary(x, positions), attention_mask=mask, position_ids=positions)
        return self.norm(out)[0]


@torch.no_grad()
def pairs_of(model, tokens):
    """The embedding of each token but the first, and the hidden state before it: [len(tokens) - 1, 2 * hidden_size]"""
    ids = torch.tensor([tokens])
    hidden = model.model(ids, use_cache=False).last_hidden_state[0]
    return torch.cat((model.model.embed_tokens(ids)[0, 1:], hidden[:-1]), -1)


@torch.no_grad()
def reference(model, head, tokens, drafts):
    """The hidden state of the head after the known tokens and the drafts that follow: [hidden_size]"""
    pairs = pairs_of(model, tokens)
    for draft in drafts:
        last = head(pairs, model.model.rotary_emb)[-1]
        pairs = torch.cat((pairs, torch.cat((model.model.embed_tokens.weight[draft], last))[None]))
    return head(pairs, model.model.rotary_emb)[-1]


class Heads:
    """Checkpoints of `HybridCheckpoints` with a head."""

    def __init__(self, root, kind="Qwen3_5", hybrids=None):
        self._root, self._kind = root / "heads", kind
        (root / "hybrids").mkdir()
        self._root.mkdir()
        self.hybrids = hybrids or HybridCheckpoints(root / "hybrids", kind)

    def make(self, is_trained=True, variant="plain"):
        """(folder, transformers model, reference of the head)"""
        return self._make(is_trained, variant)

    @functools.cache  # noqa: B019 (lives as long as the module's tests)
    def _make(self, is_trained, variant):
        plain, model = self.hybrids.make(variant)
        torch.manual_seed(1)
        head = ReferenceHead(model, self._kind).apply(model._init_weights)  # layers leave experts uninitialised
        for parameter in head.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        if is_trained:
            self.train(model, head, variant)
        folder = self._root / f"{variant}-{is_trained}"
        shutil.copytree(plain, folder)
        weights = load_file(folder / "model.safetensors")
        own = {f"mtp.{name}": tensor.detach().contiguous() for name, tensor in head.state_dict().items()}
        save_file({**weights, **own}, folder / "model.safetensors", {"format": "pt"})
        return folder, model, head.eval()

    def train(self, model, head, variant):
        """Fit the head to the answers, so that most drafts are right."""
        texts = [[*prompt, *ids] for prompt, (ids, _) in zip(self.hybrids.prompts(), self.hybrids.greedy(variant),
                                                             strict=True)]  # fmt: skip
        examples = [(pairs_of(model, text), torch.tensor(text[2:])) for text in texts]
        model.requires_grad_(False)
        optimizer = torch.optim.Adam(head.parameters(), lr=5e-3)
        for _ in range(12):
            for pairs, targets in examples:
                hidden = head(pairs, model.model.rotary_emb)[:-1]
                loss = F.cross_entropy(model.lm_head(hidden)[-8:], targets[-8:])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


def predicting(most=3):
    return {"method": "mtp", "num_speculative_tokens": most, "disable_by_batch_size": 64}


def make_predicting_llm(folder, most=3, **options):
    return make_llm(folder, speculative_config=predicting(most), **options)


def record_draws(engine):
    """Returns a list that gets (known tokens, drafts so far, next draft, hidden state of the head) of each draw."""
    proposer, draws = engine.scheduler.drafter.proposer, []
    draw = proposer._draw

    def recorded(growing, drafts):
        before = [(seq.token_ids.tolist(), list(drafts[i])) for i, seq in growing]
        token_ids = draw(growing, drafts)
        after = zip(token_ids, (proposer._hidden[i] for i, _ in growing), strict=True)
        draws.extend((*one, *other) for one, other in zip(before, after, strict=True))
        return token_ids

    proposer._draw = recorded
    return draws


def check_draws(model, head, draws, is_greedy=True):
    assert draws
    for tokens, drafts, token_id, hidden in draws:
        expected = reference(model, head, tokens, drafts)
        torch.testing.assert_close(hidden, expected, rtol=1e-3, atol=1e-3)
        assert not is_greedy or token_id == model.lm_head(expected).argmax()


CASES = [
    pytest.param({"block_size": 1, "num_kv_blocks": 90}, marks=pytest.mark.slow),
    {"num_kv_blocks": TINY_POOLS[4], "preemption_mode": "swap", "swap_space_bytes": 1 << 20},
    {"max_num_batched_tokens": 13, "state_snapshot_interval": 1},
    pytest.param(
        {"attention_backend": "cpu", "block_size": 16, "num_kv_blocks": TINY_POOLS[16]}, marks=pytest.mark.slow
    ),
    pytest.param({"max_num_seqs": 2, "enable_prefix_caching": False}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_drafts_are_those_of_the_reference(heads, options):
    """The second time prompts begin with hits. The outputs are those of `transformers`."""
    folder, model, head = heads.make()
    llm = make_predicting_llm(folder, **options)
    draws = record_draws(llm.engine)
    prompts, expected = heads.hybrids.prompts(), heads.hybrids.greedy()
    check_greedy(llm, prompts, expected)
    num_first = len(draws)
    check_greedy(llm, prompts[::-1], expected[::-1])
    assert 0 < num_first < len(draws)
    check_draws(model, head, draws)
    stats = llm.get_stats()
    assert (stats.num_swaps > 0) == ("preemption_mode" in options)
    assert stats.num_accepted_tokens / stats.num_draft_tokens > 0.3


def test_a_conversation_has_the_drafts_of_the_reference(heads):
    """Each prompt is found as far as a snapshot, in which the hidden state before the next token is kept."""
    folder, model, head = heads.make()
    llm = make_predicting_llm(folder, state_snapshot_interval=2)
    draws, plain, prompt = record_draws(llm.engine), make_llm(folder), heads.hybrids.prompts()[2]
    for turn in range(3):
        output = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
        expected = plain.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        assert output.outputs[0].token_ids == expected
        assert (output.num_cached_tokens > 0) == (turn > 0)
        prompt = [*prompt, *expected, turn, 7 * turn]
    check_draws(model, head, draws)


def test_samples_are_those_without_drafts(heads):
    folder, model, head = heads.make()
    prompts = heads.hybrids.prompts()[:5]
    params = [
        SamplingParams(n=3, temperature=0.7, seed=i, max_tokens=12, ignore_eos=True, logprobs=0) for i in range(5)
    ]
    plain = make_llm(folder).generate(prompts, params, use_tqdm=False)
    llm = make_predicting_llm(folder, max_num_batched_tokens=9)
    draws = record_draws(llm.engine)
    for output, expected in zip(llm.generate(prompts, params, use_tqdm=False), plain, strict=True):
        for one, other in zip(output.outputs, expected.outputs, strict=True):
            assert one.token_ids == other.token_ids
            assert logprobs(one) == pytest.approx(logprobs(other), abs=2e-4)
    check_draws(model, head, draws, is_greedy=False)
    assert 0 < llm.get_stats().num_accepted_tokens < llm.get_stats().num_draft_tokens
    check_all_free(llm)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["tied", "yarn"])
def test_variants_have_the_drafts_of_the_reference(heads, variant):
    folder, model, head = heads.make(True, variant)
    llm = make_predicting_llm(folder)
    draws = record_draws(llm.engine)
    check_greedy(llm, heads.hybrids.prompts(), heads.hybrids.greedy(variant))
    check_draws(model, head, draws)


@pytest.mark.slow
def test_a_model_with_experts_has_the_drafts_of_the_reference(tmp_path):
    """The experts of the head are stored in one tensor, like those of the model."""
    heads = Heads(tmp_path, "Qwen3_5Moe")
    folder, model, head = heads.make()
    assert "mtp.layers.0.mlp.experts.gate_up_proj" in load_file(folder / "model.safetensors")
    for backend in ("torch", "cpu"):
        llm = make_predicting_llm(folder, attention_backend=backend, block_size=16)
        draws = record_draws(llm.engine)
        check_greedy(llm, heads.hybrids.prompts(), heads.hybrids.greedy())
        check_draws(model, head, draws)
        assert llm.get_stats().num_draft_tokens > 0


# ---- which checkpoints, and memory


def test_a_checkpoint_without_a_head_is_refused(heads):
    folder, _ = heads.hybrids.make()
    with pytest.raises(
        ValueError, match=r"'mtp' needs a head for multi-token prediction, but .* has no tensors mtp\.\*"
    ):
        make_predicting_llm(folder)


def test_another_architecture_is_refused():
    with pytest.raises(ValueError, match="'mtp' needs a model of the kind of Qwen3.5"):
        LLM(TINY_QWEN3, device="cpu", speculative_config=predicting())


def test_a_head_of_several_layers_is_refused(heads, tmp_path):
    folder = tmp_path / "two"
    shutil.copytree(heads.make()[0], folder)
    weights = load_file(folder / "model.safetensors")
    weights["mtp.layers.1.input_layernorm.weight"] = torch.zeros(64)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="a head of one layer"):
        make_predicting_llm(folder)


def test_an_index_names_the_tensors_of_the_head(heads, tmp_path):
    folder = tmp_path / "parts"
    shutil.copytree(heads.make()[0], folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {name: f"{'head' if name.startswith('mtp.') else 'rest'}.safetensors" for name in weights}
    for file in set(parts.values()):
        save_file({name: weights[name] for name in weights if parts[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    check_greedy(make_predicting_llm(folder), heads.hybrids.prompts()[:2], heads.hybrids.greedy()[:2])


def test_without_the_method_the_head_is_not_loaded(heads):
    llm = make_llm(heads.make()[0])
    assert llm.engine.runner.model.mtp is None
    check_greedy(llm, heads.hybrids.prompts()[:2], heads.hybrids.greedy()[:2])


def test_blocks_and_slots_have_room_for_the_head(heads):
    sizes = {"num_kv_blocks": None, "kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 2}
    llms = [make_llm(heads.make()[0], speculative_config=one, **sizes) for one in (None, predicting())]
    plain, runner = (llm.engine.runner for llm in llms)
    of_model, of_head = runner.kv_caches
    of_block = of_model.bytes_per_block + of_head.bytes_per_block
    assert of_block == 2 * plain.kv_cache.bytes_per_block, "one layer of the model attends, and one of the head"
    assert runner.layout.pool.bytes_per_slot == plain.layout.pool.bytes_per_slot + 64 * 4
    assert of_head.num_blocks == of_model.num_blocks < plain.kv_cache.num_blocks
    num_bytes = sum(one.nbytes for one in (of_model.tensor, of_head.tensor, *runner.layout.pool.states))
    assert (1 << 20) - of_block < num_bytes <= 1 << 20
