"""Keeps the copies by sequence, and frees the blocks of the prefill engine one by one."""


class HandOver:
    def __init__(self, prefill, decode):
        self.prefill = prefill
        self.decode = decode
        self.tables = {}
        self.running = []

    def try_send(self, seq):
        needed = -(-(len(seq.token_ids) - 1 + seq.max_tokens) // self.decode.block_size)
        if len(self.decode.free) < needed:
            return None
        table = []
        while len(table) < needed:
            table.append(self.decode.take())
        self.tables[seq] = table
        num_sent = -(-seq.num_computed_tokens // self.decode.block_size)
        return [(seq.block_table[i], table[i]) for i in range(num_sent)]

    def arrive(self, seq):
        for block_id in seq.block_table[::-1]:
            self.prefill.num_owners[block_id] -= 1
            self.prefill.free[block_id] = None
        seq.block_table = self.tables[seq]
        self.running += [seq]
