"""Pads the inputs, and copies whole tensors."""

import torch
import torch.nn.functional as F


class Graphs:
    def __init__(self, sizes, max_num_blocks, record):
        self.sizes = sizes
        self.input_ids = torch.zeros(sizes[-1], dtype=torch.int64)
        self.slot_mapping = torch.zeros(sizes[-1], dtype=torch.int64)
        self.seq_lens = torch.zeros(sizes[-1], dtype=torch.int64)
        self.block_tables = torch.zeros(sizes[-1], max_num_blocks, dtype=torch.int64)
        buffers = self.input_ids, self.slot_mapping, self.seq_lens, self.block_tables
        self.graphs = {size: record(size, *buffers) for size in sizes}

    def replay(self, input_ids, slot_mapping, seq_lens, block_tables):
        n, width = block_tables.shape
        size = self.sizes[sum(size < n for size in self.sizes)]
        self.input_ids[:size].copy_(F.pad(input_ids, (0, size - n)))
        self.slot_mapping[:size].copy_(F.pad(slot_mapping, (0, size - n)))
        self.seq_lens[:size].copy_(F.pad(seq_lens, (0, size - n)))
        right = self.block_tables.shape[1] - width
        self.block_tables[:size].copy_(F.pad(block_tables, (0, right, 0, size - n)))
        return self.graphs[size]().narrow(0, 0, n)
