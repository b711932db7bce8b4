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
        num_full, rest = divmod(seq.num_computed_tokens, self.block_size)
        blocks = seq.block_table[: num_full + (rest > 0)]
        if len(blocks) > len(self.host_free):
            return False
        self.host_tables[seq] = []
        for block_id in blocks:
            host_id = self.host_free.pop()
            self.host_tables[seq].append(host_id)
            self.swap_outs.append((block_id, host_id))
        self.release(seq)
        return True

    def try_swap_in(self, seq):
        table = []
        while len(table) * self.block_size < len(seq.token_ids):
            if not self.free:
                self.free += reversed(table)
                return False
            table.append(self.free.pop())
        seq.block_table = table
        for i, host_id in enumerate(self.host_tables[seq]):
            self.swap_ins.append((host_id, table[i]))
            self.host_free.append(host_id)
        del self.host_tables[seq]
        return True
