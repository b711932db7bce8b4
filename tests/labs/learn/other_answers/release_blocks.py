from labs.one_file import BlockManager


class Blocks(BlockManager):
    def release(self, seq):
        table, seq.block_table = seq.block_table, []
        for block_id in table:
            self.num_owners[block_id] -= 1
        unowned = [block_id for block_id in table if self.num_owners[block_id] == 0]
        self.free = dict.fromkeys([*self.free, *unowned[::-1]])
