"""An observer that fails: the engine goes on, counts on, and says so. Oracle: the same requests without an observer."""

import logging

import pytest

from nanovllm_extras import LLM, Config, LLMEngine, SamplingParams
from nanovllm_extras.full_observer import Observer, SchedulingStats
from nanovllm_extras.trace.recording import Sinks, TraceFile, read_recording
from nanovllm_extras.watching import Watching

EVENTS = [name for name in dir(Observer) if name.startswith("on_")]
SMALL = {"device": "cpu", "attention_backend": "torch", "block_size": 4, "num_kv_blocks": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [list(range(i, i + 9)) for i in (1, 1, 40, 80)]


def serve(engine):
    """The tokens of the prompts, served twice, and what the engine has counted but for times."""
    tokens = []
    for round_ in range(2):
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(f"{round_} {i}", prompt, GREEDY)
        outputs = {}
        while engine.has_unfinished_requests():
            outputs |= {output.request_id: output.outputs[0].token_ids for output in engine.step().outputs}
        tokens.append(outputs)
    stats = vars(engine.get_stats()).copy()
    return tokens, {name: value for name, value in stats.items() if not name.endswith("_s") and "failed" not in name}


@pytest.fixture(scope="module")
def expected(tiny_checkpoint):
    tokens, stats = serve(LLMEngine(Config(tiny_checkpoint[0], **SMALL)))
    assert stats["num_preemptions"] > 0
    return tokens, stats


@pytest.mark.parametrize("event", ["on_schedule", "on_preempt", "on_finish", "on_step_end", "on_take_block"])
def test_an_observer_that_fails_stops_watching(tiny_checkpoint, expected, event, caplog):
    class Broken(Observer):
        num_calls = 0

    def fail(self, *arguments):
        self.num_calls += 1
        if self.num_calls == 2:
            raise OSError(28, "No space left on device")

    setattr(Broken, event, fail)
    broken = Broken()
    engine = LLMEngine(Config(tiny_checkpoint[0], **SMALL), broken)
    assert serve(engine) == expected
    assert broken.num_calls == 2
    assert engine.get_stats().num_failed_observers == 1
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert message == f"Broken has failed in {event}, and is told no more"


def test_an_observer_hears_of_everything(tiny_checkpoint, expected):
    """It hears what an observer hears that the scheduler tells without a stand-in, in the same order."""

    class Log(SchedulingStats):
        def __init__(self):
            super().__init__()
            self.heard = []

    def hear(event):
        def method(self, *arguments):
            getattr(SchedulingStats, event)(self, *arguments)
            self.heard.append((event, [argument for argument in arguments if isinstance(argument, int | bool)]))

        return method

    for event in EVENTS:
        setattr(Log, event, hear(event))
    told = Log()
    engine = LLMEngine(Config(tiny_checkpoint[0], **SMALL), told)
    assert serve(engine) == expected
    direct = LLMEngine(Config(tiny_checkpoint[0], **SMALL))
    direct.stats = Log()
    direct.reset()
    serve(direct)
    assert told.heard == direct.observer.heard
    assert len({event for event, _ in told.heard}) >= 12
    assert {"on_take_block", "on_swap_out"} <= set(EVENTS), "the core's, and those of extras"
    assert set(EVENTS) <= vars(Watching).keys()


def fill_the_disk(trace):
    """From now on the file's disk is full."""
    trace._file = open("/dev/full", "w")  # noqa: SIM115


def test_a_recording_on_a_full_disk_stops_and_nothing_else(with_tokenizer, tmp_path, caplog):
    trace = TraceFile(tmp_path / "run.jsonl")
    with LLM(with_tokenizer, trace=trace, **SMALL) as llm:
        first = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        num_lines = len(read_recording(trace.path))
        fill_the_disk(trace)
        second = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [one.outputs[0].token_ids for one in first] == [one.outputs[0].token_ids for one in second]
        assert llm.get_stats().num_failed_observers == 1
        failures = [metric for metric in llm.get_metrics() if metric.name == "nanovllm:recording_failures"]
        assert [metric.value for metric in failures] == [1]
    assert len(read_recording(trace.path)) == num_lines
    assert "Recorder has failed" in caplog.text


def test_of_two_recordings_the_one_that_can_goes_on(with_tokenizer, tmp_path):
    good, bad = (TraceFile(tmp_path / name) for name in ("good.jsonl", "bad.jsonl"))
    with LLM(with_tokenizer, trace=Sinks([bad, good]), **SMALL) as llm:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        fill_the_disk(bad)
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert llm.get_stats().num_failed_observers == 1
        num_steps = llm.get_stats().steps
    assert sum("times" in line for line in read_recording(good.path)) == num_steps
    assert sum("times" in line for line in read_recording(bad.path)) < num_steps
