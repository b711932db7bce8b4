from labs.one_file import BlockManager


class Blocks(BlockManager):
    def hash_block(self, seq, i):
        before = self.hash_block(seq, i - 1) if i else None
        return hash((before, *seq.token_ids[i * self.block_size :][: self.block_size]))
