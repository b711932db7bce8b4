"""Why were prompt tokens computed? The oracle is a naive model that remembers each prefix that was ever cached, as a
tuple of tokens, and decides token by token. It uses no hashes and no serial numbers.
"""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.block_manager import BlockManager
from nanovllm.prefix_cache import PrefixCache
from nanovllm.scheduler import Scheduler
from nanovllm_extras import LLM, TINY_QWEN3, Config, LLMEngine, SamplingParams
from nanovllm_extras.engine.prefix_misses import CAUSES, MAX_SHOWN_TOKENS, PrefixMiss, PrefixMisses
from nanovllm_extras.engine.watching import Observers
from nanovllm_extras.memory.kinds import Window
from nanovllm_extras.memory.slots import Slots
from nanovllm_extras.records.full_observer import Observer, SchedulingStats
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.scheduling import scheduler as full
from nanovllm_extras.scheduling.roll_back import reset_prefix_cache, roll_back
from nanovllm_extras.serve.metrics_route import Metrics
from tests.conftest import examples

ANY_TOKEN = 0


class NaiveModel(PrefixMisses):
    """Compares each explanation with its own."""

    def __init__(self, max_evictions):
        super().__init__(max_evictions)
        self.next_step = 1

    def on_start(self, blocks):
        super().on_start(blocks)
        self.blocks, self.size = blocks, blocks.block_size
        self.prefixes, self.evictions = {}, {}  # block id -> prefix; prefix -> (step, request), the oldest first
        # the same for groups of layers with a window: block id -> (group, prefix); prefix -> (step, request)
        self.window_prefixes, self.window_evictions = {}, {}

    def on_register_block(self, seq, block_id, block_hash, serial):
        super().on_register_block(seq, block_id, block_hash, serial)
        place = seq.block_table.index(block_id)
        self.prefixes[block_id] = tuple(seq.token_ids[: (place + 1) * self.size])

    def on_forget_block(self, block_id):
        super().on_forget_block(block_id)
        self.window_evictions.pop(self.prefixes.pop(block_id), None)

    def on_take_block(self, seq, block_id, is_evicted):
        super().on_take_block(seq, block_id, is_evicted)
        if is_evicted:
            self.evict(block_id, (self.next_step, seq.request_id))

    def evict(self, block_id, eviction):
        if block_id in self.window_prefixes:
            _, prefix = self.window_prefixes[block_id]
            self.window_evictions[prefix] = eviction
            return
        prefix = self.prefixes[block_id]
        self.evictions.pop(prefix, None)
        self.evictions[prefix] = eviction
        if len(self.evictions) > self.max_evictions:
            del self.evictions[next(iter(self.evictions))]

    def on_take_in_group(self, seq, group, place, block_id, is_evicted):
        super().on_take_in_group(seq, group, place, block_id, is_evicted)
        if is_evicted:
            self.evict(block_id, (self.next_step, seq.request_id))

    def on_register_in_group(self, seq, group, block_id, block_hash, serial):
        super().on_register_in_group(seq, group, block_id, block_hash, serial)
        place = seq.window_tables[group - 1].index(block_id)
        prefix = tuple(seq.token_ids[: (place + 1) * self.size])
        self.window_prefixes[block_id] = group, prefix
        self.window_evictions.pop(prefix, None)

    def on_forget_in_group(self, block_id):
        del self.window_prefixes[block_id]

    def on_reset_prefix_cache(self):
        super().on_reset_prefix_cache()
        self.prefixes, self.evictions, self.window_evictions = {}, {}, {}

    def on_miss(self, seq, misses):
        prompt = seq.token_ids.tolist()
        said = ["hit"] * seq.num_computed_tokens
        for miss in misses:
            assert miss.start == len(said) < miss.end
            said += [(miss.cause, miss.step, miss.request_id)] * (miss.end - miss.start)
            if miss.cause == "differs":
                self.check_shown(prompt, miss.start // self.size * self.size, miss)
        # of states and groups: the naive model has the core's own search for blocks, and knows nothing of snapshots
        num_cached = len(PrefixCache.find(self.blocks.prefix_cache, seq)) * self.size
        causes = [self.cause_of_unusable(prompt, i) for i in range(seq.num_computed_tokens, num_cached)]
        num_cached = max(num_cached, seq.num_computed_tokens)
        causes += [self.cause_of(seq, prompt, i, num_cached) for i in range(num_cached, len(prompt))]
        assert said == ["hit"] * seq.num_computed_tokens + causes, prompt
        for one, other in zip(misses, misses[1:], strict=False):
            assert (one.cause, one.step, one.request_id) != (other.cause, other.step, other.request_id), "one span"

    def cause_of_unusable(self, prompt, i):
        """Token `i` has a cached block in group 0, which cannot be used."""
        if getattr(self.blocks, "num_groups", 1) == 1:
            return "no_snapshot", None, None
        end = (i // self.size + 1) * self.size  # the prefix up to here is not found
        missing = []
        for stop in range(self.size, end + 1, self.size):  # blocks with a token that token `end` sees
            groups = {group for group, prefix in self.window_prefixes.values() if list(prefix) == prompt[:stop]}
            if stop > end - self.blocks.other_kind.window + 1 and len(groups) < self.blocks.num_groups - 1:
                missing.append(self.window_evictions.get(tuple(prompt[:stop])))
        assert missing, "the prefix could be used"
        if None in missing:
            return "no_window", None, None
        return "evicted", *max(missing)

    def cause_of(self, seq, prompt, i, num_hits):
        if not self.blocks.prefix_cache.is_enabled or seq.reads_prompt:
            return "cache_off", None, None
        if i >= (len(prompt) - 1) // self.size * self.size:
            return "partial_block", None, None
        lost = [self.lost_to(prompt[: end + self.size]) for end in range(num_hits, i + 1, self.size)]
        if None not in lost:
            return "evicted", *lost[-1]
        lcp = self.longest_common(prompt, num_hits)
        if lost[0] is not None or not lcp:
            return "never_seen", None, None
        return "differs" if i >= lcp else "partial_block", None, None

    def lost_to(self, prefix):
        """To which eviction? Its own, or the newest one before it, if it is cached behind a prefix that was evicted."""
        if tuple(prefix) not in self.prefixes.values():
            return self.evictions.get(tuple(prefix))
        before = [self.evictions.get(tuple(prefix[:end])) for end in range(self.size, len(prefix), self.size)]
        return max((one for one in before if one is not None), default=None)

    def followers(self, prompt, num_hits):
        """The cached prefixes of one block more than the hits, if they can be found."""
        found = [one for one in self.prefixes.values() if len(one) == num_hits + self.size]
        found = [one for one in found if list(one[:num_hits]) == prompt[:num_hits]]
        return [
            one
            for one in found
            if len(PrefixCache.find(self.blocks.prefix_cache, make_seq([*one, ANY_TOKEN]))) * self.size == len(one)
        ]

    def longest_common(self, prompt, num_hits):
        """How many first tokens does the prompt have in common with one of them? None if there is none."""
        return max((common(one, prompt) for one in self.followers(prompt, num_hits)), default=None)

    def check_shown(self, prompt, num_hits, miss):
        cached, own = list(miss.cached_token_ids), list(miss.prompt_token_ids)
        start, end = miss.start, miss.start + len(own)
        assert own == prompt[start:end]
        assert all(one != other for one, other in zip(cached, own, strict=True))
        shown = [one for one in self.followers(prompt, num_hits) if list(one[:end]) == prompt[:start] + cached]
        assert shown
        assert len(own) == MAX_SHOWN_TOKENS or any(end == len(one) or one[end] == prompt[end] for one in shown)


def common(one, other):
    num_equal = 0
    while num_equal < min(len(one), len(other)) and one[num_equal] == other[num_equal]:
        num_equal += 1
    return num_equal


def make_seq(prompt, name="?", max_tokens=1):
    return Sequence(name, prompt, SamplingParams(temperature=0, max_tokens=max_tokens))


class ReadsPrompt:
    reads_prompt = True


class Traffic:
    """Requests over a tiny pool. The sampled tokens are the parity of the tokens before, so that texts meet again."""

    def __init__(self, num_blocks, block_size, budget, max_evictions, is_enabled=True, num_slots=0, window=0):
        self.stats, self.model = SchedulingStats(), NaiveModel(max_evictions)
        observers = Observers(self.stats, explanation=self.model)
        held = {}
        if window:  # three groups of layers
            num_blocks, held = 3 * num_blocks, {"num_groups": 3, "other_kind": Window(window, budget, block_size)}
        if num_slots:
            held = {"states": Slots(num_slots, block_size, observers, is_enabled)}
        blocks_class, scheduler_class = (full.BlockManager, full.Scheduler) if held else (BlockManager, Scheduler)
        self.blocks = blocks_class(num_blocks, block_size, is_enabled, observers, **held)
        observers.on_start(self.blocks)
        self.scheduler = scheduler_class(self.blocks, 3, budget, max_model_len=24)
        self.seqs = []

    def add(self, prompt, max_tokens=1, reads_prompt=False):
        longest = min(self.blocks.capacity, self.scheduler.max_model_len - 1)
        seq = Sequence(
            f"r{len(self.seqs)}", prompt[:longest], SamplingParams(temperature=0, max_tokens=max_tokens),
            readers=(ReadsPrompt(),) if reads_prompt else (),
        )  # fmt: skip
        self.seqs.append(seq)
        self.scheduler.add(seq)
        return seq

    def ask_again(self, i, length, max_tokens):
        """The beginning of an earlier request, which may include its output, as in a conversation."""
        tokens = self.seqs[i % len(self.seqs)].token_ids.tolist() if self.seqs else [0]
        self.add(tokens[:length], max_tokens)

    def step(self, is_done=True):
        step = self.scheduler.schedule()
        self.model.next_step += bool(step.chunks)
        if not is_done:
            roll_back(self.scheduler)
        elif step.chunks:
            self.scheduler.update(step, [sum(seq.token_ids) % 2 for seq in step.samples])

    def finish(self):
        while self.scheduler.running or self.scheduler.waiting:
            self.step()


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
ADD = st.tuples(st.just("add"), TOKENS, st.integers(1, 8), st.sampled_from([False] * 5 + [True]))
AGAIN = st.tuples(st.just("ask_again"), st.integers(0, 14), st.integers(1, 14), st.integers(1, 8))
STEP = st.tuples(st.sampled_from(["step"] * 12 + ["fail", "reset"]))


@settings(max_examples=examples(400), deadline=None, derandomize=True)
@given(
    st.integers(2, 9),
    st.integers(1, 4),
    st.sampled_from([3, 8, 30]),
    st.integers(1, 30),
    st.sampled_from([{}, {}, {"num_slots": 3}, {"num_slots": 5}, {"window": 1}, {"window": 4}, {"window": 7}]),
    st.lists(ADD | AGAIN | STEP),
)
def test_each_token_has_the_cause_that_the_whole_history_gives(
    num_blocks, size, budget, max_evictions, others, operations
):
    traffic = Traffic(num_blocks, size, budget, max_evictions, **others)
    play(traffic, operations)
    stats, model = traffic.stats, traffic.model
    misses = stats.prefix_cache_query_tokens - stats.prefix_cache_hit_tokens
    assert sum(stats.prefix_cache_miss_tokens.values()) == misses
    assert len(model._evictions) <= max_evictions
    assert set(model._cached) == set(traffic.blocks.prefix_cache._by_id), "nothing is kept longer"
    assert sum(map(len, model._next.values())) == len(model._cached)
    assert model._window_evictions.keys() <= {one.serial for one in model._cached.values()}


def play(traffic, operations):
    for operation, *arguments in operations:
        if operation in ("add", "ask_again"):
            getattr(traffic, operation)(*arguments)
        elif operation == "reset":
            reset_prefix_cache(traffic.scheduler)
        else:
            traffic.step(is_done=operation == "step")
    traffic.finish()


# ---- by hand


def explained(traffic, prompt, **options):
    seq = traffic.add(prompt, **options)
    traffic.finish()
    return seq.prefix_misses


def test_example_of_the_module():
    a, b, c, d, e, f, g, h, i, j, k, x, y, z = range(14)
    traffic = Traffic(num_blocks=9, block_size=4, budget=30, max_evictions=9)
    first = explained(traffic, [a, b, c, d, e, f, g, h, i])
    assert first == [PrefixMiss(0, 8, "never_seen"), PrefixMiss(8, 9, "partial_block")]
    assert explained(traffic, [a, b, c, d, e, f, x, h, i, j, k, y, z]) == [
        PrefixMiss(4, 6, "partial_block"),
        PrefixMiss(6, 12, "differs", (g,), (x,)),
        PrefixMiss(12, 13, "partial_block"),
    ]


def test_cache_that_is_off_explains_everything():
    off = Traffic(num_blocks=9, block_size=4, budget=30, max_evictions=9, is_enabled=False)
    for _ in range(2):
        assert explained(off, [1] * 9) == [PrefixMiss(0, 9, "cache_off")]
    on = Traffic(num_blocks=9, block_size=4, budget=30, max_evictions=9)
    explained(on, [1] * 9)
    assert explained(on, [1] * 9, reads_prompt=True) == [PrefixMiss(0, 9, "cache_off")]
    assert explained(on, [1] * 9) == [PrefixMiss(8, 9, "partial_block")]


# ---- the engine

SMALL = {"device": "cpu", "attention_backend": "torch", "enforce_eager": True, "dtype": "float32", "block_size": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
PROMPT = [*range(100, 114)]


def ask(llm, token_ids, **params):
    params = SamplingParams(**{"temperature": 0, "max_tokens": 2, "ignore_eos": True} | params)
    return llm.generate({"prompt_token_ids": token_ids}, params, use_tqdm=False)[0]


def test_metrics_of_outputs_and_counters_have_the_causes():
    with LLM(TINY_QWEN3, num_kv_blocks=32, explain_prefix_misses=True, **SMALL) as llm:
        before = llm.get_stats()
        first, same = ask(llm, PROMPT), ask(llm, PROMPT)
        other = ask(llm, [*PROMPT[:9], 7, *PROMPT[10:]], n=2, temperature=1)
        scored = ask(llm, PROMPT, prompt_logprobs=1)
        stats = llm.get_stats()
        exporter = Metrics("tiny")  # of a server's /metrics
        exporter.watch(llm.get_stats, {})
        text = exporter.as_text().decode()
        counters = {one.labels["cause"]: one.value for one in llm.get_metrics() if one.name.endswith("cache_misses")}
    assert first.metrics.prefix_misses == [PrefixMiss(0, 12, "never_seen"), PrefixMiss(12, 14, "partial_block")]
    assert same.metrics.prefix_misses == [PrefixMiss(12, 14, "partial_block")]
    assert other.metrics.prefix_misses == [
        PrefixMiss(8, 9, "partial_block"),
        PrefixMiss(9, 12, "differs", (109,), (7,)),
        PrefixMiss(12, 14, "partial_block"),
    ]
    assert scored.metrics.prefix_misses == [PrefixMiss(0, 14, "cache_off")]
    assert counters == {
        "differs": 3,
        "evicted": 0,
        "partial_block": 7,
        "cache_off": 14,
        "no_snapshot": 0,
        "no_window": 0,
        "never_seen": 12,
    }
    assert stats.prefix_cache_miss_tokens == counters
    assert before.prefix_cache_miss_tokens == dict.fromkeys(CAUSES, 0), "it does not grow later"
    exported = re.findall(
        r'^nanovllm:prefix_cache_misses_total\{cause="(\w+)",model_name="tiny"\} (\S+)$', text, re.MULTILINE
    )
    assert {cause: float(value) for cause, value in exported} == counters
    assert sum(counters.values()) == stats.prefix_cache_query_tokens - stats.prefix_cache_hit_tokens


def test_nothing_is_kept_without_the_option():
    with LLM(TINY_QWEN3, num_kv_blocks=32, **SMALL) as llm:
        output = ask(llm, PROMPT)
        assert type(llm.engine.observer) is SchedulingStats
        assert output.metrics.prefix_misses is None
        assert llm.get_stats().prefix_cache_miss_tokens == {}
        assert not [one for one in llm.get_metrics() if "misses" in one.name and "store" not in one.name]


def test_observer_of_the_user_is_notified():
    class Watcher(Observer):
        def __init__(self):
            self.calls = []

        def on_admit(self, seq):
            self.calls.append(("admit", seq.request_id))

        def on_miss(self, seq, misses):
            self.calls.append((seq.request_id, misses))

    watcher = Watcher()
    engine = LLMEngine(Config(TINY_QWEN3, num_kv_blocks=32, explain_prefix_misses=True, **SMALL), watcher)
    engine.add_request("A", {"prompt_token_ids": PROMPT[:3]}, GREEDY)
    while engine.has_unfinished_requests():
        engine.step()
    assert watcher.calls == [("admit", "A"), ("A", [PrefixMiss(0, 3, "partial_block")])]
