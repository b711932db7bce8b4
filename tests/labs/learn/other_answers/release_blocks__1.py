from labs.one_file import BlockManager


class Blocks(BlockManager):
    def release(self, seq):
        while seq.block_table:
            block_id = seq.block_table.pop()
            if self.num_owners[block_id] == 1:
                self.free.update({block_id: None})
            self.num_owners[block_id] = self.num_owners[block_id] - 1
