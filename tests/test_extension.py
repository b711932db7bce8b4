"""Parts of one's own: options, files and names that give them, and what the core asks of them."""

import os
import random
import sys

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.block_manager import BlockManager
from nanovllm.config import Config
from nanovllm.extension import import_extension
from nanovllm.layers.attention import TorchAttention
from nanovllm.model_runner import ModelRunner
from nanovllm.prefix_cache import PrefixCache
from nanovllm.sampler import sample_tokens
from nanovllm.scheduler import Scheduler
from nanovllm_testing.engine_traffic import MODEL, SMALL, drive, random_requests

FILE = """
from nanovllm.block_manager import BlockManager
from nanovllm.layers.attention import TorchAttention
from nanovllm.model_runner import ModelRunner
from nanovllm.prefix_cache import PrefixCache
from nanovllm.sampler import sample_tokens
from nanovllm.scheduler import Scheduler

called = set()


class Arrivals(Scheduler):
    def add(self, seq):
        called.add(("scheduler", (seq.sampling_params.extra_args or {}).get("tenant")))
        super().add(seq)


class Blocks(BlockManager):
    def free(self, seq):
        called.add("block manager")
        super().free(seq)


class Prefixes(PrefixCache):
    def find(self, seq):
        called.add("prefix cache")
        return super().find(seq)


class Runner(ModelRunner):
    def make_metadata(self, step, metadata):
        called.add("metadata")
        return super().make_metadata(step, metadata)

    def forward(self, batch):
        called.add("forward")
        return super().forward(batch)


class Backend(TorchAttention):
    def attend(self, *inputs):
        called.add("attention")
        return super().attend(*inputs)


def sample(logits, temperatures, *others, **more):
    called.add("sampler")
    return sample_tokens(logits, temperatures, *others, **more)


scheduler_cls, block_manager_cls, prefix_cache_cls = Arrivals, Blocks, Prefixes
runner_cls, attention_backend, sampler_cls = Runner, Backend, sample
extra_args = {"tenant": str, "deadline": float}
"""
ALL_CALLED = {
    *(("scheduler", "a"), "block manager", "prefix cache", "metadata", "forward", "attention", "sampler"),
}


@pytest.fixture
def extension(tmp_path):
    path = tmp_path / "my_parts.py"
    path.write_text(FILE, encoding="utf-8")
    return path


def test_each_part_of_a_file_takes_its_place(extension):
    llm = LLM(MODEL, extension=extension, **SMALL)
    params = SamplingParams(temperature=0, max_tokens=6, extra_args={"tenant": "a"})
    found = llm.generate("What is a block table?", params, use_tqdm=False)
    expected = LLM(MODEL, attention_backend="torch", **SMALL).generate(
        "What is a block table?", SamplingParams(temperature=0, max_tokens=6), use_tqdm=False
    )
    assert found[0].outputs == expected[0].outputs
    assert sys.modules[type(llm.engine.scheduler).__module__].called == ALL_CALLED


def test_a_class_may_be_given_by_its_name(extension, monkeypatch):
    monkeypatch.syspath_prepend(extension.parent)
    for name in ("my_parts:Arrivals", "my_parts.Arrivals"):
        assert Config(MODEL, scheduler_cls=name).scheduler_cls.__name__ == "Arrivals"
    assert Config(MODEL, extension="my_parts").extra_args == {"tenant": str, "deadline": float}


def test_a_file_that_has_changed_is_imported_again(extension):
    first = import_extension(extension)
    assert import_extension(str(extension)) is first
    extension.write_text(FILE + "changed = True\n", encoding="utf-8")
    os.utime(extension, (1, 1))
    assert import_extension(extension).changed


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("scheduler_clss = 1", "names none of its own"),
        ("schedular_cls = dict", "names schedular_cls, which this engine does not have"),
        ("extra_arg = {'a': str}", "names extra_arg, which this engine does not have"),
        ("def f(:", "cannot be imported (SyntaxError"),
        ("import nothing_of_this_name", "cannot be imported (ModuleNotFoundError"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, text, says):
    path = tmp_path / "bad.py"
    path.write_text(text, encoding="utf-8")
    before = set(sys.modules)
    with pytest.raises(ValueError, match="extension") as error:
        Config(MODEL, extension=path)
    assert says in str(error.value)
    if "imported" in says:
        assert set(sys.modules) == before


def test_a_part_that_is_given_twice_is_refused(extension):
    with pytest.raises(ValueError, match="scheduler_cls is given twice"):
        Config(MODEL, extension=extension, scheduler_cls=Scheduler)
    with pytest.raises(ValueError, match="attention_backend is given twice"):
        Config(MODEL, extension=extension, attention_backend="torch")


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("scheduler_cls", Scheduler),
        ("block_manager_cls", BlockManager),
        ("prefix_cache_cls", PrefixCache),
        ("runner_cls", ModelRunner),
    ],
)
def test_only_subclasses_of_the_cores_classes_are_taken(name, base):
    with pytest.raises(TypeError, match=f"{name} must be a subclass of {base.__module__}.{base.__name__}"):
        LLM(MODEL, **{name: TorchAttention})
    with pytest.raises(ValueError, match=f"{name}='a.b' cannot be imported"):
        LLM(MODEL, **{name: "a.b"})


def test_extra_args_are_those_that_are_declared(extension):
    llm = LLM(MODEL, extension=extension, **SMALL)
    for good in (None, {}, {"tenant": "a"}, {"deadline": 1}, {"deadline": 0.5, "tenant": ""}):
        llm.engine.check_params(SamplingParams(extra_args=good))
    with pytest.raises(ValueError, match="extra_args may have tenant, deadline, got 'tennant'"):
        llm.generate([5], SamplingParams(extra_args={"tennant": "a"}))
    for bad in ({"tenant": 1}, {"deadline": True}, {"deadline": "1"}):
        with pytest.raises(TypeError, match=r"extra_args\['(tenant|deadline)'\] must be of class (str|float)"):
            llm.generate([5], SamplingParams(extra_args=bad))
    with pytest.raises(ValueError, match="extra_args must be None: this engine has no extension with fields"):
        LLM(MODEL, **SMALL).generate([5], SamplingParams(extra_args={"tenant": "a"}))


class Hostile(Scheduler):
    """Takes any candidate, often `needy` itself, or one that came first."""

    rng = random.Random(5)
    victims: list = []

    def choose_victim(self, candidates, needy):
        assert candidates[0] is needy
        assert set(candidates) <= set(self.running)
        victim = self.rng.choice([needy, candidates[-1], self.rng.choice(candidates)])
        self.victims.append(candidates.index(victim) - len(candidates))
        return victim


def test_every_request_finishes_whichever_victim_is_chosen():
    """And its tokens are those of the core's own scheduler."""
    requests, options = list(random_requests(random.Random(1), 40)), {**SMALL, "num_kv_blocks": 12, "max_model_len": 48}
    base = drive(LLM(MODEL, **options).engine, requests, random.Random(2))
    assert drive(LLM(MODEL, **options, scheduler_cls=Hostile).engine, requests, random.Random(2)) == base
    assert len(set(Hostile.victims)) > 2  # not only the last ones


@pytest.mark.parametrize("is_queued", [False, True])
def test_a_request_that_the_scheduler_refuses_leaves_nothing(is_queued):
    class Refuses(Scheduler):
        def add(self, seq):
            if is_queued:
                super().add(seq)
            raise ValueError("refused")

    engine = LLM(MODEL, **SMALL, scheduler_cls=Refuses).engine
    with pytest.raises(ValueError, match="refused"):
        engine.add_request("0", [5, 6])
    assert not engine.has_unfinished_requests()
    assert engine.scheduler.waiting == []


def test_a_victim_must_be_a_candidate():
    class Wrong(Scheduler):
        def choose_victim(self, candidates, needy):
            return self.running[0] if self.running[0] is not needy else None

    engine = LLM(MODEL, **SMALL, scheduler_cls=Wrong).engine
    with pytest.raises(ValueError, match="choose_victim must return one of its candidates"):
        drive(engine, list(random_requests(random.Random(1), 40)), random.Random(2))


def test_sampler_gets_what_the_cores_gets():
    seen = []

    def sample(*arguments, **others):
        seen.append((len(arguments), set(others)))
        return sample_tokens(*arguments, **others)

    llm = LLM(MODEL, **SMALL, sampler_cls=sample)
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=4)
    found = llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs
    assert found == LLM(MODEL, **SMALL).generate([5, 6, 7], params, use_tqdm=False)[0].outputs
    assert seen[0] == (1, {"temperatures", "uniforms", "top_k", "top_p", "min_p", "argmax"})
