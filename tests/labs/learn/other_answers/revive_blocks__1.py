from labs.one_file import BlockManager


class Blocks(BlockManager):
    def find(self, seq):
        found, i = [], 0
        while (i + 1) * self.block_size < len(seq.token_ids):
            block_hash = self.hash_block(seq, i)
            if block_hash not in self.block_of_hash:
                return found
            found.append(self.block_of_hash[block_hash])
            i += 1
        return found

    def try_admit(self, seq):
        table = self.find(seq)
        others = [block_id for block_id in self.free if block_id not in table]
        num_found, num_blocks = len(table), self.num_blocks_for(len(seq.token_ids))
        if len(table) + len(others) < num_blocks:
            return False
        for block_id in table:
            if block_id in self.free:
                del self.free[block_id]
            self.num_owners[block_id] = self.num_owners[block_id] + 1
        while len(table) < num_blocks:
            table.append(self.take())
        seq.block_table = table
        seq.num_computed_tokens = num_found * self.block_size
        return True
