"""`nanovllm test`: it finds faults that are planted in small extensions, explains them, and lets right ones pass."""

import re
import textwrap

import pytest

from nanovllm_testing import command

HEADER = """
    from dataclasses import replace
    import torch
    from nanovllm.block_manager import BlockManager
    from nanovllm.layers.attention import TorchAttention
    from nanovllm.model_runner import ModelRunner
    from nanovllm.prefix_cache import PrefixCache, hash_block
    from nanovllm.sampler import sample_tokens
    from nanovllm.scheduler import Scheduler
"""


@pytest.fixture
def run(tmp_path, capsys):
    """Write an extension, and run the command: (exit status, what it prints)."""

    def run_command(code, *options):
        path = tmp_path / "my_file.py"
        path.write_text(textwrap.dedent(HEADER) + textwrap.dedent(code), encoding="utf-8")
        status = command.main([str(path), *options])
        return status, capsys.readouterr().out

    return run_command


RIGHT = {
    "the core's own parts": """
        scheduler_cls, block_manager_cls, prefix_cache_cls = Scheduler, BlockManager, PrefixCache
        attention_backend, sampler_cls, runner_cls = TorchAttention, sample_tokens, ModelRunner
    """,
    "shortest first, unfair": """
        class scheduler_cls(Scheduler):
            def add(self, seq):
                super().add(seq)
                self.waiting.sort(key=lambda one: one.num_prompt_tokens)
            def choose_victim(self, candidates, needy):
                return max(candidates, key=lambda one: one.num_tokens)
    """,
    "with fields": """
        extra_args = {"level": int}
        class scheduler_cls(Scheduler):
            def add(self, seq):
                super().add(seq)
                self.waiting.sort(key=lambda one: one.sampling_params.extra_args["level"])
        def example_extra_args(rng):
            return {"level": rng.randrange(3)}
    """,
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_parts_pass(run, name):
    status, printed = run(RIGHT[name], "--examples", "60")
    assert status == 0, printed
    assert {line.split()[0] for line in printed.splitlines()} == {"ok"}
    assert "token for token" in printed


# name -> (the extension, a text of the explanation)
WRONG = {
    "a scheduler that loses a sequence": (
        """
        class scheduler_cls(Scheduler):
            def make_room(self, seq, num_new_tokens, preempted):
                has_room = super().make_room(seq, num_new_tokens, preempted)
                if preempted and preempted[-1] in self.waiting:
                    self.waiting.remove(preempted[-1])
                return has_room
        """,
        r"has not finished, but is neither in `waiting` nor in `running`",
    ),
    "a scheduler that computes a token twice": (
        """
        class scheduler_cls(Scheduler):
            def schedule(self):
                step = super().schedule()
                early = [min(start, 1) if n > 1 else 0 for _, start, n in step.chunks]
                chunks = [(seq, start - e, n + e) for (seq, start, n), e in zip(step.chunks, early)]
                return replace(step, chunks=chunks, num_scheduled_tokens=sum(n for _, _, n in chunks))
        """,
        r"its chunk begins at token \d+: token \d+ is computed twice",
    ),
    "a scheduler that never serves long prompts": (
        """
        class scheduler_cls(Scheduler):
            def admit_waiting(self, budget, chunks):
                late = [seq for seq in self.waiting if seq.num_prompt_tokens > 9]
                self.waiting = [seq for seq in self.waiting if seq not in late]
                budget = super().admit_waiting(budget, chunks)
                self.waiting += late
                return budget
        """,
        r"steps in a row compute nothing, but these have not finished: A",
    ),
    "a scheduler whose loop never ends": (
        """
        class scheduler_cls(Scheduler):
            def make_room(self, seq, num_new_tokens, preempted):
                while not self.block_manager.try_allocate(seq, seq.num_computed_tokens + num_new_tokens):
                    pass
                return True
        """,
        r"has not ended after 1 s; it is in line \d+ of .*my_file.py, `while not",
    ),
    "a scheduler that raises": (
        """
        class scheduler_cls(Scheduler):
            def preempt(self, seq, needy):
                raise KeyError("no victims")
        """,
        r"KeyError: 'no victims', in line \d+ of .*my_file.py",
    ),
    "a block manager that frees a block that another sequence owns": (
        """
        class block_manager_cls(BlockManager):
            def release(self, block_id):
                self._ref_counts[block_id] = 1
                super().release(block_id)
        """,
        r"block 1 is in 1 block table, but the block manager counts no owners: it can be given away",
    ),
    "a block manager that loses a block": (
        """
        class block_manager_cls(BlockManager):
            def free(self, seq):
                if len(seq.block_table) == 3:
                    seq.block_table.pop()
                super().free(seq)
        """,
        r"block \d is in no block tables, but the block manager counts 1 owner: it is never free again",
    ),
    "a block manager that does not copy on write": (
        """
        class block_manager_cls(BlockManager):
            def try_allocate(self, seq, num_tokens):
                seq.has_shared_tail = False
                return super().try_allocate(seq, num_tokens)
        """,
        r"two sequences write to block 1|block 1 is written by A",
    ),
    "a prefix cache that compares hashes only": (
        """
        class prefix_cache_cls(PrefixCache):
            def look_up(self, block_hash, parent_serial, tokens):
                return self._by_hash.get(block_hash)
        """,
        r"would read the K and V of another prefix at position \d",
    ),
    "a prefix cache that ignores the parent": (
        """
        class prefix_cache_cls(PrefixCache):
            def key(self, seq, before):
                tokens = super().key(seq, before)[2]
                return hash_block(0, tokens), 0, tokens
        """,
        r"would read the K and V of another prefix at position \d",
    ),
    "a backend that reads a slot without a token": (
        """
        class attention_backend(TorchAttention):
            def attend(self, q, layer_cache, metadata, **more):
                return super().attend(q, layer_cache, metadata, **more) + 0 * layer_cache[1, 0].sum()
        """,
        r"the result has NaN. The backend reads a slot in which no token is stored",
    ),
    "a backend that does not see its own token": (
        """
        class attention_backend(TorchAttention):
            def attend(self, q, layer_cache, metadata, **more):
                lens = metadata.seq_lens.clone()
                lens[: metadata.num_decodes] = (lens[: metadata.num_decodes] - 1).clamp(min=1)
                return super().attend(q, layer_cache, replace(metadata, seq_lens=lens), **more)
        """,
        r"at position 1, which sees 2 tokens: the result differs from the reference",
    ),
    "a sampler that ignores the temperature": (
        """
        def sampler_cls(logits, temperatures, **more):
            return sample_tokens(logits, (temperatures > 0).float(), **more)
        """,
        r"10,000 draws do not follow the distribution .* with temperature 0.5",
    ),
    "a sampler that uses the temperature of the first row": (
        """
        def sampler_cls(logits, temperatures, **more):
            drawn = temperatures[temperatures > 0]
            first = drawn[0] if len(drawn) else 1
            return sample_tokens(logits, torch.where(temperatures > 0, first, temperatures), **more)
        """,
        r"row \d+ of 30 gets token \d+, but token \d+ if it is the only row",
    ),
    "a sampler that draws greedy rows too": (
        """
        def sampler_cls(logits, temperatures, **more):
            return sample_tokens(logits, temperatures.clamp(min=0.5), **more)
        """,
        r"row \d+ has temperature 0, so it must get its most likely token",
    ),
    "a runner whose positions are wrong after a prefix hit or a chunk": (
        """
        class runner_cls(ModelRunner):
            def forward(self, batch):
                wrong = replace(batch, positions=(batch.positions - batch.metadata.num_prefix_tokens).clamp(min=0))
                return super().forward(wrong)
        """,
        r"[AB] must get token \d+ at position \d+, as an engine that computes each request by itself",
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * ("never ends" in name)) for name in WRONG]
)
def test_a_planted_fault_is_found_and_explained(run, name):
    code, explanation = WRONG[name]
    status, printed = run(code)
    assert status == 1
    assert re.search(f"wrong: .*({explanation})", printed), printed
    assert len(printed.splitlines()) < 40, printed


SHORTEST = """
    1 block of 2 tokens without prefix caching; at most 2 sequences and 1 token in a step
    A: prompt [0], max_tokens 2, 2 samples

    step    A   A.1   free   waiting
       1   0+     +      0
       2   1+            0             preempts A.1

    wrong: A, sample 1 has not finished, but is neither in `waiting` nor in `running`
"""


def test_the_run_of_a_failure_is_the_shortest(run):
    """Two sequences must run out of blocks: no run of fewer steps, requests or tokens loses one."""
    _, printed = run(WRONG["a scheduler that loses a sequence"][0])
    lines = [line.strip() for line in printed.splitlines()[1:-1]]
    assert lines == [line.strip() for line in SHORTEST.strip().splitlines()]


WINDOW = """
    class attention_backend(TorchAttention):
        def attend(self, q, layer_cache, metadata, **more):
            tables = metadata.block_tables.clone()
            tables[:, 1:-2] = tables[:, :1]  # forgets the middle of long sequences
            return super().attend(q, layer_cache, replace(metadata, block_tables=tables), **more)
"""


def test_a_cache_that_forgets_passes_only_as_approximate(run):
    assert run(WINDOW)[0] == 1
    status, printed = run(WINDOW, "--approximate", "--examples", "40")
    assert status == 0, printed
    assert "not compared" in printed


def test_what_is_not_checked_is_said(run):
    code = """
        models = {"MyNetwork": object}
        proposer_cls = object
        class attention_backend(TorchAttention):
            @classmethod
            def why_not(cls, device, dtype, head_dim, block_size):
                return None if device.type == "cuda" else "it needs a CUDA device"
    """
    status, printed = run(code)
    assert status == 0
    lines = [line.split(None, 1) for line in printed.splitlines()]
    assert [word for word, _ in lines] == ["skipped"] * 4
    assert "on a CPU: it needs a CUDA device" in lines[0][1]
    assert [text.split(":")[0] for _, text in lines[1:]] == ["models", "proposer_cls", "the engine with a model"]


def test_networks_of_the_file_need_a_model_of_theirs(run):
    status, printed = run("models, runner_cls = {'MyNetwork': object}, ModelRunner")
    assert status == 0
    assert "the bundled model is none of them: give --model" in printed


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1", "names no part of an engine"),
        ("import not_there", "cannot be imported"),
        ("1 / 0", "ZeroDivisionError"),
        ("scheduler_cls = dict", "scheduler_cls must be a subclass of nanovllm.scheduler.Scheduler"),
    ],
)
def test_a_file_that_cannot_be_tested_is_refused(run, capsys, code, message):
    with pytest.raises(SystemExit):
        run(code)
    assert message in capsys.readouterr().err
