from labs.one_file import BlockManager


class Blocks(BlockManager):
    def take(self):
        block_id, *others = self.free
        self.free = dict.fromkeys(others)
        old = self.hash_of_block.pop(block_id, None)
        self.block_of_hash.pop(old, None)
        self.num_owners[block_id] = 1
        return block_id

    def register(self, seq, num_before):
        i = num_before // self.block_size
        while (i + 1) * self.block_size <= seq.num_computed_tokens:
            block_id, block_hash = seq.block_table[i], self.hash_block(seq, i)
            if self.block_of_hash.setdefault(block_hash, block_id) == block_id:
                self.hash_of_block[block_id] = block_hash
            i += 1
