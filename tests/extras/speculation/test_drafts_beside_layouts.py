"""A draft model for models that keep more than K and V of one shape: states, several shapes, windows.

The large models answer as in `transformers`, in float32. The draft model is a small Qwen3 that was trained on these
answers, so most drafts are right. Each draft is compared with that of `transformers`, which computes all tokens again:
it differs if the draft model's cache lacks the K and V of a token, or has those of a rejected draft.

Broken by hand, and seen here: a draft model that does not follow the large one; swap and a K/V store without its K and
V; blocks behind the large model's window that are given back; memory that is not divided.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
import transformers

from nanovllm_extras import LLM, Config, SamplingParams
from nanovllm_extras.engine.invariants import check_invariants
from nanovllm_extras.scheduling.roll_back import reset_prefix_cache
from tests.extras.failing_request import isolating_engine, serve_beside_a_failing_one
from tests.extras.models.architectures import SHAPE, Checkpoints
from tests.extras.models.gemma4_checkpoints import Gemma4Checkpoints
from tests.extras.models.hybrid_checkpoints import HybridCheckpoints

pytest.importorskip("transformers.models.qwen3_5")
pytest.importorskip("transformers.models.gemma4")
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
SMALL = {**SHAPE, "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
SWAP = {"preemption_mode": "swap", "swap_space_bytes": 1 << 20}
TIGHT = {"num_kv_blocks": 19, "max_num_batched_tokens": 64}
"""One prompt fits, not all of them."""
PLAIN = {"gemma3": "plain", "mistral": "short window"}
"""Of `Checkpoints`: models with K and V of one shape, and their variants. Gemma 3 mixes windows."""


class Pairs:
    """Large models, and for each a draft model. `make` returns (folder, folder of the draft model, and both models)."""

    def __init__(self, root):
        self._root = root
        kinds = {"qwen3_5": HybridCheckpoints, "gemma4": Gemma4Checkpoints, **dict.fromkeys(PLAIN, Checkpoints)}
        kinds["lfm2"] = functools.partial(HybridCheckpoints, kind="Lfm2")
        for name in kinds:
            (root / name).mkdir()
        self.large = {name: kind(root / name) for name, kind in kinds.items()}

    @staticmethod
    def variant(name):
        return (name, PLAIN[name]) if name in PLAIN else ()

    def prompts(self, name):
        return self.large[name].prompts(*self.variant(name))

    def greedy(self, name):
        answers = self.large[name].greedy(*self.variant(name))
        return answers if name in PLAIN else [token_ids for token_ids, _ in answers]

    @functools.cache  # noqa: B019 (lives as long as the module's tests)
    def make(self, name):
        folder, model = self.large[name].make(*self.variant(name))
        texts = [[*prompt, *ids] for prompt, ids in zip(self.prompts(name), self.greedy(name), strict=True)]
        torch.manual_seed(0)
        draft = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, bos_token_id=None, eos_token_id=None))
        train(draft, texts)
        draft.eval().save_pretrained(self._root / f"draft of {name}")
        return folder, self._root / f"draft of {name}", model, draft


def train(draft, texts, num_last=9):
    """Fit the draft model to the answers at the ends of texts, so that most drafts are right."""
    rows, ends = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64), []
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = torch.tensor(text)  # attention is causal, so tokens behind a text change nothing
        ends.append(torch.arange(len(text) - num_last - 1, len(text) - 1))
    which, before = torch.arange(len(texts))[:, None], torch.stack(ends)  # [num_texts, 1], [num_texts, num_last]
    optimizer = torch.optim.Adam(draft.parameters(), lr=1e-2)
    for _ in range(60):
        logits = draft(rows, use_cache=False).logits[which, before]
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), rows[which, before + 1].flatten()).backward()
        optimizer.step()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return Pairs(tmp_path_factory.mktemp("pairs"))


def options_for(draft=None, **options):
    sizes = {"block_size": 4, "num_kv_blocks": 120, "max_num_seqs": 8, "attention_backend": "torch"}
    if draft is not None:
        drafting = {"model": str(draft), "num_speculative_tokens": 3, "disable_by_batch_size": 64}
        sizes["speculative_config"] = drafting
    return {"dtype": "float32", "device": "cpu", **sizes, **options}


def record_draws(engine):
    """Return a list that gets (tokens, drafts included, and the next draft) of each draw."""
    proposer, draws = engine.scheduler.drafter.proposer, []
    draw = proposer._draw

    def recorded(growing, drafts):
        before = [[*seq.token_ids, *drafts[i]] for i, seq in growing]
        token_ids = draw(growing, drafts)
        draws.extend(zip(before, token_ids, strict=True))
        return token_ids

    proposer._draw = recorded
    return draws


def check_draws(draft, draws):
    assert draws
    for tokens, token_id in draws:
        with torch.no_grad():
            assert draft(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax() == token_id


def tokens_of(llm, prompts, params=GREEDY):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    check_invariants(llm.engine)
    assert llm.engine.scheduler.block_manager.num_used_blocks == 0
    return [[one.token_ids for one in output.outputs] for output in outputs]


CASES = [  # (model, options); states are not stored with drafts
    ("qwen3_5", {**TIGHT, **SWAP}),
    ("gemma4", {"kv_offloading_size": 0.01}),
    pytest.param("lfm2", {"max_num_batched_tokens": 7, "state_snapshot_interval": 1}, marks=pytest.mark.slow),
    pytest.param("mistral", TIGHT, marks=pytest.mark.slow),
    pytest.param("gemma3", {"attention_backend": "cpu", "block_size": 16}, marks=pytest.mark.slow),
    pytest.param("gemma4", {**TIGHT, **SWAP}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_drafts_are_those_of_the_draft_model(pairs, name, options):
    """The second time prompts begin with hits. The outputs are those of `transformers`."""
    folder, small, _, draft = pairs.make(name)
    llm = LLM(folder, **options_for(small, **options))
    draws = record_draws(llm.engine)
    prompts, expected = pairs.prompts(name), [[token_ids] for token_ids in pairs.greedy(name)]
    assert tokens_of(llm, prompts) == expected
    if "kv_offloading_size" in options:
        llm.engine.parts.kv_store.saver.wait(5)
        reset_prefix_cache(llm.engine.scheduler)  # of the pool, not of the store
    num_first = len(draws)
    assert tokens_of(llm, prompts[::-1]) == expected[::-1]
    assert 0 < num_first < len(draws)
    check_draws(draft, draws)
    stats = llm.get_stats()
    assert stats.num_accepted_tokens / stats.num_draft_tokens > 0.3
    assert (stats.num_preemptions > 0) == ("num_kv_blocks" in options)
    assert (stats.num_swaps > 0) == ("preemption_mode" in options)
    if "kv_offloading_size" in options:
        assert stats.kv_store.num_loaded_blocks > 0
    elif "num_kv_blocks" not in options:
        assert stats.prefix_cache_hit_tokens > 0


def test_a_request_that_fails_beside_drafts(pairs):
    """Its step runs again, in both models."""
    name = "qwen3_5"
    folder, small, _, draft = pairs.make(name)
    engine = isolating_engine(Config(folder, **options_for(small)))
    draws = record_draws(engine)
    assert serve_beside_a_failing_one(engine, pairs.prompts(name), GREEDY) == pairs.greedy(name)
    check_draws(draft, draws)


@pytest.mark.parametrize("name", ["qwen3_5", "gemma4"])
def test_memory_is_divided_between_both_models(pairs, name):
    """Blocks of both models and slots of states fill it, but for less than one block."""
    folder, small, _, _ = pairs.make(name)
    sizes = {"num_kv_blocks": None, "kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 2}
    engine = LLM(folder, **options_for(small, **sizes)).engine
    runner, of_draft = engine.runner, engine.scheduler.drafter.proposer.runner.kv_cache
    pool, caches = runner.layout.pool, [*runner.kv_caches, of_draft]
    assert {cache.num_blocks for cache in caches} == {of_draft.num_blocks}
    num_bytes = sum(tensor.nbytes for tensor in (cache.tensor for cache in caches))
    num_bytes += sum(states.nbytes for states in (() if pool is None else pool.states))
    assert (1 << 20) - sum(cache.bytes_per_block for cache in caches) < num_bytes <= 1 << 20
