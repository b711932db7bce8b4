"""Who gets how many tokens: budgets, order, preemption, ends, failed steps, and the statistics of a step.

No model runs. Each sequence's next token is made up from all of its tokens, so what a request must produce follows from
its prompt alone (`expected_output`), however it was chunked, shared, preempted or rolled back. `fake_kv_cache.py` plays
the KV cache, and counts are checked against naive ones over its slots. `Run.step` checks what holds in every step.
"""

import pytest
from fake_kv_cache import FakeKVCache, check_cached_blocks, check_ownership, table_of, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.block_manager import BlockManager
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Sequence, SequenceStatus

VOCAB_SIZE = 50


def next_token(tokens):
    return (sum(token * (i + 3) for i, token in enumerate(tokens)) + 7 * len(tokens)) % VOCAB_SIZE


def expected_output(seq, eos_token_ids, max_model_len, capacity):
    """(tokens, finish_reason, stop_reason) of a request, by generating it alone, one token at a time."""
    params, tokens = seq.sampling_params, tokens_of(seq)[: seq.num_prompt_tokens]
    while True:
        token = next_token(tokens)
        tokens.append(token)
        output = tokens[seq.num_prompt_tokens :]
        if token in eos_token_ids and not params.ignore_eos:
            return output, "stop", None
        if token in (params.stop_token_ids or ()):
            return output, "stop", token
        if len(output) == params.max_tokens or len(tokens) == max_model_len:
            return output, "length", None
        if len(tokens) > capacity:
            return output, "length", "kv_cache"


def output_of(seq):
    return tokens_of(seq)[seq.num_prompt_tokens :]


class Run:
    """A scheduler, its fake cache, and all sequences that were ever added."""

    def __init__(
        self,
        num_blocks=64,
        block_size=4,
        max_num_seqs=8,
        budget=16,
        max_model_len=64,
        eos_token_ids=frozenset(),
        enable_prefix_caching=True,
    ):
        self.manager = BlockManager(num_blocks, block_size, enable_prefix_caching)
        self.scheduler = Scheduler(self.manager, max_num_seqs, budget, max_model_len)
        self.cache = FakeKVCache(block_size)
        self.eos_token_ids = eos_token_ids
        self.seqs = []

    def add(self, prompt, **params):
        seq = Sequence(
            f"seq-{len(self.seqs)}", prompt, SamplingParams(**{"max_tokens": None, **params}), self.eos_token_ids
        )
        self.seqs.append(seq)
        self.scheduler.add(seq)
        return seq

    def step(self):
        """Schedule, compute, update; what `schedule()` said."""
        out = self.scheduler.schedule()
        self.check_scheduled(out)
        for seq, num_new in out.chunks:
            self.cache.write(seq, seq.num_computed_tokens, seq.num_computed_tokens + num_new)
        for seq, num_new in out.chunks:
            self.cache.check(seq, seq.num_computed_tokens + num_new)
        caught_up = [seq for seq, num_new in out.chunks if seq.num_computed_tokens + num_new == seq.num_tokens]
        advanced = self.scheduler.update(out, [next_token(tokens_of(seq)) for seq in caught_up])
        assert advanced == caught_up
        for seq in advanced:
            assert (seq.status is SequenceStatus.FINISHED) == (seq.finish_reason is not None)
        self.check_state()
        return out

    def fail_step(self):
        """Schedule, and lose the forward pass."""
        out = self.scheduler.schedule()
        self.check_scheduled(out)
        for seq, num_new in out.chunks:
            self.cache.spoil(seq, seq.num_computed_tokens, seq.num_computed_tokens + num_new)
        self.scheduler.rollback(out)
        self.check_state()
        return out

    def finish(self, max_steps=1000):
        num_steps = 0
        while self.scheduler.has_unfinished():
            self.step()
            num_steps += 1
            assert num_steps <= max_steps, "hangs"
        for seq in self.seqs:
            self.check_output(seq)
        check_ownership(self.manager, [])
        return num_steps

    # ---- what always holds

    def check_scheduled(self, out):
        scheduler, size = self.scheduler, self.manager.block_size
        seqs = [seq for seq, _ in out.chunks]
        lens = [num_new for _, num_new in out.chunks]
        assert sum(lens) == out.num_scheduled_tokens <= scheduler.max_num_batched_tokens
        assert bool(seqs) == scheduler.has_unfinished(), "some sequence always advances"
        assert len(scheduler.running) <= scheduler.max_num_seqs
        assert sorted(map(id, seqs)) == sorted(map(id, scheduler.running)), "each running one gets tokens, and once"
        assert all(num_new == 1 for num_new in lens[: out.num_decodes])
        assert all(num_new > 1 for num_new in lens[out.num_decodes :])
        assert out.num_prefill_tokens == sum(lens[out.num_decodes :])
        for seq, num_new in out.chunks:
            num_covered = seq.num_computed_tokens + num_new
            assert 1 <= num_new <= seq.num_tokens - seq.num_computed_tokens
            assert len(table_of(seq)) == max(-(-num_covered // size), seq.num_computed_tokens // size), "a reserve"
        slots = {
            self.cache.slot(seq, position)
            for seq, num_new in out.chunks
            for position in range(seq.num_computed_tokens + num_new)
        }
        blocks = {block_id for seq in scheduler.running for block_id in table_of(seq)}
        assert out.kv_tokens_stored == len(slots)
        assert out.kv_slots_reserved == len(blocks) * size

    def check_state(self):
        waiting, running = list(self.scheduler.waiting), self.scheduler.running
        check_ownership(self.manager, self.seqs)
        check_cached_blocks(self.manager, self.cache)
        assert all(seq.status is SequenceStatus.WAITING and len(table_of(seq)) == 0 for seq in waiting)
        assert all(seq.status is SequenceStatus.RUNNING for seq in running)
        order = [self.seqs.index(seq) for seq in running + waiting]
        assert order == sorted(order), "first come, first served"
        assert all(seq.num_tokens <= self.scheduler.max_model_len for seq in self.seqs)
        assert [seq for seq in self.seqs if seq.finish_reason is None] == running + waiting, "one is lost"

    def check_output(self, seq):
        if seq.finish_reason != "abort":
            assert (output_of(seq), seq.finish_reason, seq.stop_reason) == self.expected(seq)

    def expected(self, seq):
        return expected_output(seq, self.eos_token_ids, self.scheduler.max_model_len, self.manager.capacity)


def chunk_lens(out):
    return {seq.request_id: num_new for seq, num_new in out.chunks}


# ---- random traffic


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_random_traffic_ends_with_every_request_served(data):
    """Any pool, block size and budget; requests come, are aborted, and steps fail at random moments."""
    block_size = data.draw(st.integers(1, 5), "block_size")
    run = Run(
        num_blocks=data.draw(st.integers(1, 12), "num_blocks"),
        block_size=block_size,
        max_num_seqs=data.draw(st.integers(1, 5), "max_num_seqs"),
        budget=data.draw(st.integers(1, 20), "budget"),
        max_model_len=data.draw(st.integers(2, 40), "max_model_len"),
        eos_token_ids=data.draw(st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=3), "eos"),
        enable_prefix_caching=data.draw(st.booleans(), "caching"),
    )
    longest = min(run.manager.capacity, run.scheduler.max_model_len - 1)
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=longest)
    for _ in range(data.draw(st.integers(1, 8), "rounds")):
        for prompt in data.draw(st.lists(prompts, max_size=3), "prompts"):
            run.add(
                prompt,
                max_tokens=data.draw(st.none() | st.integers(1, 12)),
                ignore_eos=data.draw(st.booleans()),
                stop_token_ids=data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2)),
            )
        if not run.scheduler.has_unfinished():
            continue
        event = data.draw(st.sampled_from(["step", "step", "step", "fail", "abort", "reset"]), "event")
        if event == "fail":
            run.fail_step()
        elif event == "abort":
            seq = data.draw(st.sampled_from([*run.scheduler.waiting, *run.scheduler.running]))
            run.scheduler.abort(seq)
            assert (seq.finish_reason, seq.status) == ("abort", SequenceStatus.FINISHED)
            run.check_state()
        elif event == "reset":
            run.manager.reset_prefix_cache()
        else:
            run.step()
    # the oldest is never preempted, and advances by a token in each step at least
    run.finish(max_steps=sum(seq.num_prompt_tokens + len(run.expected(seq)[0]) for seq in run.seqs))


# ---- budget and order


def test_budget_is_shared_out_in_order_of_arrival():
    run = Run(budget=16)
    for start, num_tokens in ((0, 10), (10, 9), (20, 5)):
        run.add(list(range(start, start + num_tokens)))
    assert chunk_lens(run.step()) == {"seq-0": 10, "seq-1": 6}
    assert chunk_lens(run.step()) == {"seq-0": 1, "seq-1": 3, "seq-2": 5}
    assert chunk_lens(run.step()) == {"seq-0": 1, "seq-1": 1, "seq-2": 1}


def test_every_prompt_of_a_batch_can_be_chunked():
    """Neither the first nor the last is special: a prompt is cut where the budget ends."""
    run = Run(budget=10)
    first, second = run.add([1] * 25), run.add([2] * 12)
    lens = [chunk_lens(run.step()) for _ in range(4)]
    assert lens[:3] == [{"seq-0": 10}, {"seq-0": 10}, {"seq-0": 5, "seq-1": 5}]
    assert lens[3] == {"seq-0": 1, "seq-1": 7}
    assert (first.num_output_tokens, second.num_output_tokens) == (2, 1)


def test_max_num_seqs_bounds_the_batch():
    run = Run(max_num_seqs=2)
    seqs = [run.add([i], max_tokens=3) for i in range(5)]
    run.step()
    assert [seq.status for seq in seqs] == [SequenceStatus.RUNNING] * 2 + [SequenceStatus.WAITING] * 3
    run.finish()


def test_decodes_come_first_also_when_their_sequence_is_younger():
    run = Run(budget=16)
    run.add([1] * 20)
    run.step()
    run.add([2])  # its only chunk is one token, beside the older one's rest of 4
    out = run.step()
    assert [(seq.request_id, num_new) for seq, num_new in out.chunks] == [("seq-1", 1), ("seq-0", 4)]
    assert (out.num_decodes, out.num_prefill_tokens, out.num_scheduled_tokens) == (1, 4, 5)


def test_decode_advances_in_every_step_while_prompts_keep_arriving():
    run = Run(num_blocks=500, budget=8, max_num_seqs=100)
    decoding = run.add([1, 2, 3])
    run.step()
    for num_output_tokens in range(2, 30):
        run.add([num_output_tokens] * 20, max_tokens=1)
        out = run.step()
        assert out.num_scheduled_tokens == 8
        assert decoding.num_output_tokens == num_output_tokens


def test_long_prompt_among_a_stream_of_short_ones_finishes():
    run = Run(num_blocks=500, budget=8, max_num_seqs=100, max_model_len=200)
    for i in range(3):
        run.add([i, i], max_tokens=5)
    long = run.add([9] * 100, max_tokens=2)
    num_steps = 0
    while long.finish_reason is None:
        run.add([num_steps % VOCAB_SIZE], max_tokens=5)
        run.step()
        num_steps += 1
        assert num_steps < 40
    run.finish()


def test_budget_of_one_token_serves_all():
    run = Run(budget=1)
    for i in range(3):
        run.add([i] * 6, max_tokens=3)
    # 6 tokens of prompt and 2 of output are computed for each; the last token never is
    assert run.finish() == 3 * 8


# ---- blocks


def test_admission_reserves_nothing_for_tokens_to_come():
    run = Run(num_blocks=4, block_size=4, max_model_len=2000)
    for i in range(4):
        run.add([i] * 4, max_tokens=1000)
    run.step()
    assert len(run.scheduler.running) == 4
    assert run.manager.num_free_blocks == 0


def test_newest_is_preempted_and_resumes_with_all_of_its_tokens():
    run = Run(num_blocks=6, block_size=4)
    seqs = [run.add([i] * 7, max_tokens=9) for i in range(3)]
    run.step()
    assert [len(table_of(seq)) for seq in seqs] == [2, 2, 2]
    run.step()
    tokens = tokens_of(seqs[2])
    assert len(tokens) == 9
    out = run.step()  # all three would need a third block
    assert (out.num_preempted, run.scheduler.num_preemptions) == (1, 1)
    assert chunk_lens(out) == {"seq-0": 1, "seq-1": 1}
    assert seqs[2].status is SequenceStatus.WAITING
    assert tokens_of(seqs[2]) == tokens
    late = run.add([5])
    assert list(run.scheduler.waiting) == [seqs[2], late], "it waits before those that came later"
    run.finish()


def test_preempted_sequence_finds_its_own_blocks_again():
    """Nothing but the block that it lost to its neighbour is computed anew."""
    run = Run(num_blocks=5, block_size=4)
    first, second = run.add([1] * 7, max_tokens=6), run.add([2] * 11)
    run.step()
    run.step()
    assert run.step().num_preempted == 1
    num_tokens = second.num_tokens
    while first.finish_reason is None:
        run.step()
    assert chunk_lens(run.step()) == {"seq-1": num_tokens - 8}, "two of three full blocks were still there"


def test_sequence_is_preempted_itself_when_it_is_the_newest():
    run = Run(num_blocks=3, block_size=4)
    old, new = run.add([1] * 5, max_tokens=4), run.add([2] * 4, max_tokens=4)
    out = run.step()
    assert chunk_lens(out) == {"seq-0": 5, "seq-1": 4}
    assert chunk_lens(run.step()) == {"seq-0": 1}
    assert (new.status, old.status) == (SequenceStatus.WAITING, SequenceStatus.RUNNING)
    run.finish()


def test_prompt_that_fills_the_whole_pool_is_served():
    run = Run(num_blocks=4, block_size=4)
    run.add(list(range(16)), max_tokens=1)
    run.add(list(range(16)), max_tokens=3)
    run.add([3], max_tokens=3)
    run.finish()
    assert run.seqs[1].stop_reason == "kv_cache"


# ---- the end of a sequence


@pytest.mark.parametrize("num_prompt_tokens", [1, 4, 5, 18, 19])
def test_max_model_len_is_kept_to_the_token(num_prompt_tokens):
    run = Run(max_model_len=20)
    seq = run.add([1] * num_prompt_tokens)
    run.finish()
    assert (seq.num_tokens, seq.finish_reason, seq.stop_reason) == (20, "length", None)


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens_is_kept_to_the_token(max_tokens):
    run = Run()
    seq = run.add([1, 2, 3], max_tokens=max_tokens)
    run.finish()
    assert (seq.num_output_tokens, seq.finish_reason, seq.stop_reason) == (max_tokens, "length", None)


def test_end_token_of_the_model_ends_it_without_a_stop_reason():
    first = next_token([1, 2])
    run = Run(eos_token_ids=frozenset([first]))
    seq = run.add([1, 2])
    run.finish()
    assert (output_of(seq), seq.finish_reason, seq.stop_reason) == ([first], "stop", None)


def test_ignore_eos_goes_on_and_stop_token_ids_hold_all_the_same():
    first = next_token([1, 2])
    second = next_token([1, 2, first])
    assert first != second
    run = Run(eos_token_ids=frozenset([first, second]))
    seq = run.add([1, 2], ignore_eos=True, stop_token_ids=[second])
    run.finish()
    assert (output_of(seq), seq.finish_reason, seq.stop_reason) == ([first, second], "stop", second)


def test_stop_token_at_the_last_allowed_place_is_a_stop():
    first = next_token([1, 2])
    run = Run(eos_token_ids=frozenset([first]))
    seq = run.add([1, 2], max_tokens=1)
    run.finish()
    assert seq.finish_reason == "stop"


def test_sequence_that_outgrows_the_whole_cache_ends_and_harms_nobody():
    """The big one is alone at the end of its life; its neighbours were preempted and finish after it, unharmed."""
    run = Run(num_blocks=3, block_size=4, max_model_len=1000)
    big = run.add([1] * 6)
    small = [run.add([2 + i] * 3, max_tokens=4) for i in range(2)]
    run.finish()
    assert (big.num_tokens, big.finish_reason, big.stop_reason) == (13, "length", "kv_cache")
    assert [seq.finish_reason for seq in small] == ["length"] * 2
    assert [seq.stop_reason for seq in small] == [None] * 2
    assert run.scheduler.num_preemptions > 0


def test_max_tokens_that_is_reached_as_the_cache_ends_is_no_cache_end():
    run = Run(num_blocks=2, block_size=4)
    seq = run.add([1] * 4, max_tokens=5)
    run.finish()
    assert (seq.num_tokens, seq.stop_reason) == (9, None)


def test_aborted_sequence_leaves_at_once_from_wherever_it_is():
    run = Run(max_num_seqs=2)
    decoding, prefilling, waiting, other = run.add([1]), run.add([2] * 40), run.add([3]), run.add([4], max_tokens=2)
    run.step()
    for seq in (waiting, prefilling, decoding):
        run.scheduler.abort(seq)
        run.check_state()
        assert (seq.finish_reason, seq.status) == ("abort", SequenceStatus.FINISHED)
    assert run.manager.num_free_blocks == run.manager.num_blocks
    run.finish()
    assert other.num_output_tokens == 2


# ---- steps that fail


def test_failed_step_loses_no_token_and_keeps_the_order():
    run = Run(budget=10)
    seqs = [run.add([i] * 6, max_tokens=6) for i in range(4)]
    run.step()
    run.step()
    tokens = [tokens_of(seq) for seq in seqs]
    run.fail_step()
    assert [tokens_of(seq) for seq in seqs] == tokens
    assert list(run.scheduler.waiting) == seqs
    assert run.manager.num_free_blocks == run.manager.num_blocks
    run.finish()


def test_blocks_of_a_failed_step_cannot_be_hit():
    run = Run(block_size=4, budget=12)
    run.add([1] * 13)
    run.fail_step()
    again = run.add([1] * 9)
    run.step()
    run.step()
    assert again.num_cached_tokens == 8, "found in what its twin computed after the failure, not before"
    run.finish()


def test_blocks_of_earlier_steps_survive_a_failed_one():
    run = Run(block_size=4, budget=8)
    run.add([1] * 20)
    run.step()  # two blocks are computed
    run.fail_step()  # two more are not
    out = run.step()
    assert chunk_lens(out) == {"seq-0": 8}
    assert run.seqs[0].num_computed_tokens == 16, "it went on after the two blocks of the first step"


def test_failed_step_that_preempted_somebody_keeps_the_order():
    run = Run(num_blocks=6, block_size=4)
    seqs = [run.add([i] * 7, max_tokens=9) for i in range(3)]
    run.step()
    run.step()
    late = run.add([5], max_tokens=1)
    assert run.fail_step().num_preempted == 1
    assert list(run.scheduler.waiting) == [*seqs, late]
    run.finish()


def test_blocks_that_were_shared_within_a_failed_step_are_forgotten():
    run = Run(block_size=4, budget=32)
    run.add([1] * 10)
    run.add([1] * 14)
    run.fail_step()
    assert run.manager.num_free_blocks == run.manager.num_blocks
    run.finish()  # nobody reads the slots that the failed step spoiled


# ---- prefix caching, and what is counted


def test_requests_of_one_step_share_their_prefix():
    run = Run(block_size=4, budget=32)
    first, second = run.add([1] * 10), run.add([1] * 10 + [2])
    out = run.step()
    assert chunk_lens(out) == {"seq-0": 10, "seq-1": 3}
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert out.kv_tokens_stored == 13
    assert out.kv_slots_reserved == 4 * 4  # two blocks shared, one of each alone
    assert run.scheduler.prefix_cache_query_tokens == 21
    assert run.scheduler.prefix_cache_hit_tokens == 8


def test_preempted_sequence_is_not_counted_as_a_hit():
    run = Run(num_blocks=6, block_size=4)
    for i in range(3):
        run.add([i] * 7, max_tokens=9)
    run.finish()
    assert run.scheduler.num_preemptions > 0
    assert run.scheduler.prefix_cache_query_tokens == 3 * 7
    assert run.scheduler.prefix_cache_hit_tokens == 0
    assert [seq.num_cached_tokens for seq in run.seqs] == [0, 0, 0]


def test_hits_after_the_end_of_the_first_request_are_counted():
    run = Run(block_size=4)
    run.add([1] * 8, max_tokens=2)
    run.finish()
    second = run.add([1] * 8, max_tokens=2)
    run.finish()
    assert second.num_cached_tokens == 4, "a prompt that is cached as a whole is computed from its last block on"
    assert (run.scheduler.prefix_cache_query_tokens, run.scheduler.prefix_cache_hit_tokens) == (16, 4)


def test_waste_is_counted_over_blocks_and_not_over_sequences():
    run = Run(num_blocks=64, block_size=8, budget=64)
    for _ in range(3):
        run.add([1] * 17)
    out = run.step()
    assert out.kv_tokens_stored == 16 + 3  # two blocks shared by three, and one token of each
    assert out.kv_slots_reserved == (2 + 3) * 8
    assert (out.num_decodes, out.num_scheduled_tokens) == (2, 19)


def test_idle_scheduler_has_no_work():
    out = Run().scheduler.schedule()
    assert list(out.chunks) == []
    assert (out.num_scheduled_tokens, out.kv_tokens_stored, out.kv_slots_reserved) == (0, 0, 0)
