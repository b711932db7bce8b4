"""Parts of one's own in the engine with everything: each takes its place, or is refused by name.

The file of parts is that of `tests/test_extension.py`. What does not go together is in `test_compatibility.py`.
"""

import pickle
import random
import sys
import time

import pytest

from nanovllm.block_manager import BlockManager as CoreBlockManager
from nanovllm.model_runner import ModelRunner
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.scheduler import Scheduler as CoreScheduler
from nanovllm_extras import LLM, TINY_QWEN3, Config, SamplingParams
from nanovllm_extras.memory.block_manager import BlockManager
from nanovllm_extras.scheduling.scheduler import Scheduler
from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.serve.routes.app import make_app
from nanovllm_extras.serve.server_options import ServerOptions
from nanovllm_extras.trace.recording import read_recording
from nanovllm_extras.trace.replay import Replay
from nanovllm_testing.engine_traffic import MODEL, SMALL, drive, random_requests
from tests.extras.serve.conftest import Client
from tests.test_extension import ALL_CALLED, Hostile, extension  # noqa: F401

PLAIN = {"device": "cpu", "attention_backend": "torch", "enforce_eager": True}
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def expected():
    with LLM(TINY_QWEN3, **PLAIN) as llm:
        return llm.generate("What is a block table?", GREEDY, use_tqdm=False)[0].outputs[0].text


def test_each_part_of_a_file_takes_its_place(extension, expected):  # noqa: F811
    with LLM(TINY_QWEN3, extension=extension, device="cpu", num_kv_blocks=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, extra_args={"tenant": "a"})
        assert llm.generate("What is a block table?", params, use_tqdm=False)[0].outputs[0].text == expected
        assert sys.modules[type(llm.engine.scheduler).__module__].called == ALL_CALLED
        assert "attention_backend=your own" in llm.engine.description


def test_a_server_takes_the_file_and_passes_the_fields_of_its_requests(extension, expected):  # noqa: F811
    with AsyncLLM(TINY_QWEN3, extension=extension, device="cpu", num_kv_blocks=64) as llm:
        client = Client(make_app(ServerOptions(model_names=("tiny",)), llm))
        body = {"prompt": "What is a block table?", "temperature": 0, "max_tokens": 6}
        answer = client.post("/v1/completions", json={**body, "vllm_xargs": {"tenant": "a", "deadline": 1}})
        assert answer.json()["choices"][0]["text"] == expected
        assert sys.modules[type(llm.engine.scheduler).__module__].called == ALL_CALLED
        for wrong, status in (({"tennant": "a"}, 400), ({"tenant": 5}, 400), ({"tenant": {"a": 1}}, 400)):
            refused = client.post("/v1/completions", json={**body, "vllm_xargs": wrong})
            assert refused.status_code == status
            assert refused.json()["error"]["param"].startswith("vllm_xargs")


def test_a_config_of_a_file_is_copied_to_other_processes_by_its_path(extension):  # noqa: F811
    config = Config(TINY_QWEN3, extension=extension, max_num_seqs=3)
    assert b"Arrivals" not in pickle.dumps(config)
    assert pickle.loads(pickle.dumps(config)) == config


class Latest(Scheduler):
    """Extends the scheduler of this package, so that it works with all that this one has."""

    def choose_victim(self, candidates, needy):
        return candidates[len(candidates) // 2]


class Counting(BlockManager):
    num_taken = 0

    def take(self, seq):
        self.num_taken += 1
        return super().take(seq)


def test_subclasses_of_this_package_work_with_its_options():
    """Speculation, swap and overlap together: the tokens are those of the core."""
    requests, options = list(random_requests(random.Random(1), 25)), {**SMALL, "num_kv_blocks": 12, "max_model_len": 48}
    options |= {**PLAIN, "dtype": "float32"}
    with LLM(MODEL, **options) as base:
        expected = drive(base.engine, requests, random.Random(2))
    ngrams = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "disable_by_batch_size": 4}
    more = {"speculative_config": ngrams, "preemption_mode": "swap", "swap_space_bytes": 1 << 20}
    own = {"scheduler_cls": Latest, "block_manager_cls": Counting, "check_invariants": True}
    with LLM(MODEL, **options, **more, **own) as llm:
        assert drive(llm.engine, requests, random.Random(2)) == expected
        assert llm.engine.scheduler.block_manager.num_taken > 0
        assert llm.get_metrics()  # it counts as any other


class Repeats:
    """Proposes the newest token again."""

    def __init__(self, runner):
        self.runner, self.num_steps = runner, 0

    def propose(self, wanted):
        return [[seq.token_ids[-1]] * count for seq, count in wanted]

    def follow(self, batch, computed, newest_ids):
        self.num_steps += len(computed.hidden) > 0


def test_a_proposer_proposes_and_follows_the_steps():
    with LLM(TINY_QWEN3, **PLAIN) as llm:
        expected = llm.generate([[5, 5, 5]], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    options = {"proposer_cls": Repeats, "speculative_config": {"num_speculative_tokens": 2, "disable_by_batch_size": 8}}
    with LLM(TINY_QWEN3, **PLAIN, **options) as llm:
        found = llm.generate([[5, 5, 5]], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        assert found[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
        proposer = llm.engine.scheduler.drafter.proposer
        assert isinstance(proposer, Repeats)
        assert llm.engine.runner.followers == (proposer,)
        assert proposer.num_steps > 10
    for bad in ({"method": "ngram"}, {"model": "a-model"}):
        with pytest.raises(ValueError, match="proposer_cls and speculative_config"):
            Config(TINY_QWEN3, proposer_cls=Repeats, speculative_config={"num_speculative_tokens": 2, **bad})
    with pytest.raises(TypeError, match="proposer_cls must have a method propose"):
        Config(TINY_QWEN3, proposer_cls=dict)


def test_a_runner_that_overrides_what_only_the_core_calls_is_refused():
    class Own(ModelRunner):
        def sample(self, hidden, batch):
            return super().sample(hidden, batch)

    with pytest.raises(ValueError, match=r"runner_cls Own overrides sample, .*use nanovllm.LLM, or override only"):
        LLM(TINY_QWEN3, **PLAIN, runner_cls=Own)


def test_only_subclasses_are_taken():
    with pytest.raises(TypeError, match="scheduler_cls must be a subclass of nanovllm.scheduler.Scheduler"):
        LLM(TINY_QWEN3, scheduler_cls=BlockManager)


class Own(Qwen3ForCausalLM):
    """Computes as Qwen3, under a name of its own."""


def test_a_model_of_ones_own(tmp_path, expected):
    (tmp_path / "model").mkdir()
    for file in TINY_QWEN3.iterdir():
        text = file.read_bytes()
        if file.name == "config.json":
            text = text.replace(b"Qwen3ForCausalLM", b"OwnForCausalLM")
        (tmp_path / "model" / file.name).write_bytes(text)
    with LLM(tmp_path / "model", **PLAIN, models={"OwnForCausalLM": Own}) as llm:
        assert type(llm.engine.runner.model) is Own
        assert llm.generate("What is a block table?", GREEDY, use_tqdm=False)[0].outputs[0].text == expected
    with pytest.raises(ValueError, match="OwnForCausalLM"):
        LLM(tmp_path / "model", **PLAIN)


class FirstFreed(CoreBlockManager):
    """Frees the first block of a sequence first, so that blocks are handed out in another order than the core's."""

    def free(self, seq):
        seq.block_table.reverse()
        super().free(seq)


def test_a_run_with_other_blocks_is_recorded_and_replayed(tmp_path, extension):  # noqa: F811
    """And a recording makes nobody import a file."""
    own = {"scheduler_cls": Hostile, "block_manager_cls": FirstFreed, "enable_prefix_caching": False}
    with LLM(TINY_QWEN3, device="cpu", num_kv_blocks=64, **own, trace=tmp_path / "run.jsonl") as llm:
        llm.generate(["What is a block table? " * 8, "b"] * 9, GREEDY, use_tqdm=False)
    header, *lines = read_recording(tmp_path / "run.jsonl")
    replay = Replay(header)
    for event in [event for line in lines for event in line["events"]]:
        replay.apply(event)
    assert len(replay.free) == 64
    assert sorted(replay.free) != list(replay.free)
    assert "FirstFreed" not in (tmp_path / "run.jsonl").read_text(encoding="utf-8")


class Waits(CoreScheduler):
    """Admits nothing for a while, by the clock."""

    begun, num_asked = None, 0

    def admit_waiting(self, budget, chunks):
        self.begun, self.num_asked = self.begun or time.monotonic(), self.num_asked + 1
        is_over = self.num_asked > 3 and time.monotonic() - self.begun > 0.3
        return super().admit_waiting(budget, chunks) if is_over else budget


def test_a_server_whose_scheduler_waits_for_the_clock_leaves_the_processor_to_others():
    """It naps for 2 ms after a step that has computed nothing. Without naps there would be thousands of steps."""
    with AsyncLLM(TINY_QWEN3, scheduler_cls=Waits, device="cpu", num_kv_blocks=64) as llm:
        client = Client(make_app(ServerOptions(model_names=("tiny",)), llm))
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        assert 3 < llm.engine.scheduler.num_asked < 300


RANKS_FILE = """
import os

from nanovllm.layers.attention import TorchAttention
from nanovllm.scheduler import Scheduler


class Backend(TorchAttention):
    def attend(self, *inputs):
        with open(__file__ + ".used", "a") as file:
            print(os.getpid(), file=file)
        return super().attend(*inputs)


class Own(Scheduler):
    pass


attention_backend, scheduler_cls = Backend, Own
"""


@pytest.mark.slow
def test_each_rank_imports_the_file_itself(tmp_path, expected):
    path = tmp_path / "of_ranks.py"
    path.write_text(RANKS_FILE, encoding="utf-8")
    with LLM(TINY_QWEN3, device="cpu", num_kv_blocks=64, extension=path, tensor_parallel_size=2) as llm:
        assert llm.generate("What is a block table?", GREEDY, use_tqdm=False)[0].outputs[0].text == expected
    assert len(set((tmp_path / "of_ranks.py.used").read_text(encoding="utf-8").split())) == 2
