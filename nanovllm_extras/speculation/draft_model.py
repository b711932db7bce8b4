"""Drafts by a small model of the same vocabulary, one token after the other.

The small model has a KV cache of its own, with as many blocks of the same size, and shares the block tables: the block
that holds a token's K and V in one cache holds them in the other. So prefix hits, forks and preemption need no second
bookkeeping. It only has to compute each token that the large model computes, in the same step (`follow`); what it
computed while it proposed is among these tokens once more. The large model may have recurrent states or several KV
caches, too. If it has windows, all layers have one block table, whose blocks are kept (`why_one_table`).

    the step runs   t6                    large model and small model; t7 is drawn
    proposals       t7 -> d1 -> d2        small model, a step for each draft
    the step runs   t7 d1 d2              large model and small model

A draft is drawn as its position will be: with the same parameters, by the same random number. Where both models have
nearly the same probabilities, they draw the same token, at any temperature.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from nanovllm.batch import Batch, SamplingBatch
from nanovllm.scheduler import Step
from nanovllm_extras.execution.runner_protocol import Runner
from nanovllm_extras.memory.block_manager import BlockManager
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.options.compatibility import check_combinations
from nanovllm_extras.options.speculation_options import Speculation
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.sampling.processed_batch import build_batch
from nanovllm_extras.sampling.runner_hooks import NO_TOKEN, Computed
from nanovllm_extras.scheduling.pending import as_if
from nanovllm_extras.weights.checkpoint import read_model_config, resolve_model

StartDraft = Callable[[Config, Path], Runner]


class DraftModel:
    """A `Proposer` that runs `runner`. It reads the block tables of `blocks`, so each scheduler has one of its own."""

    def __init__(self, runner: Runner, blocks: BlockManager) -> None:
        self.runner = runner
        self.blocks = blocks

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Propose the requested number of drafts for each sequence, or none while it shares its last block.

        The caller has checked that there are free blocks for the drafts.
        """
        drafts: list[list[int]] = [[] for _ in wanted]
        growing = [(i, seq) for i, (seq, _) in enumerate(wanted) if not seq.has_shared_tail]
        for i, seq in growing:
            self.blocks.reserve(seq, seq.num_known_tokens + wanted[i][1])
        while growing:
            for (i, _), token_id in zip(growing, self._draw(growing, drafts), strict=True):
                drafts[i].append(token_id)
            # where all tokens are forbidden, the draft is NO_TOKEN, which no network can read
            growing = [(i, seq) for i, seq in growing if len(drafts[i]) < wanted[i][1] and drafts[i][-1] != NO_TOKEN]
        return drafts

    def _draw(self, growing: list[tuple[int, Sequence]], drafts: list[list[int]]) -> list[int]:
        """Return the next token of each sequence after its drafts so far."""
        return self.runner.run(self._make_batch(growing, drafts)).wait().token_ids

    def _make_batch(self, growing: list[tuple[int, Sequence]], drafts: list[list[int]]) -> Batch:
        """Return a batch with the newest token of each sequence. Copies of the sequences hold their drafts so far."""
        seqs = [as_if(seq, drafts[i]) for i, seq in growing]
        count = len(seqs)
        step = Step([(seq, seq.num_known_tokens - 1, 1) for seq in seqs], count, count, [*seqs], [*range(count)])
        return build_batch(step, self.blocks.block_size)


class Following:
    """A `Follower` of the large model's runner: the draft model computes each step, too, for its K and V."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def follow(self, batch: Batch, computed: Computed, newest_ids: Tensor) -> None:
        """Compute the tokens of a step of the large model, for their K and V. Placeholders are tokens of that model."""
        self.runner.newest_ids = newest_ids
        greedy = SamplingBatch(torch.zeros(len(batch.logits_indices)))  # a graph of whole steps samples, too
        batch = replace(batch, sampling=greedy, copies=[])  # the large model's runner has done them for both
        self.runner.compute_hidden(batch, self.runner.can_replay(batch))


def load_draft_model(runner: Runner, options: Speculation, start: StartDraft) -> Runner:
    """Load the draft model, which computes each step of `runner`, too, and return its runner.

    start: returns a runner of the draft model. Raises ValueError or TypeError if it cannot be loaded, or cannot draft
    for this model.
    """
    found = find_draft_model(runner, options, runner.kv_cache.num_blocks)
    with named(options):
        draft = start(*found)
    runner.followers = (Following(draft),)
    runner.transfers.add(draft.kv_cache)
    return draft


@contextmanager
def named(options: Speculation) -> Iterator[None]:
    """Let a ValueError or TypeError within the context say that the draft model is meant, and what serves instead."""
    try:
        yield
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        advice = "take another draft model, or the method 'ngram'"
        raise kind(f"speculative_config['model'] {options.model!r}: {error}; {advice}") from error


def find_draft_model(runner: Runner, options: Speculation, num_kv_blocks: int) -> tuple[Config, Path]:
    """Return the draft model's configuration and folder. runner: the large model's. Raises as `load_draft_model`."""
    with named(options):
        return find_and_check(runner, options, num_kv_blocks)


def find_and_check(runner: Runner, options: Speculation, num_kv_blocks: int) -> tuple[Config, Path]:
    """Do what `find_draft_model` does. Errors do not name the draft model."""
    assert options.model is not None
    config = replace(
        runner.config,
        model=options.model,
        revision=None,
        hf_overrides=None,
        block_size=runner.backend.block_size,
        max_model_len=runner.max_model_len,
        max_num_batched_tokens=runner.max_num_batched_tokens,
        num_kv_blocks=num_kv_blocks,
        enable_overlap=runner.has_overlap,  # then there are placeholders
        speculative_config=None,
        disable_hybrid_kv_cache_manager=True,  # it reads the one block table of the large model
        tensor_parallel_size=1,  # it is whole, on rank 0, which has the scheduler
        nnodes=1,
    )
    folder = resolve_model(config.model, config.load_format != "dummy", config.revision)
    _, shape = read_model_config(folder, config.hf_overrides, config.max_model_len)
    large = runner.whole_shape
    if shape.vocab_size != large.vocab_size:
        raise ValueError(
            f"the draft model must have the vocabulary of the model, {large.vocab_size} tokens, got {shape.vocab_size}"
        )
    if (longest := shape.max_position_embeddings) < runner.max_model_len:
        raise ValueError(
            f"the draft model must take max_model_len {runner.max_model_len} tokens; it takes {longest}: take "
            f"max_model_len={longest}"
        )
    if shape.state_shape is not None:
        raise ValueError("the draft model must have K and V only, it has recurrent states")
    if shape.kv_groups:
        raise ValueError("the draft model must have K and V of one shape, its layers have several")
    check_combinations(config, shape)
    return config, folder
