"""Every pair of features works: the tokens of engines that together have all pairs are those of engines without.

`feature_pairs.py` has the features and chooses the engines from the table of what is refused. Each engine serves two
rounds of the same requests, so that prefixes and stored blocks are found. The oracle is the plain engine of the same
model, weights and K and V in 8 bits, whose greedy tokens and log-probabilities are, with plain ones, those of
`transformers` in float32. `check_invariants` follows each step (`tests/conftest.py`). At the end each feature must have
acted: something was preempted, loaded, drafted, recorded and so on.
"""

import copy
import dataclasses
import functools
import itertools
import json
import random
import re
import shutil

import pytest
import torch
import transformers
from safetensors.torch import save_file

from nanovllm_extras import LLM, LoRARequest, SamplingParams
from nanovllm_extras.beam_search.beam_params import BeamSearchParams
from nanovllm_extras.embedding.pooling_params import PoolingParams
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.parallel import start_ranks
from nanovllm_extras.records.tier import BlockName
from nanovllm_extras.scheduling.roll_back import reset_prefix_cache
from nanovllm_extras.trace.check import check_recording
from nanovllm_extras.trace.recording import read_recording
from nanovllm_extras.weights.quantised_linear import QuantisedLinear
from tests.extras import feature_pairs
from tests.extras.feature_pairs import PLAIN, VOCAB_SIZE, name_of
from tests.extras.late_runner import LateRunner
from tests.extras.models import gemma4_checkpoints, hybrid_checkpoints
from tests.extras.models.hybrid_checkpoints import logprobs_of
from tests.extras.parallel.conftest import quick_ranks, rank_threads  # noqa: F401 (fixtures)
from tests.extras.speculation.test_mtp import Heads

BASE = {
    "device": "cpu", "dtype": "float32", "attention_backend": "torch", "enforce_eager": True, "block_size": 4,
    "num_kv_blocks": 300, "max_num_seqs": 16, "state_snapshot_interval": 2,
}  # fmt: skip
MAX_TOKENS = 8
LONG = 22  # tokens of the last request, which has drafts when it runs alone: others leave no rows for them
FEW_TOKENS = [40, 50, 60]
FORM = {"regex": "(ab|cd){2,3}"}


# ---- models


class Models:
    """Random checkpoints, each made once, with a tokenizer of single bytes; and what plain engines answer."""

    def __init__(self, root, tokenizer):
        self._root, self._tokenizer, self._answers = root, tokenizer, {}

    @functools.cache  # noqa: B019 (lives as long as the module's tests)
    def make(self, name):
        """(folder, transformers model in float32)"""
        torch.manual_seed(0)
        model = feature_pairs.class_of(name)(feature_pairs.make_config(name)).eval()
        set_weights_that_matter(name, model)
        model.save_pretrained(folder := self._root / name)
        for file in self._tokenizer.glob("tokenizer*"):
            shutil.copy(file, folder)
        if name == "Qwen3.5":
            folder = self._add_head(folder, model)
        return folder, model

    def _add_head(self, folder, model):
        """Return a folder with a head for multi-token prediction too, which is fitted to the answers."""
        (self._root / "head").mkdir()
        heads, prompt = Heads(self._root / "head"), prompts()[3]
        answer = continue_with(model, prompt, FEW_TOKENS, LONG)
        heads.hybrids.make = lambda variant: (folder, model)
        heads.hybrids.prompts = lambda: [prompt] * 3
        heads.hybrids.greedy = lambda variant: [(answer[:length], None) for length in (8, 16, 24)]
        return heads.make()[0]

    @functools.cache  # noqa: B019
    def adapters(self, name):
        """Return LoRA adapters of a model, and the merged model of each."""
        folder, model = self.make(name)
        made = [make_adapter(model, folder / f"adapter {number}", number) for number in (1, 2)]
        requests = [LoRARequest(f"adapter {i}", i, folder / f"adapter {i}") for i in (1, 2)]
        return requests, made

    def adapters_of(self, row):
        """Return the adapter of each request of a row that has one. The last one has drafts made without."""
        if row["adapters"] == "none":
            return {}
        names = [name for name in all_requests() if name != "few tokens"]
        found = self.adapters(row["model"])[0]
        return {name: found[i % 3] for i, name in enumerate(names) if i % 3 < 2}

    @functools.cache  # noqa: B019
    def plain(self, name, weights, kv, adapters):
        """Return an engine without features."""
        row = {**PLAIN, "model": name, "weights": weights, "K and V": kv, "adapters": adapters}
        return LLM(self.make(name)[0], **BASE, **feature_pairs.options_of(row)).engine

    def answers(self, name, weights, kv, adapters, requests=None):
        """Return what a plain engine answers to these requests, or to all, by their name. It serves each only once."""
        known = self._answers.setdefault((name, weights, kv, adapters), {})
        missing = {
            key: one for key, one in all_requests().items() if key in (requests or all_requests()).keys() - known
        }
        own = self.adapters_of({"model": name, "adapters": adapters})
        found = serve(self.plain(name, weights, kv, adapters), missing, adapters=own)
        if (weights, kv) == ("plain", "plain"):
            for request in {"greedy", "read prompt"} & found.keys():
                adapter = own.get(request)
                model = self.adapters(name)[1][adapter.lora_int_id - 1] if adapter else self.make(name)[1]
                check_likeliest(model, missing[request][0], found[request].outputs[0])
        for request in {"formed", "4 formed"} & found.keys():
            for sample in found[request].outputs:
                assert re.fullmatch(FORM["regex"], sample.text)
        known |= found
        return known

    def read(self, row, prompt, token_ids, adapter):
        """Return what the plain engine finds at each place of an output: token -> log-probability, of all tokens."""
        engine = self.plain(row["model"], row["weights"], row["K and V"], row["adapters"])
        params = SamplingParams(max_tokens=1, prompt_logprobs=-1)
        (output,) = serve(engine, {"read": ([*prompt, *token_ids], params)}, adapters={"read": adapter}).values()
        return [{key: one.logprob for key, one in row.items()} for row in output.prompt_logprobs[len(prompt) :]]

    @functools.cache  # noqa: B019
    def draft_model(self, name, adapters):
        """Return the folder of a Qwen3 that has learned which token follows another in the answers of a model."""
        config = transformers.Qwen3Config(
            vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, max_position_embeddings=256, tie_word_embeddings=False,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        torch.manual_seed(0)
        draft, layer = transformers.Qwen3ForCausalLM(config), "model.layers.0"
        draft.get_parameter(f"{layer}.self_attn.o_proj.weight").data.zero_()
        draft.get_parameter(f"{layer}.mlp.down_proj.weight").data.zero_()
        keys = torch.nn.functional.normalize(torch.randn(VOCAB_SIZE, 64), dim=-1)
        draft.model.embed_tokens.weight.data.copy_(keys)
        draft.lm_head.weight.data.zero_()
        for answer in self.answers(name, "plain", "plain", adapters).values():
            for sample in getattr(answer, "outputs", ()) if hasattr(answer, "prompt_logprobs") else ():
                token_ids = [answer.prompt_token_ids[-1], *sample.token_ids]
                for before, after in itertools.pairwise(token_ids):
                    draft.lm_head.weight.data[after] += keys[before]
        draft.save_pretrained(folder := self._root / f"draft for {name}, adapters {adapters}")
        return folder


def make_adapter(model, folder, seed):
    """Save an adapter of all linear layers but those of experts and routers; return the merged model."""
    merged, tensors = copy.deepcopy(model), {}
    generator = torch.Generator().manual_seed(seed)
    for path, layer in merged.named_modules():
        if type(layer) is torch.nn.Linear and not re.search(r"lm_head|\.experts\.|kv_b_proj|\.gate$", path):
            a = torch.randn(4, layer.in_features, generator=generator) / layer.in_features**0.5
            b = 0.2 * torch.randn(layer.out_features, 4, generator=generator)
            layer.weight.data += 2 * b @ a
            tensors |= {f"base_model.model.{path}.lora_{kind}.weight": t for kind, t in (("A", a), ("B", b))}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in tensors})
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged


def set_weights_that_matter(name, model):
    """Give an effect to weights that `transformers` starts without any, and both ranks the same scales in 8 bits."""
    kind, variant, _ = feature_pairs.MODELS[name]
    if kind == "gemma4":
        gemma4_checkpoints.set_weights_that_matter(model)
    elif variant is None:
        hybrid_checkpoints.set_weights_that_matter(model)
    else:
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("bias", "norm.weight", "sinks")):
                parameter.data += 0.3 * torch.randn_like(parameter)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.removesuffix(".weight").endswith(("o_proj", "down_proj", "out_proj", "w2")):
            weight = parameter.data if parameter_name.endswith("weight") or kind != "gpt_oss" else parameter.data.mT
            for half in weight.chunk(2, -1):  # the inputs of a rank
                half[..., 0] = weight.abs().amax(-1)


@pytest.fixture(scope="module")
def models(tmp_path_factory, with_tokenizer):
    return Models(tmp_path_factory.mktemp("pairs"), with_tokenizer)


# ---- requests


@functools.cache
def prompts():
    """Random tokens. The first three begin with the same 9, and two are equal."""
    rng = random.Random(0)
    found = [[rng.randrange(1, 257) for _ in range(n)] for n in (14, 17, 13, 6)]
    found[1][:9] = found[2][:9] = found[0][:9]
    return [*found, found[0]]


def sampled(seed, **fields):
    return SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0.8, seed=seed, **fields)


def all_requests():
    """Return name -> (prompt, parameters) of all requests that an engine may get, with all log-probabilities."""
    greedy = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0, logprobs=2)
    first, second, third, fourth, fifth = prompts()
    form = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, logprobs=2, structured_outputs=FORM)
    return {
        "greedy": (first, greedy),
        "read prompt": (second, dataclasses.replace(greedy, prompt_logprobs=2)),
        "sampled": (third, sampled(1, logprobs=2)),
        "4 samples": (third, sampled(2, logprobs=2, n=4)),
        "again": (fifth, greedy),
        "formed": (first, form),
        "4 formed": (second, sampled(3, logprobs=2, n=4, structured_outputs=FORM)),
        "beams": (third, BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)),
        "last": (second, PoolingParams("last")),
        "mean": (third, PoolingParams("mean")),
        "few tokens": (fourth, dataclasses.replace(greedy, allowed_token_ids=FEW_TOKENS, max_tokens=LONG)),
    }


def requests_of(row):
    """Return the requests of a row's engine."""
    has = {factor: level != PLAIN[factor] for factor, level in row.items()}
    left_out = {"sampled", "formed"} if has["samples"] else {"4 samples", "4 formed"}
    left_out |= set() if has["structured output"] else {"formed", "4 formed"}
    left_out |= set() if has["beams"] else {"beams"}
    left_out |= set() if has["embeddings"] else {"last", "mean"}
    found = {}
    for name, (prompt, params) in all_requests().items():
        if isinstance(params, SamplingParams) and not has["log-probabilities"]:
            params.logprobs = None
        if isinstance(params, SamplingParams) and not has["prompt log-probabilities"]:
            params.prompt_logprobs = None
        if name not in left_out:
            found[name] = prompt, params
    return found


def serve(engine, requests, num_steps=None, adapters=None):
    """Return the last output of each request, by its name. num_steps: a list that gets the tokens of each step

    adapters: name of a request -> its LoRA adapter
    """
    outputs = {}
    for name, (prompt, params) in requests.items():
        engine.add_request(name, prompt, params, lora_request=(adapters or {}).get(name))
    while engine.has_unfinished_requests():
        step = engine.step()
        if num_steps is not None:
            num_steps.append(step.num_scheduled_tokens)
        outputs |= {output.request_id: output for output in step.outputs if output.finished}
    return {name: outputs[name] for name in requests}


# ---- oracles


def continue_with(model, prompt, allowed, max_tokens):
    """Return the likeliest continuation of allowed tokens, each of which recomputes all before it."""
    ids = list(prompt)
    for _ in range(max_tokens):
        with torch.no_grad():
            row = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(max(allowed, key=lambda token_id: row[token_id].item()))
    return ids[len(prompt) :]


def check_likeliest(model, prompt, completion):
    """Each token is the likeliest after those before it, with the log-probability that `transformers` computes."""
    found = [logprobs[token_id] for token_id, logprobs in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert [one.rank for one in found] == [1] * MAX_TOKENS
    assert [one.logprob for one in found] == pytest.approx(logprobs_of(model, prompt, completion.token_ids), abs=1e-3)


class Checker:
    """Compares the answers of one engine with those of the plain one.

    Sums of float32 depend on the batch in their last bits. A value that is then rounded to 8 bits may become the next
    one, so engines with 8 bits may choose another token if it is almost as likely. The plain engine then reads it.
    """

    def __init__(self, models, row, requests):
        self._models, self._row = models, row
        self._expected = models.answers(row["model"], row["weights"], row["K and V"], row["adapters"], requests)
        self._adapters = models.adapters_of(row)
        self._is_rounded = (row["weights"], row["K and V"]) != ("plain", "plain")
        self._tolerance = 0.25 if self._is_rounded else 1e-3
        self.num_samples = self.num_others = 0  # and those with other tokens

    def check(self, name, prompt, params, found):
        """`found` has what was requested, and it is what the plain engine has answered."""
        expected = self._expected[name]
        if isinstance(params, BeamSearchParams):
            self._check_beams(prompt, found.sequences, expected.sequences)
        elif isinstance(params, PoolingParams):
            assert found.outputs.embedding == pytest.approx(expected.outputs.embedding, abs=self._tolerance)
        else:
            assert len(found.outputs) == params.n
            for one, other in zip(found.outputs, expected.outputs, strict=True):
                assert (one.logprobs is not None) == (params.logprobs is not None)
                self._check_sample(prompt, params, one, other, self._adapters.get(name))
            assert (found.prompt_logprobs is not None) == (params.prompt_logprobs is not None)
            if params.prompt_logprobs is not None:
                assert found.prompt_logprobs[0] is None
                self._check_logprobs(found.prompt_logprobs[1:], expected.prompt_logprobs[1:])

    def _check_sample(self, prompt, params, one, other, adapter):
        self.num_samples += 1
        if self._is_rounded and one.token_ids != other.token_ids:
            self._check_other_tokens(prompt, params, one, adapter)
            return
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        if params.logprobs is not None:
            self._check_logprobs(one.logprobs, other.logprobs)

    def _check_other_tokens(self, prompt, params, found, adapter):
        """The plain engine finds the same log-probabilities, and no token much likelier than a greedy one."""
        self.num_others += 1
        for i, read in enumerate(self._models.read(self._row, prompt, found.token_ids, adapter)):
            chosen = read[found.token_ids[i]]
            if params.temperature == 0 and not params.structured_outputs:
                likeliest = max(read[token_id] for token_id in params.allowed_token_ids or read)
                assert chosen == pytest.approx(likeliest, abs=self._tolerance)
            if found.logprobs is not None:
                assert found.logprobs[i][found.token_ids[i]].logprob == pytest.approx(chosen, abs=self._tolerance)

    def _check_beams(self, prompt, found, expected):
        beams = [[beam.tokens for beam in one] for one in (found, expected)]
        assert self._is_rounded or beams[0] == beams[1]
        scores = [[beam.cum_logprob for beam in one] for one in (found, expected)]
        assert scores[0] == pytest.approx(scores[1], abs=4 * self._tolerance)

    def _check_logprobs(self, found, expected):
        """The values are close. Of tokens that are almost as likely, one or the other may be among the likeliest."""
        for one, other in zip(found, expected, strict=True):
            both = one.keys() & other.keys()
            assert both
            values = [[some[key].logprob for key in both] for some in (one, other)]
            assert values[0] == pytest.approx(values[1], abs=self._tolerance)


# ---- the engines


def rows():
    for row in feature_pairs.default_rows():
        yield pytest.param(row, id=name_of(row))
    for row in feature_pairs.sweep_rows():
        yield pytest.param(row, id=name_of(row), marks=pytest.mark.slow)


@pytest.mark.parametrize("row", list(rows()))
def test_tokens_are_those_without_the_features(models, quick_ranks, tmp_path, row):  # noqa: F811 (a fixture)
    requests, num_steps = requests_of(row), []
    checker = Checker(models, row, requests)
    options = own_options(models, row, tmp_path)
    trace = tmp_path / "run.jsonl" if row["recording"] == "on" else None
    with LLM(models.make(row["model"])[0], trace=trace, **{**BASE, **options}) as llm:
        engine = llm.engine
        late = watch_overlap(row, engine)
        for number in range(1 if row["prefix cache"] == "off" else 2):
            if number and engine.parts.kv_store is not None:
                assert engine.parts.kv_store.saver.wait(30)
                reset_prefix_cache(engine.scheduler)  # of the pool, not of the store
                forget_half(engine.parts.kv_store)
            outputs = serve(engine, requests, num_steps, models.adapters_of(row))
            for name, (prompt, params) in requests.items():
                checker.check(name, prompt, params, outputs[name])
            check_explained(row, requests, outputs, engine.get_stats())
        # two ranks add in another order than one, and samples of a prompt share what has been rounded otherwise
        share = 0.75 if row["ranks"] == "2" else 0.25
        assert checker.num_others <= checker.num_samples * share
        stats = engine.get_stats()
        assert stats.num_free_blocks == stats.num_kv_blocks
        check_acted(row, engine, stats, late, num_steps, quick_ranks)
    if trace is not None:
        check_recording(trace, read_recording(trace))


def forget_half(store):
    """Let host memory forget every second block, if another tier has it."""
    if len(store.tiers.tiers) == 2:
        memory = store.tiers.tiers[0]
        for key in list(memory._blocks)[::2]:
            memory.failed(BlockName(key, b""))


class Watched:
    """Counts the steps that are launched ahead. Unlike `LateRunner`, it does not delay them."""

    def __init__(self, engine):
        self._engine, self._run = engine, engine.runner.run
        engine.runner.run = self.run
        self.num_ahead = 0

    def run(self, batch):
        self.num_ahead += len(self._engine.scheduler.pending.steps) == 2
        return self._run(batch)


def watch_overlap(row, engine):
    """Compute steps as late as a device may, unless ranks or a draft model are asked before a step is awaited."""
    if row["overlap"] == "off":
        return None
    asks_ranks = row["ranks"] == "2" and "on" in (row["host tier"], row["disk tier"])
    return Watched(engine) if asks_ranks or row["speculation"] != "none" else LateRunner(engine)


def own_options(models, row, folder):
    """Return the options of a row, with folders and sizes in place of placeholders."""
    options = feature_pairs.options_of(row)
    if row["disk tier"] == "on":
        extra = {"shared_storage_path": folder / "tier"}
        options["kv_transfer_config"] = {**options["kv_transfer_config"], "kv_connector_extra_config": extra}
    if row["speculation"] == "draft model":
        draft = models.draft_model(row["model"], row["adapters"])
        options["speculative_config"] = {**options["speculative_config"], "model": draft}
    return options


def check_explained(row, requests, outputs, stats):
    """All tokens of a prompt are hits or misses with a cause, if causes are asked for. A recording has them too."""
    is_explained = "on" in (row["explained misses"], row["recording"])
    assert bool(stats.prefix_cache_miss_tokens) == is_explained
    for name, (prompt, params) in requests.items():
        if isinstance(params, SamplingParams):
            misses = outputs[name].metrics.prefix_misses
            assert (misses is not None) == is_explained
            if misses is not None:
                num_missed = sum(miss.end - miss.start for miss in misses)
                assert outputs[name].num_cached_tokens + num_missed == len(prompt)


def check_acted(row, engine, stats, late, num_steps, ranks):
    """Each feature of the row has done something, and no other has."""
    runner, store = engine.runner, stats.kv_store
    tiers = [name for name, factor in (("memory", "host tier"), ("disk", "disk tier")) if row[factor] == "on"]
    quantised = [module.quantised.bits for module in runner.model.modules() if isinstance(module, QuantisedLinear)]
    # two ranks, or adapters, with 8 bits or fewer may sample other tokens, which the drafts were not made for
    is_rounded = (row["weights"], row["K and V"]) != ("plain", "plain")
    may_have_others = row["ranks"] == "2" or row["adapters"] == "on"
    has_other_drafts = may_have_others and is_rounded and stats.num_draft_tokens
    acted = {
        "prefix cache": ("on", "off")[stats.prefix_cache_hit_tokens == 0 and not tiers],
        "budget": "7 tokens" if max(num_steps) == 7 else "large",
        "small pool": {(False, False): "no", (True, False): "recompute", (True, True): "swap"}[
            stats.num_preemptions > 0, stats.num_swaps > 0
        ],
        "speculation": row["speculation"] if stats.num_accepted_tokens or has_other_drafts else "none",
        "overlap": "on" if late is not None and late.num_ahead > 0 else "off",
        "weights": {frozenset(): "plain", frozenset([8]): "int8", frozenset([4]): "int4"}[frozenset(quantised)],
        "K and V": "int8" if any("Int8" in type(one).__name__ for one in runner.backends) else "plain",
        "ranks": str(1 + len(ranks)),
        "adapters": "on" if engine.adapters is not None and engine.scheduler.adapter_slots.slot_of else "none",
    }
    if row["speculation"] != "none":  # no step is launched ahead while a sequence could get drafts
        del acted["overlap"]
    assert acted == {factor: row[factor] for factor in acted}
    if tiers:
        assert {name: one.loaded_bytes > 0 for name, one in store.tiers.items()} == dict.fromkeys(tiers, True)
        assert store.num_failed_loads == store.num_dropped_blocks == 0
        assert store.num_loaded_blocks > 0


# ---- what is refused


def test_what_the_array_leaves_out_is_refused_before_weights_are_loaded(models, monkeypatch):
    def fail(*_):
        raise AssertionError("weights are loaded, or a rank has started")

    folders = {name: models.make(name)[0] for name in feature_pairs.MODELS}
    monkeypatch.setattr(ModelRunner, "load_network", fail)
    monkeypatch.setattr(start_ranks, "start_all", fail)
    for some in feature_pairs.refused():
        options, model = feature_pairs.options_of(dict(some)), dict(some).get("model", PLAIN["model"])
        with pytest.raises(ValueError, match="do not go together: |needs a model of the kind of"):
            LLM(folders[model], **{**BASE, **options})


def test_few_pairs_of_factors_have_something_that_is_refused():
    assert len({frozenset(factor for factor, _ in some) for some in feature_pairs.refused()}) <= 12


def test_the_rows_have_all_pairs():
    default = [feature_pairs.pairs_of(row) for row in feature_pairs.default_rows()]
    assert set().union(*default) == set(feature_pairs.allowed_pairs())
    for model in feature_pairs.MODELS:
        rows = [row for row in [*feature_pairs.default_rows(), *feature_pairs.sweep_rows()] if row["model"] == model]
        assert set().union(*map(feature_pairs.pairs_of, rows)) >= set(feature_pairs.allowed_pairs(model))
    assert all(
        feature_pairs.why_not(row) is None for row in [*feature_pairs.default_rows(), *feature_pairs.sweep_rows()]
    )
