"""Traces: times by hand, prefixes that are shared, and no more requests in memory than the scheduler looks at."""

import json

import pytest

from nanovllm.scheduler import Scheduler
from nanovllm_extras.what_if.figures import Figures
from nanovllm_extras.what_if.options import Options, Parts
from nanovllm_extras.what_if.run import simulate
from nanovllm_extras.what_if.trace_requests import plan_trace


class Line:
    """A clock of 1 s for a step and 0.01 s for a token."""

    is_good = True

    def seconds(self, num_tokens, num_context_tokens):
        return 1 + 0.01 * num_tokens


class Same(Scheduler):
    """The core's, but a class of one's own: it gets all requests that have arrived."""


class Most(Figures):
    """Counts the sequences in memory."""

    def __init__(self):
        super().__init__()
        self.num_live = self.most = 0

    def on_add(self, seq):
        super().on_add(seq)
        self.num_live += 1
        self.most = max(self.most, self.num_live)

    def on_finish(self, seq):
        super().on_finish(seq)
        self.num_live -= 1


def write_trace(path, requests):
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(names, one, strict=True))) + "\n" for one in requests))
    return path


def test_times_by_hand(tmp_path):
    """A arrives at 0 and computes 50 tokens: 1.5 s. B, which has come at 1 s, computes 30 with A's second: 1.31 s."""
    path = write_trace(tmp_path / "trace.jsonl", [(5000, 50, 3, []), (6000, 30, 2, [])])
    figures = simulate(plan_trace(path), Options(), Line())
    assert figures.steps == 3
    assert figures.ttft_s.tolist() == pytest.approx([1.5, 1.5 + 1.31 - 1])
    assert figures.tpot_s.tolist() == pytest.approx([(1.31 + 1.02) / 2, 1.02])
    assert figures.time_s == pytest.approx(1.5 + 1.31 + 1.02)
    assert simulate(plan_trace(path, speed=0.1), Options(), Line()).ttft_s.tolist() == pytest.approx([1.5, 1.3])


def test_equal_ids_share_blocks_and_nothing_else_does(tmp_path):
    requests = [(0, 1300, 2, [7, 8]), (0, 1300, 2, [7, 8]), (0, 1300, 2, [7, 9]), (0, 600, 2, [8]), (0, 1300, 2, [])]
    path = write_trace(tmp_path / "trace.jsonl", requests)
    figures = simulate(plan_trace(path), Options(max_num_seqs=1), Line())
    assert figures.prefix_cache_hit_tokens == 1024 + 512
    off = Options(max_num_seqs=1, enable_prefix_caching=False)
    assert simulate(plan_trace(path), off, Line()).prefix_cache_hit_tokens == 0


@pytest.mark.parametrize(
    ("longest", "options"),
    [
        (40, Options(block_size=4, num_blocks=90, max_num_seqs=6, max_num_batched_tokens=50)),  # preempts
        (1, Options(block_size=4, num_blocks=400, max_num_seqs=6, max_num_batched_tokens=2000)),  # admits 6 in a step
    ],
)
def test_a_queue_that_grows_stays_in_the_file_and_changes_nothing(tmp_path, longest, options):
    requests = [(10 * i, 20 + 37 * i % 90, 1 + 11 * i % longest, [i % 3] if i % 2 else []) for i in range(300)]
    path = write_trace(tmp_path / "trace.jsonl", requests)
    bounded, unbounded = Most(), Most()
    simulate(plan_trace(path), options, Line(), figures=bounded, is_stream=True)
    simulate(plan_trace(path), options, Line(), Parts(scheduler_cls=Same), unbounded, is_stream=True)
    assert bounded.describe() == unbounded.describe()
    assert (bounded.num_preemptions > 10) == (longest > 1)
    assert bounded.most <= 2 * options.max_num_seqs + 1
    assert unbounded.most > 150


def test_a_trace_must_be_in_the_order_of_time(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", [(5000, 50, 3, []), (4000, 30, 2, [])])
    with pytest.raises(ValueError, match=r"request 2 arrives before.*sort the file"):
        simulate(plan_trace(path), Options(), Line())


def test_a_number_of_requests_and_a_prompt_have_limits(tmp_path):
    """The tokens of a prompt are made before the engine refuses it, so a prompt must not fill the memory."""
    path = write_trace(tmp_path / "trace.jsonl", [(0, 50, 3, []), (0, 10**11, 2, [])])
    with pytest.raises(ValueError, match="num_requests must be an integer >= 1 or None, got -1"):
        next(plan_trace(path, -1))
    with pytest.raises(ValueError, match="prompt of request 2 must have at most 10000000 tokens, got 100000000000"):
        list(plan_trace(path))


@pytest.mark.parametrize(
    "text", ["timestamp,input_length,output_length\n" + "1" * 200_000, '{"timestamp":' + "[" * 100_000]
)
def test_a_damaged_file_is_refused_with_its_line(tmp_path, text):
    (tmp_path / "trace").write_text(text)
    with pytest.raises(ValueError, match=r"trace, line \d"):
        list(plan_trace(tmp_path / "trace"))
