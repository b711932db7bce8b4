from labs.mixed_batches import BlockManager


class Blocks(BlockManager):
    def __init__(self, num_blocks, block_size, num_host_blocks):
        super().__init__(num_blocks, block_size)
        self.host_free = list(range(num_host_blocks))
        self.host_tables = {}
        self.swap_outs = []
        self.swap_ins = []

    def try_admit(self, seq):
        return self.try_swap_in(seq) if seq in self.host_tables else super().try_admit(seq)

    def try_swap_out(self, seq):
        count = len(range(0, seq.num_computed_tokens, self.block_size))
        kept = len(self.host_free) - count
        if kept < 0:
            return False
        self.host_free, taken = self.host_free[:kept], self.host_free[kept:]
        self.host_tables[seq] = taken[::-1]
        self.swap_outs.extend((seq.block_table[i], self.host_tables[seq][i]) for i in range(count))
        self.free, seq.block_table = self.free + seq.block_table, []
        return True

    def try_swap_in(self, seq):
        computed = seq.num_computed_tokens
        if not super().try_admit(seq):
            return False
        seq.num_computed_tokens = computed
        hosts = self.host_tables[seq]
        self.host_tables = {other: table for other, table in self.host_tables.items() if other is not seq}
        self.swap_ins = self.swap_ins + [(hosts[i], seq.block_table[i]) for i in range(len(hosts))]
        self.host_free.extend(hosts)
        return True
