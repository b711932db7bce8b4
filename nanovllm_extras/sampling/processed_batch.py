"""The batch of a step in which some sequence asks for more than the core's sampler does.

Log-probabilities, changes of logits and readers of hidden states are added to the core's `Batch`. If no sequence of a
step asks for any, the batch is the core's own. `LLMEngine.build` calls `build_batch`.
"""

from array import array
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm import batch
from nanovllm.batch import Batch, MakeMetadata, build_sampling_batch
from nanovllm.scheduler import Step
from nanovllm_extras.records.full_sequence import Sequence, own_chunks
from nanovllm_extras.records.grouped_metadata import add_groups
from nanovllm_extras.sampling.logits_processors import ProcessorRows, ReaderRows, build_processors, build_readers

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class ProcessedSampling(batch.SamplingBatch):
    processors: tuple[ProcessorRows, ...] = ()  # what changes the logits before sampling, in this order
    num_logprobs: int | None = None  # the most likely tokens whose log-probabilities are wanted at most; None for none


@dataclass(frozen=True)
class ReadBatch(Batch):
    readers: tuple[ReaderRows, ...] = ()  # what is read of the hidden states of prompts


def build_batch(step: Step, block_size: int, make_metadata: MakeMetadata | None = None) -> Batch:
    """Return the tensors of a step, as the core's `build_batch` does, with all that its sequences ask for."""
    chunks = own_chunks(step.chunks)
    built = batch.build_batch(step, block_size, make_metadata, gather_token_ids(chunks, step.num_decodes))
    if chunks[0][0].window_tables:
        built = add_groups(chunks, built, block_size)
    if all([seq.is_plain for seq, _, _ in chunks]):
        return built
    positions = [chunks[i][1] + chunks[i][2] for i in step.sampled_chunks]
    sampling = add_processors(built.sampling, step.samples, positions)
    readers = build_readers(step, built.metadata.cu_seqlens_q.numpy())
    return ReadBatch(**{**values_of(built), "sampling": sampling}, readers=readers)


def gather_token_ids(chunks: list[tuple[Sequence, int, int]], num_decodes: int) -> "array[int]":
    """Return the new tokens of every sequence, as the core does. Those of decodes may not be known yet."""
    ids = [
        known[start] if start < len(known := seq.token_ids) else seq.unknown_token_ids[start - len(known)]
        for seq, start, _ in chunks[:num_decodes]
    ]
    return array("i", ids) + batch.gather_token_ids([], chunks[num_decodes:])


def build_sampling(samples: list[Any], positions: list[int]) -> batch.SamplingBatch:
    """Build the sampling batch as `build_sampling_batch` does, with all that the sequences ask for."""
    return add_processors(build_sampling_batch(samples, np.array(positions)), samples, positions)


def add_processors(sampling: batch.SamplingBatch, samples: list[Any], positions: list[int]) -> batch.SamplingBatch:
    """Add logits processors. positions: for each sample, the position that its new token will have"""
    wanted = [seq.sampling_params.logprobs for seq in samples]
    num_logprobs = [one for one in wanted if one is not None]
    return ProcessedSampling(
        **values_of(sampling),
        processors=build_processors(samples, positions),
        num_logprobs=(-1 if -1 in num_logprobs else max(num_logprobs)) if num_logprobs else None,
    )


def values_of(record: "DataclassInstance") -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}
