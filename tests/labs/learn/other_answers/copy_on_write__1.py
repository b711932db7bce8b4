from labs.one_file import BlockManager


class Blocks(BlockManager):
    def try_grow(self, seq):
        used = seq.num_computed_tokens % self.block_size  # of the last block, 0 if it is full
        if used == 0:
            if len(seq.block_table) * self.block_size > seq.num_computed_tokens:
                return True
            if len(self.free) == 0:
                return False
            seq.block_table += [self.take()]
            return True
        old = seq.block_table[-1]
        if self.num_owners[old] == 1:
            return True
        if len(self.free) == 0:
            return False
        new = self.take()
        seq.block_table[-1] = new
        self.num_owners[old] -= 1
        self.copies += [(old, new)]
        return True
