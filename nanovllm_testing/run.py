"""Runs of a scheduler without a model, in which each step is checked.

Each sequence's next token is a function of all of its tokens (`next_token`), so what a request must produce follows
from its prompt (`expected_output`), however it was chunked, shared or preempted. `FakeKVCache` replaces the KV cache.

`Run` checks what must hold for every scheduler, block manager and prefix cache:

- each block is free, or owned by exactly the sequences that have it in their block tables
- no two sequences write to a block, and each sequence reads its own K and V
- each token of a sequence is computed once, unless the sequence was preempted, within the token budget
- no sequence is lost, and each finishes with the tokens that follow from its prompt

`first_come.py` adds the order of service of the core's own scheduler.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nanovllm.block_manager import BlockManager
from nanovllm.observer import Stats
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler, Step
from nanovllm.sequence import Sequence
from nanovllm_testing.fake_kv_cache import (
    FakeKVCache,
    Write,
    WriterCheck,
    check_owners,
    count,
    name_of,
    stored_slots,
    table_of,
    tokens_of,
)
from nanovllm_testing.progress import MAX_IDLE_STEPS, Progress
from nanovllm_testing.violation import Violation, require

VOCAB_SIZE = 50
"""A scheduler may let this number of steps pass without a chunk, for example to wait for more requests."""

Output = tuple[list[int], str | None, int | str | None]
"""(tokens, finish_reason, stop_reason)"""


def next_token(tokens: list[int], sample_index: int = 0) -> int:
    return (sum(token * (i + 3) for i, token in enumerate(tokens)) + 7 * len(tokens) + 11 * sample_index) % VOCAB_SIZE


def expected_output(
    seq: Any, eos_token_ids: frozenset[int], max_model_len: int, capacity: int, min_tokens: int = 0
) -> Output:
    """Return what one sample must produce, by generating it by itself, one token at a time."""
    params, tokens = seq.sampling_params, tokens_of(seq)[: seq.num_prompt_tokens]
    while True:
        token = next_token(tokens, seq.sample_index)
        tokens.append(token)
        output = tokens[seq.num_prompt_tokens :]
        if len(output) > min_tokens:
            if token in eos_token_ids and not params.ignore_eos:
                return output, "stop", None
            if token in (params.stop_token_ids or ()):
                return output, "stop", token
        if len(output) == params.max_tokens or len(tokens) == max_model_len:
            return output, "length", None
        if len(tokens) > capacity:
            return output, "length", "kv_cache"


def output_of(seq: Sequence) -> list[int]:
    return tokens_of(seq)[seq.num_prompt_tokens :]


def chunk_lens(out: Step) -> dict[str, int]:
    return {seq.request_id: num_new for seq, _, num_new in out.chunks}


class RecordingStats(Stats):
    """Keeps for each step the tokens that are stored and the slots that are reserved, counted in the block tables."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: dict[int, tuple[int, int]] = {}
        self.recorded: list[Step] = []  # so that no two have the same id
        self.preemptions: Counter[Sequence] = Counter()  # of each sequence

    def on_preempt(self, seq: Sequence, needy: Sequence) -> None:
        super().on_preempt(seq, needy)
        self.preemptions[seq] += 1

    def on_schedule(self, step: Step, running: list[Sequence], blocks: BlockManager) -> None:
        super().on_schedule(step, running, blocks)
        self.recorded.append(step)
        self.uses[id(step)] = kv_use(running, blocks.block_size)


def kv_use(running: Iterable[Sequence], block_size: int) -> tuple[int, int]:
    """Return (tokens stored, slots reserved). A block of several sequences counts once."""
    running = list(running)
    blocks = {block_id for seq in running for block_id in table_of(seq)}
    return len(stored_slots(running, block_size)), len(blocks) * block_size


class Run:
    """A scheduler, its fake cache, and all sequences that were ever added. The `make_…` methods choose the parts."""

    params_class: type[Any] = SamplingParams
    sequence_class: type[Any] = Sequence

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        budget: int = 16,
        max_model_len: int = 64,
        eos_token_ids: frozenset[int] = frozenset(),
        enable_prefix_caching: bool = True,
    ) -> None:
        self.eos_token_ids = eos_token_ids
        self.requests: list[list[Sequence]] = []  # of each, its sequences
        self.num_steps = 0
        self.progress = self.make_progress()
        self.max_chunk_len = budget
        self.stats = self.make_stats()
        self.manager = self.make_manager(num_blocks, block_size, enable_prefix_caching, self.stats)
        self.scheduler = self.make_scheduler(self.manager, max_num_seqs, budget, max_model_len)
        self.cache = self.make_cache(block_size)

    def make_progress(self) -> Progress:
        return Progress()

    def make_stats(self) -> Any:
        return RecordingStats()

    def make_manager(self, *arguments: Any) -> Any:
        return BlockManager(*arguments)

    def make_scheduler(self, *arguments: Any) -> Any:
        return Scheduler(*arguments)

    def make_cache(self, block_size: int) -> Any:
        return FakeKVCache(block_size)

    def make_before(self) -> "Before":
        return Before(self)

    @property
    def seqs(self) -> list[Sequence]:
        return [seq for seqs in self.requests for seq in seqs]

    @property
    def waiting(self) -> list[Sequence]:
        return list(self.scheduler.waiting)

    @property
    def has_unfinished(self) -> bool:
        return any(seq.finish_reason is None for seq in self.seqs)

    def place_of(self, seq: Sequence) -> Any:
        """Return the place of `seq` in the order of arrival, and among the samples of its request."""
        return next(i for i, seqs in enumerate(self.requests) if seq in seqs), seq.sample_index

    def is_running(self, seq: Sequence) -> bool:
        return seq in self.scheduler.running

    def is_waiting(self, seq: Sequence) -> bool:
        """Return whether `seq` waits itself, or is a child of a sequence that waits."""
        return any(seq in (one, *one.children) for one in self.scheduler.waiting)

    def kv_use(self, out: Step) -> tuple[int, int]:
        """Return (tokens stored, slots reserved) of a step."""
        uses: dict[int, tuple[int, int]] = self.stats.uses
        return uses[id(out)]

    def add(self, prompt: list[int], n: int = 1, **params: Any) -> Any:
        """Add a request, and return its sequences, or the one sequence if it has one."""
        params = self.params_class(n=n, **{"max_tokens": None, **params})
        seqs = [self.make_seq(f"seq-{len(self.requests)}", prompt, params, i) for i in range(n)]
        seqs[0].children = seqs[1:]
        self.requests.append(seqs)
        self.scheduler.add(seqs[0])
        return seqs if n > 1 else seqs[0]

    def make_seq(self, name: str, prompt: list[int], params: Any, sample_index: int) -> Any:
        return self.sequence_class(name, prompt, params, self.eos_token_ids, sample_index=sample_index)

    def step(self) -> Step:
        """Schedule, compute and update. Returns what `schedule()` returned."""
        self.num_steps += 1
        flight = self.launch()
        if flight is None:
            return Step()
        self.update(flight)
        self.check_state()
        return flight.out

    def launch(self) -> "Flight | None":
        """Schedule and compute the next step. Returns None if there is nothing to do."""
        before = self.make_before()
        out = self.scheduler.schedule()
        before.check(out)
        self.check_scheduled(out)
        if not out.chunks:
            return None
        writes = [(seq, start, start + num_new) for seq, start, num_new in out.chunks]
        before.writers.check(writes, self.manager.block_size)
        self.cache.copy(out.copies)
        for write in writes:
            self.cache.write(*write)
        for seq, _, stop in writes:
            self.cache.check(seq, stop)
        samples, tokens = self.draw(writes, before)
        return Flight(out, samples, tokens)

    def draw(self, writes: list[Write], before: "Before") -> tuple[list[Sequence], list[int]]:
        """Return the sequences that have caught up, with their children, and the next token of each."""
        caught_up = [(seq, stop) for seq, _, stop in writes if stop == before.num_tokens[seq]]
        samples = [(sample, stop) for seq, stop in caught_up for sample in (seq, *before.children[seq])]
        tokens = [next_token(self.cache.tokens_of(seq, stop), seq.sample_index) for seq, stop in samples]
        return [seq for seq, _ in samples], tokens

    def update(self, flight: Any) -> None:
        right = [name_of(seq) for seq in flight.samples]
        given = [name_of(seq) for seq in flight.out.samples]
        require(right == given, f"these sequences get a token: {right}, but the step's `samples` are {given}")
        samples = [(row, seq) for row, seq in enumerate(flight.samples) if seq.finish_reason is None]
        advanced = self.scheduler.update(flight.out, flight.tokens)
        require(advanced == samples, "`update` must return (row, sequence) of each sequence that got a token")

    def abort(self, seqs: Iterable[Sequence]) -> None:
        for seq in seqs:
            if seq.finish_reason is None:
                self.scheduler.finish(seq, "abort")
        self.check_state()

    def finish(self, max_steps: int | None = None) -> int:
        """Step until all is done, and return the number of steps."""
        first = self.num_steps
        max_steps = self.max_steps() if max_steps is None else max_steps
        while self.has_unfinished:
            if self.num_steps - first >= max_steps + self.progress.num_all_idle_steps:
                raise Violation(f"after {max_steps} steps, these have not finished: {self.unfinished}")
            self.step()
        self.check_end()
        return self.num_steps - first

    def max_steps(self) -> int:
        """Return the number of steps after which a run counts as one that never ends. Unfair schedulers need more."""
        lens = self.lens_at_the_end()
        return 4 * (len(lens) + 1) * sum(lens) + MAX_IDLE_STEPS

    @property
    def unfinished(self) -> str:
        """The names of the sequences that have not finished."""
        return ", ".join(name_of(seq) for seq in self.seqs if seq.finish_reason is None)

    def lens_at_the_end(self) -> list[int]:
        return [seq.num_prompt_tokens + len(self.expected(seq)[0]) for seq in self.seqs]

    # ---- what always holds

    def check_scheduled(self, out: Step) -> None:
        """Raise unless a step is consistent, within the budget, and has blocks for what it computes."""
        scheduler, size = self.scheduler, self.manager.block_size
        lens = [num_new for _, _, num_new in out.chunks]
        total, budget = sum(lens), scheduler.max_num_batched_tokens
        require(total <= budget, f"the step computes {count(total, 'token')}, but the budget is {budget}")
        require(
            total == out.num_scheduled_tokens,
            f"the step computes {count(total, 'token')}, but its num_scheduled_tokens is {out.num_scheduled_tokens}",
        )
        self.check_progress(out)
        for seq, times in Counter(seq for seq, _, _ in out.chunks).items():
            require(times == 1, f"{name_of(seq)} has {times} chunks in one step")
        for i, (seq, start, num_new) in enumerate(out.chunks):
            stop, name = start + num_new, name_of(seq)
            if seq not in scheduler.running:
                raise Violation(f"{name} has a chunk, but is not in `running`")
            if num_new < 1 or (num_new == 1) != (i < out.num_decodes):
                raise Violation(
                    f"chunk {i} has {count(num_new, 'token')}, and num_decodes is {out.num_decodes}: chunks of one "
                    f"token come first, and num_decodes is their number (`make_step` does this)"
                )
            if seq.num_computed_tokens != stop:
                raise Violation(
                    f"{name} has a chunk of the tokens {start} to {stop - 1}, so its num_computed_tokens must be "
                    f"{stop} after `schedule()`, but is {seq.num_computed_tokens}"
                )
            self.check_table(seq, start, max(-(-stop // size), start // size))

    def check_table(self, seq: Sequence, start: int, num_needed: int) -> None:
        """Raise unless `seq` has the blocks for its chunk, which begins at `start`."""
        num_held = len(table_of(seq))
        require(
            num_held >= num_needed,
            f"{name_of(seq)} needs {count(num_needed, 'block')} for its computed tokens, but has {num_held}",
        )

    def check_progress(self, out: Step) -> None:
        """Raise if the scheduler has not computed anything for too many steps."""
        self.progress.note(bool(out.chunks), self.unfinished)

    def check_state(self) -> None:
        """Raise unless blocks, queues and tokens are consistent between two steps."""
        waiting, running = self.waiting, self.scheduler.running
        self.check_blocks()
        for seq in waiting:
            if table_of(seq):
                raise Violation(f"{name_of(seq)} is in `waiting`, but owns the blocks {table_of(seq)}")
        num_running, max_num_seqs = sum(1 + len(seq.children) for seq in running), self.scheduler.max_num_seqs
        require(num_running <= max_num_seqs, f"{num_running} sequences run, but max_num_seqs is {max_num_seqs}")
        for seq in self.seqs:
            if seq.finish_reason is not None and table_of(seq):
                raise Violation(f"{name_of(seq)} has finished, but owns the blocks {table_of(seq)}")
            if seq.num_tokens > self.scheduler.max_model_len:
                raise Violation(f"{name_of(seq)} has {seq.num_tokens} tokens, more than max_model_len")
        self.check_tokens()
        self.check_queues()
        for seq in running:
            self.cache.check(seq, seq.num_computed_tokens)

    def check_queues(self) -> None:
        """Raise unless each sequence that has not finished is in exactly one queue, or a child of one that is."""
        queues = [*self.scheduler.running, *self.waiting]
        places = Counter([*queues, *(child for seq in queues for child in seq.children)])
        for seq in self.seqs:
            is_living = seq.finish_reason is None
            if places[seq] != is_living:
                where = f"in the queues {places[seq]} times" if places[seq] else "neither in `waiting` nor in `running`"
                state = "has not finished" if is_living else f"has finished ({seq.finish_reason})"
                raise Violation(f"{name_of(seq)} {state}, but is {where}")

    def check_blocks(self) -> None:
        check_owners(self.manager, [table_of(seq) for seq in self.seqs])

    def check_tokens(self) -> None:
        for seq in self.seqs:
            if seq.num_tokens != len(seq.token_ids):
                raise Violation(f"{name_of(seq)} has {len(seq.token_ids)} tokens, but num_tokens is {seq.num_tokens}")

    def check_end(self) -> None:
        """Raise unless all sequences have what follows from their prompts, and all blocks are free."""
        for seq in self.seqs:
            if seq.finish_reason != "abort" and seq.stop_reason != "a stop string":
                found, right = (output_of(seq), seq.finish_reason, seq.stop_reason), self.expected(seq)
                if found != right:
                    raise Violation(f"{name_of(seq)} must end with {describe(right)}, but ends with {describe(found)}")
        self.check_blocks()
        require(self.manager.num_used_blocks == 0, "all sequences have finished, but some blocks are not free")

    def expected(self, seq: Sequence) -> Output:
        return expected_output(seq, self.eos_token_ids, self.scheduler.max_model_len, self.manager.capacity)


def describe(output: Output) -> str:
    tokens, finish_reason, stop_reason = output
    return f"the tokens {tokens} ({finish_reason}{'' if stop_reason is None else f', {stop_reason}'})"


@dataclass
class Flight:
    """A step that is computed, before the scheduler is notified of its tokens."""

    out: Step
    samples: list[Sequence]
    tokens: list[int]


class Before:
    """The state before a step, and the rules by which a step may change it."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.running: list[Sequence] = list(run.scheduler.running)
        self.tables = {seq: table_of(seq) for seq in self.running}
        self.num_computed = {seq: seq.num_computed_tokens for seq in self.running}
        self.num_tokens = {seq: seq.num_tokens for seq in run.seqs}
        self.children = {seq: list(seq.children) for seq in run.seqs}
        self.writers = WriterCheck(self.running)

    def check(self, out: Step) -> None:
        """Raise unless each chunk begins where its sequence was, and ends within its tokens."""
        for seq, start, num_new in out.chunks:
            name = name_of(seq)
            if seq not in self.num_tokens or seq.finish_reason is not None:
                raise Violation(f"the step has a chunk of {name}, which has finished or was never added")
            was = self.num_computed.get(seq, start)
            if start != was and seq not in out.preempted:
                what = "computed twice" if start < was else "never computed"
                first, last = sorted((start, was))
                tokens = f"the tokens {first} to {last - 1} are" if last - first > 1 else f"token {first} is"
                raise Violation(
                    f"{name} had {count(was, 'computed token')}, but its chunk begins at token {start}: {tokens} {what}"
                )
            if start + num_new > self.num_tokens[seq]:
                raise Violation(
                    f"{name} has {self.num_tokens[seq]} tokens, but its chunk is the tokens {start} to "
                    f"{start + num_new - 1}"
                )
