from labs.one_file import BlockManager


class Blocks(BlockManager):
    def try_grow(self, seq):
        full, rest = divmod(seq.num_computed_tokens, self.block_size)
        owners = sum(self.num_owners[block_id] for block_id in seq.block_table[full:])  # of a block that is not full
        assert rest or not owners
        if owners == 1:
            return True
        try:
            block_id = self.take()
        except StopIteration:
            return False
        for source in seq.block_table[full:]:
            self.copies.append((source, block_id))
            self.num_owners[source] = owners - 1
        seq.block_table = [*seq.block_table[:full], block_id]
        return True
