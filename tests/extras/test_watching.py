"""An observer that fails: the engine goes on, counts on, and says so. Oracle: the same requests without an observer."""

import logging

import pytest

from nanovllm import observer
from nanovllm_extras import LLM, Config, LLMEngine, SamplingParams
from nanovllm_extras.engine.prefix_misses import PrefixMisses
from nanovllm_extras.engine.watching import Observers
from nanovllm_extras.records.full_observer import Observer, SchedulingStats
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.trace.recording import TraceFile, read_recording

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
    direct.observer = Log()
    direct.reset()
    serve(direct)
    assert told.heard == direct.observer.heard
    assert len({event for event, _ in told.heard}) >= 12
    assert {"on_take_block", "on_swap_out"} <= set(EVENTS), "the core's, and those of extras"
    assert all(hasattr(Observers(SchedulingStats()), event) for event in EVENTS)


def test_of_several_watchers_the_ones_that_can_go_on():
    class Watcher:  # of the class of no observer, and with few methods
        def __init__(self, fails_at):
            self.fails_at, self.heard = fails_at, []

        def on_add(self, seq):
            self.heard.append(seq)
            if len(self.heard) == self.fails_at:
                raise RuntimeError("enough")

        def __eq__(self, other):
            return True

    watchers = [Watcher(0), Watcher(2), Watcher(1), Watcher(0)]
    stats = SchedulingStats()
    observers = Observers(stats, watchers)
    seqs = [Sequence(str(i), [1, 2], GREEDY) for i in range(3)]
    for seq in seqs:
        observers.on_add(seq)
        observers.on_free(seq)
    assert [len(one.heard) for one in watchers] == [3, 2, 1, 3]
    assert (stats.num_requests, stats.num_failed_observers) == (3, 2)


def test_an_observer_of_the_core_hears_of_the_cores_events(tiny_checkpoint, expected):
    class Watcher(observer.Observer):
        num_steps = 0

        def on_schedule(self, step, running, blocks):
            self.num_steps += 1

    watcher = Watcher()
    engine = LLMEngine(Config(tiny_checkpoint[0], **SMALL), watcher)
    assert serve(engine) == expected
    assert engine.get_stats().num_failed_observers == 0
    assert watcher.num_steps == engine.get_stats().steps > 0


def test_an_error_of_the_explanation_of_misses_is_raised(tiny_checkpoint):
    """It is a part of the engine: the step fails, and is done again."""

    class Broken(PrefixMisses):
        num_calls = 0

        def explain(self, seq):
            self.num_calls += 1
            if self.num_calls == 2:
                raise KeyError("a bug")
            return super().explain(seq)

    engine = LLMEngine(Config(tiny_checkpoint[0], explain_prefix_misses=True, **SMALL))
    engine.observer.explanation = Broken()
    engine.reset()
    for i in range(2):
        engine.add_request(str(i), PROMPTS[i], GREEDY)
    with pytest.raises(KeyError, match="a bug"):
        engine.step()
    assert engine.get_stats().num_failed_observers == 0
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.get_stats().num_finished == 2


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
