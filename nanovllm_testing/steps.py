"""Batches of steps that are made by hand: sequences whose block tables a test has filled, without a scheduler."""

import numpy as np

from nanovllm.batch import Batch, SamplingBatch, build_batch, build_sampling_batch, draw_uniforms
from nanovllm.scheduler import Chunk, Step, make_step
from nanovllm.sequence import Sequence


def batch_of(chunks: list[Chunk], block_size: int) -> Batch:
    """Return the batch of `chunks`, (sequence, start, num_new_tokens) each, with the decodes first."""
    return build_batch(step_of(chunks), block_size)


def step_of(chunks: list[Chunk]) -> Step:
    """Return the scheduler's `Step` of `chunks`."""
    return make_step(chunks, sum(num_new for _, _, num_new in chunks))


def sampling_of(samples: list[Sequence]) -> SamplingBatch:
    """Return the `SamplingBatch` of sequences whose next token comes after all tokens that they have."""
    return build_sampling_batch(samples, positions_of(samples))


def uniforms_of(samples: list[Sequence]) -> np.ndarray:
    """Return the random numbers that decide the next token of each sequence."""
    return draw_uniforms(samples, positions_of(samples))


def positions_of(samples: list[Sequence]) -> np.ndarray:
    return np.array([len(seq.token_ids) for seq in samples], dtype=np.int32)
