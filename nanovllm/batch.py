"""SchedulerOutput → Batch: the tensors that the model computes with.

Vectorised with numpy: no Python loop over tokens. `LLMEngine.step()` calls `build_batch` after `schedule()` and before
anything else changes the sequences: it reads their token ids and block tables, and shares no memory with them.

Two sequences with block_size 4: A decodes position 5 (block table [7, 2]), B prefills positions 4 … 6
(block table [3, 5]):

    input_ids      [ a5 | b4 b5 b6 ]      all new tokens end to end, no padding; decodes first
    positions      [  5 |  4  5  6 ]
    slot_mapping   [  9 | 20 21 22 ]      2*4 + 5%4,  5*4 + 4%4 …: where their K and V are written
    block_tables   [[7, 2], [3, 5]]       where the K and V of all tokens are read
    seq_lens       [  6,  7 ]             how many are read, the new ones included
    cu_seqlens_q   [  0,  1,  4 ]         rows cu[i] … cu[i+1] belong to sequence i
    logits_indices [  0,  3 ]             the last row of each sequence that has caught up: it gets a new token
"""

from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.block_tables import BlockTables
from nanovllm.layers.attention import AttentionMetadata
from nanovllm.sampling_batch import SamplingBatch, build_sampling_batch
from nanovllm.sequence import Sequence
from nanovllm.extras.logits_processors import ReaderRows, build_readers
from nanovllm.step import BlockMoves, SchedulerOutput


@dataclass(frozen=True)
class Batch:
    """One step's input; num_tokens new tokens of num_seqs sequences, of which num_samples get a new token."""

    input_ids: torch.Tensor  # [num_tokens] int32
    positions: torch.Tensor  # [num_tokens] int32
    metadata: AttentionMetadata  # which token belongs to which sequence, and where K and V lie
    logits_indices: torch.Tensor  # [num_samples] int32
    sampling: SamplingBatch  # what the num_samples rows ask for
    readers: tuple[ReaderRows, ...]  # what is read of the hidden states of prompts
    moves: BlockMoves  # blocks to be copied before the forward pass


def build_batch(scheduled: SchedulerOutput, block_tables: BlockTables) -> Batch:
    """The tensors of a step that has chunks; the module's docstring shows an example."""
    block_size = block_tables.block_size
    seqs, *spans = zip(*scheduled.chunks, strict=True)
    starts, num_new = [np.array(span, dtype=np.int32) for span in spans]  # [num_seqs] each
    seq_lens = starts + num_new  # [num_seqs]
    cu_seqlens_q = offsets(num_new)  # [num_seqs + 1]

    # every new token's sequence, and its position there: starts [5, 4] and cu_seqlens_q [0, 1, 4] give
    owners = np.repeat(np.arange(len(seqs)), num_new)  # [num_tokens]: 0 | 1 1 1
    rows_in_chunk = np.arange(len(owners), dtype=np.int32) - cu_seqlens_q[owners]  # [num_tokens]: 0 | 0 1 2
    positions = starts[owners] + rows_in_chunk  # [num_tokens]: 5 | 4 5 6
    max_num_blocks = -(-int(seq_lens.max()) // block_size)
    rows = [seq.block_table.row for seq in seqs]
    tables = block_tables.rows[rows, :max_num_blocks]  # [num_seqs, max_num_blocks], a copy
    slot_mapping = tables[owners, positions // block_size] * block_size + positions % block_size  # [num_tokens]

    sampled = np.array(scheduled.sampled_chunks, dtype=np.intp)  # [num_samples], indices of sequences
    nd = scheduled.num_decodes
    input_ids = gather_token_ids(seqs, starts.tolist(), seq_lens.tolist(), nd)  # [num_tokens]
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        positions=torch.from_numpy(positions),
        metadata=AttentionMetadata(
            slot_mapping=torch.from_numpy(slot_mapping),
            block_tables=torch.from_numpy(tables),
            seq_lens=torch.from_numpy(seq_lens),
            cu_seqlens_q=torch.from_numpy(cu_seqlens_q),
            prefill_cu_seqlens_q=torch.from_numpy(cu_seqlens_q[nd:] - cu_seqlens_q[nd]),
            prefill_cu_seqlens_k=torch.from_numpy(offsets(seq_lens[nd:])),
            num_decodes=nd,
            max_seqlen_q=int(num_new[nd:].max(initial=0)),
            max_seqlen_k=int(seq_lens[nd:].max(initial=0)),
            num_prefix_tokens=int(starts[nd:].sum()),
        ),
        logits_indices=torch.from_numpy(cu_seqlens_q[1:][sampled] - 1),
        sampling=build_sampling_batch(scheduled.samples, seq_lens[sampled]),
        readers=build_readers(scheduled, cu_seqlens_q),
        moves=scheduled.moves,
    )


def offsets(lens: np.ndarray) -> np.ndarray:
    """[3, 1, 4] -> [0, 3, 4, 8]"""
    cu = np.zeros(len(lens) + 1, dtype=np.int32)
    np.cumsum(lens, out=cu[1:])
    return cu


def gather_token_ids(seqs: tuple[Sequence, ...], starts: list[int], stops: list[int], num_decodes: int) -> np.ndarray:
    """The tokens [start, stop) of every sequence end to end: [num_tokens] int32."""
    decodes = zip(seqs[:num_decodes], starts, strict=False)
    prefills = zip(seqs[num_decodes:], starts[num_decodes:], stops[num_decodes:], strict=True)
    ids = [np.array([seq.token_ids.data.item(start) for seq, start in decodes], dtype=np.int32)]
    ids += [seq.token_ids.data[start:stop] for seq, start, stop in prefills]
    return np.concatenate(ids)
