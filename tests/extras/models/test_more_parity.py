"""Models with states, groups, sinks or factors: the tokens of `transformers` also where their own modules do not look.

`test_qwen3_5.py`, `test_gemma4.py`, `test_lfm2.py`, `test_grouped_layers.py` and `test_architectures.py` have most
budgets, block sizes and features of these models. The cases here are the others, so that each model has all of them.
The oracle recomputes all tokens for each new one, without a cache.
"""

import functools
import itertools
import random
import shutil

import pytest
import torch
import transformers

from nanovllm_extras import SamplingParams
from tests.extras.models import gemma4_checkpoints, hybrid_checkpoints
from tests.extras.models.architectures import Checkpoints
from tests.extras.models.hybrid_checkpoints import LENS, MAX_TOKENS, continue_greedily, logprobs_of
from tests.extras.models.test_qwen3_5 import GREEDY, logprobs, make_llm
from tests.extras.models.test_qwen3_5_drafts import Knowing, drafting

pytest.importorskip("transformers.models.qwen3_5_moe")
VOCAB_SIZE = 300  # of the tokenizer of single bytes
HYBRIDS = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe", "lfm2": "Lfm2"}
VARIANTS = {"gpt_oss": "clamped", "smollm3": "windows", "granite": "factors"}
MODELS = (*HYBRIDS, "gemma4", *VARIANTS)
POOLS = {1: 72, 4: 19}  # blocks, by their size: one prompt fits, not all of them
SWAP = {"preemption_mode": "swap", "swap_space_bytes": 1 << 20}
FORM = {"regex": "(ab|cd){2,4}"}
MATCHES = {"".join(parts) for n in (2, 3, 4) for parts in itertools.product(("ab", "cd"), repeat=n)}


class NewModels:
    """Each model is made once, as are the continuations that `transformers` computes without a cache."""

    def __init__(self, root, tokenizer):
        self._root, self._tokenizer = root, tokenizer

    @functools.cache  # noqa: B019 (lives as long as the module's tests)
    def make(self, name):
        """(folder with a tokenizer, transformers model in float32)"""
        torch.manual_seed(0)
        if name in VARIANTS:
            folder, model = Checkpoints(self._root).make(name, VARIANTS[name], vocab_size=VOCAB_SIZE)
        else:
            model = self.make_hybrid(name) if name in HYBRIDS else self.make_gemma4()
            model.save_pretrained(folder := self._root / name)
        for file in self._tokenizer.glob("tokenizer*"):
            shutil.copy(file, folder)
        return folder, model

    def make_hybrid(self, name):
        config = hybrid_checkpoints.make_config(HYBRIDS[name], vocab_size=VOCAB_SIZE)
        model = getattr(transformers, f"{HYBRIDS[name]}ForCausalLM")(config).eval()
        hybrid_checkpoints.set_weights_that_matter(model)
        return model

    def make_gemma4(self):
        config = gemma4_checkpoints.make_config(vocab_size=VOCAB_SIZE, vocab_size_per_layer_input=VOCAB_SIZE)
        model = transformers.Gemma4ForCausalLM(config).eval()
        gemma4_checkpoints.set_weights_that_matter(model)
        return model

    def prompts(self):
        """Random tokens; the last two prompts begin with the same 40."""
        rng = random.Random(0)
        prompts = [[rng.randrange(1, 257) for _ in range(n)] for n in LENS]
        prompts[-1][:40] = prompts[-2][:40]
        return prompts

    @functools.cache  # noqa: B019
    def greedy(self, name):
        return [continue_greedily(self.make(name)[1], prompt) for prompt in self.prompts()]


@pytest.fixture(scope="module")
def models(tmp_path_factory, with_tokenizer):
    return NewModels(tmp_path_factory.mktemp("models"), with_tokenizer)


def check_greedy(llm, prompts, expected):
    """Returns the outputs. At the end nothing owns a block or a slot."""
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for output, (token_ids, wanted) in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == token_ids
        assert logprobs(output.outputs[0]) == pytest.approx(wanted, abs=2e-4)
    stats = llm.get_stats()
    assert stats.num_free_blocks == stats.num_kv_blocks
    assert getattr(stats.states, "num_running", 0) == 0
    return outputs


def cases():
    """(model, budget, block size, pool)"""
    for name in ("qwen3_5", "qwen3_5_moe", "gemma4", "lfm2"):
        yield from ((name, 1, 1, "large"), (name, 7, 1, "tiny"), (name, 13, 1, "large"), (name, 64, 1, "tiny"))
    yield from (("qwen3_5_moe", budget, 4, "tiny" if budget == 13 else "large") for budget in (1, 7, 13, 64))
    yield from (("granite", budget, 4, "tiny" if budget == 13 else "large") for budget in (1, 7, 13, 64))
    yield from (("granite", 1, 1, "large"), ("granite", 7, 1, "large"), ("granite", 64, 1, "tiny"))
    yield "granite", 13, 16, "large"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "budget", "block_size", "pool"), list(cases()))
def test_tokens_are_those_of_transformers(models, name, budget, block_size, pool):
    options = {"block_size": block_size, "max_num_batched_tokens": budget}
    options["num_kv_blocks"] = POOLS[block_size] if pool == "tiny" else 480 // block_size
    llm, num = make_llm(models.make(name)[0], **options), 2 if budget == 1 else 6  # a budget of one is slow
    prompts, expected = models.prompts()[:num], models.greedy(name)[:num]
    check_greedy(llm, prompts, expected)
    num_preemptions = llm.get_stats().num_preemptions
    is_scarce = pool == "tiny" and budget != 7 and name != "gemma4"  # whose groups give back blocks behind the window
    assert num_preemptions > 0 if is_scarce else num_preemptions == 0 or pool == "tiny"
    check_greedy(llm, prompts[::-1], expected[::-1])  # prefixes are cached
    if pool == "large":
        assert llm.get_stats().prefix_cache_hit_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "budget", "block_size"), [("qwen3_5_moe", 64, 4), ("lfm2", 13, 1)])
def test_swapped_sequences_go_on_with_their_states(models, name, budget, block_size):
    options = {"max_num_batched_tokens": budget, "block_size": block_size, "num_kv_blocks": POOLS[block_size]}
    llm = make_llm(models.make(name)[0], **options, **SWAP)
    check_greedy(llm, models.prompts(), models.greedy(name))
    assert llm.get_stats().num_swaps > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5_moe", "lfm2", "smollm3", "granite"])
def test_samples_fork_in_the_middle_of_a_block(models, name):
    """The oracle: the log-probabilities that `transformers` gives to the tokens of each sample."""
    folder, model = models.make(name)
    prompts = [prompt for prompt in models.prompts() if len(prompt) % 4]
    llm = make_llm(folder, max_num_batched_tokens=13, num_kv_blocks=60)
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert len({tuple(sample.token_ids) for sample in output.outputs}) == 3
        for sample in output.outputs:
            assert logprobs(sample) == pytest.approx(logprobs_of(model, prompt, sample.token_ids), abs=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize(
    ("interval", "budget", "num_found"),
    [(5, 20, 40), (5, 7, 40), (0, 64, 0)],  # snapshots after 20 and 40 tokens, in chunks that also end between them
)
def test_hits_with_and_without_a_snapshot(models, name, interval, budget, num_found):
    """The prompts have 40 tokens in common, 10 blocks. The third one finds them in any case."""
    options = {"state_snapshot_interval": interval, "max_num_batched_tokens": budget, "explain_prefix_misses": True}
    llm, prompts = make_llm(models.make(name)[0], **options), models.prompts()[-2:]
    prompts.append([*prompts[0][:40], 5, 6, 7])
    expected = [*models.greedy(name)[-2:], continue_greedily(models.make(name)[1], prompts[-1])]
    outputs = [check_greedy(llm, [prompt], [one])[0] for prompt, one in zip(prompts, expected, strict=True)]
    lost = [sum(miss.end - miss.start for miss in output.metrics.prefix_misses if miss.cause == "no_snapshot")
            for output in outputs]  # fmt: skip
    assert [output.num_cached_tokens for output in outputs][2] == 40
    assert [output.num_cached_tokens + n for output, n in zip(outputs, lost, strict=True)] == [0, 40, 40]
    assert outputs[1].num_cached_tokens == num_found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [
    ("qwen3_5_moe", {"max_num_batched_tokens": 13}),
    ("lfm2", {"block_size": 1, "num_kv_blocks": POOLS[1]}),
    ("gemma4", {"block_size": 1, "num_kv_blocks": POOLS[1]}),
    ("smollm3", {"max_num_batched_tokens": 13, "num_kv_blocks": POOLS[4]}),
    ("granite", {"max_num_batched_tokens": 13}),
])  # fmt: skip
def test_drafts_change_no_token(models, name, options):
    """Right and wrong drafts of all lengths."""
    texts = [[*prompt, *ids] for prompt, (ids, _) in zip(models.prompts(), models.greedy(name), strict=True)]
    llm = make_llm(models.make(name)[0], speculative_config=drafting(Knowing(texts)), **options)
    check_greedy(llm, models.prompts(), models.greedy(name))
    check_greedy(llm, models.prompts()[::-1], models.greedy(name)[::-1])
    assert 0 < llm.get_stats().num_accepted_tokens < llm.get_stats().num_draft_tokens


@pytest.mark.parametrize(
    "name", [name if name == "qwen3_5" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_a_form_takes_the_likeliest_token_that_fits(models, name):
    """The second time from cached prefixes, beside a request without a form."""
    folder, model = models.make(name)
    prompts = models.prompts()[2:5]
    expected = [(write_form(model, prompt), "stop") for prompt in prompts]
    llm = make_llm(folder, max_num_batched_tokens=20)
    form = SamplingParams(temperature=0, max_tokens=20, structured_outputs=FORM)
    for _ in range(2):
        *formed, free = llm.generate([*prompts, prompts[0]], [form] * 3 + [GREEDY], use_tqdm=False)
        assert [(one.outputs[0].text, one.outputs[0].finish_reason) for one in formed] == expected
        assert free.outputs[0].token_ids == continue_greedily(model, prompts[0])[0]


def write_form(model, prompt):
    """Of the tokens with which the text can still become one of `MATCHES`, take the likeliest. Token 0 ends it."""
    ids_of = {letter: ord(letter) - ord("!") + 1 for letter in "abcd"}  # as the tokenizer numbers printable bytes
    ids, text = list(prompt), ""
    while True:
        following = {ids_of[match[len(text)]]: match[len(text)] for match in MATCHES
                     if match.startswith(text) and match != text}  # fmt: skip
        with torch.no_grad():
            row = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        best = max([*following, *([0] if text in MATCHES else [])], key=lambda token_id: row[token_id].item())
        if best == 0:
            return text
        ids.append(best)
        text += following[best]
