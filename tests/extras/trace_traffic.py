"""Recorded runs of random traffic, and the engine's true state at each of their steps. See `full_traffic.Run`."""

import json
import random

from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from nanovllm_extras.engine.prefix_misses import PrefixMisses
from nanovllm_extras.engine.watching import Observers
from nanovllm_extras.scheduling.roll_back import reset_prefix_cache
from nanovllm_extras.trace.recorder import Recorder, has_groups
from nanovllm_extras.trace.recording import read_recording
from tests.extras.full_traffic import Run
from tests.extras.grouped_fake_kv_cache import window_tables
from tests.extras.kv_groups.test_grouped_blocks import GroupedRun
from tests.extras.speculative_traffic import SpeculativeRun
from tests.extras.store_traffic import WithStore


class Lines:
    """A sink that keeps all lines; with `limit` it is full after that number of lines, and starts again."""

    def __init__(self, limit=10**9):
        self.limit = limit
        self.segments = []

    @property
    def is_full(self):
        return len(self.segments[-1]) > self.limit

    def begin(self, line):
        self.segments.append([json.loads(line)])

    def write(self, line):
        self.segments[-1].append(json.loads(line))

    def close(self):
        pass


def state_of_replay(replay):
    living = [seq for seq in replay.seqs.values() if seq.status != "finished"]
    return {
        "ref_counts": replay.ref_counts[1:],
        "free": list(replay.free),
        "cached": dict(replay.cached),
        "loaded": dict(replay.loaded),
        "seqs": {
            (seq.request, seq.sample): (
                seq.status, seq.num_computed_tokens, seq.block_table, seq.host_block_ids, seq.tokens,
                *[[*table, *[0] * (len(seq.block_table) - len(table))] for table in seq.window_tables],
            )
            for seq in living
        },
    }  # fmt: skip


def state_of_engine(manager, seqs, running, host_block_ids):
    cached = {one.block_id: (f"{one.block_hash:016x}", one.serial) for one in manager.prefix_cache._by_id.values()}
    by_serial = {serial: (block_hash, serial) for block_hash, serial in cached.values()}
    if has_groups(manager):
        for serial, block_ids in manager.prefix_cache.others.blocks_of.items():
            cached |= dict.fromkeys(block_ids, by_serial[serial])
    living = [seq for seq in seqs if seq.finish_reason is None]
    return {
        "ref_counts": manager._ref_counts[1:],
        "free": list(manager._free),
        "cached": cached,
        "seqs": {
            (seq.request_id, seq.sample_index): (
                "running" if seq in running else "waiting", seq.num_computed_tokens, seq.block_table.tolist(),
                host_block_ids(seq), seq.token_ids.tolist(),
                *(window_tables(seq) or [[]] * (manager.num_groups - 1) if has_groups(manager) else []),
            )
            for seq in seqs if seq in living
        },
    }  # fmt: skip


class StrictObservers(Observers):
    """Raises what a watcher raises."""

    def _drop(self, watcher, event):
        raise


class NotingRecorder(Recorder):
    """Notes the true state at each `schedule`, for the comparison."""

    def __init__(self, host_block_ids):
        super().__init__()
        self.host_block_ids = host_block_ids
        self.states = {}
        self.loaded = {}  # block that a step has loaded, and no sequence has taken since -> tier

    def on_take_block(self, seq, block_id, is_evicted):
        super().on_take_block(seq, block_id, is_evicted)
        self.loaded.pop(block_id, None)

    def on_schedule(self, step, running, blocks):
        super().on_schedule(step, running, blocks)
        for name, block_id in getattr(step.copies, "loads", ()):
            self.loaded[block_id] = self.tier_of(step.copies.loaded[name])
        state = state_of_engine(blocks, list(self._seqs), running, self.host_block_ids)
        self.states[self._num_steps] = state | {"loaded": dict(self.loaded)}


class RecordedRun(Run):
    """`Run` with a recorder and explanations, as an engine has them."""

    def __init__(self, lines, decode=None, **options):
        self.lines = lines
        self.recorder = NotingRecorder(self.host_block_ids)
        super().__init__(**options)
        config = {
            "max_num_batched_tokens": self.scheduler.max_num_batched_tokens,
            "long_prefill_token_threshold": self.threshold,
        }
        self.recorder.begin(lines, config, decode)

    def make_manager(self, num_blocks, block_size, enable_prefix_caching, stats):
        observers = StrictObservers(stats, [self.recorder], PrefixMisses())
        return super().make_manager(num_blocks, block_size, enable_prefix_caching, observers)

    def step(self, is_done=True):
        out = super().step(is_done)
        assert self.recorder._seqs.keys() >= {*self.scheduler.running, *self.scheduler.waiting}, "each is recorded"
        self.recorder.flush()
        return out


class RecordedSpeculativeRun(RecordedRun, SpeculativeRun):
    """The same with drafts."""


class RecordedGroupedRun(RecordedRun, GroupedRun):
    """The same with groups of layers."""


class RecordedSpeculativeGroupedRun(RecordedSpeculativeRun, GroupedRun):
    """The same with groups of layers and drafts."""


class RecordedStoreRun(WithStore, RecordedRun):
    """The same with a K/V store."""

    def make_cache(self, block_size):
        cache = super().make_cache(block_size)
        self.recorder.tier_of = self.store.tier_of
        return cache


class RecordedSpeculativeStoreRun(RecordedStoreRun, RecordedSpeculativeRun):
    """The same with drafts and a K/V store."""


def known_run():
    """(lines, states) of a run in which a prefix is shared, a fork copies, and a request is preempted and waits."""
    lines = Lines()
    run = RecordedRun(lines, num_blocks=8, block_size=4, budget=12, max_num_seqs=4)
    run.add([1] * 9, max_tokens=16)
    run.add([1] * 6, n=2, max_tokens=6)
    run.add([2] * 10, max_tokens=4)
    run.finish()
    run.recorder.close()
    [segment] = lines.segments
    return segment, run.recorder.states


def loaded_run(tmp_path):
    """A recording whose last request has a block from the pool, one from host memory, and four from a folder."""
    folder = {"shared_storage_path": str(tmp_path / "store"), "max_bytes": 1 << 26}
    options = {"num_kv_blocks": 16, "block_size": 4, "attention_backend": "torch", "device": "cpu"}
    options["kv_transfer_config"] = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": folder}
    params, prompt = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), list(range(5, 30))

    def generate(llm, num_tokens):
        llm.generate([{"prompt_token_ids": prompt[:num_tokens]}], params, use_tqdm=False)
        assert llm.engine.parts.kv_store.saver.wait(5)

    with LLM(TINY_QWEN3, **options) as llm:
        generate(llm, 25)
    with LLM(TINY_QWEN3, trace=tmp_path / "run.jsonl", kv_offloading_size=0.1, **options) as llm:
        generate(llm, 9)  # two blocks come from the folder, and are kept in host memory too
        reset_prefix_cache(llm.engine.scheduler)  # of the pool only
        generate(llm, 5)
        generate(llm, 25)
    return read_recording(tmp_path / "run.jsonl")


def random_run(seed, limit=10**9, window=None, has_drafts=False, num_groups=1):
    """A finished run of some thirty requests in a pool of a few blocks, in which all kinds of events occur.

    Odd seeds have a K/V store, which fails now and then, unless the layers form groups, whose window is `window` then.
    """
    rng = random.Random(seed)
    lines = Lines(limit)
    make_run = RecordedSpeculativeRun if has_drafts else RecordedRun
    options = {}
    if num_groups > 1:
        make_run = RecordedSpeculativeGroupedRun if has_drafts else RecordedGroupedRun
        options, window = {"num_groups": num_groups, "group_window": window}, None
    elif seed % 2:
        make_run, options = RecordedSpeculativeStoreRun if has_drafts else RecordedStoreRun, {"store_seed": seed}
    run = make_run(
        lines,
        **options,
        num_blocks=rng.randint(8, 14) * num_groups,
        block_size=rng.choice([1, 2, 4]),
        max_num_seqs=rng.randint(3, 6),
        budget=rng.choice([4, 8, 20]),
        max_model_len=40,
        threshold=rng.choice([0, 3]),
        num_swap_blocks=rng.choice([None, 12 * num_groups]),
        overlap=rng.random() < 0.5 and not has_drafts,
        window=window,
    )
    longest = min(run.manager.capacity, run.scheduler.max_model_len - 1, 16)
    for _ in range(30):
        prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, longest))]
        what = rng.random()
        if what < 0.2:
            run.add_search(prompt, rng.randint(1, 3), rng.randint(1, 6))
        else:
            run.add(prompt, n=rng.choice([1, 1, 2, 3]), max_tokens=rng.randint(1, 12))
        for _ in range(rng.randint(0, 5)):
            if run.has_unfinished:
                run.step(is_done=rng.random() > 0.03)
        living = [seqs for seqs in run.requests if any(seq.finish_reason is None for seq in seqs)]
        if living and rng.random() < 0.1:
            run.abort(rng.choice(living))
        if rng.random() < 0.03:
            reset_prefix_cache(run.scheduler)
    run.finish()
    run.recorder.close()
    return run


QUESTION = "What is a block table? Which block of the pool has Rome, and who owns it?"
LONG_QUESTION = "Explain why a long prompt is cut into chunks, and what else the scheduler does in a step."
ASKED = [  # so that each cause occurs
    (QUESTION, {}),
    (QUESTION, {}),
    (QUESTION.replace("Which block", "Which table"), {}),
    (QUESTION.replace("Rome", "Paris"), {}),
    (QUESTION, {"prompt_logprobs": 1}),
    (LONG_QUESTION, {}),
    (QUESTION, {}),
    (LONG_QUESTION[:50], {}),
    (LONG_QUESTION[40:], {}),
    (QUESTION, {}),
]


def explained_run(path):
    """The outputs of a run of the bundled model that is recorded in a file."""
    options = {"num_kv_blocks": 10, "block_size": 4, "device": "cpu", "attention_backend": "torch"}
    with LLM(TINY_QWEN3, trace=path, enforce_eager=True, **options) as llm:
        return [
            llm.generate(
                prompt, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, **params), use_tqdm=False
            )[0]
            for prompt, params in ASKED
        ]


def known_groups():
    """(lines, states) of a run with three groups: a prefix is shared, forks copy, and a request is preempted."""
    lines = Lines()
    sizes = {"num_blocks": 30, "block_size": 4, "num_groups": 3, "group_window": 6}
    run = RecordedGroupedRun(lines, budget=16, max_num_seqs=4, max_model_len=60, **sizes)
    run.add(list(range(14)), max_tokens=14)
    run.step()
    run.add([*range(12), 50, 51], n=2, max_tokens=8)
    run.add([60] * 17, max_tokens=6)
    run.finish()
    run.recorder.close()
    [segment] = lines.segments
    return segment, run.recorder.states
