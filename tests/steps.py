"""Batches of hand-made steps: sequences whose block tables a test has filled, without a scheduler."""

import numpy as np

from nanovllm.batch import build_batch, build_sampling_batch, draw_uniforms
from nanovllm.scheduler import make_step


def batch_of(chunks, block_size):
    """The batch of `chunks`, (sequence, start, num_new_tokens) each, which have the decodes in front."""
    return build_batch(step_of(chunks), block_size)


def step_of(chunks):
    """The scheduler's `Step` of `chunks`."""
    num_tokens = sum(num_new for _, _, num_new in chunks)
    return make_step(chunks, num_tokens)


def sampling_of(samples):
    """The `SamplingBatch` of sequences whose next token comes after all that they have."""
    return build_sampling_batch(samples, positions_of(samples))


def uniforms_of(samples):
    """The random numbers that decide the next token of each sequence."""
    return draw_uniforms(samples, positions_of(samples))


def positions_of(samples):
    return np.array([len(seq.token_ids) for seq in samples], dtype=np.int32)
