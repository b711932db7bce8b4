from labs.one_file import BlockManager


class Blocks(BlockManager):
    def take(self):
        block_id = list(self.free)[0]  # noqa: RUF015
        self.free.pop(block_id)
        self.num_owners[block_id] += 1
        self.hash_of_block.pop(block_id, None)
        self.block_of_hash = {key: value for key, value in self.block_of_hash.items() if value != block_id}
        return block_id

    def register(self, seq, num_before):
        for position in range(num_before, seq.num_computed_tokens):
            i, offset = divmod(position, self.block_size)
            if offset < self.block_size - 1:
                continue
            block_hash = self.hash_block(seq, i)
            if block_hash in self.block_of_hash:
                continue
            self.block_of_hash[block_hash] = seq.block_table[i]
            self.hash_of_block[seq.block_table[i]] = block_hash
